"""A headless chromium, driven through the DevTools protocol over a pair of pipes: no package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
          "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
          "--disable-features=Translate,OptimizationHints", "--force-color-profile=srgb", "--remote-debugging-pipe")
_PATIENCE = 30.0  # seconds for an answer of the browser, or for what a test waits for
_KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "/": 191, "?": 191}


class Browser:
    """The process, and what it reports."""

    def __init__(self, profile: Path) -> None:
        assert BINARY
        inward, self._write = os.pipe()
        self._read, outward = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (inward, outward)]  # chromium wants them as 3 and 4
        start = f"import os, sys; os.dup2({high[0]}, 3); os.dup2({high[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", start, BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (inward, outward, *high):
            os.close(end)
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data):]
        deadline = time.monotonic() + _PATIENCE
        while True:
            answer = self._message(deadline - time.monotonic())
            assert answer, f"the browser did not answer to {method}"
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _message(self, seconds: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if seconds <= 0 or not select.select([self._read], [], [], seconds)[0]:
                return None
            piece = os.read(self._read, 1 << 20)
            if not piece:
                return None
            self._buffer += piece
        raw, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(raw))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._write)
        os.close(self._read)


class Page:
    origin = ""

    """A tab of its own profile: nothing that others keep in the browser is seen."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        self._target = browser.call("Target.createTarget", url="about:blank",
                                    browserContextId=self._context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.size(1280, 860)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def size(self, width: int, height: int, scale: float = 1, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def prefer(self, scheme: str) -> None:
        """What the system says: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.body?.dataset.ready")

    def eval(self, script: str) -> Any:
        """What an expression is worth; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = _PATIENCE) -> Any:
        """Wait until an expression is true; returns what it is worth."""
        deadline = time.monotonic() + seconds
        look = (f"(() => {{ try {{ const found = {condition}; return found instanceof Node || found; }} "
                "catch { return null; } })()")
        while time.monotonic() < deadline:
            if value := self.eval(look):
                return value
            time.sleep(0.03)
        raise AssertionError(f"{condition} did not become true; the page says {self.text('body')[:2000]!r}")

    def text(self, selector: str) -> str:
        """What is shown of the first such element, or nothing."""
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText") or ""

    def count(self, selector: str) -> int:
        return int(self.eval(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def hover(self, selector: str) -> dict[str, float]:
        """Move the mouse to the middle of the last such element, which must be what one would hit there."""
        place: dict[str, float] = self.wait(f"""(() => {{
            const node = [...document.querySelectorAll({json.dumps(selector)})].at(-1);
            node.scrollIntoView({{block: "nearest"}});
            const box = node.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            return node.contains(document.elementFromPoint(x, y)) && {{x, y}};
        }})()""")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        return place

    def click(self, selector: str) -> None:
        place = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0, code: str = "") -> None:
        """modifiers: 1 is Alt, 2 is Control, 8 is Shift."""
        about = {"key": key, "code": code or key, "windowsVirtualKeyCode": _KEYS.get(key, 0), "modifiers": modifiers}
        written = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **written)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def seen(self, method: str) -> list[Mapping[str, Any]]:
        """What the browser has reported of this kind, such as Network.requestWillBeSent."""
        self.eval("0")
        return [event["params"] for event in self._browser.events
                if event["method"] == method and event.get("sessionId") == self._session]

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def tab(browser: Browser) -> Iterator[Page]:
    page = Page(browser)
    try:
        yield page
    finally:
        page.close()

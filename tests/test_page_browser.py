"""The chat page in a real headless browser, with the embedded model behind `deltic serve` and with scripted answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import BINARY, Browser, Page, browsing, tab
from page_cases import HOSTILE, RICH
from test_server_harness import Scripted, Served, serving, tiny
from test_vision_chat import llm, served
from vision_models import directory

from deltic import LLM
from deltic.cluster.gather import merged_metrics
from deltic.server.models import ModelSet, ModelSource

__all__ = ["directory", "llm", "served"]

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(BINARY is None, reason="there is no chromium (apt-get install chromium)")]

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
ALT = 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab. Errors, violations of its policy and requests to other servers fail the test."""
    with tab(browser) as page:
        page.origin = ""
        yield page
        assert not page.seen("Runtime.exceptionThrown")
        entries = [event["entry"] for event in page.seen("Log.entryAdded")]
        assert not [entry for entry in entries if entry["source"] != "network"], entries
        urls = {event["request"]["url"] for event in page.seen("Network.requestWillBeSent")}
        assert not [url for url in urls if not url.startswith((f"{page.origin}/", "blob:", "data:image/"))], urls
        assert not page.seen("Page.javascriptDialogOpening")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `deltic serve` with the embedded model."""
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "deltic", "serve", "--port", "0", "--memory", "64MiB", "--threads", "1"]
    with log.open("w") as out, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True,
                                                env=os.environ | {"DELTIC_API_KEY": ""}) as server:
        assert server.stdout
        found = re.search(r"(http://[^/]+)/v1", server.stdout.readline())
        assert found, log.read_text()
        yield found[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Served, Scripted]]:
    engine = Scripted("Hi")
    with serving(engine.model()) as served:
        yield served, engine


@pytest.fixture
def played(stage: tuple[Served, Scripted]) -> Any:
    """Sets the answer of the scripted engine, and returns the server."""
    served, engine = stage

    def play(text: str | None, **options: Any) -> tuple[Served, Scripted]:
        served.wait_idle()
        engine.play(text, **options)
        return served, engine
    return play


def visit(page: Page, url: str) -> Page:
    page.origin = url
    page.open(f"{url}/")
    return page


def say(page: Page, text: str, wait: bool = True) -> None:
    """Sends a message and waits for the whole answer."""
    page.click("#input")
    page.type(text)
    page.press("Enter")
    page.wait("document.body.classList.contains('busy') || document.querySelector('.answer .foot > *')")
    if wait:
        finished(page)


def finished(page: Page) -> None:
    page.wait("!document.body.classList.contains('busy') && document.querySelector('.answer:last-child .foot > *')")


def answers(page: Page) -> list[str]:
    return list(page.eval("[...document.querySelectorAll('.answer .content')].map((node) => node.innerText.trim())"))


def set_tools(page: Page, tools: Any) -> None:
    page.click("#settings-button")
    page.eval(f"document.querySelector('[name=tools]').value = {json.dumps(json.dumps(tools))}")
    page.click("#settings-form [type=submit]")
    page.wait("!document.querySelector('#settings').open")


def background(page: Page) -> str:
    return str(page.eval("getComputedStyle(document.body).backgroundColor"))


# With the embedded model


def test_a_conversation(page: Page, live: str) -> None:
    """Send, continue, regenerate from the cache, edit, reload."""
    visit(page, live)
    assert page.text("#model") == "tiny" and "tokens" in page.text("#model-note")
    say(page, "What is the capital of France?")
    assert answers(page) == ["The capital of France is Paris."]
    assert re.search(r"8 tokens\b.*first after", page.text(".figures"))
    assert page.eval("document.title") == "What is the capital of France? · deltic"

    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.answer .pager')")
    finished(page)
    reused, prompt = map(int, re.search(r"(\d+) of (\d+) reused", page.text(".reuse")).groups())  # type: ignore[union-attr]
    assert reused == prompt > 10 and page.text(".answer .pager") == "2 / 2"
    page.click("[title='Earlier version']")
    assert page.text(".answer .pager") == "1 / 2"

    page.click("#input")
    page.press("ArrowUp")
    page.wait("document.activeElement.matches('.edit textarea')")
    page.eval("document.activeElement.select()")
    page.type("What is the capital of Italy?")
    page.press("Enter")
    page.wait("document.querySelector('.user .pager')")
    finished(page)
    assert answers(page) == ["The capital of Italy is Rome."] and page.text(".user .pager") == "2 / 2"
    page.click(".user [title='Earlier version']")
    assert answers(page) == ["The capital of France is Paris."]
    say(page, "And of Italy?")

    shown = answers(page)
    assert len(shown) == 2
    page.open(f"{live}/?again={page.eval('location.hash')}")
    assert page.count(".talk") == 1
    page.click(".talk .open")
    assert answers(page) == shown and page.count(".pager") == 2


def test_engine_panel_shows_metrics(page: Page, live: str) -> None:
    visit(page, live)
    say(page, "1+1=")
    page.press("e", ALT, "KeyE")
    page.wait("document.querySelectorAll('#engine .plot').length === 3")
    panel = page.text("#engine")
    assert re.search(r"tokens written\s+[1-9]", panel) and re.search(r"K/V pages\s+\d+ of", panel)
    assert re.search(r"from the cache\s+\d+ %", panel) and re.search(r"half of the requests\s+≤", panel)
    assert re.search(r"device\s+[\d.]+ \w+ of \d+ MiB", panel)
    before = int(re.search(r"answers\s+(\d+)\s+failed", panel)[1])  # type: ignore[index]
    say(page, "2+2=")
    page.wait(f"Number(/answers\\s+(\\d+)\\s+failed/.exec(document.querySelector('#engine').innerText)[1]) > {before}")
    assert page.eval("document.querySelector('#engine .plot polyline').points.length") > 1
    page.press("e", ALT, "KeyE")
    assert not page.eval("document.querySelector('#engine').checkVisibility()")


def test_engine_panel_has_a_row_for_each_model(page: Page) -> None:
    def load() -> LLM:
        return LLM(threads=1, memory="16MiB", max_context=512)

    with serving(ModelSet(tuple(ModelSource(name, load) for name in ("<b>one</b>", "two")))) as served:
        body = {"prompt": [*range(5, 105)], "max_tokens": 4, "temperature": 0}
        for model in ("<b>one</b>", "two", "two"):
            assert served.post("/v1/completions", model=model, **body).status_code == 200
        visit(page, served.url)
        page.press("e", ALT, "KeyE")
        page.wait("document.querySelectorAll('#engine .status tbody tr').length === 3")
        cells = page.eval("[...document.querySelectorAll('#engine .status tr')].map((row) => "
                          "[...row.children].map((cell) => cell.innerText))")
        assert cells[0] == ["model", "running", "waiting", "tokens/s", "reused", "first token", "p95", "device"]
        every, one, two = cells[1:]
        assert (every[0], one[0], two[0], one[4]) == ("all 2", "<b>one</b>", "two", "0 %") and one[5].startswith("≤")
        reused = [int(row[4].removesuffix(" %")) for row in (every, two)]
        assert 0 < reused[0] < reused[1] and re.fullmatch(r"[\d.]+ \w+ of 12 MiB", one[7])
        panel = page.text("#engine")
        assert f"from the cache\n{every[4]}" in panel and re.search(r"device\s+[\d.]+ \w+ of 24 MiB", panel)
        page.size(360, 740, 2, phone=True)
        assert page.eval("document.querySelector('#engine').scrollWidth") <= 360
        page.eval("window.shown = document.querySelector('.status'); document.querySelector('.status').scrollLeft = 50")
        page.wait("document.querySelector('.status') !== window.shown")
        assert page.eval("document.querySelector('.status').scrollLeft") == 50, "renewed where it was scrolled to"
        served.wait_idle()


def test_engine_panel_has_a_row_for_each_replica(page: Page, live: str) -> None:
    """The front's page of metrics, made of those of one server at two times."""
    visit(page, live)
    say(page, "1+1=")
    before = httpx.get(f"{live}/metrics").content
    say(page, "And of Italy?")
    after = httpx.get(f"{live}/metrics").content
    merged = merged_metrics({"k2v81wqd": before, "x70gxtpz": after}).decode()
    page.eval(f"window.fetch = async () => new Response({json.dumps(merged)})")
    page.press("e", ALT, "KeyE")
    page.wait("document.querySelectorAll('#engine .status tbody tr').length === 3")
    names = page.eval("[...document.querySelectorAll('#engine .status tr > :first-child')].map((one) => one.innerText)")
    assert names == ["replica", "all 2", "k2v81wqd", "x70gxtpz"]
    finished = [int(re.search(r'requests_finished_total\{.*"length"\} (\d+)', text.decode())[1])  # type: ignore[index]
                + int(re.search(r'requests_finished_total\{.*"stop"\} (\d+)', text.decode())[1])  # type: ignore[index]
                for text in (before, after)]
    assert int(re.search(r"answers\s+(\d+)", page.text("#engine"))[1]) == sum(finished)  # type: ignore[index]
    cache = page.eval("[...document.querySelectorAll('#engine .card')].find((one) => one.innerText.startsWith('Cache'))"
                      ".innerText")
    one = page.eval("document.querySelector('#engine .status tbody tr:last-child td:last-child').innerText")
    size = int(re.search(r"of (\d+) MiB", one)[1])  # type: ignore[index]
    assert re.fullmatch(rf"Cache\ndevice\n[\d.]+ \w+ of {2 * size} MiB\nK/V pages\n.*\nstate slots\n.*", cache), cache
    assert re.search(r"half of the requests\s+≤", page.text("#engine"))
    page.wait("!document.querySelector('#engine-problem').innerText")


# With scripted answers


def test_an_answer_streams_and_stops(page: Page, played: Any) -> None:
    served, _ = played(None, pause=0.01)
    visit(page, served.url)
    say(page, "Go on", wait=False)
    length = page.wait("document.querySelector('.answer .content').innerText.length")
    page.wait(f"document.querySelector('.answer .content').innerText.length > {length} + 20")
    assert page.eval("document.querySelector('#send').hidden") and page.count(".answer.running") == 1
    page.click("#stop")
    finished(page)
    assert "Stopped." in page.text(".answer .foot") and len(answers(page)[0]) > 20
    served.wait_idle()

    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.answer.running .content').innerText.length > 10")
    page.press("Escape")
    finished(page)
    served.wait_idle()
    assert page.text(".answer .pager") == "2 / 2"


def test_an_answer_continues_in_the_background(page: Page, played: Any) -> None:
    served, _ = played("word " * 60, pause=0.01)
    visit(page, served.url)
    say(page, "First", wait=False)
    page.press("n", ALT, "KeyN")
    assert page.count(".message") == 0 and page.count(".talk.running") == 1
    page.wait("!document.querySelector('.talk.running')")
    page.click(".talk .open")
    assert answers(page) == [("word " * 60).strip()]


def test_thinking_is_folded(page: Page, played: Any) -> None:
    served, _ = played("<think>\nLet me **see**.\n</think>\n\nIt is 4.")
    visit(page, served.url)
    say(page, "2+2=")
    assert answers(page) == ["It is 4."]
    assert page.text(".thinking summary").startswith("Thought for") and page.text(".thought") == ""
    page.click(".thinking summary")
    assert page.text(".thought") == "Let me see." and page.count(".thought strong") == 1


def test_a_tool_call(page: Page, played: Any) -> None:
    served, engine = played("I look it up.\n" + CALL)
    visit(page, served.url)
    set_tools(page, TOOLS)
    say(page, "Weather?")
    assert page.text(".call strong") == "weather" and '"city": "Oslo"' in page.text(".call pre")
    assert page.count(".call .t-property") == 1, "arguments have colours"
    page.click(".call textarea")
    page.type("Rain")
    engine.play("It rains.")
    page.click(".calls .primary")
    page.wait("document.querySelectorAll('.answer').length === 2")
    finished(page)
    assert answers(page)[1] == "It rains." and page.text(".result summary") == "Result of weather"
    prompt = tiny().chat_processor.tokenizer.decode(engine.seen[-1].prompt, skip_special=False)
    assert "Rain" in prompt and "<parameter=city>\nOslo" in prompt


def test_settings_are_sent_and_kept(page: Page, played: Any) -> None:
    served, engine = played("Hi")
    visit(page, served.url)
    page.press(",", ALT, "Comma")
    values = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "33", "seed": "7",
              "thinking": "on"}
    for name, value in values.items():
        page.eval(f"document.querySelector('[name={name}]').value = {value!r}")
    page.click("#settings-form [type=submit]")
    page.open(f"{served.url}/?again")
    say(page, "Hi")
    sampling = engine.seen[-1].output
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 33, 7)
    page.press(",", ALT, "Comma")
    assert {name: page.eval(f"document.querySelector('[name={name}]').value") for name in values} == values
    page.eval("document.querySelector('[name=tools]').value = '{'")
    page.click("#settings-form [type=submit]")
    assert "Tools must be JSON" in page.text("#settings-problem")


def test_rich_text(page: Page, played: Any) -> None:
    served, _ = played(RICH)
    visit(page, served.url)
    say(page, "Explain")
    assert page.count(".content .katex") == 5 and page.count(".content .katex-display") == 1
    assert page.count(".content .katex-error") == 0 and "$5 or $10" in page.text(".content")
    assert page.count(".content .t-keyword") == 2 and page.count(".content tbody tr") == 3
    assert page.count(".content input[disabled]") == 2 and page.count(".content ol ul li") == 1
    assert page.eval("document.querySelector('.content a').rel") == "noopener noreferrer nofollow"
    assert page.eval("document.querySelector('.content svg[data-width]').style.width").endswith("em")
    whole = page.eval("document.querySelector('.content').textContent")
    again = page.eval(f"""(async () => {{
        const {{Growing}} = await import("/page/markdown.js");
        const [text, grown] = [{json.dumps(RICH.split('</think>')[1].strip())}, document.createElement("div")];
        const view = new Growing(grown);
        for (let end = 1; end <= text.length; end += 3) view.render(text.slice(0, end), false);
        view.render(text, true);
        return grown.textContent;
    }})()""")
    assert again == whole, "a text that grows looks in the end as if it had come at once"


def test_hostile_answers_stay_text(page: Page, played: Any) -> None:
    """In an answer, in thinking, and in arguments of a call. The fixture of the page checks all requests."""
    hostile = "\n\n".join(HOSTILE)
    served, engine = played(f"<think>\n{hostile}\n</think>\n\n{hostile}")
    visit(page, served.url)
    page.eval("window.owned = 0; addEventListener('securitypolicyviolation', () => { owned += 1000; })")
    say(page, "<img src=x onerror=owned++> <script>owned++</script>")
    page.click(".thinking summary")
    assert_harmless(page)
    shown = page.text(".content")
    assert "<script>owned++</script>" in shown and "<img src=x onerror=owned++>" in shown, "it is shown as it is"
    set_tools(page, TOOLS)
    engine.play(CALL.replace("Oslo", "<img src=x onerror=owned++>").replace("weather", "<b onclick=owned++>w</b>"))
    say(page, "Call")
    assert_harmless(page)
    page.open(f"{served.url}/?again")
    page.click(".talk .open")
    assert_harmless(page)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_each_hostile_text_alone(page: Page, stage: tuple[Served, Scripted], text: str) -> None:
    visit(page, stage[0].url)
    page.eval(f"""(async () => {{
        window.owned = 0;
        const {{elements}} = await import("/page/markdown.js");
        document.querySelector("#thread").replaceChildren(...elements({json.dumps(text)}));
    }})()""")
    assert_harmless(page)


def assert_harmless(page: Page) -> None:
    page.eval("Promise.all(document.getAnimations().map(() => 0)).then(() => new Promise((r) => setTimeout(r, 50)))")
    assert not page.eval("window.owned")
    wrong = page.eval("""[...document.querySelectorAll("#thread *, #sidebar *")].filter((node) =>
        ["script", "img", "iframe", "object", "embed", "form", "base", "meta", "style", "link", "video", "audio",
         "foreignobject", "animate", "set", "b", "marquee"].includes(node.localName)
        || [...node.attributes].some(({name}) => name.startsWith("on") || name === "srcdoc" || name === "formaction")
        || ("href" in node && typeof node.href === "string" && !/^(https?|mailto):/.test(node.href))
    ).map((node) => node.outerHTML)""")
    assert not wrong
    assert page.eval("document.title").endswith("deltic") and page.eval("({}).owned") is None


def test_long_nonsense_does_not_stop_the_page(page: Page, stage: tuple[Served, Scripted]) -> None:
    visit(page, stage[0].url)
    for piece in (">", "[", "**a*", "$", "<div>", "- ", "`a``", "|a", "\\(", "\\def\\a{\\a\\a}$\\a$ "):
        took = page.eval(f"""(async () => {{
            const {{elements}} = await import("/page/markdown.js");
            const begun = performance.now();
            document.querySelector("#thread").replaceChildren(...elements({json.dumps(piece)}.repeat(5000)));
            return performance.now() - begun;
        }})()""")
        assert took < 10_000, piece


def test_errors_are_shown_and_retried(page: Page, played: Any) -> None:
    served, engine = played("A long answer that breaks", error="the model fell over")
    visit(page, served.url)
    say(page, "Hi")
    assert "the model fell over" in page.text(".problem")
    engine.play("Better.")
    page.click(".problem button")
    page.wait("document.querySelector('.answer .pager')")
    finished(page)
    assert answers(page) == ["Better."]


def test_the_page_asks_for_an_api_key_and_keeps_it(page: Page) -> None:
    with serving(Scripted("Hello.").model(), api_keys={"secret": "me"}) as served:
        visit(page, served.url)
        page.wait("document.querySelector('#settings').open")
        assert "API key" in page.text("#settings-problem")
        page.type("secret")
        page.press("Enter")
        page.wait("document.querySelector('#model').innerText === 'tiny'")
        say(page, "Hi")
        assert answers(page) == ["Hello."]
        page.open(f"{served.url}/?again")
        assert page.text("#model") == "tiny" and not page.eval("document.querySelector('#settings').open")


def test_light_and_dark(page: Page, stage: tuple[Served, Scripted]) -> None:
    """The system decides, until the button overrides it, also after a reload."""
    page.prefer("light")
    visit(page, stage[0].url)
    light = background(page)
    page.prefer("dark")
    dark = background(page)
    assert light != dark
    page.click("#theme")
    assert background(page) == light
    page.open(f"{stage[0].url}/?again")
    assert background(page) == light
    page.press("t", ALT, "KeyT")
    assert background(page) == dark


def test_the_width_of_a_phone(page: Page, played: Any) -> None:
    served, _ = played(RICH)
    page.size(360, 740, 2, phone=True)
    visit(page, served.url)
    assert not page.eval("document.querySelector('#sidebar').checkVisibility()")
    page.click("#input")
    page.type("Explain")
    page.click("#send")
    page.wait("document.querySelector('.figures')")
    assert page.eval("document.documentElement.scrollWidth") == 360
    assert page.eval("""[...document.querySelectorAll("#thread article, .box, .top > *")].every((node) =>
        node.getBoundingClientRect().right <= 360 && node.getBoundingClientRect().left >= 0)""")
    assert page.eval("document.querySelector('.box').getBoundingClientRect().bottom") <= 740
    page.click("#menu")
    assert page.text(".talk .open") == "Explain"
    page.click("#new")
    assert page.count(".message") == 0 and not page.eval("document.querySelector('#sidebar').checkVisibility()")


def test_the_engine_on_a_phone(page: Page, live: str) -> None:
    page.size(360, 740, 2, phone=True)
    visit(page, live)
    page.click("#engine-button")
    page.wait("document.querySelector('#engine .plot')")
    assert page.eval("document.querySelector('#engine').getBoundingClientRect().width") == 360
    assert page.eval("document.querySelector('#engine').scrollWidth") <= 360
    page.click("#close-engine")
    assert not page.eval("document.querySelector('#engine').checkVisibility()")


def test_conversation_list(page: Page, played: Any) -> None:
    served, _ = played("Yes.")
    visit(page, served.url)
    for text in ("About apples", "About pears"):
        page.press("n", ALT, "KeyN")
        say(page, text)
    assert page.eval("[...document.querySelectorAll('.talk .open')].map((row) => row.innerText)") == [
        "About pears", "About apples"]
    page.eval("document.querySelector('#search').value = 'apple'; "
              "document.querySelector('#search').dispatchEvent(new Event('input'))")
    assert page.count(".talk") == 1
    page.hover(".talk")
    page.click(".talk [title=Rename]")
    page.eval("document.activeElement.select()")
    page.type("Apples!")
    page.press("Enter")
    page.wait("document.querySelector('.talk .open').innerText === 'Apples!'")
    page.hover(".talk")
    page.click(".talk [title=Delete]")
    page.wait("!document.querySelector('.talk')")
    page.click(".toast button")
    page.wait("document.querySelector('.talk')")
    page.open(f"{served.url}/?again")
    assert page.count(".talk") == 2


def test_phone_touch_targets_have_44_pixels(page: Page, played: Any) -> None:
    served, _ = played(RICH)
    page.size(360, 740, 2, phone=True)
    visit(page, served.url)
    say_on_a_phone(page, "Explain")
    page.wait("document.querySelector('.figures')")
    small = """[...document.querySelectorAll("button, select")].filter((node) => node.checkVisibility()).map((node) =>
        [node.id || node.title, node.getBoundingClientRect()]).filter(([, box]) => box.width < 44 || box.height < 44)
        .map(([name]) => name)"""
    assert page.eval(small) == []
    assert page.eval("document.documentElement.scrollWidth") == 360
    page.click("#menu")
    assert page.eval(small) == []


def say_on_a_phone(page: Page, text: str) -> None:
    page.click("#input")
    page.type(text)
    page.click("#send")


def test_a_model_is_chosen_and_kept(page: Page) -> None:
    one, two = (ModelSource(name, lambda name=name: Scripted(f"I am {name}.").model()) for name in ("one", "two"))
    with serving(ModelSet((one, two))) as served:
        visit(page, served.url)
        assert page.eval("[...document.querySelector('#model').options].map((node) => node.text)") == ["one", "two"]
        say(page, "Who?")
        page.eval("""document.querySelector('#model').value = 'two';
                     document.querySelector('#model').dispatchEvent(new Event('change'))""")
        say(page, "And you?")
        assert answers(page) == ["I am one.", "I am two."]
        page.open(f"{served.url}/?again")
        assert page.eval("document.querySelector('#model').value") == "two"


FILES = """(async () => {
  const data = new DataTransfer();
  data.items.add(new File(["the code word is plum"], "notes.txt", {type: "text/plain"}));
  data.items.add(new File([new Uint8Array([0, 1, 2, 255])], "a.bin"));
  document.querySelector("#input").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true,
    cancelable: true}));
})()"""


def test_text_files_are_attached(page: Page, played: Any) -> None:
    served, _ = played("Plum.")
    visit(page, served.url)
    page.eval(FILES)
    page.wait("document.querySelectorAll('#pictures .file').length === 1 && document.querySelector('.toast')")
    assert "neither a picture, nor text" in page.text(".toast")
    say(page, "Which word?")
    assert page.text(".bubble .file") == "notes.txt" and page.count("#pictures .file") == 0
    assert answers(page) == ["Plum."]


# Pictures

BRING = """(async () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [40, 24];
  canvas.getContext("2d").fillStyle = "%s";
  canvas.getContext("2d").fillRect(0, 0, 30, 24);
  const blob = await new Promise((done) => canvas.toBlob(done));
  const data = new DataTransfer();
  data.items.add(new File([blob], "it.png", {type: "image/png"}));
  const how = "%s" === "drop" ? new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})
    : new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true});
  document.querySelector("#input").dispatchEvent(how);
})()"""


def test_pictures(page: Page, served: Served, llm: LLM) -> None:
    """Paste, drop, choose, remove, send, show, and send again in the next turn."""
    pictures = llm.engine.pictures
    assert pictures
    visit(page, served.url)
    before = pictures.encoded
    for number, (colour, how) in enumerate((("red", "paste"), ("blue", "drop"), ("green", "paste")), 1):
        page.eval(BRING % (colour, how))
        page.wait(f"document.querySelectorAll('#pictures img').length === {number}")
    page.click("#pictures figure:last-child button")
    page.wait("document.querySelectorAll('#pictures img').length === 2")
    assert page.eval("!document.querySelector('#send').disabled"), "pictures alone can be sent"
    say(page, "What is this?")
    assert page.count("#pictures img") == 0 and page.count(".user .bubble img") == 2
    assert page.count(".problem") == 0 and pictures.encoded == before + 2
    say(page, "And?")
    assert page.count(".problem") == 0 and pictures.encoded == before + 2
    page.click("#attach")

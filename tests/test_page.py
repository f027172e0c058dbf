"""The chat page without a browser: routes, headers, contents of its files, and the wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from shutil import which

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from test_server_harness import Scripted, tiny

from deltic import SamplingParams
from deltic.server import page
from deltic.server.app import create_app

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "deltic" / "server" / "page" / "static"
OWN = sorted(path for path in STATIC.glob("*") if path.is_file())
SCRIPTS = [path for path in OWN if path.suffix == ".js"]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=page.routes())) as client:
        yield client


def policy(client: TestClient) -> dict[str, str]:
    """The parts of the Content-Security-Policy."""
    parts = client.get("/").headers["content-security-policy"].split("; ")
    return {name: values for name, _, values in (part.partition(" ") for part in parts)}


def test_page_needs_no_api_key() -> None:
    model = Scripted("Hi").model()
    with TestClient(create_app(model, api_keys={"secret": "me"})) as client:
        assert client.get("/").status_code == 200 and client.get("/page/app.js").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/page/nothing.js").json()["error"]["type"] == "not_found_error"
        assert client.post("/").status_code == 405
    model.close()


def test_referenced_files_are_served(client: TestClient) -> None:
    html = client.get("/").text
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', html))
    imported = {f"page/{name}" for path in SCRIPTS
                for name in re.findall(r'from "\./([^"]+)"', path.read_text("utf-8"))}
    assert {"page/app.js", "page/style.css"} <= named and "page/markdown.js" in imported
    for name in named | imported:
        assert client.get(f"/{name}").status_code == 200, name
    fonts = re.findall(r"url\((fonts/[^)]+\.woff2)\)", client.get("/page/vendor/katex-0.19.1/katex.min.css").text)
    assert len(fonts) == 20
    assert all(client.get(f"/page/vendor/katex-0.19.1/{font}").status_code == 200 for font in fonts)


@pytest.mark.parametrize(("path", "kind"), [
    ("/", "text/html; charset=utf-8"), ("/page/app.js", "text/javascript; charset=utf-8"),
    ("/page/style.css", "text/css; charset=utf-8"), ("/page/favicon.svg", "image/svg+xml"),
    ("/page/vendor/katex-0.19.1/fonts/KaTeX_Main-Regular.woff2", "font/woff2")])
def test_headers(client: TestClient, path: str, kind: str) -> None:
    found = client.get(path)
    assert found.headers["content-type"] == kind and found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer" and "content-security-policy" in found.headers
    head = client.head(path)
    assert head.status_code == 200 and not head.content
    assert head.headers["content-length"] == str(len(found.content))


def test_caching(client: TestClient) -> None:
    """Libraries have versions in their paths and are cached; other files are revalidated."""
    own, library = client.get("/page/app.js"), client.get("/page/vendor/marked-18.2.1/marked.esm.js")
    assert own.headers["cache-control"] == "no-cache" and "immutable" in library.headers["cache-control"]
    tag = own.headers["etag"]
    assert tag != library.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get("/page/app.js", headers={"if-none-match": known})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    assert client.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", [
    "", "index", "../__init__.py", "..%2f__init__.py", "%2e%2e/__init__.py", "/etc/passwd", "vendor",
    "vendor/README.md", "vendor/katex-0.19.1/LICENSE", "app.js/", "app.js%00"])
def test_other_paths_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_content_security_policy(client: TestClient) -> None:
    parts = policy(client)
    assert parts["default-src"] == "'none'" and parts["script-src"] == parts["style-src"] == "'self'"
    assert parts["require-trusted-types-for"] == "'script'" and parts["trusted-types"] == "'none'"
    assert parts["connect-src"] == "'self'" and parts["img-src"] == "'self' data:", "nothing can be sent elsewhere"
    assert parts["frame-ancestors"] == parts["base-uri"] == parts["form-action"] == "'none'"
    rest = [value for name, value in parts.items() if name != "img-src"]  # pictures that go with a message are shown
    assert not re.search("unsafe|http|\\*|data:|blob:", " ".join(rest))


def test_the_html_has_no_inline_code() -> None:
    html = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))


def test_own_scripts_write_no_html() -> None:
    """Scripts do not use the functions that parse text as HTML or code, which the policy refuses, too."""
    sinks = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
                       r"|srcdoc|setHTML|\beval\b|new Function|setTimeout\([\"'`]")
    found = [f"{path.name}: {line.strip()}" for path in SCRIPTS for line in path.read_text("utf-8").splitlines()
             if sinks.search(line)]
    assert not found


def test_page_loads_nothing_from_other_hosts() -> None:
    for path in OWN:
        named = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", path.read_text("utf-8")))
        assert named <= {"http://www.w3.org/2000/svg"}, path.name


def test_suggested_prompts_work_with_the_embedded_model() -> None:
    text = (STATIC / "app.js").read_text("utf-8")
    found = re.search(r"const IDEAS = \[(.*?)\];", text, re.DOTALL)
    assert found
    ideas, right = re.findall(r'"([^"]+)"', found[1]), ("Paris", "12", "April")
    assert len(ideas) == len(right)
    for idea, word in zip(ideas, right, strict=True):
        assert word in tiny().chat(idea, SamplingParams(temperature=0.0, max_tokens=40)).text, idea
        sampled = [tiny().chat(idea, SamplingParams(seed=seed, max_tokens=60)).text for seed in range(4)]
        assert all(word in text for text in sampled), (idea, sampled)


def test_meters_have_labels() -> None:
    for path in SCRIPTS:
        for meter in re.findall(r'el\("meter", \{(.*?)\}\)', path.read_text("utf-8"), re.DOTALL):
            assert "aria-label" in meter, path.name


def test_touch_targets_have_44_pixels() -> None:
    """The rule for phones; test_page_browser.py measures."""
    style = (STATIC / "style.css").read_text("utf-8")
    rule = style.partition("@media (max-width: 760px), (pointer: coarse)")[2]
    assert re.search(r"button, .*\{ min-width: 44px;\s+min-height: 44px; \}", rule, re.DOTALL)


def test_scripts_are_valid() -> None:
    """Node parses them, if it is installed."""
    if node := which("node"):
        for path in SCRIPTS:
            done = subprocess.run([node, "--input-type=module", "--check"], input=path.read_text("utf-8"), text=True,
                                  capture_output=True)
            assert done.returncode == 0, (path.name, done.stderr)


NODE = """
import {wire} from "./conversation.js";
const nodes = [{role: "user", content: "Hi", files: [{name: "a.txt", text: "one"},
  {name: "b.pdf", data: "data:application/pdf;base64,AA=="}], images: ["data:image/png;base64,AA=="]},
  {role: "user", content: "plain"}, {role: "user", content: "", files: [{name: "c.md", text: "two"}]}];
console.log(JSON.stringify(wire(nodes, "")));
"""


def test_files_are_sent_as_message_parts(tmp_path: Path) -> None:
    node = which("node")
    if node is None:
        assert "file_data" in (STATIC / "conversation.js").read_text("utf-8")
        return
    for name in ("conversation.js", "dom.js", "tokens.js"):
        (tmp_path / name).write_text((STATIC / name).read_text("utf-8"))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(NODE)
    done = subprocess.run([node, "run.js"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third = (message["content"] for message in json.loads(done.stdout))
    assert [part["type"] for part in first] == ["image_url", "text", "file", "text"] and second == "plain"
    assert first[2]["file"] == {"filename": "b.pdf", "file_data": "data:application/pdf;base64,AA=="}
    assert first[1]["text"].startswith("File a.txt:") and first[3]["text"] == "Hi" and len(third) == 1


def test_page_files_are_small() -> None:
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in OWN}
    assert max(lines.values()) <= 500, lines
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < 1_000_000


def test_vendored_libraries_match_their_notes() -> None:
    vendor = STATIC / "vendor"
    notes = (vendor / "README.md").read_text("utf-8")
    sums = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", notes, re.MULTILINE))
    there = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.suffix in (".js", ".css")}
    assert set(sums) == there
    assert {name: sha256((vendor / name).read_bytes()).hexdigest() for name in sums} == sums
    assert all((folder / "LICENSE").exists() for folder in vendor.iterdir() if folder.is_dir())


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    """The files that hatchling would pack, without compiling the kernels."""
    program = ("from hatchling.builders.wheel import WheelBuilder; import sys\n"
               "builder = WheelBuilder('.'); builder.config.build_config['hooks'] = {}\n"
               "builder.get_build_hooks = lambda directory: {}\n"
               "print(*builder.build(directory=sys.argv[1], versions=['standard']))")
    if subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True, check=False).returncode:
        pytest.skip("hatchling is not installed")
    made = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.split()[-1]
    packed = set(zipfile.ZipFile(made).namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert wanted and wanted <= packed

"""Histories of agents: what other servers' tools left in them is read as text, or replaced and named, never refused."""

from __future__ import annotations

import base64
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image
from test_documents import document
from test_server_harness import USER, Scripted, each, scripted, serving, tiny, wait_until

from deltic.chat.processor import ChatProcessor
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.server.content import ContentReader, DocumentTexts, digest
from deltic.server.routing import IGNORED_HEADER
from deltic.vision.decoder_process import DecoderProcess, reader_process

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
pytestmark = pytest.mark.usefixtures("script_server")

CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
PDF = base64.b64encode(document("The door code is 4711.")).decode()
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def asked(path: str, messages: list[Any]) -> dict[str, Any]:
    return {RESPONSES: {"input": messages}, MESSAGES: {"messages": messages, "max_tokens": 5},
            CHAT: {"messages": messages}}[path]


def prompt_of(path: str, messages: list[Any], **more: Any) -> tuple[str, str]:
    """The prompt that the model reads, and what the client is told to have had no effect."""
    with scripted("Yes.") as (served, engine):
        response = served.post(path, **asked(path, messages), **more)
        assert response.status_code == 200, response.text
        return (tiny().chat_processor.tokenizer.decode(engine.seen[-1].prompt, skip_special=False),
                response.headers.get(IGNORED_HEADER, ""))


def result(*blocks: Any) -> list[Any]:
    """An agent's loop, in which a tool has answered with these blocks."""
    return [*USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(blocks)}]}]


def later(*blocks: Any) -> list[Any]:
    """A conversation in which the assistant's answer had these blocks."""
    return [*USER, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "And?"}]


SEARCH = ({"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "rivers of Norway"}},
          {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{
              "type": "web_search_result", "title": "Glomma", "url": "https://r.example", "encrypted_content": "zzz"}]})


@each(("messages", "read", "hidden", "ignored"), [
    (result({"type": "tool_reference", "tool_name": "mcp__x"}), "[tool_reference] mcp__x", "toolu", ""),
    (later(*SEARCH, {"type": "text", "text": "done"}), "[web_search_tool_result] Glomma\nhttps://r.example", "zzz", ""),
    (later(*SEARCH), "[server_tool_use] web_search\nquery: rivers of Norway", "srv_1", ""),
    (result({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}),
     "The door code is 4711.", PDF[:20], ""),
    (result({"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "JVBERi0xLjQK"}}),
     "[document: not shown] a.pdf", "JVBE", "content.document"),
    (result({"type": "document", "source": {"type": "file", "file_id": "file_1"}}), "[document: not shown]", "file_1",
     "content.document"),
    (result({"type": "container_upload", "file_id": "file_1"}), "[container_upload: not shown]", "file_1",
     "content.container_upload"),
    ([{"role": "user", "content": [{"type": "tool_addition", "tool": {"name": "dig", "input_schema": {}}},
                                   {"type": "text", "text": "go"}]}], "[tool_addition] dig\n\ngo", "schema", ""),
    (later({"type": "bash_code_execution_tool_result", "content": {"stdout": "total 0", "return_code": 0}}),
     "total 0", "return_code", ""),
    (later({"type": "redacted_thinking", "data": "zzz"}, {"type": "text", "text": "done"}), "done", "zzz", ""),
    (later({"type": "hologram", "data": "zzz"}), "[hologram: not shown]", "zzz", "content.hologram"),
])
def test_blocks_of_other_servers_in_messages(messages: list[Any], read: str, hidden: str, ignored: str) -> None:
    prompt, named = prompt_of(MESSAGES, messages)
    assert read in prompt and hidden not in prompt and named == ignored


@each(("item", "read", "ignored"), [
    ({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "rivers"}},
     "[web_search_call] type: search\nquery: rivers", ""),
    ({"type": "image_generation_call", "id": "ig", "status": "completed", "result": "AAAA"},
     "[image_generation_call: not shown]", "content.image_generation_call"),
    ({"type": "compaction", "encrypted_content": "AAAA"}, "[compaction: not shown]", "content.compaction"),
    ({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "dig", "input_schema": {}}]},
     "[mcp_list_tools] dig", ""),
    ({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}, "[mcp_list_tools: not shown]",
     "content.mcp_list_tools"),
    ({"type": "tool_search_call", "call_id": "t1", "arguments": {"query": "dig"}}, "dig", ""),
    ({"type": "code_interpreter_call", "id": "c", "code": "1 + 1", "outputs": [{"type": "logs", "logs": "2"}]},
     "1 + 1\n2", ""),
    ({"type": "alien", "x": 1}, "[alien: not shown]", "content.alien"),
])
def test_items_of_other_servers_in_responses(item: dict[str, Any], read: str, ignored: str) -> None:
    user = {"type": "message", "role": "user", "content": "Hi"}
    prompt, named = prompt_of(RESPONSES, [user, item, user])
    assert read in prompt and "AAAA" not in prompt and named == ignored
    assert prompt_of(RESPONSES, [user, item])[1] == ignored  # also as the newest


@each(("kind", "more"), [("local_shell_call", {"action": {"type": "exec", "command": ["ls"]}}),
                                            ("apply_patch_call", {"operation": {"path": "a.py"}})])
def test_calls_of_the_clients_own_machine_are_calls(kind: str, more: dict[str, Any]) -> None:
    turn = [*USER, {"type": kind, "id": "l1", "call_id": "c1", "status": "completed", **more},
            {"type": f"{kind}_output", "call_id": "c1", "output": "README.md"}]
    prompt, named = prompt_of(RESPONSES, turn)
    function = {"name": kind.removesuffix("_call"), "arguments": next(iter(more.values()))}
    same = [*USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "README.md"}]
    assert (prompt, named) == (prompt_of(CHAT, same)[0], "")


def test_output_of_a_foreign_call_that_is_no_text_is_read() -> None:
    output = [{"stdout": "README.md", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    turn = [*USER, {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c1", "output": output}]
    assert "[shell_call_output] README.md" in prompt_of(RESPONSES, turn)[0]


@each("path", [CHAT, RESPONSES, MESSAGES])
def test_old_pictures_behind_urls_are_placeholders_where_nothing_is_fetched(path: str) -> None:
    url = "https://pictures.example/a.png"
    picture = {CHAT: {"type": "image_url", "image_url": {"url": url}}, RESPONSES: {
        "type": "input_image", "image_url": url}, MESSAGES: {
            "type": "image", "source": {"type": "url", "url": url}}}[path]
    turn = {"role": "user", "content": [picture]}
    with scripted("Yes.") as (served, _):
        new = served.post(path, **asked(path, [turn]))
    assert new.status_code == 400 and "allow_image_urls" in new.json()["error"]["message"]
    prompt, ignored = prompt_of(path, [turn, *USER])
    assert "pictures.example" not in prompt and ignored == f"content.{picture['type']}"


def test_a_screenshot_that_a_call_gave_is_seen() -> None:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    turn = [*USER, {"type": "computer_call", "call_id": "c1", "action": {"type": "screenshot"}},
            {"type": "computer_call_output", "call_id": "c1", "output": {
                "type": "computer_screenshot", "image_url": url}}]
    with scripted("Red.") as (served, engine):
        assert served.post(RESPONSES, input=turn).status_code == 200
    assert engine.seen[-1].prompt.pictures  # type: ignore[union-attr]


@each(("part", "same"), [
    ({"type": "output_text", "text": "Hm."}, {"content": "Hm.Paris."}),
    ({"type": "thinking", "thinking": "Hm."}, {"content": "Paris.", "reasoning_content": "Hm."}),
    ({"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
     {"content": "Paris.", "reasoning_content": "Hm."}),
    ({"type": "reasoning", "text": "Hm."}, {"content": "Paris.", "reasoning_content": "Hm."}),
    ({"type": "redacted_thinking", "data": "x"}, {"content": "Paris."}),
    ({"type": "refusal", "refusal": "Hm."}, {"content": "Hm.Paris."}),
])
def test_parts_of_other_wires_in_chat(part: dict[str, Any], same: dict[str, Any]) -> None:
    answers = ({"content": [part, {"type": "text", "text": "Paris."}]}, same)
    prompts = [prompt_of(CHAT, [*USER, {"role": "assistant", **answer}, *USER], history="preserve")
               for answer in answers]
    assert prompts[0] == prompts[1]


@each("path", [CHAT, RESPONSES, MESSAGES])
def test_the_newest_message_may_be_spelled_as_on_other_wires(path: str) -> None:
    assert prompt_of(path, [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]) == prompt_of(
        path, USER)


def file_part(path: str, data: str, name: str) -> dict[str, Any]:
    given = {"filename": name, "file_data": data}
    return {CHAT: {"type": "file", "file": given}, RESPONSES: {"type": "input_file", **given},
            MESSAGES: {"type": "document", "title": name, "source": {"type": "base64", "data": data}}}[path]


@each("path", [CHAT, RESPONSES, MESSAGES])
@each("url", [True, False])
def test_files_are_read(path: str, url: bool) -> None:
    kind = {"a.pdf": "application/pdf", "a.csv": "text/csv"}
    for name, data in (("a.pdf", PDF), ("a.csv", base64.b64encode(b"city,rain\nOslo,3").decode())):
        given = f"data:{kind[name]};base64,{data}" if url else data
        prompt, ignored = prompt_of(path, [{"role": "user", "content": [
            file_part(path, given, name), {"type": "text", "text": "What does it say?"}]}])
        assert f"{name}\n" in prompt and ("4711" in prompt or "Oslo,3" in prompt) and not ignored


@each("path", [CHAT, RESPONSES, MESSAGES])
@each("data", ["JVBERi0xLjQK", "gAAA", "?", ""])
def test_a_new_file_that_cannot_be_read_is_refused_and_an_old_one_replaced(path: str, data: str) -> None:
    turn = {"role": "user", "content": [file_part(path, data, "a.pdf")]}
    with scripted("Yes.") as (served, _):
        new = served.post(path, **asked(path, [turn]))
    assert new.status_code == 400 and "content[0]" in new.json()["error"]["message"], new.text
    kind = turn["content"][0]["type"]
    prompt, ignored = prompt_of(path, [turn, *USER])
    assert f"[{kind}: not shown] a.pdf" in prompt and ignored == f"content.{kind}"


@each("path", [CHAT, RESPONSES, MESSAGES])
def test_a_model_that_only_reads_shows_old_pictures_as_placeholders(path: str) -> None:
    engine = Scripted("Yes.")
    model = engine.model()
    model.chat_processor = ChatProcessor(tiny().chat_processor.tokenizer)
    picture = {CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, MESSAGES: PICTURE,
               RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AA=="}}[path]
    turn = {"role": "user", "content": [picture]}
    with serving(model) as served:
        new = served.post(path, **asked(path, [turn]))
        assert new.status_code == 400 and "this model reads text only" in new.json()["error"]["message"]
        old = served.post(path, **asked(path, [turn, *USER]))
        assert old.status_code == 200 and old.headers[IGNORED_HEADER] == f"content.{picture['type']}"
        if path == MESSAGES:  # a tool's result is not what the user has sent
            assert served.post(path, **asked(path, result(PICTURE))).status_code == 200


@each("path", [CHAT, RESPONSES, MESSAGES])
def test_a_model_that_sees_is_never_said_to_read_text_only(path: str) -> None:
    for part in ({"type": "input_image", "file_id": "file_1"}, {"type": "audio", "data": "x"}, {"type": "txt"}):
        with scripted("Yes.") as (served, _):
            error = served.post(path, **asked(path, [{"role": "user", "content": [part]}])).json()["error"]
        assert "text only" not in error["message"] and "content[0]" in error["message"]


def test_tools_of_types_that_nobody_knows_are_named_beside_a_function() -> None:
    function = {"name": "dig", "parameters": {"type": "object", "properties": {}}}
    own: dict[str, Any] = {
        CHAT: {"type": "function", "function": function}, RESPONSES: {"type": "function", **function},
        MESSAGES: {"name": "dig", "input_schema": {"type": "object", "properties": {}}}}
    for path, tool in own.items():
        both, named = prompt_of(path, USER, tools=[{"type": "collaboration", "name": "x"}, tool])
        assert (both, named) == (prompt_of(path, USER, tools=[tool])[0], "tools.collaboration")
        with scripted("Yes.") as (served, _):
            for wrong in ([{"type": "collaboration"}], [tool, {**tool, "type": "functoin"}]):
                if path == MESSAGES and len(wrong) == 2:
                    wrong[1]["type"] = "custm"
                assert served.post(path, **asked(path, USER), tools=wrong).status_code == 400


def test_a_client_may_try_with_no_input_whether_somebody_is_there() -> None:
    assert prompt_of(RESPONSES, []) == prompt_of(RESPONSES, [{"role": "user", "content": ""}])


def test_a_document_is_read_once_for_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bytes] = []

    def counted(data: bytes, limits: Limits, field: str, process: DecoderProcess) -> str:
        reads.append(data)
        if b"bad" in data:
            raise RequestError(f"{field} is damaged", field)
        return "x" * 4_000_000

    monkeypatch.setattr("deltic.server.content.pdf_text", counted)
    documents = DocumentTexts()
    for owner in ("me", "me", "you", None, "me"):
        assert len(str(documents.read(owner, [b"a", b"a"], Limits(), reader_process())[digest(b"a")])) == 4_000_000
    assert len(reads) == 3
    for _ in range(2):
        assert str(documents.read("me", [b"bad"], Limits(), reader_process())[digest(b"bad")]) == "is damaged"
    assert len(reads) == 4
    for owner, data in (("me", b"b"), ("you", b"a"), (None, b"a"), ("me", b"a")):
        documents.read(owner, [data], Limits(), reader_process())
    assert reads[4:] == [b"b", b"a"], "the least recently used of the owner with most had to go"


def test_all_documents_of_a_request_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], list[float]()

    def slow(data: bytes, limits: Limits, field: str, process: DecoderProcess) -> str:
        given.append(limits.document_seconds)
        now[0] += limits.document_seconds
        raise RequestError(f"{field} takes too long", field)

    monkeypatch.setattr("deltic.server.content.pdf_text", slow)
    monkeypatch.setattr("deltic.server.content.monotonic", lambda: now[0])
    documents = DocumentTexts()
    data = [bytes([index]) for index in range(9)]
    texts = documents.read("me", data, Limits(document_seconds=2.0), reader_process())
    assert given == [2.0, 2.0, 2.0] and texts.keys() == {digest(each) for each in data[:3]}
    reader = ContentReader(True, False, texts.get)
    part = {"type": "document", "source": {"type": "base64", "data": PDF}}  # there was no time for this one
    assert reader.messages([{"role": "tool", "content": [part]}])[0]["content"][0]["text"] == "[document: not shown]"
    with pytest.raises(RequestError, match="document_seconds"):
        reader.messages([{"role": "user", "content": [part]}])


def test_documents_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While those of more clients than there are threads are being read, others are answered, and of one client's
    requests one is at it at a time."""
    go, reading = threading.Event(), list[bytes]()

    def slow(data: bytes, limits: Limits, field: str, process: DecoderProcess) -> str:
        reading.append(data)
        assert go.wait(30)
        return "It says so."

    monkeypatch.setattr("deltic.server.content.pdf_text", slow)
    files = [base64.b64encode(b"%PDF-" + bytes([65 + index])).decode() for index in range(10)]
    turns = [[{"role": "user", "content": [file_part(CHAT, data, "a.pdf")]}] for data in files]
    with scripted("Yes.") as (served, _), ThreadPoolExecutor(12) as pool:
        asking = [pool.submit(served.post, CHAT, messages=turn) for turn in turns]
        try:
            wait_until(lambda: bool(reading))
            for _ in range(5):
                assert served.post(CHAT, messages=USER).status_code == 200
            assert len(reading) == 1
        finally:
            go.set()
        assert [future.result().status_code for future in asking] == [200] * 10
    assert len(reading) == 10


def test_documents_are_given_up_when_their_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads the first is killed, no other one is read, and nothing is kept of either."""
    begun, processes, reads = threading.Event(), list[DecoderProcess](), list[RequestError | str]()

    def noted(data: bytes, limits: Limits, field: str, process: DecoderProcess) -> str:
        processes.append(process)
        begun.set()
        try:
            process.call(time.sleep, 60, seconds=60, limit="document_seconds")  # uses no processor time
        except RequestError as error:
            reads.append(error)
            raise
        return "read"

    monkeypatch.setattr("deltic.server.content.pdf_text", noted)
    files = [base64.b64encode(b"%PDF- left " + bytes([65 + index])).decode() for index in range(3)]
    turn = {"role": "user", "content": [file_part(CHAT, data, "a.pdf") for data in files]}
    with scripted("Yes.") as (served, _):
        with served.send(CHAT, messages=[turn]):
            assert begun.wait(60)
        wait_until(lambda: bool(reads))
        assert served.post(CHAT, messages=USER).status_code == 200
        assert len(processes) == 1 and processes[0].closed and isinstance(reads[0], RequestError)


def test_a_document_of_a_response_before_is_read_again() -> None:
    turn = {"role": "user", "content": [file_part(RESPONSES, PDF, "a.pdf")]}
    with scripted("Yes.") as (served, engine):
        first = served.post(RESPONSES, input=[turn]).json()
        again = served.post(RESPONSES, input="And?", previous_response_id=first["id"])
        assert again.status_code == 200 and IGNORED_HEADER not in again.headers
    assert "4711" in tiny().chat_processor.tokenizer.decode(engine.seen[-1].prompt)


def test_calls_of_tools_that_take_a_text() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    prompts = [prompt_of(CHAT, [*USER, {"role": "assistant", "content": None, "tool_calls": [each]},
                                {"role": "tool", "tool_call_id": "c1", "content": "done"}]) for each in (
        call, {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": {"input": "*** Begin"}}})]
    assert prompts[0] == prompts[1] and "*** Begin" in prompts[0][0]


def test_many_unknown_types_are_looked_at_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def close(kind: str, *more: Any) -> list[str]:
        looked.append(kind)
        return []

    monkeypatch.setattr("deltic.server.content.difflib.get_close_matches", close)
    reader = ContentReader(True, False, lambda _: None)
    parts = [{"type": f"alien{index}" * 20} for index in range(20_000)] + [{"type": "same"}] * 20_000
    read, = reader.messages([{"role": "user", "content": parts}])
    assert len(looked) == 100 and max(map(len, looked)) == 64
    assert max(len(part["text"]) for part in read["content"]) < 100

"""Saved states over HTTP: in the operator's directory alone, for their owners, and at nobody else's cost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_server_harness import Served, serving

from deltic import LLM, SamplingParams
from deltic.config import Limits
from deltic.errors import ConfigError
from deltic.server.app import create_app

PATH = "/v1/states"
SYSTEM = {"role": "system", "content": "You answer questions about rivers in one short sentence. " * 3}
QUESTION = {"role": "user", "content": "Which river is the longest one?"}
SMALL: dict[str, Any] = {"memory": "32MiB", "max_batch": 4, "threads": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SMALL) as found:
        yield found


def chat(served: Served, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}
    response = served.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def error(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_a_server_saves_nothing_unless_it_is_told_where(llm: LLM, tmp_path: Path) -> None:
    with serving(llm) as served:
        assert "--state-dir" in error(served.post(PATH, messages=[SYSTEM, QUESTION]), 404)
        assert "--state-dir" in error(served.post(PATH, load="0" * 64), 404)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as a directory of states"):
        create_app(llm, state_dir=tmp_path / "file")


def test_a_conversation_moves_to_another_server(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path / "new" / "states") as served:
        saved = served.post(PATH, messages=[SYSTEM, QUESTION], name="rivers").json()
        assert saved["object"] == "state" and saved["name"] == "rivers" and saved["exact"] is True
        again = served.post(PATH, messages=[SYSTEM, QUESTION], name="rivers").json()
        assert again["tokens"] == saved["tokens"]
    with LLM(**SMALL) as other, serving(other, state_dir=tmp_path / "new" / "states") as served:
        loaded = served.post(PATH, load=saved["id"]).json()
        assert loaded == saved
        answer = chat(served, SYSTEM, QUESTION)
        assert cached(answer) == saved["tokens"] == answer["usage"]["prompt_tokens"]
        expected = llm.chat([SYSTEM, QUESTION], SamplingParams(temperature=0.0)).text
        assert answer["choices"][0]["message"]["content"] == expected[:len(answer["choices"][0]["message"]["content"])]
        other.engine.check()


def test_the_next_turn_reads_what_is_new(llm: LLM, tmp_path: Path) -> None:
    """With the thinking of the first turn, which the client does not send."""
    thinking = {"enable_thinking": True, "max_tokens": 200, "ignore_eos": False}
    with serving(llm, state_dir=tmp_path) as served:
        asked = {"role": "user", "content": "Which river is the widest one?"}
        message = chat(served, SYSTEM, asked, **thinking)["choices"][0]["message"]
        assert message["reasoning_content"]
        turn = [SYSTEM, asked, {"role": "assistant", "content": message["content"]}]
        saved = served.post(PATH, messages=turn, enable_thinking=True).json()
        following = [*turn, {"role": "user", "content": "And the second longest?"}]
        expected = chat(served, *following, enable_thinking=True)
    with LLM(**SMALL) as other, serving(other, state_dir=tmp_path) as served:
        assert served.post(PATH, load=saved["id"]).json() == saved
        answer = chat(served, *following, enable_thinking=True)
        assert cached(answer) == saved["tokens"] == cached(expected)
        assert answer["choices"][0]["message"] == expected["choices"][0]["message"]


def test_what_all_conversations_share(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path) as served:
        parts = [{"role": "system", "content": [{"type": "text", "text": SYSTEM["content"]}]}]
        saved = served.post(PATH, messages=parts).json()
    assert saved["tokens"] == len(llm.chat_processor.system_prefix([SYSTEM]))
    with LLM(**SMALL) as other, serving(other, state_dir=tmp_path) as served:
        assert served.post(PATH, load=saved["id"]).status_code == 200
        for text in ("One.", "Two."):
            assert cached(chat(served, SYSTEM, {"role": "user", "content": text})) == saved["tokens"]


def test_the_conversation_of_a_response(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path) as served:
        body = {"instructions": SYSTEM["content"], "input": "What is a delta?", "temperature": 0,
                "max_output_tokens": 12}
        response = served.post("/v1/responses", **body).json()
        saved = served.post(PATH, response_id=response["id"]).json()
        usage = response["usage"]
        assert saved["tokens"] >= usage["input_tokens"] + usage["output_tokens"] - 1
        assert "is not kept" in error(served.post(PATH, response_id="resp_0"), 404)


def test_raw_prompts(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path) as served:
        assert served.post(PATH, prompt=[5] * 40).json()["tokens"] == 40
        text = served.post(PATH, prompt="A river is a large stream of water. " * 5).json()
        assert text["tokens"] > 20
        for prompt in (7, {"a": 1}, ["text"], [True], [1 << 40], [-1], []):
            assert error(served.post(PATH, prompt=prompt), 400)


def test_owners_and_salts_load_for_themselves(llm: LLM, tmp_path: Path) -> None:
    keys = {"key-a": "ann", "key-b": "bob"}
    ann, bob = ({"authorization": f"Bearer {key}"} for key in keys)
    with serving(llm, state_dir=tmp_path, api_keys=keys) as served:
        body = {"messages": [SYSTEM, QUESTION], "cache_salt": "one"}
        saved = served.http.post(PATH, json=body, headers=ann).json()
        assert error(served.http.post(PATH, json={"load": saved["id"]}), 401)
    with LLM(**SMALL) as other, serving(other, state_dir=tmp_path, api_keys=keys) as served:
        assert served.http.post(PATH, json={"load": saved["id"]}, headers=bob).json() == saved
        assert cached(chat(served, SYSTEM, QUESTION, headers=ann)) == 0
        assert cached(chat(served, SYSTEM, QUESTION, headers=bob, cache_salt="one")) == 0
        assert cached(chat(served, SYSTEM, QUESTION, headers=bob)) == saved["tokens"]


@pytest.mark.parametrize("id", ["", "..", "../secret", "/etc/passwd", "0" * 63, "0" * 65, "G" * 64, "0" * 60 + "/../",
                                "0" * 64 + "\n", "0" * 64 + "\0", "%2e%2e", "０" * 64, 5, ["0" * 64], None, {}])
def test_ids_are_no_paths(llm: LLM, tmp_path: Path, id: Any) -> None:
    (tmp_path / "secret.json").write_text("{}")
    with serving(llm, state_dir=tmp_path / "states") as served:
        message = error(served.post(PATH, load=id), 400)
        assert str(tmp_path) not in message
        assert str(tmp_path) not in error(served.post(PATH, load="0" * 64), 404)


def test_links_are_not_followed(llm: LLM, tmp_path: Path) -> None:
    store = tmp_path / "states"
    with serving(llm, state_dir=store) as served:
        saved = served.post(PATH, messages=[SYSTEM, QUESTION]).json()
        item = next(store.glob("*.safetensors"))
        item.rename(tmp_path / "elsewhere")
        item.symlink_to(tmp_path / "elsewhere")
        message = error(served.post(PATH, load=saved["id"]), 400)
        assert "cannot be read" in message and str(tmp_path) not in message
        manifest = store / f"{saved['id']}.json"
        manifest.rename(tmp_path / "manifest")
        os.mkfifo(manifest)
        assert error(served.post(PATH, load=saved["id"]), 400)
        assert chat(served, SYSTEM, QUESTION)["choices"]


def test_bodies_that_mean_nothing(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path) as served:
        assert "give one of" in error(served.post(PATH), 400)
        assert "messages and load" in error(served.post(PATH, messages=[QUESTION], load="0" * 64), 400)
        assert "at most 200" in error(served.post(PATH, messages=[QUESTION], name="n" * 201), 400)
        assert "load" in error(served.post(PATH, lod="0" * 64), 400)
        assert error(served.post(PATH, messages=[{"role": "user", "content": "word " * 40_000}]), 400)
    assert not list(tmp_path.iterdir())


def test_the_directory_has_a_limit(tmp_path: Path) -> None:
    with LLM(**SMALL, limits=Limits(max_states_mib=1)) as small, serving(small, state_dir=tmp_path) as served:
        states = [served.post(PATH, prompt=[number] * 300) for number in range(10, 20)]
        refused = [each for each in states if each.status_code != 200]
        assert 0 < len(refused) < 10
        assert "max_states_mib" in error(refused[0], 400)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 20
        assert cached(chat(served, SYSTEM, QUESTION)) == 0


def test_changed_files_are_refused_while_others_are_served(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, state_dir=tmp_path) as served:
        saved = served.post(PATH, messages=[SYSTEM, QUESTION]).json()
        before = chat(served, SYSTEM, QUESTION)
        item = next(tmp_path.glob("*.safetensors"))
        data = bytearray(item.read_bytes())
        data[len(data) // 2] ^= 1
        item.write_bytes(data)
        assert "was changed" in error(served.post(PATH, load=saved["id"]), 400)
        (tmp_path / f"{saved['id']}.json").write_text(json.dumps({"format": "deltic-state"}))
        assert "was changed" in error(served.post(PATH, load=saved["id"]), 400)
        assert chat(served, SYSTEM, QUESTION)["choices"] == before["choices"]
    llm.engine.check()


def test_states_among_ordinary_requests(llm: LLM, tmp_path: Path) -> None:
    """A client that saves and loads long prompts at once, as fast as it can, costs the others no answer, and the event
    loop no turn: all of it happens in threads."""
    with serving(llm, state_dir=tmp_path) as served:
        saved = served.post(PATH, prompt=[7] * 3000).json()
        over, statuses = threading.Event(), list[int]()

        def hostile(number: int) -> None:
            count = 0
            while not over.is_set():
                count += 1
                body = {"load": saved["id"]} if number % 2 else {"prompt": [number + count] * 2000}
                statuses.append(served.http.post(PATH, json=body).status_code)

        threads = [threading.Thread(target=hostile, args=(number,)) for number in range(4)]
        expected = chat(served, SYSTEM, QUESTION)["choices"]
        with served.lateness() as late:
            for thread in threads:
                thread.start()
            answers = [chat(served, SYSTEM, QUESTION)["choices"] for _ in range(12)]
            over.set()
            for thread in threads:
                thread.join()
        assert answers == [expected] * 12
        assert statuses.count(200) == len(statuses) > 4
        assert sorted(late)[len(late) // 2] < 0.1
        served.wait_idle()
    llm.engine.check()

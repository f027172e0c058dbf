"""Prefixes as files: the same bits elsewhere, and nothing that was changed is believed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from support import odd_shape

from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.cache.offload.state_manifest import Manifest, StateError
from deltic.cache.offload.state_stores import (
    StateDirectory,
)
from deltic.errors import ConfigError, RequestError
from deltic.ops import capabilities

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SYSTEM = [{"role": "system", "content": "You are a helpful assistant. Answer in one sentence. " * 4}]
SHAPE = RandomModel(shape=odd_shape(), initializer_range=0.1)
SMALL: dict[str, Any] = {"memory": "8MiB", "max_batch": 4, "threads": 1}


def odd_session(**options: Any) -> Session:
    return Session(SHAPE, **{**SMALL, **options})


def prompt_of(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(509) for _ in range(count)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def nothing(done: int, size: int) -> None:
    pass


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(memory="32MiB", max_batch=4, threads=1) as found:
        yield found


# Sessions


@pytest.mark.parametrize("count", [1, 3, 16, 37, 200])
def test_a_session_goes_on_in_another_one(tmp_path, count):
    tokens, one, other = prompt_of(count), odd_session(), odd_session()
    one.prefill(tokens)
    saved = one.save(tmp_path, "a name")
    assert (saved.tokens, saved.boundaries, saved.name, saved.exact) == (count, (count,), "a name", True)
    other.prefill([5, 6, 7])
    assert other.load(tmp_path) == saved
    assert other.position == count
    for token in (3, 1, 4):
        assert torch.equal(one.step(token), other.step(token))
    assert torch.equal(one.prefill(prompt_of(30, 1), True), other.prefill(prompt_of(30, 1), True))
    other.runtime.cache.check()


def test_a_session_with_a_delta_log_is_saved_at_its_position(tmp_path):
    one, other, plain = odd_session(), odd_session(), odd_session()
    for session in (one, plain):
        session.prefill(prompt_of(40))
    one.verify([1, 2, 3])
    one.accept(2)
    plain.commit([1, 2])
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.position == 42
    found, expected, kept = other.step(9), plain.step(9), one.step(9)
    assert torch.equal(found, kept)
    assert torch.allclose(found, expected, atol=1e-4)


def test_snapshots_stay_valid(tmp_path):
    session = odd_session()
    session.prefill(prompt_of(20))
    kept, logits = session.snapshot(), session.batch_logits([[*prompt_of(20), 8]])[0]
    session.prefill(prompt_of(20, 2))
    session.save(tmp_path)
    session.reset()
    session.load(tmp_path)
    assert session.position == 40
    session.restore(kept)
    assert torch.allclose(session.step(8), logits, atol=1e-5)
    session.drop(kept)
    session.reset()
    session.runtime.cache.check()


def test_what_a_session_cannot_save_or_load(tmp_path):
    session = odd_session()
    with pytest.raises(RequestError, match="no tokens to save"):
        session.save(tmp_path)
    session.prefill_assembled(torch.randn(3, session.config.hidden_size))
    with pytest.raises(RequestError, match="images"):
        session.save(tmp_path)
    with pytest.raises(StateError, match="no saved state"):
        session.load(tmp_path)
    with pytest.raises(StateError, match="cannot be read"):
        session.load(tmp_path / "none")
    assert session.position == 3 and not names(tmp_path)
    weights = dict(SHAPE.tensors(odd_shape(), "float32", "cpu"))
    given = Session(config=odd_shape(), weights=weights, **SMALL)
    given.prefill([1, 2])
    with pytest.raises(ConfigError, match="given as tensors"):
        given.save(tmp_path)


def test_one_of_several_states_is_named_by_its_id(tmp_path):
    session = odd_session()
    session.prefill(prompt_of(20))
    first = session.save(tmp_path)
    session.prefill([1, 2, 3])
    second = session.save(tmp_path)
    with pytest.raises(StateError, match="2 saved states: name one"):
        session.load(tmp_path)
    assert session.load(tmp_path, first.id[:10]).tokens == session.position == 20
    assert session.load(tmp_path, second.id).tokens == session.position == 23
    with pytest.raises(StateError, match="has no saved state ffff"):
        session.load(tmp_path, "ffff")
    with pytest.raises(StateError, match="64 hexadecimal digits"):
        session.load(tmp_path, "../" * 20 + "etcx")
    with pytest.raises(StateError, match="No such file"):
        session.load(tmp_path, "0" * 64)


# Models


def test_a_conversation_goes_on_in_a_fresh_process(llm, tmp_path):
    """The next turn reads the new tokens alone, and its answer and log probabilities have the same bits."""
    opening = llm.chat_processor.system_prefix(SYSTEM)
    prompt = [*opening, *llm.chat_processor.tokenizer.encode("A question, and a story about a river. " * 20)]
    saved = llm.save_state(prompt, tmp_path / "store")
    assert saved.tokens == len(prompt)
    following = [*prompt, *llm.chat_processor.tokenizer.encode("Go on.")]
    sampling = replace(GREEDY, logprobs=3)
    here = llm.generate([following], sampling)[0].choices[0]
    code = f"""
from deltic import LLM, SamplingParams
with LLM(memory="32MiB", max_batch=4, threads=1, device={capabilities.find_device()!r},
         cache_dir={str(tmp_path / "cache")!r}) as llm:
    saved = llm.load_state({str(tmp_path / "store")!r})
    assert saved.exact
    choice = llm.generate([{following!r}], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
                          )[0].choices[0]
    print(repr((choice.usage.cached_tokens, choice.tokens, choice.logprobs)))
    llm.engine.check()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == repr((len(prompt), here.tokens, here.logprobs))
    with LLM(memory="32MiB", max_batch=4, threads=1, cache_dir=tmp_path / "cache") as again:
        assert again.generate([following], GREEDY)[0].choices[0].usage.cached_tokens >= len(prompt)


@pytest.mark.slow
def test_8000_tokens_of_the_shape_of_a_real_model_go_on_in_a_fresh_process(tmp_path):
    """Written to one directory, read from another one: only the new tokens are read, with the same bits."""
    code = """
import random, sys
from deltic import LLM, RandomModel, SamplingParams
with LLM(RandomModel("qwen3.5-0.8b"), dtype="bfloat16", device=sys.argv[3], max_batch=2, max_context=10_000,
         memory="3GiB") as llm:
    draw = random.Random(0)
    prompt = [draw.randrange(llm.runtime.config.vocab_size) for _ in range(8000)]
    saved = llm.save_state(prompt, sys.argv[2]) if sys.argv[1] == "save" else llm.load_state(sys.argv[2])
    assert saved.tokens == 8000 and saved.exact
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    choice = llm.generate([[*prompt, *range(100, 150)]], sampling)[0].choices[0]
    assert choice.usage.cached_tokens == 8000
    print(repr((choice.tokens, choice.logprobs)))
"""
    answers = []
    for action, store in (("save", tmp_path / "one"), ("load", tmp_path / "two")):
        result = subprocess.run([sys.executable, "-c", code, action, str(store), capabilities.find_device()],
                                capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        answers.append(result.stdout)
        if action == "save":
            shutil.copytree(store, tmp_path / "two")
            shutil.rmtree(store)
    assert answers[0] == answers[1]


def test_the_prefix_of_all_conversations_with_a_system_message(llm, tmp_path):
    saved = llm.save_state(SYSTEM, tmp_path)
    assert saved.tokens == len(llm.chat_processor.system_prefix(SYSTEM))
    with LLM(memory="32MiB", max_batch=4, threads=1) as other:
        other.load_state(tmp_path, cache_salt="me")
        chat = [*SYSTEM, {"role": "user", "content": "Hello"}]
        assert other.chat(chat, GREEDY, cache_salt="me").choices[0].usage.cached_tokens == saved.tokens
        assert other.chat(chat, GREEDY, cache_salt="you").choices[0].usage.cached_tokens == 0
        other.engine.check()


def test_prefixes_share_items(llm, tmp_path):
    first = llm.save_state(SYSTEM, tmp_path)
    items = {path.name for path in tmp_path.glob("*.safetensors")}
    again = llm.save_state([*SYSTEM, {"role": "user", "content": "Tell me about rivers. " * 4}], tmp_path)
    assert first.tokens in again.boundaries and first.tokens < again.tokens
    manifest, _ = StateDirectory(tmp_path).manifest(again.id)
    assert items < {item.sha256 + ".safetensors" for item in manifest.items}


def test_a_damaged_item_is_written_again(llm, tmp_path):
    saved = llm.save_state(SYSTEM, tmp_path)
    item = next(tmp_path.glob("*.safetensors"))
    whole = item.read_bytes()
    item.write_bytes(b"?" * len(whole))
    with pytest.raises(StateError, match="was changed"):
        llm.load_state(tmp_path, saved.id)
    llm.save_state(SYSTEM, tmp_path)
    assert item.read_bytes() == whole
    assert llm.load_state(tmp_path, saved.id).tokens == saved.tokens


def test_files_are_private(llm, tmp_path):
    llm.save_state(SYSTEM, tmp_path / "store")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()} == {0o600}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_a_cache_that_is_off_or_too_small(tmp_path, llm):
    saved = llm.save_state([1] * 300, tmp_path)
    with LLM(memory="32MiB", max_batch=4, threads=1, prefix_cache=False) as off:
        with pytest.raises(ConfigError, match="prefix_cache"):
            off.load_state(tmp_path, saved.id)
        with pytest.raises(StateError, match="nothing of this prompt is kept"):
            off.save_state(SYSTEM, tmp_path)
    with LLM(memory="32MiB", max_batch=4, threads=1, max_context=200) as short, pytest.raises(
            StateError, match="the context holds 200"):
        short.load_state(tmp_path, saved.id)


# Other dtypes and models


@pytest.mark.parametrize(("written", "read"), [("bfloat16", "float32"), ("float32", "bfloat16"),
                                               ("float32", "float16")])
def test_floats_are_converted(llm, tmp_path, written, read):
    """The greedy tokens are those of the reading model alone wherever its best two logits are apart."""
    prompt = [*llm.chat_processor.tokenizer.encode("A story about a river and a bird. " * 12)]
    options: dict[str, Any] = {"memory": "32MiB", "max_batch": 4, "threads": 1}
    with LLM(dtype=written, **options) as writer:
        saved = writer.save_state(prompt, tmp_path)
    with LLM(dtype=read, **options) as reader, LLM(dtype=read, **options) as alone:
        assert reader.load_state(tmp_path, saved.id).exact is False
        sampling = replace(GREEDY, logprobs=2)
        got = reader.generate([[*prompt, 5]], sampling)[0].choices[0]
        expected = alone.generate([[*prompt, 5]], sampling)[0].choices[0]
        assert got.usage.cached_tokens == len(prompt) and expected.usage.cached_tokens == 0
        for mine, other, score in zip(got.tokens, expected.tokens, expected.logprobs, strict=True):
            if mine != other:
                best, second = sorted((probability for _, probability in score.top), reverse=True)[:2]
                assert best - second < 0.1
                break
        reader.engine.check()


def test_a_state_of_bfloat16_goes_to_one_of_float32(tmp_path):
    session = odd_session(state_dtype="bfloat16", dtype="bfloat16")
    session.prefill(prompt_of(50))
    session.save(tmp_path)
    assert session.load(tmp_path).exact is True
    with pytest.raises(StateError, match="another model"):  # random weights differ by dtype
        odd_session().load(tmp_path)


def test_states_of_other_models_are_refused(tmp_path):
    session = odd_session()
    session.prefill(prompt_of(50))
    session.save(tmp_path)
    for other in (RandomModel(shape=odd_shape(), initializer_range=0.1, seed=1),
                  RandomModel(shape=odd_shape(hidden_size=44), initializer_range=0.1)):
        stranger = Session(other, **SMALL)
        with pytest.raises(StateError, match="is of another model: random-qwen3"):
            stranger.load(tmp_path)
        assert stranger.position == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_packed_kv_is_not_converted(llm, tmp_path, kv_dtype):
    options: dict[str, Any] = {"memory": "32MiB", "max_batch": 4, "threads": 1}
    with LLM(kv_dtype=kv_dtype, device="cpu", **options) as writer:  # MLX has neither
        saved = writer.save_state(SYSTEM, tmp_path)
        assert writer.load_state(tmp_path, saved.id).exact is True
    with pytest.raises(StateError, match=f"has K/V in {kv_dtype}"):
        llm.load_state(tmp_path, saved.id)


def test_a_state_with_a_draft_head_goes_to_a_model_without_one(llm, tmp_path):
    assert llm.runtime.mtp_runner is not None
    saved = llm.save_state(SYSTEM, tmp_path / "with")
    with LLM(memory="32MiB", max_batch=4, threads=1, speculate="off") as plain:
        assert plain.load_state(tmp_path / "with", saved.id).exact is False
        chat = [*SYSTEM, {"role": "user", "content": "Hello"}]
        found = plain.chat(chat, GREEDY).choices[0]
        assert found.usage.cached_tokens == saved.tokens
        assert found.tokens == llm.chat(chat, GREEDY).choices[0].tokens
        without = plain.save_state([*SYSTEM, {"role": "user", "content": "Bye"}], tmp_path / "without")
    with pytest.raises(StateError, match="draft head"):
        llm.load_state(tmp_path / "without", without.id)


# Changed files


def flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1:]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[:draw.randrange(len(data))]


def grown(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randrange(1, 99))


def noise(data: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(200))


def renamed(store: Path, path: Path, data: bytes, manifest: dict[str, Any]) -> str:
    """Puts changed content under its right name, and a manifest that names it: what an attacker would do."""
    digest, old = sha256(data).hexdigest(), path.name.split(".")[0]
    (store / f"{digest}.safetensors").write_bytes(data)
    for item in manifest["items"]:
        if item["sha256"] == old:
            item |= {"sha256": digest, "size": len(data)}
    return put_manifest(store, json.dumps(manifest).encode())


def put_manifest(store: Path, data: bytes) -> str:
    id = sha256(data).hexdigest()
    (store / f"{id}.json").write_bytes(data)
    return id


VALUES: list[Any] = [None, True, -1, 0, 1, 1 << 40, 10 ** 30, 1.5, "", "x" * 600, "../../etc/passwd", [], {}, [[]],
                     ["a"], "0" * 64, {"a": 1}]


def edited(manifest: Any, draw: random.Random) -> Any:
    """One value of a JSON document, at any depth, replaced, removed, doubled or swapped."""
    node, path = manifest, list[tuple[Any, Any]]()
    while isinstance(node, dict | list) and node:
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        path.append((node, key))
        node = node[key]
    holder, key = draw.choice(path)
    kind = draw.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["extra", "path", "__class__"])] = holder[key]
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, holder[draw.randrange(len(holder))])
    else:
        holder[key] = draw.choice(VALUES)
    return manifest


def same_meaning(one: bytes, other: Any) -> bool:
    """True if an edit left everything as it was, but for what is for people or for the reader's judgement."""
    def bare(manifest: dict[str, Any]) -> dict[str, Any]:
        model = manifest["model"]
        return {**manifest, "name": 0, "created": 0, "dtypes": 0,
                "model": {**model, "name": 0, "about": 0, "identity": 0}}
    try:
        Manifest.model_validate_json(json.dumps(other))
        return bare(json.loads(one)) == bare(other)
    except (ValueError, KeyError, TypeError):
        return False


def mutate(store: Path, id: str, number: int) -> str | None:
    """Changes one thing in a store. Returns the id to load, or None if the change has no meaning."""
    draw = random.Random(number)
    manifest_path = store / f"{id}.json"
    text = manifest_path.read_bytes()
    items = sorted(store.glob("*.safetensors"))
    item = draw.choice(items)
    change = draw.choice([flipped, cut, grown, noise])
    kind = number % 8
    if kind == 0:
        item.write_bytes(change(item.read_bytes(), draw))
    elif kind == 1:
        manifest_path.write_bytes(change(text, draw))
    elif kind == 2:  # swapped items
        other = draw.choice([path for path in items if path != item])
        one, two = item.read_bytes(), other.read_bytes()
        item.write_bytes(two)
        other.write_bytes(one)
    elif kind == 3:
        item.unlink()
        draw.choice([lambda: None, item.mkdir, partial(item.symlink_to, manifest_path), partial(os.mkfifo, item)])()
    elif kind == 4:  # an edit of the manifest in its place
        manifest_path.write_bytes(json.dumps(edited(json.loads(text), draw)).encode() + b" ")
    elif kind in (5, 6):  # an edit with a right name
        found = edited(json.loads(text), draw)
        return None if same_meaning(text, found) else put_manifest(store, json.dumps(found).encode())
    else:  # a header with a right name
        data = bytearray(item.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = edited(json.loads(data[8:8 + length]), draw)
        spelled = json.dumps(header).encode()
        spelled += b" " * (-len(spelled) % 8)
        changed = len(spelled).to_bytes(8, "little") + spelled + bytes(data[8 + length:])
        if draw.randrange(3) == 0:
            changed = draw.choice([0, 1 << 40, (1 << 64) - 1]).to_bytes(8, "little") + changed[8:]
        return renamed(store, item, changed, json.loads(text))
    return id


def states_of(saved: Session, store: Path) -> str:
    saved.reset()
    saved.prefill(prompt_of(40))
    return saved.save(store).id


def test_500_changed_files_are_refused_and_nothing_else_is_harmed(tmp_path):
    session, check = odd_session(), odd_session()
    whole = tmp_path / "whole"
    id = states_of(session, whole)
    expected = session.step(7)
    session.reset()
    session.prefill(prompt_of(25, 3))
    after = session.batch_logits([[1, 2, 3]])[0]
    refused = meaningless = 0
    for number in range(520):
        store = tmp_path / "changed"
        shutil.copytree(whole, store)
        changed = mutate(store, id, number)
        if changed is None:
            meaningless += 1
        else:
            with pytest.raises(StateError) as error:
                session.load(store, changed)
            assert len(str(error.value)) < 500
            refused += 1
        assert session.position == 25
        shutil.rmtree(store)
    assert refused >= 500, (refused, meaningless)
    session.runtime.cache.check()
    assert torch.equal(session.batch_logits([[1, 2, 3]])[0], after)
    assert session.load(whole).id == id
    assert torch.equal(session.step(7), expected)
    check.load(whole)
    assert torch.equal(check.step(7), expected)


# Answers


def test_thinking_goes_on_in_a_fresh_process(llm, tmp_path):
    """The client does not send the thinking back; the prompt of the next turn has it all the same."""
    messages = [*SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=200), thinking=True)
    assert answer.reasoning
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of Italy?"}]
    read = llm.engine.stats.prompt_tokens
    saved = llm.save_state(messages[:-1], tmp_path, thinking=True)
    assert llm.engine.stats.prompt_tokens == read
    expected = llm.chat(messages, GREEDY, thinking=True).choices[0]
    for salt, known in (None, True), ("mine", False):
        with LLM(memory="32MiB", max_batch=4, threads=1) as other:
            other.load_state(tmp_path, saved.id, cache_salt=salt)
            found = other.chat(messages, GREEDY, thinking=True, cache_salt=salt).choices[0]
            assert (found.usage.cached_tokens >= saved.tokens) == known
            assert (found.usage.prompt_tokens == expected.usage.prompt_tokens) == known
            assert not known or found.tokens == expected.tokens


@pytest.mark.parametrize("data", ["", "!", "YWJj", "A" * 4000])
def test_a_record_that_means_nothing_is_left_out(llm, tmp_path, data):
    messages = [*SYSTEM, {"role": "user", "content": "What is the capital of Spain?"}]
    messages += [{"role": "assistant", "content": llm.chat(messages, SamplingParams(temperature=0.0)).text}]
    saved = llm.save_state(messages, tmp_path)
    manifest = json.loads((tmp_path / f"{saved.id}.json").read_bytes())
    assert manifest["answer"]["tokens"] <= saved.tokens
    manifest["answer"]["data"] = data
    with LLM(memory="32MiB", max_batch=4, threads=1) as other:
        assert other.load_state(tmp_path, put_manifest(tmp_path, json.dumps(manifest).encode())).tokens == saved.tokens
        messages += [{"role": "user", "content": "And of Italy?"}]
        assert other.chat(messages, GREEDY).choices[0].finish == "length"

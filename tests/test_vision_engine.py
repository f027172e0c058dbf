"""Pictures in prompts: the tokens equal those of transformers for any schedule and cache, and nothing is prefilled or
encoded twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import drain, transformers_vision_model
from vision_models import picture

from deltic.config import EngineConfig
from deltic.config.vision import ImageConfig, VisionConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.errors import RequestError
from deltic.loader.model_files import open_model
from deltic.params import EngineRequest, Prompt, SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session
from deltic.vision.images import Pixels, Video, patches_of
from deltic.vision.prompt import with_pictures

PICTURES = ImageConfig(min_pixels=8 * 8 * 4, max_pixels=8 * 8 * 40)


@dataclass(frozen=True)
class Pair:
    """One model in both libraries."""

    theirs: Any
    directory: Path
    vision: VisionConfig

    def load(self, **options: Any) -> ModelRunner:
        return load(str(self.directory), EngineConfig(**{"dtype": "float32", "memory": "64MiB", "max_context": 2048,
                                                         "threads": 1, **options}))

    def pixels(self, width: int, height: int, seed: int) -> Pixels:
        random = np.random.default_rng(seed)
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        return picture([image], PICTURES, self.vision)

    def prompt(self, text: list[int | Pixels]) -> Prompt:
        """Builds a prompt from token ids and pictures."""
        ids = [part if isinstance(part, int) else self.vision.image_token_id for part in text]
        return with_pictures(ids, [part for part in text if isinstance(part, Pixels)], self.vision)[0]

    def expected(self, text: list[int | Pixels], count: int) -> tuple[list[int], torch.Tensor]:
        """Returns the greedy tokens of transformers and their log-probabilities."""
        prompt, seen = self.prompt(text), [part for part in text if isinstance(part, Pixels)]
        ids, kinds = list(prompt.ids), [int(key < 0) for key in prompt.keys or ()]
        patches = torch.cat([torch.from_numpy(patches_of(each, PICTURES, self.vision)) for each in seen])
        grids = torch.tensor([[1, *each.grid] for each in seen])
        tokens, logprobs = list[int](), list[float]()
        for _ in range(count):
            with torch.no_grad():
                logits = self.theirs(torch.tensor([ids]), pixel_values=patches, image_grid_thw=grids,
                                     mm_token_type_ids=torch.tensor([kinds]), use_cache=False).logits[0, -1]
            best = int(logits[:250].argmax())
            tokens.append(best)
            logprobs.append(float(logits.log_softmax(-1)[best]))
            ids.append(best)
            kinds.append(0)
        return tokens, torch.tensor(logprobs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("sees")
    theirs = transformers_vision_model(directory)
    files = open_model(str(directory))
    assert files.vision
    yield Pair(theirs, directory, files.vision.tower)


@pytest.fixture(scope="module")
def runtime(pair: Pair) -> ModelRunner:
    return pair.load()


def ask(prompt: Prompt, count: int = 12, name: str = "a", **more: Any) -> EngineRequest:
    """A request whose answer contains no placeholder tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=0, ignore_eos=True,
                            logit_bias=dict.fromkeys(range(250, 307), -100.0))
    return EngineRequest(name, prompt, replace(params, **more))


def tokens_of(engine: Engine, *requests: EngineRequest) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    engine.check()
    return [answers[request.id, choice].tokens for request in requests for choice in range(request.choices)]


def cached(engine: Engine, request: EngineRequest) -> int:
    engine.add(request)
    usage = drain(engine)[request.id, 0].last.usage
    assert usage
    return usage.cached_tokens


def words(seed: int, count: int) -> list[int | Pixels]:
    return [int(word) for word in np.random.default_rng(seed).integers(0, 250, count)]


def conversations(pair: Pair) -> dict[str, list[int | Pixels]]:
    one, two = pair.pixels(40, 24, 1), pair.pixels(17, 60, 2)
    return {"first": [one, *words(1, 9)], "middle": [*words(2, 7), one, *words(3, 5)],
            "last": [*words(4, 30), one, 5], "two": [*words(5, 3), one, *words(6, 4), two, *words(7, 6)],
            "one twice": [*words(8, 3), two, 7, two, *words(9, 2)],
            "result": [*words(10, 6), one, *words(11, 5), *words(12, 4), two, 251, *words(13, 2)]}


@pytest.mark.parametrize("name", ["first", "middle", "last", "two", "one twice", "result"])
def test_answers_equal_transformers(pair: Pair, runtime: ModelRunner, name: str) -> None:
    text = conversations(pair)[name]
    tokens, logprobs = pair.expected(text, 12)
    engine = Engine(runtime)
    engine.add(ask(pair.prompt(text)))
    found = drain(engine)["a", 0]
    assert found.tokens == tokens
    ours = torch.tensor([event.logprobs.token for event in found.events if event.logprobs])
    assert torch.allclose(ours, logprobs, atol=1e-4)


def test_moe_answers_equal_transformers(tmp_path: Path) -> None:
    """The architecture with a mixture of experts."""
    theirs = transformers_vision_model(tmp_path, family="qwen3_5_moe")
    files = open_model(str(tmp_path))
    assert files.vision and files.config.experts
    pair = Pair(theirs, tmp_path, files.vision.tower)
    text = conversations(pair)["two"]
    assert tokens_of(Engine(pair.load()), ask(pair.prompt(text), 4))[0] == pair.expected(text, 4)[0]


def test_video_answers_equal_transformers(pair: Pair, runtime: ModelRunner) -> None:
    """A picture and a video of three parts."""
    vision, still = pair.vision, pair.pixels(17, 60, 2)
    frames = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8))
              for seed in range(6)]
    video = Video(tuple(picture(frames[start:start + 2], PICTURES, vision, (24, 40)) for start in (0, 2, 4)),
                ((11, 12), (13,), (14, 15, 16)))
    ids = [3, 250, vision.video_token_id, 251, 9, 250, vision.image_token_id, 251, 5]
    prompt, (place,) = with_pictures(ids, [video, still], vision, [5])
    assert place == 4 + sum(map(len, video.stamps)) + sum(2 + part.tokens for part in video.parts)
    kinds = [2 if token == vision.video_token_id else int(token == vision.image_token_id) for token in prompt.ids]
    patches = [torch.from_numpy(patches_of(each, PICTURES, vision)) for each in (still, *video.parts)]
    with torch.no_grad():
        logits = pair.theirs(
            torch.tensor([prompt.ids]), mm_token_type_ids=torch.tensor([kinds]), use_cache=False,
            pixel_values=patches[0], image_grid_thw=torch.tensor([[1, *still.grid]]),
            pixel_values_videos=torch.cat(patches[1:]), video_grid_thw=torch.tensor([[3, *video.parts[0].grid]])).logits
    engine = Engine(runtime)
    engine.add(ask(prompt, 1))
    event = drain(engine)["a", 0].events[0]
    best = int(logits[0, -1, :250].argmax())
    assert event.token == best and event.logprobs
    assert abs(event.logprobs.token - float(logits[0, -1].log_softmax(-1)[best])) < 1e-4


@pytest.fixture(scope="module")
def alone(pair: Pair) -> list[list[int]]:
    """The answers of all conversations, one at a time."""
    return [tokens_of(Engine(pair.load(prefix_cache=False)), ask(pair.prompt(text)))[0]
            for text in conversations(pair).values()]


@pytest.mark.parametrize("options", [{"token_budget": 7}, {"ops": ("reference",)}, {"speculate": "ngram"},
                                     {"memory": "3MiB", "max_context": 192}, {"prefix_cache": False},
                                     {"packed_weights": "off", "ops": ("mlp=torch",)}], ids=str)
def test_answers_do_not_depend_on_options(pair: Pair, alone: list[list[int]], options: dict[str, Any]) -> None:
    """One request at a time and all at once, in chunks, with drafts, and in a cache that is too small for all."""
    asked = {name: ask(pair.prompt(text), name=name) for name, text in conversations(pair).items()}
    other = Engine(pair.load(**options))
    assert [tokens_of(other, replace(request, id=f"{name} again"))[0] for name, request in asked.items()] == alone
    assert tokens_of(other, *asked.values()) == alone


def test_a_second_turn_reuses_pictures_and_prefix(pair: Pair) -> None:
    engine = Engine(pair.load())
    assert engine.pictures
    text = conversations(pair)["two"]
    first = ask(pair.prompt(text), name="first")
    (answer,) = tokens_of(engine, first)
    assert engine.pictures.encoded == 2
    turn = pair.prompt([*text, *answer, *words(20, 4)])
    (again,) = tokens_of(Engine(pair.load()), ask(turn, name="cold"))
    engine.add(ask(turn, name="second"))
    found = drain(engine)["second", 0]
    assert found.tokens == again
    assert found.last.usage and found.last.usage.cached_tokens == len(first.prompt) + len(answer) - 1
    assert engine.pictures.encoded == 2
    elsewhere = pair.prompt([3, 4, 5, *[part for part in text if isinstance(part, Pixels)], *words(21, 5)])
    tokens_of(engine, ask(elsewhere, name="elsewhere"))
    assert engine.pictures.encoded == 2, "the same pictures in another conversation"
    salted = replace(ask(turn, name="salted"), cache_salt="mine")
    assert tokens_of(engine, salted) == [again]
    assert engine.pictures.encoded == 4, "whether another has shown them is nobody's business"


def test_exact_and_forked(pair: Pair) -> None:
    engine = Engine(pair.load())
    prompt = pair.prompt(conversations(pair)["middle"])
    first, *_ = several = tokens_of(engine, ask(prompt, name="three", n=3, temperature=1.0, seed=5))
    plain = Engine(pair.load(prefix_cache=False))
    assert several == tokens_of(plain, ask(prompt, name="b", n=3, temperature=1.0, seed=5))
    assert tokens_of(engine, ask(prompt, name="again", temperature=1.0, seed=5)) == [first]
    assert cached(engine, ask(prompt, name="known")) == len(prompt)


def test_from_disk(pair: Pair, tmp_path: Path) -> None:
    prompt = pair.prompt([*conversations(pair)["two"], *words(30, 40)])
    engine = Engine(pair.load(cache_dir=str(tmp_path)))
    expected = tokens_of(engine, ask(prompt, name="a"))
    engine.close()
    engine = Engine(pair.load(cache_dir=str(tmp_path)))
    assert tokens_of(engine, ask(prompt, name="b")) == expected
    assert engine.pictures and engine.pictures.encoded == 0
    assert engine.stats.reused_tokens > 60
    engine.close()


def test_two_pictures_of_one_size_never_match(pair: Pair) -> None:
    engine = Engine(pair.load())
    one, other = ([*words(2, 7), pair.pixels(40, 24, seed), *words(3, 5)] for seed in (1, 2))
    found = tokens_of(engine, ask(pair.prompt(one), name="one"))
    assert cached(engine, ask(pair.prompt(other), name="other")) <= 7
    assert pair.prompt(one).ids == pair.prompt(other).ids
    assert tokens_of(engine, ask(pair.prompt(other), name="again")) != found


def test_image_embeds_are_evicted(pair: Pair) -> None:
    """A hundred pictures in two prompts: embeddings that were prefilled make room for others."""
    engine = Engine(pair.load(max_context=4096, memory="256MiB"))
    assert engine.pictures
    engine.pictures._room = 40_000
    prompts = [pair.prompt([part for seed in range(base, base + 50)
                            for part in (pair.pixels(40, 24, seed), 7)]) for base in (0, 100)]
    most = 0
    for index, prompt in enumerate(prompts):
        engine.add(ask(prompt, 2, str(index)))
    while engine.has_work:
        engine.step()
        most = max(most, engine.pictures._kept())
    assert engine.pictures.encoded == 100
    assert most < 40_000 + 2 * 15 * 40 * 4 * 3


def test_decoding_continues_while_a_picture_is_encoded(pair: Pair) -> None:
    """At most one slow slice runs between two steps."""
    runtime = pair.load()
    encode, slices = runtime.encode, list[int]()
    assert encode

    def slow(content: Any) -> Any:
        work = encode(content)
        while True:
            slices.append(engine.stats.generated_tokens)
            try:
                next(work)
            except StopIteration as done:
                return done.value
            yield

    runtime.encode = slow
    engine = Engine(runtime)
    assert engine.pictures
    engine.add(
        EngineRequest("words", tuple(range(5)), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    )
    for _ in range(3):
        engine.step()
    import deltic.runner.image_embeds as module

    before = module._SLICES
    module._SLICES = 0.0
    try:
        engine.add(ask(pair.prompt(conversations(pair)["two"]), 1, "sees"))
        drain(engine)
    finally:
        module._SLICES = before
    steps = [after - now for now, after in itertools.pairwise(slices)]
    assert len(slices) > 10 and sum(step == 0 for step in steps) <= 2, "one for each picture's last slice"


def test_a_failing_tower_ends_only_its_request(pair: Pair) -> None:
    runtime = pair.load()
    encode = runtime.encode
    assert encode
    broken = pair.pixels(17, 60, 2).digest
    for fault, message in [(lambda rows: rows * float("nan"), "not finite"), (lambda rows: rows[1:], "rows for")]:
        def faulty(content: Any, fault: Any = fault) -> Any:
            rows = yield from encode(content)
            return fault(rows) if content.digest == broken else rows

        runtime.encode = faulty
        engine = Engine(runtime)
        texts = conversations(pair)
        for name in ("middle", "two"):
            engine.add(ask(pair.prompt(texts[name]), 3, name))
        answers = drain(engine)
        engine.check()
        assert answers["two", 0].last.finish == "error" and message in str(answers["two", 0].last.error)
        assert len(answers["middle", 0].tokens) == 3


def test_a_model_without_vision(pair: Pair) -> None:
    engine = Engine(pair.load(vision=False))
    with pytest.raises(RequestError, match="reads text only"):
        engine.add(ask(pair.prompt(conversations(pair)["first"])))


PLACES = ("first", "middle", "last", "two", "result")
WAYS: dict[str, dict[str, Any]] = {"plain": {"speculate": "off"}, "drafts": {"speculate": "ngram:3"},
                                   "chunks": {"speculate": "ngram:3", "token_budget": 7}}


@pytest.fixture(scope="module")
def cold(pair: Pair) -> dict[str, list[list[int]]]:
    """For each position: three sampled answers and that of the next turn, without a prefix cache."""
    texts, found, runtime = conversations(pair), dict[str, list[list[int]]](), pair.load(prefix_cache=False)
    for name in PLACES:
        drawn = tokens_of(Engine(runtime), several(pair.prompt(texts[name])))
        turn = ask(pair.prompt(next_turn(texts[name], drawn[0])), name="turn")
        found[name] = [*drawn, *tokens_of(Engine(runtime), turn)]
    return found


def several(prompt: Prompt, name: str = "several") -> EngineRequest:
    return ask(prompt, name=name, n=3, temperature=1.0, seed=5)


def next_turn(text: list[int | Pixels], answer: list[int]) -> list[int | Pixels]:
    return [*text, *answer, *words(40, 4)]


@pytest.mark.parametrize("way", ["plain", "drafts", pytest.param("chunks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_answers_do_not_depend_on_cached_parts(pair: Pair, cold: dict[str, list[list[int]]], tmp_path: Path, place: str,
                                             way: str) -> None:
    """For each position of a picture: cold, warm, exact, forked and from disk, with and without drafts."""
    text, wanted = conversations(pair)[place], cold[place]
    prompt, turn = pair.prompt(text), pair.prompt(next_turn(text, wanted[0]))
    options = {**WAYS[way], "cache_dir": str(tmp_path)}
    engine = Engine(pair.load(**options))
    assert engine.pictures
    assert tokens_of(engine, several(prompt)) == wanted[:3], "cold, and forked"
    encoded = engine.pictures.encoded
    assert tokens_of(engine, several(prompt, "again")) == wanted[:3], "exact"
    assert tokens_of(engine, ask(turn, name="turn")) == wanted[3:], "warm"
    assert engine.pictures.encoded == encoded
    engine.close()
    engine = Engine(pair.load(**options))
    assert engine.pictures
    assert tokens_of(engine, ask(turn, name="turn")) == wanted[3:], "from disk"
    assert tokens_of(engine, several(prompt)) == wanted[:3]
    assert engine.pictures.encoded == 0 and engine.stats.reused_tokens > 0
    engine.close()


# By hand


@pytest.mark.parametrize("budget", [512, 7])
def test_session_with_pictures(pair: Pair, runtime: ModelRunner, budget: int) -> None:
    """Pictures and assembled embeddings give the logits of transformers, also after a restore."""
    text = [*words(1, 5), pair.pixels(40, 24, 1), *words(2, 6)]
    tokens, logprobs = pair.expected(text, 6)
    session = Session(str(pair.directory), dtype="float32", memory="64MiB", threads=1, token_budget=budget,
                      speculate="off")
    assert session.runtime.encode
    prompt, empty = pair.prompt(text), session.snapshot()

    def follow(logits: torch.Tensor) -> None:
        for token, logprob in zip(tokens, logprobs, strict=True):
            assert abs(float(logits.log_softmax(-1)[token] - logprob)) < 1e-4
            logits = session.step(token)

    logits = session.prefill(prompt)
    after = session.snapshot()
    follow(logits)
    session.restore(after)
    session.commit(tokens[:2])
    session.restore(after)
    follow(logits)
    session.restore(empty)
    picture, = prompt.pictures
    rows = session._encoded(picture)
    table = runtime.decoder.ops.embed(torch.tensor(prompt.ids), runtime.decoder.weights.embedding, torch.float32)
    table[picture.start:picture.end] = rows
    follow(session.prefill_assembled(table, torch.tensor(prompt.positions)))
    session.reset()
    assert torch.equal(session.prefill([1, 2, 3]), Session(str(pair.directory), dtype="float32", memory="64MiB",
                                                           threads=1).prefill([1, 2, 3]))


def test_session_refuses_invalid_input(pair: Pair) -> None:
    session = Session(str(pair.directory), dtype="float32", memory="64MiB", threads=1, vision=False)
    with pytest.raises(RequestError, match="reads text only"):
        session.prefill(pair.prompt(conversations(pair)["first"]))
    with pytest.raises(RequestError, match=r"must be \[n, 40\]"):
        session.prefill_assembled(torch.zeros(3, 41))
    with pytest.raises(RequestError, match=r"positions must be \[3, 2\]"):
        session.prefill_assembled(torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64))
    assert session.position == 0

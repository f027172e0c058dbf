"""The multi-token-prediction head against one made of transformers' modules: the same logits, however the prompt's K/V
came to be. And wrong wirings, for which the same comparison must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import load_directory, numbers, odd_shape, transformers_model
from torch import Tensor, nn

from deltic import Session
from deltic.cache.tensors import allocate
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.gguf.convert import FILE_TYPES, target_of
from deltic.loader.names import canonical_head, expected_head, packed_parts, split_packed
from deltic.loader.quantize import quantize_tensors
from deltic.model.decoder import Decoder, build
from deltic.model.mtp_head import MtpHead, build_head
from deltic.ops import Ops, backends
from deltic.ops.cpu import missing
from deltic.ops.types import AttentionWeights, Batch, Block, CacheViews, KvView
from deltic.params import PAGE
from deltic.runner.input_batch import build as build_batch

PROMPT, DEPTH = 37, 3
CHUNKS = (1, 7, 2, 16, 11)
"""How the prompt's K/V are kept; they add up to PROMPT."""
TOLERANCE = 1e-5
BACKENDS = [name for name in backends() if name != "cpu" or not missing()]


# The oracle


class Theirs(nn.Module):
    """A head in transformers' modules, over a trunk."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        config = type(trunk.config)(**{**trunk.config.to_dict(), "layer_types": ["full_attention"],
                                       "num_hidden_layers": 1})
        config._attn_implementation = config._experts_implementation = "eager"
        hidden, layer, norm = config.hidden_size, type(trunk.model.layers[0]), type(trunk.model.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.normal_(0.0, 0.2 if tensor.ndim == 1 else 0.1, generator=generator)
        self.trunk = [trunk]

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The trunk's hidden states [n, H] after its final norm."""
        found: Tensor = self.trunk[0].model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
        return found

    def forward(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H]: the states before the tokens -> (states [n, H], logits [n, V])."""
        trunk = self.trunk[0]
        ids, positions = torch.tensor([list(tokens)]), torch.arange(len(tokens))[None]
        parts = [self.pre_fc_norm_embedding(trunk.model.embed_tokens(ids)), self.pre_fc_norm_hidden(hidden[None])]
        x = self.fc(torch.cat(parts, dim=-1))
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        rotary = trunk.model.rotary_emb
        places = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions
        x = self.layers[0](x, position_embeddings=rotary(x, places), attention_mask=mask, position_ids=positions)
        out = self.norm((x if torch.is_tensor(x) else x[0])[0])
        return out, trunk.lm_head(out)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int]) -> Tensor:
        """The logits of DEPTH drafts, forced to say the last tokens, [DEPTH, V]: rows up to PROMPT are made of the
        trunk's hidden states, later ones of the head's own."""
        states = self.hidden(tokens[:PROMPT])
        before = torch.cat([torch.zeros_like(states[:1]), states])
        logits = []
        for step in range(DEPTH):
            out, found = self(tokens[:PROMPT + 1 + step], before)
            logits.append(found[-1])
            before = torch.cat([before, out[-1:]])
        return torch.stack(logits)

    def tensors(self, config: ModelConfig) -> dict[str, Tensor]:
        """Under our names."""
        found: dict[str, Tensor] = {}
        for theirs, parameter in self.named_parameters():
            name, tensor = canonical_head(f"mtp.{theirs}") or "", parameter.detach().clone()
            found |= split_packed(name, tensor, config) if packed_parts(name) else {name: tensor}
        return found


@dataclass(frozen=True)
class Pair:
    theirs: Theirs
    config: ModelConfig
    weights: dict[str, Tensor]
    place: Path

    def mtp(self, ops: Ops) -> tuple[Decoder, MtpHead]:
        decoder = build(self.config, [{**self.weights}], ops, torch.float32)
        return decoder, build_head(self.config, [{**self.theirs.tensors(self.config)}], decoder)


@pytest.fixture(scope="module", params=[
    {}, {"tie_word_embeddings": True}, {"family": "qwen3_5_moe"}, {"family": "qwen3_next"}, {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1],
        "factor": 4.0, "original_max_position_embeddings": 16}}],
    ids=["untied", "tied", "experts", "next", "yarn"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    import json

    directory = tmp_path_factory.mktemp("trunk")
    trunk = transformers_model(directory, **request.param)
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    theirs = Theirs(trunk).eval()
    assert set(theirs.tensors(config)) == set(expected_head(config))
    with torch.no_grad():
        yield Pair(theirs, config, load_directory(directory, config), directory)


# Ours


def poisoned(config: ModelConfig, mtp: MtpHead) -> CacheViews:
    """The head's own pages, full of NaN; those of the trunk are not there to be read."""
    assert mtp.layer.store == len(config.attention_layers)
    shape = (2 + -(-(PROMPT + DEPTH) // PAGE), PAGE, config.num_key_value_heads, config.head_dim)
    nothing = torch.empty(0)
    trunk = (KvView(nothing, nothing),) * mtp.layer.store
    return CacheViews((*trunk, KvView(torch.full(shape, float("nan")), torch.full(shape, float("nan")))), ())


PAGES = (3, 1, 4)


def batch_of(*rows: tuple[Sequence[int], int, tuple[int, ...]]) -> Batch:
    """rows: tokens, cursor, pages."""
    return build_batch(
        StepPlan(tuple(PlannedRow(tuple(tokens), done, pages, 0, logits=True) for tokens, done, pages in rows)),
        torch.device("cpu"),
    )


def drafted(mtp: MtpHead, config: ModelConfig, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """As `Theirs.drafts`: the prompt's rows through `keep`, in chunks of several lengths, and then one by one."""
    views, done = poisoned(config, mtp), 0
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden])
    for chunk in CHUNKS:
        span = slice(done, done + chunk)
        batch = batch_of((tokens[span], done, PAGES))
        mtp.keep(batch.ids, before[span], batch, views)
        done += chunk
    state, logits = before[PROMPT:], []
    for step in range(DEPTH):
        batch = batch_of((tokens[PROMPT + step:PROMPT + step + 1], PROMPT + step, PAGES))
        state, found = mtp.draft(batch.ids, state, batch, views)
        logits.append(found[0])
    return torch.stack(logits)


def error(expected: Tensor, found: Tensor) -> float:
    assert found.isfinite().all() and found.shape == expected.shape
    return float((expected - found).abs().max() / expected.abs().max())


def tokens_of(config: ModelConfig, seed: int = 0) -> tuple[int, ...]:
    return numbers(seed, PROMPT + DEPTH, config.vocab_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_three_drafts_are_transformers(pair: Pair, backend: str) -> None:
    _, mtp = pair.mtp(backends()[backend])
    tokens = tokens_of(pair.config)
    expected = pair.theirs.drafts(tokens)
    found = drafted(mtp, pair.config, tokens, pair.theirs.hidden(tokens[:PROMPT]))
    assert error(expected, found) < TOLERANCE
    assert len({int(row.argmax()) for row in expected}) == DEPTH and found.dtype == torch.float32


def test_a_session_gives_the_logits_of_its_drafts(pair: Pair) -> None:
    head = {f"mtp.{name}": parameter.detach().clone() for name, parameter in pair.theirs.named_parameters()}
    save_file(head, pair.place / "mtp.safetensors")
    session = Session(pair.place, speculate="mtp", memory="8MiB", threads=1)
    tokens = tokens_of(pair.config, seed=4)[:PROMPT + 1]
    session.prefill(tokens[:PROMPT])
    drafts, logits = session.draft(tokens[PROMPT], DEPTH, logits=True)
    expected = pair.theirs.drafts((*tokens, *drafts[:-1]))
    assert error(expected, logits) < TOLERANCE and logits.dtype == torch.float32
    assert drafts == expected.argmax(-1).tolist() == session.draft(tokens[PROMPT], DEPTH)
    assert session.position == PROMPT


def test_hidden_states_come_from_the_trunks_own_forward(pair: Pair) -> None:
    """What `Decoder.forward` returns is what the head wants."""
    decoder, mtp = pair.mtp(backends()["torch"])
    tokens = tokens_of(pair.config, seed=1)
    pools = allocate(pair.config, 4, 1, torch.float32, decoder.ops)
    row = PlannedRow(tokens[:PROMPT], 0, (0, 1, 2), 0, logits=True)
    batch = build_batch(StepPlan((row,)), torch.device("cpu"), all_logits=True)
    hidden = decoder.forward(batch, CacheViews(pools.kv_views(), pools.state_views()))
    assert error(pair.theirs.drafts(tokens), drafted(mtp, pair.config, tokens, hidden)) < TOLERANCE


def test_a_batch_of_several_rows_is_each_row_alone(pair: Pair) -> None:
    _, mtp = pair.mtp(backends()["torch"])
    tokens, generator = tokens_of(pair.config, seed=2), torch.Generator().manual_seed(3)
    hidden = torch.randn(PROMPT, pair.config.hidden_size, generator=generator)
    rows = [(0, 9, (0,)), (9, 21, (1, 2)), (30, 7, (4,))]
    alone, together = [], poisoned(pair.config, mtp)
    prompts = [(tokens[start:start + count - 1], 0, pages) for start, count, pages in rows]
    singles = [(tokens[start + count - 1:start + count], count - 1, pages) for start, count, pages in rows]
    befores = [hidden[start:start + count - 1] for start, count, _ in rows]
    lasts = [hidden[start + count - 1:start + count] for start, count, _ in rows]
    for prompt, single, before, last in zip(prompts, singles, befores, lasts, strict=True):
        views, batch = poisoned(pair.config, mtp), batch_of(prompt)
        mtp.keep(batch.ids, before, batch, views)
        batch = batch_of(single)
        alone.append(mtp.draft(batch.ids, last, batch, views))
    batch = batch_of(*prompts)
    mtp.keep(batch.ids, torch.cat(befores), batch, together)
    batch = batch_of(*singles)
    states, logits = mtp.draft(batch.ids, torch.cat(lasts), batch, together)
    assert error(torch.cat([one[0] for one in alone]), states) < TOLERANCE
    assert error(torch.cat([one[1] for one in alone]), logits) < TOLERANCE


# Wrong wirings must not pass


def swapped(mtp: MtpHead) -> MtpHead:
    assert isinstance(mtp.fc, Tensor)
    return replace(mtp, fc=torch.cat(mtp.fc.chunk(2, dim=1)[::-1], dim=1))


WRONG_HEADS = {
    "concatenated the other way round": swapped,
    "norms without their offset": lambda mtp: replace(mtp, norm_embedding=mtp.norm_embedding - 1),
    "norms changed for each other": lambda mtp: replace(mtp, norm_embedding=mtp.norm_hidden,
                                                        norm_hidden=mtp.norm_embedding),
    "keys for values": lambda mtp: replace(mtp, kv=torch.cat(mtp.kv.chunk(2)[::-1])),
}


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_a_wrong_head_is_noticed(pair: Pair, name: str) -> None:
    _, mtp = pair.mtp(backends()["torch"])
    tokens = tokens_of(pair.config)
    found = drafted(WRONG_HEADS[name](mtp), pair.config, tokens, pair.theirs.hidden(tokens[:PROMPT]))
    assert error(pair.theirs.drafts(tokens), found) > 100 * TOLERANCE


def before_the_final_norm(pair: Pair, tokens: Sequence[int]) -> Tensor:
    caught: list[Tensor] = []
    hook = pair.theirs.trunk[0].model.norm.register_forward_pre_hook(lambda _m, inputs: caught.append(inputs[0][0]))
    pair.theirs.hidden(tokens)
    hook.remove()
    return caught[0]


WRONG_STATES = {
    "before the final norm": before_the_final_norm,
    "a row too late": lambda pair, tokens: pair.theirs.hidden(tokens).roll(1, 0),
    "a row too early": lambda pair, tokens: pair.theirs.hidden(tokens).roll(-1, 0),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_wrong_hidden_states_are_noticed(pair: Pair, name: str) -> None:
    _, mtp = pair.mtp(backends()["torch"])
    tokens = tokens_of(pair.config)
    found = drafted(mtp, pair.config, tokens, WRONG_STATES[name](pair, tokens[:PROMPT]))
    assert error(pair.theirs.drafts(tokens), found) > 100 * TOLERANCE


# Fewer logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [[*range(16)], [*range(300, 204, -1)], [*range(0, 304, 19)]])
def test_a_shortened_head_gives_the_logits_of_its_tokens(pair: Pair, backend: str, tokens: list[int]) -> None:
    decoder, whole = pair.mtp(backends()[backend])
    short = build_head(pair.config, [{**pair.theirs.tensors(pair.config)}], decoder, tokens)
    x = torch.randn(3, pair.config.hidden_size)
    logits, wanted = decoder.ops.head(x, short.head), decoder.ops.head(x, whole.head)[:, tokens]
    assert torch.equal(logits, wanted) if backend == "cpu" else torch.allclose(logits, wanted, atol=1e-6)
    assert short.tokens is not None and short.tokens.tolist() == tokens and whole.tokens is None
    assert short.vocabulary and short.vocabulary.head is short.head


@pytest.mark.parametrize(("options", "rows"), [({}, 307), ({"draft_vocab": 0}, 307), ({"draft_vocab": 33}, 48)])
def test_how_many_tokens_a_head_knows_is_an_option(options: dict[str, int], rows: int) -> None:
    model = RandomModel(shape=odd_shape(vocab_size=307), head=True)
    runtime = load(model, EngineConfig(dtype="float32", memory="8MiB", threads=1, **options))
    assert runtime.mtp and len(runtime.mtp.head) == rows and (runtime.mtp.vocabulary is None) == (rows == 307)


# Forms of weights


def head_of(config: ModelConfig, name: str, tensors: dict[str, Block]) -> tuple[Decoder, MtpHead]:
    ops = backends()[name]
    decoder = build(config, [{**random_weights(config)}], ops, torch.bfloat16)
    return decoder, build_head(config, [tensors], decoder)


@pytest.mark.skipif(bool(missing()), reason="needs the compiled kernels")
def test_packed_heads_compute_in_float32() -> None:
    """As whole native steps do, and whatever is packed; plain ones in the model's dtype."""
    config = odd_shape(dtype="bfloat16", num_mtp_layers=1)
    plain, packed = (head_of(config, name, {**random_head(config)})[1] for name in ("torch", "cpu"))
    assert (plain.dtype, packed.dtype) == (torch.bfloat16, torch.float32)
    tokens, hidden = numbers(0, PROMPT + DEPTH, config.vocab_size), torch.randn(PROMPT, config.hidden_size)
    left, right = (drafted(mtp, config, tokens, hidden) for mtp in (plain, packed))
    assert 0 < error(right, left) < 0.05


@pytest.mark.skipif(bool(missing()), reason="needs the compiled kernels")
def test_quantized_heads_draft_too() -> None:
    config = odd_shape(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64, num_mtp_layers=1)
    tensors = random_head(config, "bfloat16")
    kinds = {name: target_of(name, tuple(tensor.shape), config, FILE_TYPES["Q4_K_M"]).type.name
             for name, tensor in tensors.items()}
    assert set(kinds.values()) == {"Q8_0", "F32"}
    plain = head_of(config, "cpu", {**tensors})[1]
    packed = head_of(config, "cpu", quantize_tensors(iter(tensors.items()), "q4_k", config))[1]
    tokens, hidden = numbers(0, PROMPT + DEPTH, config.vocab_size), torch.randn(PROMPT, config.hidden_size)
    left, right = (drafted(mtp, config, tokens, hidden) for mtp in (plain, packed))
    assert 0 < error(left, right) < 0.1


def test_own_embedding_and_logits_are_used(pair: Pair) -> None:
    decoder, shared = pair.mtp(backends()["torch"])
    own = {name: torch.randn(pair.config.vocab_size, pair.config.hidden_size)
           for name in ("mtp.embed_tokens.weight", "mtp.shared_head.head.weight")}
    tensors: dict[str, Block] = {**pair.theirs.tensors(pair.config), **own}
    mtp = build_head(pair.config, [tensors], decoder, None)
    assert not tensors
    assert mtp.embedding is own["mtp.embed_tokens.weight"] and mtp.head is own["mtp.shared_head.head.weight"]
    assert shared.embedding is decoder.weights.embedding and shared.head is decoder.weights.head


# Norms that have been saved with the family's offset


def norms_of(mtp: MtpHead) -> list[Tensor]:
    mixer = mtp.layer.mixer
    assert isinstance(mixer, AttentionWeights) and mixer.q_norm is not None and mixer.k_norm is not None
    return [mtp.norm_embedding, mtp.norm_hidden, mtp.norm, mtp.layer.input_norm, mtp.layer.post_norm, mixer.q_norm,
            mixer.k_norm]


def moved(head: dict[str, Tensor], by: float) -> dict[str, Block]:
    return {name: tensor + by if "norm" in name else tensor for name, tensor in head.items()}


@pytest.mark.parametrize("embedding", [0.0, -0.6], ids=["around zero", "small for the embedding"])
def test_norms_with_the_offset_are_known(caplog: pytest.LogCaptureFixture, embedding: float) -> None:
    config = odd_shape(num_mtp_layers=1)
    head = random_head(config)
    head["mtp.pre_fc_norm_embedding.weight"] += embedding
    honest = norms_of(head_of(config, "torch", {**head})[1])
    assert not caplog.records
    for left, right in zip(honest, norms_of(head_of(config, "torch", moved(head, 1.0))[1]), strict=True):
        assert torch.equal(left, right)
    (record,) = caplog.records
    assert "have been saved with the 1 that is added" in record.getMessage()


@pytest.mark.parametrize("by", [-0.5, 0.05, 0.3])
def test_honest_norms_are_never_corrected(caplog: pytest.LogCaptureFixture, by: float) -> None:
    """Also where they have all grown: then they are nearer to the trunk's with the offset than without."""
    config = odd_shape(num_mtp_layers=1)
    head = random_head(config)
    for norm, tensor in zip(norms_of(head_of(config, "torch", moved(head, by))[1]),
                            norms_of(head_of(config, "torch", {**head})[1]), strict=True):
        assert torch.allclose(norm, tensor + by)
    assert not caplog.records


def test_families_without_an_offset_have_none_to_correct(caplog: pytest.LogCaptureFixture) -> None:
    config = odd_shape(architecture="qwen3", layer_types=("full_attention",) * 6, linear=None,
                       attention_output_gate=False, num_mtp_layers=1)
    for norm in norms_of(head_of(config, "torch", {**random_head(config)})[1]):
        assert abs(float(norm.mean()) - 1) < 0.05
    assert not caplog.records

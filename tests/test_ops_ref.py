"""The naive ops against transformers, against themselves cut anywhere, and against bugs put in on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from op_cases import (
    ATTENTION,
    GDN,
    HIDDEN,
    RING_POOLS,
    ROPE,
    Case,
    Row,
    assert_close,
    attention_weights,
    build_batch,
    cases,
    clone_state,
    conv_places,
    gdn_weights,
    generator,
    hidden_states,
    kv_errors,
    kv_view,
    randn,
    rope_table,
    same_bits,
    state_errors,
    state_view,
    uniform,
)
from support import every
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from deltic.ops import reference
from deltic.ops.types import PAGE, RING, AttentionWeights, GdnWeights, KvView, MlpWeights, RopeSpec

CASES = cases()
NEW = -1


def config(**changes: object) -> Qwen3_5TextConfig:
    values = {
        "hidden_size": HIDDEN, "intermediate_size": 17, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": ATTENTION.heads, "num_key_value_heads": ATTENTION.kv_heads,
        "head_dim": ATTENTION.head_dim, "linear_num_key_heads": GDN.key_heads,
        "linear_num_value_heads": GDN.value_heads, "linear_key_head_dim": GDN.key_dim,
        "linear_value_head_dim": GDN.value_dim, "linear_conv_kernel_dim": GDN.conv_kernel,
        "rms_norm_eps": 1e-6, "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.6,
                            "mrope_section": [1, 1, 1], "mrope_interleaved": True},
    }
    made = Qwen3_5TextConfig(**(values | changes))
    made._attn_implementation = "eager"
    return made


def randomise(module: torch.nn.Module, seed: int) -> None:
    rng = generator(seed)
    for name, parameter in module.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        if not name.endswith("A_log"):
            parameter.data = (randn(rng, *parameter.shape) * scale).to(parameter.dtype)


# Linear maps, norms, rotation


def test_linear_takes_row_blocks() -> None:
    rng = generator(0)
    x, weight = randn(rng, 5, 9), randn(rng, 12, 9)
    torch.testing.assert_close(reference.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(reference.linear(x, weight.split([5, 1, 6])), x @ weight.T)
    assert reference.head(x[:0], weight).shape == (0, 12)
    assert reference.head(x.bfloat16(), weight.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_matches_transformers(dtype: torch.dtype) -> None:
    module = theirs.Qwen3_5RMSNorm(HIDDEN, eps=1e-6)
    randomise(module, 1)
    x = randn(generator(2), 7, HIDDEN).to(dtype)
    assert same_bits(reference.rms_norm(x, 1.0 + module.weight.detach(), 1e-6), module(x).detach())


def test_add_norm_norms_the_sum() -> None:
    rng = generator(3)
    residual, delta, weight = randn(rng, 4, 9).bfloat16(), randn(rng, 4, 9).bfloat16(), randn(rng, 9).float()
    total, normed = reference.add_norm(residual, delta, weight, 1e-5)
    assert same_bits(total, residual + delta)
    assert same_bits(normed, reference.rms_norm(total, weight, 1e-5))
    alone, _ = reference.add_norm(residual, None, weight, 1e-5)
    assert same_bits(alone, residual)
    assert alone.data_ptr() != residual.data_ptr()


def test_gated_norm_matches_transformers() -> None:
    module = theirs.Qwen3_5RMSNormGated(HIDDEN, eps=1e-6)
    randomise(module, 4)
    rng = generator(5)
    x, gate = randn(rng, 7, HIDDEN).float(), randn(rng, 7, HIDDEN).float()
    torch.testing.assert_close(reference.gated_norm(x, gate, module.weight.detach(), 1e-6), module(x, gate).detach())


def test_mlp_matches_transformers() -> None:
    module = theirs.Qwen3_5MLP(config(), 17).double()
    randomise(module, 6)
    x = randn(generator(7), 5, HIDDEN)
    gate_up = (module.gate_proj.weight.detach(), module.up_proj.weight.detach())
    weights = MlpWeights(gate_up, module.down_proj.weight.detach())
    torch.testing.assert_close(reference.mlp(x, weights), module(x).detach())


@pytest.mark.parametrize("sections", [(11, 11, 10), (8, 16, 8), (1, 30, 1)])
def test_rope_of_three_axes_matches_transformers(sections: tuple[int, int, int]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                  "mrope_section": list(sections), "mrope_interleaved": True}
    module = theirs.Qwen3_5TextRotaryEmbedding(config(head_dim=256, rope_parameters=parameters))
    positions = torch.randint(0, 200_000, (3, 40), generator=generator(8))
    cos, sin = module(torch.zeros(1), positions[:, None])
    rope = reference.rope(positions, RopeSpec(1e7, 64, sections))
    assert same_bits(rope.cos, cos[0])
    assert same_bits(rope.sin, sin[0])


def test_rope_without_sections_is_plain() -> None:
    positions = torch.arange(30).expand(3, -1).clone()
    plain, split = reference.rope(positions, RopeSpec(1e4, 12)), reference.rope(positions, RopeSpec(1e4, 12, (2, 2, 2)))
    assert same_bits(plain.cos, split.cos)
    positions[1:] = 0
    assert same_bits(plain.cos, reference.rope(positions, RopeSpec(1e4, 12)).cos)


def test_rotate_matches_transformers() -> None:
    rng = generator(9)
    x, rope = randn(rng, 8, 6, 10), reference.rope(torch.randint(0, 99, (3, 8), generator=rng), ROPE)
    wanted, _ = theirs.apply_rotary_pos_emb(x, x, rope.cos.double(), rope.sin.double())
    torch.testing.assert_close(reference.rotate(x, rope), wanted)


# Short convolution


def test_split_short_conv_matches_transformers() -> None:
    rng = generator(10)
    inputs, weight = randn(rng, 40, 9).float(), randn(rng, 9, 4).float()
    wanted = theirs.causal_conv1d_fn(inputs.T[None], weight, activation="silu")[0].T
    ring, done = torch.full((7, 9), torch.nan), 0
    for chunk in (1, 2, 3, 11, 1, 1, 7, 14):
        piece = inputs[done : done + chunk]
        result = reference.short_conv(ring, piece, done, weight)
        torch.testing.assert_close(result, wanted[done : done + chunk], rtol=1e-5, atol=1e-6)
        ring, done = reference.advance_conv(ring, piece, done, done + chunk), done + chunk
    places = conv_places(40, 7)
    assert same_bits(ring[places], inputs[-7:])


# The delta rule


def delta_inputs(seed: int, tokens: int, heads: tuple[int, int] = (2, 6), dims: tuple[int, int] = (5, 7),
                 dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Normalised query and key, value, decay, beta."""
    rng = generator(seed)
    query, key = (reference.unit(randn(rng, tokens, heads[0], dims[0])).to(dtype) for _ in range(2))
    value, decay = randn(rng, tokens, heads[1], dims[1]).to(dtype), uniform(rng, tokens, heads[1]).to(dtype)
    return query, key, value, decay, uniform(rng, tokens, heads[1]).to(dtype)


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 130])
def test_delta_rule_matches_transformers(rule: str, tokens: int) -> None:
    rng = generator(tokens)
    query, key, value, decay, beta = delta_inputs(tokens, tokens)
    query, key, state = query * uniform(rng, tokens, 2, 1), key * 3.0, randn(rng, 6, 5, 7).float()
    query = query.float()
    output, last = getattr(theirs, rule)(
        query[None], key[None], value[None], g=decay.log()[None], beta=beta[None], initial_state=state[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True)
    run = reference.gated_delta(state, reference.unit(query), reference.unit(key), value, decay, beta)
    assert_close(run.outputs, output[0], 2e-6)
    assert_close(run.states[tokens], last[0], 2e-6)


def test_split_delta_rule_has_the_same_bits() -> None:
    inputs, state = delta_inputs(1, 50), randn(generator(2), 6, 5, 7).float()
    whole = reference.gated_delta(state, *inputs, wanted=tuple(range(51)))
    for cut in range(51):
        rest = reference.gated_delta(whole.states[cut], *(x[cut:] for x in inputs))
        assert same_bits(rest.outputs, whole.outputs[cut:])
        assert same_bits(rest.states[50 - cut], whole.states[50])


def test_flush_has_the_bits_of_the_steps() -> None:
    inputs, state = delta_inputs(3, RING), randn(generator(4), 6, 5, 7).float()
    run = reference.gated_delta(state, *inputs, wanted=tuple(range(RING)))
    for count in range(RING + 1):
        folded = reference.fold(state, inputs[1][:count], run.updates[:count], inputs[3][:count])
        assert same_bits(folded, run.states[count])


def replay(state: Tensor, entries: tuple[Tensor, ...], token: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns one token's (output, update), [Hv, Dv] each, from a state and the n entries after it, in low-rank form:
    what the kernels compute that do not write the state.

    Shapes as in `reference.fold` (entries) and `reference.gated_delta_step` (token). With D_i the product of the decays
    after entry i, including the token's own decay:
    u = β (v - D_0 Sᵀ k - Σ D_i (k_i·k) u_i), o = (D_0 Sᵀ q + Σ D_i (k_i·q) u_i + (k·q) u) / √Dk.
    D is a product from newest to oldest: a ratio of prefix products would divide by zero after an underflow.
    Differs from these only by rounding.
    """
    keys, updates, decays = entries
    query, key, value, decay, beta = token
    heads = len(value)
    query, key = reference.spread(query, heads) / state.shape[-2] ** 0.5, reference.spread(key, heads)
    remembered, output = torch.zeros_like(value), torch.zeros_like(value)
    product = decay
    for index in reversed(range(len(keys))):
        old = reference.spread(keys[index], heads)
        remembered = remembered + (product * (old * key).sum(-1))[:, None] * updates[index]
        output = output + (product * (old * query).sum(-1))[:, None] * updates[index]
        product = product * decays[index]
    remembered = remembered + product[:, None] * (state * key[..., None]).sum(-2)
    output = output + product[:, None] * (state * query[..., None]).sum(-2)
    update = (value - remembered) * beta[:, None]
    return output + (key * query).sum(-1, keepdim=True) * update, update


def test_replay_without_writing_the_state() -> None:
    state = randn(generator(5), 6, 5, 7)
    inputs = delta_inputs(6, RING + 1, dtype=torch.float64)
    run = reference.gated_delta(state, *inputs)
    for count in range(RING + 1):
        entries = inputs[1][:count], run.updates[:count], inputs[3][:count]
        output, update = replay(state, entries, [x[count] for x in inputs])
        assert_close(output, run.outputs[count], 1e-13)
        assert_close(update, run.updates[count], 1e-13)


def test_replay_survives_decays_that_underflow() -> None:
    state = randn(generator(7), 6, 5, 7).float()
    query, key, value, decay, beta = delta_inputs(8, RING + 1)
    decay = decay * 1e-30
    run = reference.gated_delta(state, query, key, value, decay, beta)
    token = [x[RING] for x in (query, key, value, decay, beta)]
    output, _ = replay(state, (key[:RING], run.updates[:RING], decay[:RING]), token)
    assert_close(output, run.outputs[RING], 1e-6)


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_delta_rule_does_not_drift(inputs: torch.dtype) -> None:
    """float32 state against float64 on the same inputs: 4,096 steps, error of the last 512."""
    query, key, value, decay, beta = delta_inputs(9, 4096, (2, 2), (64, 32), torch.float64)
    rounded = [x.to(inputs).float() for x in (query, key, value)] + [decay.pow(0.05).float(), beta.float()]
    zero = torch.zeros(2, 64, 32)
    run = reference.gated_delta(zero, *rounded)
    exact = reference.gated_delta(zero.double(), *(x.double() for x in rounded))
    assert_close(run.outputs[-512:], exact.outputs[-512:], 1.5e-6)


# Whole layers


def gdn_module(dtype: torch.dtype = torch.float32) -> tuple[theirs.Qwen3_5GatedDeltaNet, GdnWeights]:
    module = theirs.Qwen3_5GatedDeltaNet(config(), 0).to(dtype)
    randomise(module, 11)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    in_proj = tuple(parameters[f"in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a"))
    return module, GdnWeights(
        GDN, in_proj, parameters["conv1d.weight"][:, 0], -parameters["A_log"].float().exp(), parameters["dt_bias"],
        parameters["norm.weight"], parameters["out_proj.weight"])


def run_gdn(weights: GdnWeights, x: Tensor, chunks: list[int]) -> Tensor:
    """One sequence through the mixer, chunk by chunk, in one slot."""
    view, done, outputs = None, 0, []
    for chunk in chunks:
        case = build_batch([Row(chunk, done)])
        view = view or state_view(case, x.dtype)
        batch = replace(case.batch, source=torch.tensor([1]), target=torch.tensor([1]), span=None)
        outputs.append(reference.gdn_mixer(x[done : done + chunk], weights, view, batch))
        done += chunk
    return torch.cat(outputs)


@pytest.mark.parametrize("tokens", [1, 3, 64, 100])
def test_gdn_mixer_matches_transformers(tokens: int) -> None:
    module, weights = gdn_module()
    x = randn(generator(12), tokens, HIDDEN).float()
    wanted = module(x[None])[0].detach()
    assert_close(run_gdn(weights, x, [tokens]), wanted, 5e-6)


def test_bfloat16_gdn_mixer_matches_transformers() -> None:
    module, weights = gdn_module(torch.bfloat16)
    x = randn(generator(12), 50, HIDDEN).bfloat16()
    wanted = module(x[None])[0].detach()
    assert_close(run_gdn(weights, x, [50]), wanted, 1e-2)


@pytest.mark.parametrize("chunks", [[1] * 90, [63, 1, 26], [2, 64, 3, 21], [5] * 18])
def test_split_gdn_mixer_has_the_same_bits(chunks: list[int]) -> None:
    weights, x = gdn_weights(13, torch.float32), randn(generator(14), 90, HIDDEN).float()
    assert same_bits(run_gdn(weights, x, chunks), run_gdn(weights, x, [90]))


def attention_module() -> tuple[theirs.Qwen3_5Attention, AttentionWeights]:
    module = theirs.Qwen3_5Attention(config(), 1)
    randomise(module, 15)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return module, AttentionWeights(
        ATTENTION, tuple(parameters[f"{name}_proj.weight"] for name in "qkv"), 1.0 + parameters["q_norm.weight"],
        1.0 + parameters["k_norm.weight"], parameters["o_proj.weight"])


def run_attention(weights: AttentionWeights, x: Tensor, positions: Tensor, chunks: list[int]) -> Tensor:
    """One sequence through the mixer, chunk by chunk, in pages that lie in reversed order."""
    count = -(-len(x) // PAGE)
    pages = torch.arange(count, 0, -1)
    kv = KvView(*(torch.full((count + 1, PAGE, ATTENTION.kv_heads, ATTENTION.head_dim), torch.nan, dtype=x.dtype)
                  for _ in range(2)))
    done, outputs = 0, []
    for chunk in chunks:
        places = torch.arange(done, done + chunk)
        batch = replace(build_batch([Row(chunk, done)]).batch, pages=pages[None],
                        store=pages[places // PAGE] * PAGE + places % PAGE)
        rope = reference.rope(positions[:, done : done + chunk], ROPE)
        outputs.append(reference.attention_mixer(x[done : done + chunk], weights, kv, batch, rope))
        done += chunk
    return torch.cat(outputs)


def test_split_attention_mixer_matches_transformers() -> None:
    module, weights = attention_module()
    rng = generator(16)
    x, positions = randn(rng, 70, HIDDEN).float(), torch.randint(0, 99, (3, 70), generator=rng)
    embedding = theirs.Qwen3_5TextRotaryEmbedding(config())(x, positions[:, None])
    mask = torch.full((70, 70), -torch.inf).triu(1)[None, None]
    wanted = module(x[None], embedding, mask)[0][0].detach()
    whole = run_attention(weights, x, positions, [70])
    assert_close(whole, wanted, 2e-6)
    for chunks in ([1] * 70, [15, 1, 1, 33, 20], [64, 6]):
        assert same_bits(run_attention(weights, x, positions, chunks), whole)


def test_attention_without_gate_reads_all_rows() -> None:
    """Gated weights whose gates are +infinity are weights without a gate."""
    _, weights = attention_module()
    rng = generator(17)
    x, positions = randn(rng, 20, HIDDEN).float().abs(), torch.zeros(3, 20, dtype=torch.int64)
    assert isinstance(weights.qkv, tuple)
    query = weights.qkv[0].reshape(ATTENTION.heads, 2, ATTENTION.head_dim, HIDDEN).clone()
    plain = replace(weights, spec=replace(ATTENTION, gate=False), qkv=(query[:, 0].flatten(0, 1), *weights.qkv[1:]))
    query[:, 1] = 1e6
    opened = replace(weights, qkv=(query.flatten(0, 2), *weights.qkv[1:]))
    assert same_bits(run_attention(plain, x, positions, [20]), run_attention(opened, x, positions, [20]))


# Memory


@pytest.mark.parametrize("case", every(3, CASES), ids=lambda case: case.name)
def test_ops_write_only_specified_slots(case: Case) -> None:
    x, view = hidden_states(case, torch.float32), state_view(case, torch.float32)
    before = clone_state(view)
    output = reference.gdn_mixer(x, gdn_weights(1, torch.float32), view, case.batch)
    assert output.isfinite().all()
    state_errors(case, view, view, before)
    kv, kept = kv_view(case, torch.float32), kv_view(case, torch.float32)
    table = rope_table(reference.OPS, case)
    mixed = reference.attention_mixer(x, attention_weights(1, torch.float32), kv, case.batch, table)
    assert mixed.isfinite().all()
    kv_errors(case, kv, kv, kept)


@pytest.mark.parametrize("case", every(3, CASES), ids=lambda case: case.name)
def test_row_bits_do_not_depend_on_batch(case: Case) -> None:
    x, weights = hidden_states(case, torch.float32), gdn_weights(1, torch.float32)
    view, starts = state_view(case, torch.float32), case.batch.starts.tolist()
    fresh = clone_state(view)
    together = reference.gdn_mixer(x, weights, view, case.batch)
    for index, row in enumerate(case.rows):
        alone = build_batch([replace(row, emits=())]).batch
        alone = replace(alone, source=case.batch.source[[index]], target=case.batch.target[[index]],
                        delta_log=case.batch.delta_log[[index]], span=None)
        output = reference.gdn_mixer(x[starts[index] : starts[index + 1]], weights, fresh, alone)
        assert same_bits(output, together[starts[index] : starts[index + 1]])
        slot = int(case.batch.target[index])
        assert same_bits(fresh.recurrent[slot], view.recurrent[slot])
        assert same_bits(fresh.conv[slot], view.conv[slot])
    assert fresh.delta_log is not None and view.delta_log is not None
    assert all(same_bits(getattr(fresh.delta_log, name), getattr(view.delta_log, name)) for name in RING_POOLS)


def test_rows_read_before_any_row_writes() -> None:
    """A row goes on in place while another starts from the same slot."""
    case = build_batch([Row(3, 10), Row(2, 10, in_place=False)])
    x, view = hidden_states(case, torch.float32), state_view(case, torch.float32)
    weights = gdn_weights(1, torch.float32)
    slot = int(case.batch.source[0])
    alone = clone_state(view)
    batch = replace(case.batch, source=torch.tensor([slot, slot]))
    together = reference.gdn_mixer(x, weights, view, batch)
    second = replace(build_batch([Row(2, 10, in_place=False)]).batch, source=torch.tensor([slot]),
                     target=case.batch.target[1:])
    assert same_bits(together[3:], reference.gdn_mixer(x[3:], weights, alone, second))


def test_copies() -> None:
    pools = tuple(randn(generator(18), 2, 6, *shape) for shape in ((3,), (4, 5)))
    before = [pool.clone() for pool in pools]
    reference.copy_slots(pools, torch.tensor([1, 2]), torch.tensor([2, 5]))
    for pool, old in zip(pools, before, strict=True):
        assert same_bits(pool, old[:, [0, 1, 1, 3, 4, 2]])


def test_convolution_needs_silu() -> None:
    """The comparison with transformers is not blind to the activation."""
    rng = generator(20)
    inputs, weight = randn(rng, 6, 3), randn(rng, 3, 4)
    linear = functional.conv1d(inputs.T[None], weight[:, None], padding=3, groups=3)[0, :, :6].T
    torch.testing.assert_close(reference.short_conv(torch.empty(4, 3), inputs, 0, weight), functional.silu(linear))

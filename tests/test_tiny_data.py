"""The embedded demo model: its made-up conversations, its chat template, its tokenizer, its files, its draft head."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "deltic" / "models" / "tiny"
EXAMPLE = ROOT / "examples" / "tiny"

sys.path.insert(0, str(EXAMPLE))
import batches  # noqa: E402
import data  # noqa: E402
import delta  # noqa: E402
import model  # noqa: E402
import network  # noqa: E402
import optimizer  # noqa: E402
import phrases  # noqa: E402
import quiz  # noqa: E402
import train_head  # noqa: E402
from phrases import HELDOUT, PHRASES, TRAIN  # noqa: E402
from render import render as render_text  # noqa: E402

sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


# Conversations


def test_every_intent_has_phrasings_of_both_kinds():
    assert len(PHRASES) > 100
    assert all(section[TRAIN] and section[HELDOUT] for section in PHRASES.values())


def test_no_heldout_phrasing_is_a_training_phrasing():
    assert len(phrases.HELDOUT_FORMS) > 250
    assert [form for form in phrases.HELDOUT_FORMS if phrases.trained_as(form)] == []


@pytest.mark.parametrize("file", sorted(phrases.FRESH))
def test_no_fresh_phrasing_is_a_training_or_heldout_phrasing(file):
    fresh = [phrases.normal(pattern) for patterns in phrases.FRESH[file].values() for pattern in patterns]
    assert phrases.FRESH[file].keys() == PHRASES.keys()
    assert [form for form in fresh if phrases.trained_as(form) or form in phrases.HELDOUT_FORMS] == []


def test_few_training_phrasings_are_banned():
    trained = {form for section in PHRASES.values() for form in phrases.normal_forms(section, TRAIN)}
    assert len(trained & phrases.BANNED) < 200
    assert not trained & phrases.BANNED & {"0", "hello", "thank you", "how are you"}


def test_normal_forms_ignore_case_punctuation_and_slots():
    assert phrases.normal("What's  {country's} Capital, please?!") == phrases.normal("whats {city} capital please")


def test_slips_and_frames_never_make_a_heldout_phrasing(monkeypatch):
    monkeypatch.setattr(data, "_filled", lambda form, slots: form)
    rng = random.Random(0)
    asked = {phrases.normal(data.ask(rng.choice(list(PHRASES)), {}, rng, TRAIN)) for _ in range(5000)}
    assert asked.isdisjoint(phrases.RESERVED)


def test_samples_are_deterministic():
    first = [data.make_sample(3, i, TRAIN) for i in range(50)]
    again = [data.make_sample(3, i, TRAIN) for i in reversed(range(50))][::-1]
    assert first == again
    assert first != [data.make_sample(4, i, TRAIN) for i in range(50)]


def test_heldout_set_has_equally_many_samples_of_each_category():
    heldout = data.heldout_set(0, 4)
    counts = {s.category: sum(o.category == s.category for o in heldout) for s in heldout}
    assert set(counts.values()) == {4}
    assert len(counts) > 30


def test_training_text_is_what_inference_renders(tokenizer):
    for i in range(100):
        sample = data.make_sample(5, i, TRAIN)
        text = render_text([*sample.messages, sample.target], sample.tools)
        assert text == render(tokenizer, [*sample.messages, sample.target], tools=sample.tools).removesuffix("\n")
        *given, (target, spoken) = data.pieces(text)
        prompt = render(
            tokenizer,
            sample.messages,
            tools=sample.tools,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        assert "".join(text for text, _ in given) == prompt
        assert spoken and target.endswith("<|im_end|>")


def dialogue(split: str, seed: int) -> Any:
    return data.Dialogue(random.Random(seed), split)


def test_calendar_and_numbers_are_right():
    for seed in range(40):
        steps = quiz.ask_steps(dialogue(TRAIN, seed)).answers[0]["content"].rstrip(".").split()
        names = quiz.DAYS if steps[-1] in quiz.DAYS else quiz.MONTHS
        count = 1 if steps[0] == "The" else int(steps[0])
        count = count if "after" in steps else -count
        assert names[(names.index(steps[-3]) + count) % len(names)] == steps[-1], seed
        left, _, right = quiz.ask_terms(dialogue(TRAIN, seed)).answers[0]["content"].rstrip(".").partition(" = ")
        assert eval(left) == int(right), seed
        order = quiz.ask_order(dialogue(TRAIN, seed)).answers[0]["content"].rstrip(".").replace(",", "").split()
        names = quiz.DAYS if order[1] in quiz.DAYS else quiz.MONTHS
        assert (names.index(order[1]) < names.index(order[-1])) == (order[3] == "before"), seed


def test_several_calls_are_those_of_the_request():
    asked = [sample for i in range(1500) if "calls" in (sample := data.make_sample(9, i, TRAIN)).category]
    calls = [sample for sample in asked if sample.target.get("tool_calls")]
    assert len(calls) > 25
    for sample in calls:
        request = sample.messages[-1]["content"].lower()
        for call in sample.target["tool_calls"]:
            assert all(str(value).lower() in request for value in call["function"]["arguments"].values()) or any(
                country.name.lower() in map(str, call["function"]["arguments"].values()) for country in data.COUNTRIES
            )


# The chat template


def test_template_file_equals_checkpoint():
    config = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == (EXAMPLE / "chat_template.jinja").read_text(encoding="utf-8")


def test_generation_prompt_thinks_only_when_asked(tokenizer):
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    closed = head + "<think>\n\n</think>\n\n"
    assert render(tokenizer, [user(" Hi\n")], add_generation_prompt=True) == closed
    assert render(tokenizer, [user("Hi")], add_generation_prompt=True, enable_thinking=False) == closed
    assert render(tokenizer, [user("Hi")], add_generation_prompt=True, enable_thinking=True) == head + "<think>\n"


def test_content_may_be_parts_or_nothing(tokenizer):
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]
    messages = [{"role": "system"}, user(parts), assistant(None)]
    assert render(tokenizer, messages) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n"
    )


def test_pictures_are_shown_where_they_stand(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "video"}]
    assert render(tokenizer, [user(parts)]) == (
        "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "<|im_end|>\n"
    )


def test_only_turns_after_the_last_query_keep_their_thinking(tokenizer):
    messages = [
        user("1"),
        assistant("one", reasoning_content="r1"),
        user("2"),
        assistant("<think>\nr2\n</think>\n\ntwo"),
        user("<tool_response>\nx\n</tool_response>"),
        assistant("three", reasoning_content=" r3 "),
    ]
    assert render(tokenizer, messages) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n<think>\nr2\n</think>\n\ntwo<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nr3\n</think>\n\nthree<|im_end|>\n"
    )


def test_tools_come_first_and_the_system_message_after_them(tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "é"}}]
    text = render(tokenizer, [{"role": "system", "content": " Be kind. "}, user("Hi")], tools=tools)
    assert text.startswith(
        "<|im_start|>system\n# Tools\n\nYou may call these functions:\n\n<tools>\n"
        '{"type": "function", "function": {"name": "f"}}\n{"type": "function", "function": {"name": "é"}}\n</tools>\n\n'
    )
    assert text.endswith("\n\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


def test_calls_and_results(tokenizer):
    arguments = {"s": "a b", "i": 3, "x": 1.5, "t": True, "n": None, "l": [1, "é"], "o": {"k": 2}}
    calls = [{"function": {"name": "f", "arguments": arguments}}, {"name": "g", "arguments": {}}]
    messages = [
        user("go"),
        assistant("Wait.", reasoning_content="r", tool_calls=calls),
        {"role": "tool", "content": " 1 "},
        {"role": "tool", "content": "2"},
    ]
    values = {"s": "a b", "i": "3", "x": "1.5", "t": "True", "n": "None", "l": '[1, "é"]', "o": '{"k": 2}'}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\nWait.\n\n"
        f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "system", "content": "x"}], "no user message"),
        ([user("<tool_response>x</tool_response>")], "no user message"),
        ([user("a"), {"role": "system", "content": "x"}], "must be the first"),
        ([{"role": "system", "content": [{"type": "image"}]}, user("a")], "outside of the system message"),
        ([user([{"type": "sound"}])], "content part"),
        ([user(3)], "must be a string"),
        ([user("a"), {"role": "robot", "content": "x"}], "Unknown message role"),
        ([user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "{}"}])], "must be an object"),
    ],
)
def test_template_refuses(tokenizer, messages, complaint):
    with pytest.raises(Exception, match=complaint):
        render(tokenizer, messages)


def test_template_refuses_an_empty_conversation(tokenizer):
    with pytest.raises(ValueError, match="empty conversation"):
        render(tokenizer, [])


# The tokenizer and the files


def test_tokenizer_round_trips_any_text(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        limit = rng.choice([0x80, 0x800, 0xD7FF, 0x110000])
        points = [rng.randrange(limit) for _ in range(rng.randint(0, 60))]
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_markup_is_one_token_each_and_digits_stand_alone(tokenizer):
    markup = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vision = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert [len(tokenizer.encode(token)) for token in markup + control + vision] == [1] * 13
    assert len(tokenizer) == 3072
    assert set(tokenizer.all_special_tokens).isdisjoint(markup)
    assert len(tokenizer.encode("2025")) == 4
    assert tokenizer.eos_token == "<|im_end|>"


def test_files_are_small_and_of_the_family():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 14e6
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config["linear_num_key_heads"] != config["linear_num_value_heads"]
    rope = config["rope_parameters"]
    assert sum(rope["mrope_section"]) == config["head_dim"] * rope["partial_rotary_factor"] / 2
    assert json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))["do_sample"] is False


# Training


def test_delta_rule_equals_transformers():
    modeling = transformers.models.qwen3_5.modeling_qwen3_5
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 128, heads, 32, generator=generator) for heads in (3, 3, 6)]
    inputs += [-torch.rand(2, 128, 6, generator=generator), torch.rand(2, 128, 6, generator=generator)]
    for x in inputs:
        x.requires_grad_()
    weight = torch.randn(2, 128, 6, 32, generator=generator)
    outputs = [
        modeling.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0],
        delta.gated_delta_rule(*inputs, torch.zeros(2, 128, dtype=torch.bool)),
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-6)
    grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in outputs]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


def test_packed_network_equals_transformers(trunk):
    reference = transformers.Qwen3_5ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    lengths = [50, 70, 130, 6]
    ids = torch.randint(0, 3072, (1, 256), generator=torch.Generator().manual_seed(0))
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    wanted = [reference.model(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(lengths, 1)]
    torch.testing.assert_close(trunk(ids, place), torch.cat(wanted, 1), rtol=1e-3, atol=1e-3)


def test_batches_hold_whole_conversations(tokenizer):
    samples = [data.make_sample(7, i, TRAIN) for i in range(30)]
    rows = batches.tokens_of(tokenizer.backend_tokenizer, samples)
    batch = batches.pack(rows, 8, 512)
    texts = [tokenizer.encode(render_text([*s.messages, s.target], s.tools), add_special_tokens=False) for s in samples]
    begins = [tuple(i) for i in (batch.place == 0).nonzero().tolist() if batch.ids[tuple(i)]]
    assert len(begins) > 5
    for row, at in begins:
        text = next(t for t in texts if t[:-1] == batch.ids[row, at : at + len(t) - 1].tolist())
        assert batch.place[row, at : at + len(text) - 1].tolist() == list(range(len(text) - 1))
        said = [p - row * 512 - at for p in batch.said.tolist() if 0 <= p - row * 512 - at < len(text) - 1]
        assert said[-1] == len(text) - 2
    whole = batches.whole(tokenizer.backend_tokenizer, samples)
    assert sum(len(b.said) for b in whole) == sum(said * len(ids) for row in rows for ids, said in row)


def test_muon_moves_along_the_singular_vectors():
    x = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(optimizer.orthogonal(x).float())
    assert singular.min() > 0.4 and singular.max() < 1.4


# The draft head


@pytest.fixture(scope="module")
def trunk() -> Any:
    return model.load_model(MODEL).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def head() -> Any:
    """A random head whose attention and norms matter."""
    torch.manual_seed(0)
    head = train_head.Head().eval().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.3 if weight.ndim == 1 else 0.15)
    return head


def draft_by_hand(head: Any, embedded: torch.Tensor, hidden: torch.Tensor, first: int) -> list[torch.Tensor]:
    """The outputs of three drafts, column by column as an engine makes them, the first at column `first`."""
    before, outputs = [], []
    for at in range(first + 3):
        if at > first:
            last = outputs[-1]
        else:
            last = hidden[:, at - 1] if at else torch.zeros_like(hidden[:, 0])
        x = head.fc(torch.cat([head.pre_fc_norm_embedding(embedded[:, at]), head.pre_fc_norm_hidden(last)], -1))[
            :, None
        ]
        place = torch.full((len(x), 1), at)
        x, keys = head.layers[0](x, place, torch.ones(1, 1, 1, at + 1, dtype=torch.bool), before)
        before = [*before, keys]
        outputs.append(head.norm(x)[:, 0])
    return outputs[first:]


@pytest.mark.parametrize("first", [0, 1, 7, 10])
def test_unrolled_drafts_equal_drafting_one_by_one(head, first):
    generator = torch.Generator().manual_seed(first)
    embedded, hidden = torch.randn(2, 2, 13, network.SHAPE.hidden, generator=generator)
    embedded[:, first + 3 :], hidden[:, first:] = torch.nan, torch.nan
    place = torch.arange(first + 3).expand(2, -1)
    outputs = head(embedded[:, : first + 3], hidden[:, : first + 3].nan_to_num(7.0), place)
    unrolled = [output[:, first + i] for i, output in enumerate(outputs)]
    torch.testing.assert_close(unrolled, draft_by_hand(head, embedded, hidden, first), rtol=1e-4, atol=1e-5)


def test_drafts_of_packed_conversations_do_not_mix(head):
    embedded, hidden = torch.randn(2, 1, 20, network.SHAPE.hidden, generator=torch.Generator().manual_seed(0))
    lengths = [8, 12]
    packed = head(embedded, hidden, torch.cat([torch.arange(n) for n in lengths])[None])
    parts = [
        head(e, h, torch.arange(e.shape[1])[None]) for e, h in zip(embedded.split(lengths, 1), hidden.split(lengths, 1))
    ]
    for draft, output in enumerate(packed):
        alone = [part[draft][:, draft:] for part in parts]
        torch.testing.assert_close([p[:, draft:] for p in output.split(lengths, 1)], alone, rtol=1e-4, atol=1e-5)


def test_loss_counts_what_the_model_says_alone(trunk, head, monkeypatch):
    monkeypatch.setattr(train_head, "WEIGHTS", (1.0, 10.0, 100.0))
    monkeypatch.setattr(train_head, "logits_at", lambda trunk, hidden, places: torch.zeros(len(places), 7))
    said = torch.zeros(1, 64, dtype=torch.bool)
    said[0, 20:24] = said[0, 40] = True
    monkeypatch.setattr(train_head, "read", lambda *_: (torch.zeros(1, 64, 192), torch.zeros(1, 64, 192), said))
    places, place = torch.arange(10, 64), torch.arange(64)[None]
    batch = batches.Batch(torch.zeros(1, 64, dtype=torch.long), place, places, torch.zeros_like(places))
    loss = train_head.mean_loss(trunk, head, batch) * len(places)
    assert loss.item() / torch.tensor(7.0).log().item() == pytest.approx(3 * 1 + 2 * 10 + 1 * 100)


def test_rounds_of_drafting():
    room = [False, True, True, True, True, True, False, False, False, True, True, False]
    assert train_head.rounds([0] * 12, room) == 7
    assert train_head.rounds([0, 3, 3, 3, 2, 1, 0, 0, 0, 2, 1, 0], room) == 3
    assert train_head.rounds([0, 1, 3, 0, 2, 1, 0, 0, 0, 0, 0, 0], room) == 5


def test_stored_head_drafts_what_the_model_says(trunk):
    assert json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["mtp_num_hidden_layers"] == 1
    head = train_head.Head().eval().requires_grad_(False)
    for weight in head.parameters():
        weight.fill_(torch.nan)
    model.load_head(head, MODEL)
    whole, = train_head.heldout_batches(MODEL, 1)
    some = whole.said < whole.ids.shape[1]
    part = batches.Batch(whole.ids[:1], whole.place[:1], whole.said[some], whole.labels[some])
    parts = train_head.hits(trunk, head, part)
    room, right = (counts.sum((1, 2)) for counts in parts)
    assert (room > 50).all()
    assert (right / room > 0.97).all()


def test_head_survives_saving(trunk, head, tmp_path):
    (tmp_path / "config.json").write_text('{"b": 1, "a": [2]}', encoding="utf-8")
    model.save_head(head, tmp_path)
    stored = safetensors_torch.load_file(tmp_path / "mtp.safetensors")
    layer = {name.replace("model.layers.3.", "mtp.layers.0.") for name in trunk.state_dict() if ".layers.3." in name}
    own = {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}
    assert stored.keys() == layer | own
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {
        "a": [2], "b": 1, "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    again = train_head.Head()
    model.load_head(again, tmp_path)
    assert all(torch.equal(w.bfloat16(), v.bfloat16()) for w, v in zip(again.parameters(), head.parameters()))

"""Raw prompts with pictures, and pictures that are arrays of pixels."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import odd_shape

from deltic import LLM, Prompt, RandomModel, SamplingParams, Session
from deltic.errors import ModelError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PIXELS = np.random.default_rng(0).integers(0, 256, (96, 144, 3), dtype=np.uint8)
OTHER = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
PADS = re.compile(r"(<\|image_pad\|>)+")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(memory="64MiB", threads=1, dtype="float32") as model:
        yield model


def shown(image: Any, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def spelled(llm: LLM, messages: list[dict[str, Any]]) -> str:
    """Returns the prompt of a conversation as text, with one token for each picture."""
    ids = llm.chat_processor.chat(messages).request.ids
    return PADS.sub(r"\1", llm.chat_processor.tokenizer.decode(list(ids), skip_special=False))


def test_a_raw_prompt_with_a_picture_equals_the_chat_prompt(llm: LLM) -> None:
    messages = shown(PIXELS, "What is it?")
    raw = spelled(llm, messages)
    assert raw.count("<|image_pad|>") == 1
    prompt = llm.prompt(raw, [PIXELS])
    assert isinstance(prompt, Prompt) and prompt == llm.chat_processor.chat(messages).request.prompt
    marked = raw.replace("<|vision_start|><|image_pad|><|vision_end|>", "<__media__>")
    assert "<__media__>" in marked and llm.prompt(marked, [PIXELS]) == prompt
    text = llm.chat(messages, GREEDY).text
    assert llm.generate([prompt, "Once"], GREEDY)[0].text == text
    assert "".join(delta.text for delta in llm.generate_stream(prompt, GREEDY)) == text
    session = Session(memory="64MiB", threads=1)
    first = session.prefill(prompt)
    assert int(first.argmax()) == llm.generate([prompt], GREEDY)[0].choices[0].tokens[0]


def test_pixel_arrays_equal_image_files(llm: LLM) -> None:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    text = "a <__media__> b <__media__>"
    expected = llm.prompt(text, [file.getvalue(), Image.fromarray(OTHER)])
    assert llm.prompt(text, [PIXELS, OTHER]) == expected and len(expected.pictures) == 2
    assert llm.prompt(text, [PIXELS[::-1][::-1], np.asfortranarray(OTHER)]) == expected
    assert llm.prompt(text, [OTHER, PIXELS]).keys != expected.keys
    grey, clear = PIXELS[..., 0], np.concatenate([PIXELS, np.full((96, 144, 1), 255, np.uint8)], 2)
    assert llm.prompt("<__media__>", [grey]) == llm.prompt("<__media__>", [np.stack([grey] * 3, 2)])
    assert llm.prompt("<__media__>", [clear]) == llm.prompt("<__media__>", [PIXELS])


def test_a_prompt_without_pictures_equals_its_text(llm: LLM) -> None:
    prompt = llm.prompt("Once upon")
    assert not prompt.pictures and prompt.ids == tuple(llm.chat_processor.tokenizer.encode("Once upon"))
    assert llm.generate([prompt], GREEDY)[0].text == llm.generate(["Once upon"], GREEDY)[0].text
    with LLM(RandomModel(shape=odd_shape()), memory="8MiB", dtype="float32") as bare:
        ids = Prompt((1, 2, 3))
        one, other = bare.generate([ids, Prompt((1, 2, 3))], GREEDY)
        expected = bare.generate([[1, 2, 3]], GREEDY)[0].choices[0].tokens
        assert one.choices[0].tokens == other.choices[0].tokens == expected
        with pytest.raises(ModelError, match="no tokenizer"):
            bare.prompt("text")


@pytest.mark.parametrize(("text", "images", "words"), [
    ("none", [PIXELS], "0 markers .* for 1 images"), ("<__media__>", [], "1 markers .* for 0 images"),
    ("<|image_pad|><__media__>", [PIXELS], "2 markers .* for 1 images"),
    ("<__media__>", [PIXELS.astype(np.float32)], r"images\[0\] must be an array of uint8 .* not of float32 \[96, 144"),
    ("<__media__>", [PIXELS[:0]], r"images\[0\] has no pixels"),
    ("<__media__>", [PIXELS.transpose(2, 0, 1)], r"must be an array of uint8 \[height, width, 3\]"),
    ("<__media__>", [5], r"images\[0\]"), ("<__media__>" * 2, [PIXELS, "x.png"], r"images\[1\]"),
    ("<__media__>", 5, "images must be a list"), ("<__media__>", PIXELS, "images must be a list"), (5, [], "prompt")])
def test_l8_invalid_prompts_with_pictures_are_explained(llm: LLM, text: Any, images: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.prompt(text, images)


def test_l8_text_only_models_refuse_pictures(llm: LLM) -> None:
    with LLM(vision=False, memory="16MiB") as blind:
        for images, text in (([PIXELS], "a"), ([], "<__media__>")):
            with pytest.raises(RequestError, match="reads text only"):
                blind.prompt(text, images)
        with pytest.raises(RequestError, match="reads text only"):
            blind.generate([llm.prompt("<__media__>", [PIXELS])])
    with pytest.raises(RequestError, match="put the prompt into a list"):
        llm.generate(llm.prompt("a"))  # type: ignore[arg-type]
    assert torch.is_tensor(Session(memory="16MiB").prefill(llm.prompt("a")))

"""Conversations with pictures: in Python, in every API and on the command line."""

from __future__ import annotations

import base64
import io
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from PIL import Image
from test_server_harness import Served, serving
from vision_models import GREEDY, data_url, directory, drawing, png, shows

from deltic import LLM
from deltic.chat.processor import ChatProcessor
from deltic.cli import main
from deltic.cli.chat import ChatState
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.params import Prompt

__all__ = ["directory"]


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32", memory="64MiB", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm) as running:
        yield running
        running.wait_idle()


def test_a_conversation_about_a_picture(llm: LLM) -> None:
    pictures = llm.engine.pictures
    assert pictures
    before = pictures.encoded
    messages = [shows(drawing(1))]
    job = llm.chat_processor.chat(messages, GREEDY)
    assert isinstance(job.request.prompt, Prompt)
    picture, = job.request.prompt.pictures
    assert picture.count == 15 and len(job.request.prompt) > 15
    assert all(boundary <= picture.start or boundary >= picture.end for boundary in job.request.stable_prefixes)
    first = llm.chat(messages, GREEDY)
    assert pictures.encoded == before + 1
    second = llm.chat([*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}],
                      GREEDY)
    assert pictures.encoded == before + 1
    assert second.choices[0].usage.cached_tokens >= picture.end
    other = llm.chat([shows(drawing(2))], GREEDY)
    assert other.choices[0].usage.cached_tokens <= picture.start
    assert pictures.encoded == before + 2


def test_ways_to_give_a_picture(llm: LLM, tmp_path: Path) -> None:
    image = drawing(3)
    image.save(tmp_path / "it.png")
    answers = {llm.chat([shows(given)], GREEDY).text for given in (
        image, png(image), tmp_path / "it.png", data_url(image), {"url": data_url(image)})}
    assert len(answers) == 1


@pytest.mark.parametrize(("image", "message"), [
    ("it.png", "as a data URL .*not as 'it.png'"), ("http://127.0.0.1/x.png", "not as 'http://"),
    ("data:image/png;base64,?", "no valid base64"), ("data:image/png,x", "not in base64"),
    ("data:image/png;base64,\u00e9", "no valid base64"),
    ("it.png", "or in Python a pathlib.Path, .* Pillow image or an array of uint8 pixels, not as 'it.png'"),
    (5, "must be a data URL, or in Python a pathlib.Path, .* an array of uint8 pixels, not 5"),
    ("data:image/png;base64,AAAA", "no picture that can be read"), (b"", "no picture that can be read"),
    (None, "has no picture.* or in Python a pathlib.Path"), (png(drawing(1))[:-60], "seems damaged"),
    (Image.open(io.BytesIO(png(drawing(1))[:-60])), "seems damaged"),
    (Image.new("RGB", (1, 300)), "aspect ratio above 200"),
    (Path("/nowhere/x.png"), r"\('/nowhere/x.png'\) cannot be read: there is no such file"),
    (Path("/dev/null"), r"\('/dev/null'\) cannot be read: there is no such file"),
    (Path(__file__), r"\(.*\) is no picture that can be read"),
])
def test_unreadable_pictures(llm: LLM, image: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.chat([shows(image)], GREEDY)
    assert str(caught.value.field).startswith("messages[0].content[0]")


def test_invalid_videos_are_named(llm: LLM) -> None:
    for odd in ("video.mp4", 5, []):
        with pytest.raises(RequestError, match=r"or in Python a pathlib.Path as video, not ") as caught:
            llm.chat([{"role": "user", "content": [{"type": "video", "video": odd}]}], GREEDY)
        assert str(caught.value).endswith(repr(odd)) and caught.value.field == "messages[0].content[0]"


def test_placeholder_tokens_in_text(llm: LLM) -> None:
    processor, spelled = llm.chat_processor, "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    plain, quoted = (processor.chat([shows(drawing(1), text)]).request.prompt for text in ("", spelled))
    assert len(plain.pictures) == len(quoted.pictures) == 1
    for token in map(processor.tokenizer.token_to_id, ("<|image_pad|>", "<|video_pad|>")):
        assert plain.ids.count(token) == quoted.ids.count(token)
    with pytest.raises(RequestError, match="3 places for 1 pictures"):
        ChatProcessor(processor.tokenizer, vision=llm.runtime.vision, parse_special=True).chat(
            [shows(drawing(1), spelled)])
    halves = [{"type": "text", "text": "<|image"}, {"type": "text", "text": "_pad|>"}]
    with_halves = [{"role": "user", "content": [*halves, *shows(drawing(1))["content"]]}]
    assert len(processor.chat(with_halves).request.prompt.pictures) == 1
    assert llm.chat([{"role": "user", "content": "<|image_pad|>"}], GREEDY).text is not None


def test_too_many_pictures(llm: LLM, directory: Path) -> None:
    with (LLM(str(directory), dtype="float32", memory="64MiB", threads=1, max_context=100) as small,
          pytest.raises(RequestError, match="more than there is room for")):
        small.chat([shows(drawing(seed, 80, 24)) for seed in range(9)], GREEDY)
    with (LLM(str(directory), dtype="float32", memory="64MiB", threads=1, limits=Limits(max_pictures=3)) as few,
          pytest.raises(RequestError, match="max_pictures")):
        few.chat([shows(drawing(1))] * 4, GREEDY)


def test_every_api_takes_pictures(served: Served, llm: LLM) -> None:
    """A picture in a question and one in a tool result give equal answers and token counts."""
    one, two, name = drawing(5), drawing(6), llm.runtime.name.rsplit("/", 1)[-1]
    more = {"ignore_eos": True, "enable_thinking": False}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    url = {"type": "image_url", "image_url": {"url": data_url(one)}}
    result = {"type": "image_url", "image_url": {"url": data_url(two)}}
    chat = served.client.chat.completions.create(
        model=name, temperature=0, max_tokens=6, extra_body=more, messages=[
            {"role": "user", "content": [url, {"type": "text", "text": "Look"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [result]}])  # type: ignore[list-item]
    assert chat.usage and chat.usage.prompt_tokens > 30
    answer = served.client.responses.create(
        model=name, temperature=0, max_output_tokens=6, extra_body=more, input=[
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url(one), "detail": "auto"},
                                         {"type": "input_text", "text": "Look"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [
                {"type": "input_image", "image_url": data_url(two)}]}])  # type: ignore[list-item]
    assert answer.usage and answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == chat.choices[0].message.content

    def block(image: Image.Image) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                            "data": base64.b64encode(png(image)).decode()}}

    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=name, max_tokens=6, extra_body={"ignore_eos": True, "temperature": 0}, messages=[
                {"role": "user", "content": [block(one), {"type": "text", "text": "Look"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [block(two)]}]},
            ])  # type: ignore[list-item]
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert "".join(part.text for part in message.content if part.type == "text") == chat.choices[0].message.content


def test_an_answer_about_a_picture_continues_its_tokens(served: Served, llm: LLM) -> None:
    image = llm.chat_processor.tokenizer.token_to_id("<|image_pad|>")
    url = {"type": "image_url", "image_url": {"url": data_url(drawing(5))}}
    asked = {"messages": [{"role": "user", "content": [url, {"type": "text", "text": "Look"}]}], "temperature": 0,
             "ignore_eos": True, "enable_thinking": False, "logprobs": True, "return_tokens_as_token_ids": True}
    first = served.post("/v1/chat/completions", **asked, max_tokens=6).json()
    scored = first["choices"][0]["logprobs"]["content"]
    begun = [int(one["token"].removeprefix("token_id:")) for one in scored[:3]]
    again = served.post("/v1/chat/completions", **asked, max_tokens=3, prefix_token_ids=begun).json()
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert [one["token"] for one in again["choices"][0]["logprobs"]["content"]] == [one["token"] for one in scored[3:]]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
    refused = served.post("/v1/chat/completions", **asked, prefix_token_ids=[image]).json()
    assert "control token" in refused["error"]["message"]


def test_videos(llm: LLM) -> None:
    frames = [drawing(seed, 24, 24) for seed in range(5)]
    video = {"type": "video", "video": [frames[0], data_url(frames[1]), *frames[2:]], "fps": 2}
    job = llm.chat_processor.chat([{"role": "user", "content": [video, {"type": "text", "text": "And then?"}]}], GREEDY)
    prompt = job.request.prompt
    assert isinstance(prompt, Prompt) and len(prompt.pictures) == 3
    spelled = llm.chat_processor.tokenizer.decode([id for id, key in zip(prompt.ids, prompt.keys or (), strict=True)
                                                   if key >= 0], skip_special=False)
    assert ("<|vision_start|><0.2 seconds><|vision_start|><|vision_end|><1.2 seconds><|vision_start|><|vision_end|>"
            "<2.0 seconds><|vision_start|><|vision_end|><|vision_end|>And then?") in spelled
    assert llm.chat([{"role": "user", "content": [video]}], GREEDY).text is not None


@pytest.mark.parametrize(("video", "message"), [
    ({"video": "video.mp4"}, "of the form"), ({"video": []}, "of the form"),
    ({"video": [5]}, r"video\[0\] must be a data URL"),
    ({"video": [Image.new("RGB", (9, 9))], "fps": 0}, "fps must be"), ({"video_url": {"url": "data:"}}, "of the form")])
def test_unreadable_videos(llm: LLM, video: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": [{"type": "video", **video}]}], GREEDY)


# The command line


def test_image_command_of_chat(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/image adds a picture to the next message only; saved conversations can be sent to a server."""
    drawing(7).save(tmp_path / "it.png")
    chat = ChatState(llm, Namespace(think=None, system=None, thinking_output=True), GREEDY)
    chat.take(f"/image {tmp_path / 'it.png'}")
    chat.take("What is this?")
    chat.take("And?")
    first, answer, second, _ = chat.messages
    assert not chat.failed and [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "And?" and answer["content"] == llm.chat([shows(drawing(7))], GREEDY).text
    chat.take(f"/save {tmp_path / 'it.json'}")
    assert json.loads((tmp_path / "it.json").read_text())["messages"] == chat.messages
    chat.take("/reset")
    chat.take(f"/load {tmp_path / 'it.json'}")
    assert not chat.failed and len(chat.messages) == 4
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("it.json", "it.json is no picture"), ("pipe", "is a pipe; name a file"), ("none", "no file")):
        chat.failed = False
        chat.take(f"/image {tmp_path / name}")
        assert chat.failed and said in capsys.readouterr().err


def test_run_with_image(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing(7).save(tmp_path / "it.png")
    options = ["--dtype", "float32", "--memory", "64MiB", "--threads", "1", "--max-tokens", "6", "--temperature", "0",
               "--json"]
    assert main(["run", str(directory), "--image", str(tmp_path / "it.png"), "What is this?", *options]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] > 15
    (tmp_path / "it.mp4").write_text("no video")
    assert main(["run", str(directory), "--video", str(tmp_path / "it.mp4"), "What is this?", *options]) != 0
    assert "it.mp4 cannot be read as a video" in (said := capsys.readouterr().err) or "deltic[video]" in said


def test_run_names_unreadable_images(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing(7).save(tmp_path / "it.png")
    Image.new("RGB", (1, 300)).save(tmp_path / "long.png")
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    for name, said in (("empty.png", "empty.png is no picture that can be read"), ("long.png", "long.png"),
                       ("pipe.png", "is a pipe; name a file")):
        assert main(["run", str(directory), "--system", "Be brief.", "--image", str(tmp_path / "it.png"), "--image",
                     str(tmp_path / name), "What is this?", "--dtype", "float32", "--memory", "64MiB"]) == 2
        assert said in (told := capsys.readouterr().err) and "messages[" not in told

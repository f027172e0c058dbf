"""Video files: frames as transformers samples them, rotation, limits, and invalid files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_vision_chat import llm
from vision_models import GREEDY, directory, drawing

from deltic import LLM
from deltic.config import Limits
from deltic.config.vision import VideoConfig
from deltic.errors import ModelError, RequestError
from deltic.params import Prompt
from deltic.vision.images import Video
from deltic.vision.prompt import Reading
from deltic.vision.video import frame_numbers, read_video

av = pytest.importorskip("av")
__all__ = ["directory", "llm"]


def video_file(path: Path, frames: int, rate: int = 5, codec: str = "mpeg4", size: tuple[int, int] = (64, 48)) -> Path:
    """Each frame has its own shade of grey."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            grey = np.full((size[1], size[0], 3), 8 * number + 10, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return path


def shades(images: list[Image.Image]) -> list[int]:
    return [round((float(np.asarray(image).mean()) - 10) / 8) for image in images]


def test_frame_numbers_equal_transformers() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    random = Random(3)
    for said in ({}, {"fps": 0.5, "min_frames": 6, "max_frames": 30}, {"fps": 4, "max_frames": 100}, {"fps": None},
                 {"fps": None, "min_frames": 20, "max_frames": 50}, {"fps": None, "num_frames": 17}):
        processor, config = Qwen3VLVideoProcessor(**said), VideoConfig.from_hf(said)
        given = {"num_frames": processor.num_frames, "fps": processor.fps}  # as its `preprocess` gives them
        for _ in range(100):
            count, rate = random.randint(1, 3000), random.choice([1.0, 5.0, 23.976, 25.0, 29.97, 60.0])
            wanted = processor.sample_frames(VideoMetadata(total_num_frames=count, fps=rate), **given)
            assert frame_numbers(count, rate, config, 3000, "it") == [*map(int, wanted)], (count, rate)
            assert VideoConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", ["it.mp4", "it.avi", "it.mkv"])
def test_frames_and_times(tmp_path: Path, name: str) -> None:
    frames, times = read_video(video_file(tmp_path / name, 20), VideoConfig(), 100, lambda image, count: image, "it")
    numbers = frame_numbers(20, 5.0, VideoConfig(), 768, "it")
    assert len(frames) == 8 and shades(frames) == numbers
    assert times == [number / 5 for number in numbers]


def test_like_a_list_of_frames(llm: LLM, tmp_path: Path) -> None:
    path = video_file(tmp_path / "it.mp4", 6, rate=1)
    frames, _ = read_video(path, VideoConfig(rate=1.0), 100, lambda image, count: image, "it")
    prompts = [llm.chat_processor.chat([{"role": "user", "content": [{"type": "video", "video": given, "fps": 1}]}],
                                       GREEDY).request.prompt for given in (path, frames)]
    assert isinstance(prompts[0], Prompt) and prompts[0].pictures and prompts[0].ids == prompts[1].ids
    assert llm.chat([{"role": "user", "content": [{"type": "video", "video": path}]}], GREEDY).text is not None


def test_invalid_video_files(llm: LLM, tmp_path: Path) -> None:
    drawing(1).save(tmp_path / "it.png")
    (tmp_path / "text.mp4").write_text("no video")
    data = video_file(tmp_path / "it.mp4", 20).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[:len(data) // 2])
    for given in ("text.mp4", "cut.mp4", "absent.mp4"):
        ask: dict[str, Any] = {"type": "video", "video": tmp_path / given}
        with pytest.raises(RequestError, match=r"cannot be read as a video|no frame|does not say"):
            llm.chat([{"role": "user", "content": [ask]}], GREEDY)
    random = Random(1)
    for _ in range(30):
        bad = bytearray(data)
        for _ in range(random.choice([1, 5, 50])):
            bad[random.randrange(len(bad))] = random.randrange(256)
        (tmp_path / "bad.mp4").write_bytes(bad)
        try:
            read_video(tmp_path / "bad.mp4", VideoConfig(), 100, lambda image, count: image, "it")
        except RequestError as error:
            assert error.field == "it"


def test_no_more_frames_than_pictures(tmp_path: Path) -> None:
    path = video_file(tmp_path / "it.mp4", 20)
    for config in (VideoConfig(rate=5.0), VideoConfig(rate=0.0), VideoConfig(count=9)):
        assert len(read_video(path, config, 3, lambda image, count: image, "it")[0]) == 3
    for config, room in ((VideoConfig(rate=5.0), 0), (VideoConfig(sampled=False), 19)):
        with pytest.raises(RequestError, match="max_pictures"):
            read_video(path, config, room, lambda image, count: image, "it")


@pytest.mark.parametrize(("said", "numbers"), [
    ({"do_sample_frames": False}, [*range(20)]), ({"do_sample_frames": False, "fps": None}, [*range(20)]),
    ({"num_frames": 3}, [0, 10, 19]), ({"num_frames": 25, "fps": None}, [*np.linspace(0, 19, 25).round()]),
    ({"do_sample_frames": None, "max_frames": 5}, [0, 5, 10, 14, 19])])
def test_video_preprocessor_configs(tmp_path: Path, said: dict[str, Any], numbers: list[int]) -> None:
    """do_sample_frames and num_frames, as they would be read from video_preprocessor_config.json."""
    config = VideoConfig.from_hf(said)
    frames, times = read_video(video_file(tmp_path / "it.mkv", 20), config, 100, lambda image, count: image, "it")
    assert shades(frames) == numbers and times == [number / 5 for number in numbers]
    assert VideoConfig.from_hf(config.to_hf()) == config


def test_a_number_of_frames_and_a_rate_exclude_each_other() -> None:
    """transformers refuses such configs."""
    with pytest.raises(ModelError, match="num_frames and fps exclude each other"):
        VideoConfig.from_hf({"num_frames": 3, "fps": 2.0})


def test_fps_of_a_message_takes_precedence(llm: LLM, tmp_path: Path) -> None:
    vision = llm.runtime.vision
    assert vision
    path = video_file(tmp_path / "it.mp4", 20)
    for config, part, count in ((VideoConfig(count=6), {}, 3), (VideoConfig(count=6), {"fps": 2}, 4),
                               (VideoConfig(sampled=False), {"fps": 2}, 10)):
        seeing = replace(vision, pictures=replace(vision.pictures, videos=config))
        reading = Reading(seeing, lambda text: [1], Limits(max_pictures=99), 10 ** 6)
        reading.see({"video": path, **part}, "video", "it")
        found, = reading.read(None).values()
        assert isinstance(found, Video) and len(found.parts) == count

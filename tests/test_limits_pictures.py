"""Small files that contain large pictures: the cost of decoding is bounded, and only their sender pays it.

Memory and processor time of child processes are read from the system.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from test_server_harness import Served, read_all, serving, wait_until
from vision_models import data_url, drawing, png

from deltic import LLM
from deltic.config import Limits
from deltic.config.vision import ImageConfig, Vision, VisionConfig
from deltic.errors import BusyError, DelticError, RequestError
from deltic.server.pictures import DECODER_MIB, HeldBytes, PictureDecoder, PictureShare
from deltic.vision.decoder_process import DecoderProcess
from deltic.vision.images import DecodeJob, PixelBudget, Pixels, decode, target_size
from deltic.vision.prompt import Reading

TOWER = VisionConfig(2, 48, 100, 4, 64, 36, 3, 16, 2, 2, 1e4, 1, 2)
SMALL = Vision(TOWER, ImageConfig(64 * 64, 512 * 512))
WIDE = (9_000, 7_500)
"""Beyond max_picture_megapixels."""
FITS = (6_000, 5_000)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


Make = Callable[[tuple[int, int]], bytes]
PLAIN: dict[str, Make] = {
    "tiff": lambda size: saved(Image.new("1", size), "TIFF", compression="group4"),
    "png": lambda size: saved(Image.new("L", size), "PNG", compress_level=1),
    "gif": lambda size: saved(Image.new("P", size), "GIF"),
    "webp": lambda size: saved(Image.new("RGB", size), "WEBP", lossless=True, quality=0, method=0),
    "bmp": lambda size: saved(Image.new("1", size), "BMP"),
    "jpeg": lambda size: saved(Image.new("L", size), "JPEG", quality=5),
}
"""A picture of one colour."""
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in ("gif", "webp", "bmp") else kind for kind in PLAIN]


def job(data: bytes, vision: Vision = SMALL) -> DecodeJob:
    return DecodeJob(data, "messages[0].content[0]", vision, PixelBudget.of(Limits()))


def decoded(process: DecoderProcess, data: bytes, vision: Vision = SMALL, seconds: float = 20.0
            ) -> np.ndarray[Any, Any]:
    about, raw = process.call(decode, job(data, vision), seconds=seconds, limit="picture_seconds")
    return np.frombuffer(raw, np.uint8).reshape(*about["size"], 3)


@pytest.fixture(scope="module")
def shared() -> Iterator[DecoderProcess]:
    with DecoderProcess(DECODER_MIB) as process:
        yield process


@pytest.fixture
def process(shared: DecoderProcess) -> DecoderProcess:
    """A running child whose peak of memory starts anew."""
    decoded(shared, png(drawing(1)))
    assert shared._child
    Path(f"/proc/{shared._child.pid}/clear_refs").write_text("5")
    return shared


def peak(process: DecoderProcess) -> int:
    """Returns the child's peak of memory in MiB."""
    assert process._child
    status = Path(f"/proc/{process._child.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


# Budgets


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_picture_is_refused_by_its_header(process: DecoderProcess, kind: str) -> None:
    with pytest.raises(RequestError, match=r"9,000 x 7,500 pixels.*max_picture_megapixels.*scale it") as caught:
        decoded(process, PLAIN[kind](WIDE))
    assert caught.value.field == "messages[0].content[0]"
    assert peak(process) < 200 or kind == "webp", "nothing is decoded; WebP's library allocates before"


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_within_the_limit_is_read_in_bounded_memory(process: DecoderProcess, kind: str) -> None:
    """30 megapixels take 4 bytes each in Pillow. Two copies exist at a time, beside the memory of the decoder."""
    assert decoded(process, PLAIN[kind](FITS)).shape == (*target_size(5_000, 6_000, SMALL.pictures, TOWER), 3)
    assert peak(process) < 550


def test_a_large_jpeg_is_decoded_at_the_size_that_is_needed(process: DecoderProcess) -> None:
    photo = drawing(1, 60, 50).resize(FITS, Image.Resampling.BILINEAR)
    found = decoded(process, saved(photo, "JPEG", quality=60))
    assert peak(process) < 100, "30 megapixels would be 120 MiB in full"
    tall, wide = found.shape[:2]
    exact = np.asarray(photo.resize((wide, tall), Image.Resampling.BICUBIC), float)
    assert np.abs(found - exact).mean() < 3


def test_max_request_megapixels() -> None:
    limits = Limits(max_request_megapixels=1)
    budget, data = PixelBudget.of(limits), png(Image.new("RGB", (800, 500)))
    for _ in range(2):
        DecodeJob(data, "it", SMALL, budget).run()
    with pytest.raises(RequestError, match="max_request_megapixels") as caught:
        DecodeJob(data, "it", SMALL, budget).run()
    assert caught.value.field == "it"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(*more: bytes) -> bytes:
    """Returns a PNG with these chunks after its header."""
    plain = png(drawing(1))
    return plain[:33] + b"".join(more) + plain[33:]


ZEROS = zlib.compress(bytes(1 << 26), 9)
HOSTILE = {
    "profile": lambda: with_chunks(chunk(b"iCCP", b"it\0\0" + ZEROS)),
    "texts": lambda: with_chunks(*[chunk(b"zTXt", b"key%d\0\0" % number + ZEROS) for number in range(20)]),
    "data": lambda: png(drawing(1))[:33] + chunk(b"IDAT", ZEROS) * 10 + chunk(b"IEND", b""),
    "frames": lambda: saved(drawing(1), "GIF", save_all=True, append_images=[
        drawing(seed, 99, 99) for seed in range(2, 16)]),
    "sizes": lambda: PLAIN["jpeg"]((64, 64)).replace(struct.pack(">HH", 64, 64), struct.pack(">HH", 7_000, 7_000)),
    "rows": lambda: b"BM" + struct.pack("<IIIIiiHHIIiiII", 1 << 30, 0, 54, 40, 7_000, 7_000, 1, 8, 1, 0, 0, 0, 0, 0),
    "tags": lambda: b"II*\0\x08\0\0\0" + struct.pack("<H", 60_000) + b"\0\1\4\0\xff\xff\xff\x7f\0\0\0\0" * 60_000,
    "text": lambda: b"P3\n7000 7000\n255\n" + b"1 " * (1 << 20),
}
"""Files that ask for much more than they show."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_read_or_refused_within_bounds(process: DecoderProcess, kind: str) -> None:
    try:
        decoded(process, HOSTILE[kind](), seconds=1.0)
    except RequestError as error:
        assert error.field in (None, "messages[0].content[0]")
    assert decoded(process, png(drawing(1))).size, "the next one is read"
    assert peak(process) < DECODER_MIB


# The same pixels as before


def plainly(data: bytes, vision: Vision) -> np.ndarray[Any, Any]:
    """Decodes at full size, without strips, reduction or a child process."""
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I;16"):
        image = image.convert("F").point(lambda value: value * (1 / 257)).convert("L")
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    image = image.convert("RGB")
    tall, wide = target_size(image.height, image.width, vision.pictures, vision.tower)
    return np.asarray(image.resize((wide, tall), Image.Resampling.BICUBIC))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def ordinary() -> dict[str, bytes]:
    photo = drawing(2, 90, 70).resize((540, 560), Image.Resampling.BICUBIC)
    clear, grey = photo.copy(), photo.convert("L")
    clear.putalpha(grey)
    deep = Image.fromarray(np.arange(300 * 200, dtype=np.uint16).reshape(200, 300))
    strips = clear.resize((2_100, 2_010))  # more than one
    return {"png": png(photo), "strips": saved(strips, "TIFF", exif=turned(5)),
            "jpeg": saved(photo, "JPEG"), "webp": saved(photo, "WEBP", method=0),
            "gif": saved(photo, "GIF"), "bmp": saved(photo, "BMP"), "tiff": saved(photo, "TIFF"),
            "clear": png(clear), "grey": png(grey), "grey and clear": png(clear.convert("LA")),
            "palette": png(photo.convert("P")), "cmyk": saved(photo.convert("CMYK"), "JPEG"),
            "one bit": saved(photo.convert("1"), "TIFF", compression="group4"), "deep": png(deep),
            "key": saved(photo, "PNG", transparency=photo.getpixel((5, 5))),
            **{f"jpeg {side}": saved(photo, "JPEG", exif=turned(side)) for side in (3, 6, 7)},
            "png turned": saved(photo, "PNG", exif=turned(8)), "tiff turned": saved(photo, "TIFF", exif=turned(6))}


def test_ordinary_pictures_keep_their_pixels(process: DecoderProcess) -> None:
    for kind, data in ordinary().items():
        for vision in (SMALL, *([Vision(TOWER, ImageConfig())] if kind in ("png", "cmyk") else [])):
            found = decoded(process, data, vision)
            assert np.array_equal(found, plainly(data, vision)), kind
            assert kind != "png" or np.array_equal(found, np.asarray(job(data, vision).run()))


# A process that can be ended


def test_a_process_that_times_out_or_crashes_starts_again(shared: DecoderProcess) -> None:
    process, data = shared, PLAIN["tiff"](FITS)
    decoded(process, png(drawing(1)))  # libraries are loaded
    with pytest.raises(RequestError, match=r"0.1 seconds of processor time.*picture_seconds"):
        decoded(process, data, seconds=0.1)  # within native code
    assert decoded(process, png(drawing(1))).size
    assert process._child
    process._child.kill()
    process._child.wait()
    with pytest.raises(RequestError, match="damaged or was cancelled"):
        decoded(process, png(drawing(1)))


def test_a_closed_process_is_not_used() -> None:
    process = DecoderProcess(DECODER_MIB)
    child = process._start()
    process.close()
    assert child.poll() is not None
    with pytest.raises(DelticError, match="closed"):
        decoded(process, png(drawing(1)))


def test_decoder_memory_is_limited() -> None:
    with DecoderProcess(120) as process, pytest.raises(RequestError, match=r"memory|damaged"):
        decoded(process, PLAIN["png"](FITS))


# All requests of a server


def reading(*sources: str, vision: Vision = SMALL) -> Reading:
    found = Reading(vision, lambda text: [1], Limits(), 10 ** 6)
    for index, source in enumerate(sources):
        found.see({"image_url": source}, "image", f"messages[0].content[{index}]")
    return found


def url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("floods", [1, 2])
def test_clients_take_turns_at_decoding(floods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three files of the flood are decoded before the other client's file. Two floods use both processes."""
    order, call = list[str](), DecoderProcess.call
    begun = threading.Event()

    def noted(process: DecoderProcess, function: Any, each: DecodeJob, **more: Any) -> Any:
        order.append("other" if each.source == single else "flood")
        begun.set()
        return call(process, function, each, **more)

    monkeypatch.setattr(DecoderProcess, "call", noted)
    flood, single = url(PLAIN["tiff"]((2_000, 2_000))), data_url(drawing(1))

    async def work() -> None:
        decoder = PictureDecoder(Limits())
        try:
            tasks = [asyncio.create_task(decoder.read(f"flood {number % floods}", reading(*[flood] * 6)))
                     for number in range(12)]
            await asyncio.to_thread(begun.wait, 60)
            before = len(order)
            await decoder.read("other", reading(single))
            assert order.index("other") - before <= 3 and len(order) < 72
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await asyncio.to_thread(decoder.close)

    asyncio.run(work())


def test_cancelled_decoding_is_killed() -> None:
    """Decoding ends within native code, and the next file of the client is decoded."""
    slow = url(PLAIN["tiff"]((7_000, 7_000)))

    async def work() -> None:
        decoder = PictureDecoder(Limits())
        task = asyncio.create_task(decoder.read("one", reading(*[slow] * 6)))
        while not (decoder.processes and decoder.processes[0]._child):
            await asyncio.sleep(0.01)
        child = decoder.processes[0]._child
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(child.wait, 60)
        assert child.returncode == -9
        found = await decoder.read("one", reading(data_url(drawing(1))))
        assert isinstance(found["messages[0].content[0]"], Pixels)
        await asyncio.to_thread(decoder.close)

    asyncio.run(work())


def test_picture_seconds_bounds_all_pictures_of_a_request() -> None:
    async def work() -> None:
        decoder = PictureDecoder(Limits(picture_seconds=0.6))
        try:
            with pytest.raises(RequestError, match="picture_seconds") as caught:
                await decoder.read("one", reading(*[url(PLAIN["png"]((3_000, 3_000)))] * 30))
            assert str(caught.value.field).startswith("messages[0].content[")
        finally:
            await asyncio.to_thread(decoder.close)

    asyncio.run(work())


def test_max_pictures_mib() -> None:
    """A client may hold at most as much as stays free. Pictures count until they are garbage."""
    limits = Limits(max_pictures_mib=4)
    large = Vision(TOWER, ImageConfig(512 * 512, 512 * 512))  # 768 KiB each

    async def work() -> None:
        decoder = PictureDecoder(limits)
        read = partial(decoder.read, reading=reading(data_url(drawing(1, 32, 32)), vision=large))
        try:
            mine = [await read("one") for _ in range(2)]
            with pytest.raises(BusyError, match="max_pictures_mib"):
                await read("one")
            other = await read("other")
            assert decoder.held.total() == 3 * 768 << 10
            assert other
            mine.clear()
            del other
            gc.collect()
            await asyncio.to_thread(wait_until, lambda: decoder.held.total() == 0)
            with pytest.raises(RequestError, match=r"half of 4 MiB \(max_pictures_mib\)"):
                await decoder.read("third", reading(*[data_url(drawing(1, 32, 32))] * 4, vision=large))
            assert await read("one")
        finally:
            await asyncio.to_thread(decoder.close)

    asyncio.run(work())


def test_held_bytes_are_counted_once() -> None:
    held = HeldBytes(99)
    assert held.take("two", 20)
    with pytest.raises(BusyError), PictureShare(held, "one") as share:
        share.take(20)
        share.take(20)
    held.free("two", 20)
    assert held.total() == 0
    assert held.take("one", 49) and not held.take("two", 26) and held.take("two", 25)


# A server


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(dtype="float32", memory="64MiB", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def served(llm: LLM) -> Any:
    with serving(llm) as running:
        yield running
        running.wait_idle()


def asking(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return {"max_tokens": 2, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/tiff"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_every_api_names_the_picture_that_is_too_large(served: Served, path: str) -> None:
    data = base64.b64encode(PLAIN["tiff"](WIDE)).decode()
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": asking(data_url(drawing(1)), f"data:;base64,{data}"),
        "/v1/responses": {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(drawing(1))},
            {"type": "input_image", "image_url": f"data:;base64,{data}"}]}]}}
    messages = {"messages": [{"role": "user", "content": [
        {**BLOCK, "source": {**BLOCK["source"], "data": base64.b64encode(png(drawing(1))).decode()}},
        {**BLOCK, "source": {**BLOCK["source"], "data": data}}]}]}  # type: ignore[dict-item]
    body = bodies.get(path) or messages | ({"max_tokens": 2} if path == "/v1/messages" else {})
    answer = read_all(served.send(path, **body))
    place = "input" if path == "/v1/responses" else "messages"
    assert " 400 " in answer and "max_picture_megapixels" in answer and f"{place}[0].content[1]" in answer


def test_decompression_bombs_cost_the_server_no_memory(served: Served) -> None:
    """12 requests of six TIFFs of 49 megapixels. Decoded in the server, each would take more than 200 MiB."""
    small = url(PLAIN["tiff"]((7_000, 7_000)))
    before = memory()
    flood = [served.send("/v1/chat/completions", **asking(*[small] * 6)) for _ in range(12)]
    for _ in range(3):
        said = read_all(served.send("/v1/chat/completions", max_tokens=2, messages=[{"role": "user", "content": "Hi"}]))
        assert " 200 " in said
    most = memory()
    for each in flood:
        each.close()
    wait_until(lambda: not served.app.state.models.pictures.held.total())
    assert most - before < 150, "MiB"


def memory() -> int:
    """Returns the MiB of this process."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) >> 10


def test_shutdown_does_not_wait_for_pictures(llm: LLM) -> None:
    slow = url(PLAIN["tiff"]((7_000, 7_000)))
    with serving(llm) as stopping:
        waiting = [stopping.send("/v1/chat/completions", **asking(*[slow] * 6)) for _ in range(4)]
        decoder = stopping.app.state.models.pictures
        wait_until(lambda: bool(decoder.processes and decoder.processes[0]._child))
        child = decoder.processes[0]._child
    assert child.returncode is not None and not any(process._child for process in decoder.processes)
    for raw in waiting:
        raw.close()


def test_urls_are_not_fetched_by_default(served: Served) -> None:
    answer = read_all(served.send("/v1/chat/completions", **asking("http://127.0.0.1/it.png")))
    assert " 400 " in answer and "allow_image_urls" in answer

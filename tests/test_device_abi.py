"""The device layer of the C interface: devices, memory, copies and streams, on the processor and over a driver of CUDA
that is none (on a true GPU: test_cuda_device_abi.py)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import device_abi
import pytest
from device_abi import BAD_ARGUMENT, LIBRARY, NO_DEVICE, Devices, Refused, refused

from deltic.ops.cpu import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
HERE = Path(__file__).parent
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="there is no gcc")


devices = pytest.fixture(device_abi.opened)


@pytest.mark.parametrize("check", device_abi.CHECKS, ids=lambda check: check.__name__)
def test_the_processor_is_device_0(devices: Devices, check: Callable[[Devices, int], None]) -> None:
    check(devices, 0)


def test_cpu_properties_equal_the_system(devices: Devices) -> None:
    found = devices.get(0)
    assert found.memory_total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.cores == len(os.sched_getaffinity(0))


def test_overlapping_cpu_copies(devices: Devices) -> None:
    memory = devices.allocate(0, 100)
    ctypes.memmove(memory, bytes(range(100)), 100)
    devices.copy((0, memory + 1), (0, memory), 99, devices.stream(0))
    assert ctypes.string_at(memory, 100) == bytes([0, *range(99)])


def test_l8_null_pointers_are_refused(devices: Devices) -> None:
    for name, (_, arguments) in device_abi.SIGNATURES.items():
        if name in ("deltic_devices_open", "deltic_devices_error"):
            continue
        plain = [None if form is not ctypes.c_int64 and form is not ctypes.c_int else 0 for form in arguments]
        assert getattr(devices.library, name)(*plain) == BAD_ARGUMENT, name
    for name, plain in (("deltic_device_count", [None]), ("deltic_device_get", [0, None]),
                        ("deltic_device_allocate", [0, 1, None]), ("deltic_stream_new", [0, None])):
        with pytest.raises(Refused, match="must not be null"):
            devices.call(name, *plain)
    assert devices.library.deltic_devices_open(None) == BAD_ARGUMENT
    assert b"deltic_devices_open" in devices.library.deltic_devices_error(None)


def test_errors_are_per_thread(devices: Devices) -> None:
    refused(NO_DEVICE, "no device -7", devices.get, -7)
    found = list[bytes]()

    def other() -> None:
        found.append(devices.library.deltic_devices_error(devices.handle))
        refused(BAD_ARGUMENT, "no stream 99", devices.synchronize, 99)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [b""] and b"no device -7" in devices.library.deltic_devices_error(devices.handle)


def test_threads_share_a_layer(devices: Devices) -> None:
    failed = list[BaseException]()

    def use() -> None:
        try:
            for _ in range(20):
                device_abi.check_refusals(devices, 0)
                device_abi.check_streams(devices, 0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


# GPUs, by a driver that a test has made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1."""
    place = tmp_path_factory.mktemp("driver")
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(HERE / "fake_cuda.c"),
                    "-o", str(place / "libcuda.so.1")], check=True)
    return place


def over(place: Path, code: str, **environment: str) -> str:
    """What a process prints that finds its driver there."""
    done = subprocess.run([sys.executable, "-c", f"from device_abi import *\npath = Path({str(LIBRARY)!r})\n{code}"],
                          capture_output=True, text=True, cwd=HERE, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(place), **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_gcc
def test_gpus_pass_the_cpu_checks(driver: Path) -> None:
    """And when the layer is closed, all is given back: memory, streams, contexts, and what was current before."""
    left = "print(check_all(path), ctypes.CDLL('libcuda.so.1').fake_left())"
    assert over(driver, left).split() == ["3", "0"]


@needs_gcc
def test_gpu_properties_come_from_the_driver(driver: Path) -> None:
    shown = ("found = Devices(path).get(2)\n"
             "print(found.name.decode(), found.kind, found.number, found.major, found.minor, found.cores,\n"
             "      found.memory_total >> 20, found.memory_free >> 20)")
    assert over(driver, shown).split() == ["Second", "1", "1", "9", "0", "101", "2048", "1024"]


@needs_gcc
def test_driver_errors_are_reported(driver: Path) -> None:
    """An address that neither the layer nor the driver knows."""
    over(driver, "\n".join((
        "devices = Devices(path)",
        "refused(BAD_ARGUMENT, 'cuMemsetD8Async failed: CUDA_ERROR_INVALID_VALUE: as the driver puts it',",
        "        devices.set, 1, 4096, 1, 1)",
        "refused(NO_MEMORY, 'cuMemAlloc of 1073741824 bytes on device 1 failed: CUDA_ERROR_OUT_OF_MEMORY',",
        "        devices.allocate, 1, 1 << 30)",
        "assert ctypes.CDLL('libcuda.so.1').fake_left() == 1  # the context",
        "devices.close()")))


@needs_gcc
@pytest.mark.parametrize(("source", "environment", "words"), [
    (None, {"FAKE_INIT": "100"}, "the NVIDIA driver cannot be used: CUDA_ERROR"),
    ("int cuInit(unsigned flags) { return (int)flags; }", {}, "too old: libcuda.so.1 has no cuDeviceGetCount"),
    ("not a library", {}, "there is no NVIDIA driver: ")])
def test_l8_without_driver_only_the_cpu_remains(driver: Path, source: str | None, tmp_path: Path,
                                                           environment: dict[str, str], words: str) -> None:
    place = driver if source is None else tmp_path
    if source is not None:
        (place / "cuda.c").write_text(source)
        if source.startswith("int"):
            subprocess.run(["gcc", "-shared", "-fPIC", str(place / "cuda.c"), "-o", str(place / "libcuda.so.1")],
                           check=True)
        else:
            (place / "libcuda.so.1").write_text(source)
    over(place, "\n".join(("devices = Devices(path)", "assert devices.count() == 1", "check_copies(devices, 0)",
                           f"refused(NO_DEVICE, {words!r}, devices.allocate, 1, 1)", "devices.close()")), **environment)

"""The device layer of deltic.h through ctypes, and what every device promises. Needs neither torch nor modules of the
package, so that it also runs in a process of its own, over a driver that a test has made."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parents[1] / "deltic" / "ops" / "cpu" / "libdeltic.so"
NO_MEMORY, BAD_ARGUMENT, NO_DEVICE, DEVICE_FAILED = -1, -2, -4, -5
CPU, CUDA = 0, 1


class DeviceProperties(Structure):
    """`deltic_device_properties`."""

    _fields_ = (*((name, c_int64) for name in ("kind", "number", "memory_total", "memory_free", "major", "minor",
                                               "cores")), ("name", c_char * 256))


_P, _I = c_void_p, c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "deltic_devices_open": (c_int, [_P]),
    "deltic_devices_close": (c_int, [_P]),
    "deltic_devices_error": (c_char_p, [_P]),
    "deltic_device_count": (c_int, [_P, _P]),
    "deltic_device_get": (c_int, [_P, _I, POINTER(DeviceProperties)]),
    "deltic_device_allocate": (c_int, [_P, _I, _I, _P]),
    "deltic_device_free": (c_int, [_P, _P]),
    "deltic_stream_new": (c_int, [_P, _I, _P]),
    "deltic_stream_free": (c_int, [_P, _I]),
    "deltic_stream_synchronize": (c_int, [_P, _I]),
    "deltic_device_copy": (c_int, [_P, _I, _P, _I, _P, _I, _I]),
    "deltic_device_set": (c_int, [_P, _I, _P, c_int, _I, _I]),
}


class Refused(Exception):
    """A call that did not give 0."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Devices:
    """An open device layer. `handle` is 0 once it is closed."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        found = c_void_p()
        assert self.library.deltic_devices_open(byref(found)) == 0
        self.handle = found.value

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(self.handle, *arguments)
        if status:
            raise Refused(status, self.library.deltic_devices_error(self.handle).decode())

    def close(self) -> None:
        self.call("deltic_devices_close")
        self.handle = None

    def count(self) -> int:
        found = c_int64()
        self.call("deltic_device_count", byref(found))
        return found.value

    def get(self, device: int) -> DeviceProperties:
        found = DeviceProperties()
        self.call("deltic_device_get", device, byref(found))
        return found

    def allocate(self, device: int, size: int) -> int:
        memory = c_void_p()
        self.call("deltic_device_allocate", device, size, byref(memory))
        return memory.value or 0

    def free(self, memory: int) -> None:
        self.call("deltic_device_free", memory)

    def stream(self, device: int) -> int:
        found = c_int64()
        self.call("deltic_stream_new", device, byref(found))
        return found.value

    def end(self, stream: int) -> None:
        self.call("deltic_stream_free", stream)

    def synchronize(self, stream: int) -> None:
        self.call("deltic_stream_synchronize", stream)

    def copy(self, target: tuple[int, int], source: tuple[int, int], size: int, stream: int = 0) -> None:
        """Target and source: a device and an address."""
        self.call("deltic_device_copy", *target, *source, size, stream)

    def set(self, device: int, memory: int, value: int, size: int, stream: int = 0) -> None:
        self.call("deltic_device_set", device, memory, value, size, stream)

    def read(self, device: int, memory: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        self.copy((0, ctypes.addressof(found)), (device, memory), size)
        return found.raw


def refused(status: int, words: str, call: Any, *arguments: Any) -> None:
    """The call gives this status, and its reason has these words."""
    try:
        call(*arguments)
    except Refused as error:
        assert error.status == status and words in str(error), (error.status, str(error))
    else:
        raise AssertionError(f"{call.__name__}{arguments} was not refused")


def check_properties(devices: Devices, device: int) -> None:
    found = devices.get(device)
    assert found.kind == (CUDA if device else CPU) and found.name and 0 < found.memory_free <= found.memory_total
    assert found.cores > 0 and (found.number, found.major > 0) == ((device - 1, True) if device else (0, False))


def check_copies(devices: Devices, device: int) -> None:
    """Through every pair of this device and the processor, with streams and without, at odd addresses."""
    size, first = 100_003, random.Random(device).randbytes(100_003)
    ours = ctypes.create_string_buffer(first, size)
    one, other = devices.allocate(device, size), devices.allocate(device, size)
    assert one % 64 == other % 64 == 0
    for stream in (0, devices.stream(device)):
        devices.set(device, one, 0xa5, size, stream)
        devices.copy((device, one + 7), (0, ctypes.addressof(ours)), size - 7, stream)
        devices.copy((device, other), (device, one), size, stream)
        if stream:
            devices.synchronize(stream)
        assert devices.read(device, other, size) == b"\xa5" * 7 + first[:-7]
        devices.copy((device, one), (device, one), 0, stream)
        if stream:
            devices.end(stream)
    devices.free(one)
    devices.free(other)
    devices.free(0)


def check_pairs(devices: Devices, devices_of: tuple[int, int]) -> None:
    """From one device to another, in a stream of either."""
    source, target = devices_of
    memory, found = devices.allocate(source, 4099), devices.allocate(target, 4099)
    for value, stream in ((1, 0), (2, devices.stream(source or target)), (3, devices.stream(target or source))):
        devices.set(source, memory, value, 4099)
        devices.copy((target, found), (source, memory), 4099, stream)
        if stream:
            devices.synchronize(stream)
        assert devices.read(target, found, 4099) == bytes([value]) * 4099
    devices.free(memory)
    devices.free(found)


def check_refusals(devices: Devices, device: int) -> None:
    """What is wrong is said, and nothing is done."""
    count, memory, here = devices.count(), devices.allocate(device, 100), ctypes.create_string_buffer(100)
    ours = (0, ctypes.addressof(here))
    devices.set(device, memory, 7, 100)
    for number in (-1, count, 1 << 40):
        refused(NO_DEVICE, f"no device {number}", devices.get, number)
        refused(NO_DEVICE, f"no device {number}", devices.allocate, number, 1)
        refused(NO_DEVICE, f"no device {number}", devices.stream, number)
        refused(NO_DEVICE, f"no device {number}", devices.copy, (number, memory), ours, 1)
        refused(NO_DEVICE, f"no device {number}", devices.set, number, memory, 1, 1)
    for size in (0, -1, -(1 << 62)):
        refused(BAD_ARGUMENT, "at least 1", devices.allocate, device, size)
    for size in (1 << 46, (1 << 63) - 1):
        refused(NO_MEMORY, str(size), devices.allocate, device, size)
    for size, words in ((101, "101 bytes at"), (1 << 62, "left of its memory"), (-1, "at least 0")):
        refused(BAD_ARGUMENT, words, devices.copy, (device, memory), ours, size)
        refused(BAD_ARGUMENT, words, devices.copy, ours, (device, memory), size)
        refused(BAD_ARGUMENT, words, devices.set, device, memory, 1, size)
    refused(BAD_ARGUMENT, "41 bytes at target", devices.copy, (device, memory + 60), ours, 41)
    for value in (-1, 256):
        refused(BAD_ARGUMENT, "from 0 to 255", devices.set, device, memory, value, 1)
    refused(BAD_ARGUMENT, "target must not be null", devices.copy, (device, 0), ours, 1)
    refused(BAD_ARGUMENT, "source must not be null", devices.copy, ours, (device, 0), 1)
    refused(BAD_ARGUMENT, "memory must not be null", devices.set, device, 0, 1, 1)
    refused(BAD_ARGUMENT, "not allocated", devices.free, memory + 1)
    refused(BAD_ARGUMENT, "not allocated", devices.free, ctypes.addressof(here))
    assert devices.read(device, memory, 100) == b"\7" * 100
    devices.free(memory)
    refused(BAD_ARGUMENT, "given back before", devices.free, memory)


def check_streams(devices: Devices, device: int) -> None:
    stream, memory = devices.stream(device), devices.allocate(device, 10)
    devices.synchronize(stream)
    devices.end(stream)
    assert devices.stream(device) != stream
    for number in (stream, -1, 0, 1 << 40):
        refused(BAD_ARGUMENT, f"no stream {number}", devices.synchronize, number)
        refused(BAD_ARGUMENT, f"no stream {number}", devices.end, number)
    refused(BAD_ARGUMENT, f"no stream {stream}", devices.set, device, memory, 1, 10, stream)
    other = devices.stream(0) if device else stream
    words = "is of device 0" if device else "no stream"
    refused(BAD_ARGUMENT, words, devices.set, device, memory, 1, 10, other)
    devices.free(memory)


CHECKS = (check_properties, check_copies, check_refusals, check_streams)


def check_all(library: Path) -> int:
    """Everything, on all devices there are; returns how many. Leaves memory and streams for `close` to give back."""
    devices = Devices(library)
    for device in range(devices.count()):
        for check in CHECKS:
            check(devices, device)
        devices.allocate(device, 1000), devices.stream(device)
    for source in range(devices.count()):
        for target in range(devices.count()):
            check_pairs(devices, (source, target))
    if devices.count() > 1:
        memory = devices.allocate(1, 10)
        refused(BAD_ARGUMENT, "memory of device 1, not of device 0", devices.set, 0, memory, 1, 1)
    found = devices.count()
    devices.close()
    refused(BAD_ARGUMENT, "call deltic_devices_open", devices.count)
    return found


if __name__ == "__main__":
    print(check_all(Path(sys.argv[1])))


def opened() -> Iterator[Devices]:
    """A fixture: the devices of the compiled library."""
    found = Devices(LIBRARY)
    yield found
    found.close()

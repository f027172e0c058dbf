"""The device layer of the C interface on a true GPU, beside torch, which uses the same context."""

from __future__ import annotations

from collections.abc import Callable

import device_abi
import pytest
import torch
from device_abi import CUDA, LIBRARY, NO_MEMORY, Devices, refused

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


devices = pytest.fixture(device_abi.opened)


@pytest.mark.parametrize("check", device_abi.CHECKS, ids=lambda check: check.__name__)
def test_gpu_passes_the_cpu_checks(devices: Devices, check: Callable[[Devices, int], None]) -> None:
    check(devices, 1)


def test_copies_between_all_devices(devices: Devices) -> None:
    for source in range(devices.count()):
        for target in range(devices.count()):
            device_abi.check_pairs(devices, (source, target))


def test_properties_equal_torch(devices: Devices) -> None:
    assert devices.count() == 1 + torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        found, expected = devices.get(1 + index), torch.cuda.get_device_properties(index)
        assert (found.kind, found.number, found.name.decode()) == (CUDA, index, expected.name)
        assert (found.major, found.minor) == (expected.major, expected.minor)
        assert found.cores == expected.multi_processor_count and found.memory_total == expected.total_memory


def test_too_large_allocation_is_refused(devices: Devices) -> None:
    total = devices.get(1).memory_total
    refused(NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", devices.allocate, 1, total)  # the context takes some of it
    refused(NO_MEMORY, f"has {total} bytes of memory", devices.allocate, 1, total + 1)
    device_abi.check_copies(devices, 1)  # the refusals left everything as it was


def test_copies_of_torch_tensors(devices: Devices) -> None:
    """Memory of torch is a source and a target; work of torch before is seen, and torch sees what was copied."""
    ours = torch.randn(1 << 20)
    theirs = ours.cuda() * 2
    size, memory = ours.numel() * 4, devices.allocate(1, ours.numel() * 4)
    for stream in (0, devices.stream(1)):
        devices.set(1, memory, 0, size, stream)
        devices.copy((1, memory), (1, theirs.data_ptr()), size, stream)
        found, back = torch.zeros(1 << 20), torch.empty_like(theirs)
        devices.copy((0, found.data_ptr()), (1, memory), size, stream)
        devices.copy((1, back.data_ptr()), (1, memory), size, stream)
        if stream:
            devices.synchronize(stream)
        assert torch.equal(found, ours * 2) and torch.equal(back, theirs)
    pinned = torch.zeros(1 << 20).pin_memory()
    stream = devices.stream(1)
    devices.copy((0, pinned.data_ptr()), (1, theirs.data_ptr()), size, stream)
    devices.synchronize(stream)
    assert torch.equal(pinned, ours * 2)


def test_stream_orders_copies(devices: Devices) -> None:
    size, stream = 64 << 20, devices.stream(1)
    memory, found = devices.allocate(1, size), torch.zeros(size, dtype=torch.uint8).pin_memory()
    for value in range(8):
        devices.set(1, memory, value, size, stream)
        devices.copy((0, found.data_ptr()), (1, memory), size, stream)
    devices.synchronize(stream)
    assert bool((found == 7).all())


def test_torch_context_stays_current() -> None:
    before, devices = torch.cuda.current_device(), Devices(LIBRARY)
    for device in range(1, devices.count()):
        devices.free(devices.allocate(device, 10))
    devices.close()
    assert torch.cuda.current_device() == before
    assert float(torch.ones(3, device="cuda").sum()) == 3

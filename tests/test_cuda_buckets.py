"""Steps that only decode, filled up to a bucket: the rows that are real give the same, and the others leave nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import pytest
import torch
from support import numbers

from deltic.config import EngineConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda.staging import MAX_NUMBERS, _buffers, on_device
from deltic.ops.types import PAGE, Layout
from deltic.runner.cuda_graphs import buckets, draft_buckets
from deltic.runner.input_batch import (
    DeviceTokens,
    InputBatch,
    PageTable,
    build,
    decodes,
    decoding,
    draft_pages,
    power_of_two,
    step_of,
    verifies,
    verifying,
)
from deltic.runner.model_runner import ModelRunner
from deltic.runner.upload import HostToDeviceBuffer

UNITS_APART = True
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runtime() -> ModelRunner:
    model = RandomModel(layers=4, initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", memory="96MiB", max_batch=8, max_context=600, ops=("torch",)))


def prompts(runtime: ModelRunner, lengths: tuple[int, ...]) -> tuple[list[PlannedRow], list[tuple[torch.Tensor, ...]]]:
    """Sequences that have read so many tokens, and their next rows."""
    cache, rows = runtime.cache, []
    for seed, length in enumerate(lengths):
        lease = cache.admit()
        assert lease is not None and cache.reserve(lease, length + 1) == length + 1
        tokens = numbers(seed, length + 1, runtime.config.vocab_size)
        if length:
            runtime.run(build(StepPlan((PlannedRow(tokens[:-1], 0, tuple(lease.pages), lease.slot, 1),)), CPU))
        lease.keys += tokens[:-1]
        cache.commit(lease, length)
        rows.append(PlannedRow(tokens[-1:], length, tuple(lease.pages), lease.slot, 1))
    return rows, [tuple(tensor.clone() for tensor in _memory(runtime))]


def _memory(runtime: ModelRunner) -> tuple[torch.Tensor, ...]:
    pools = runtime.pools
    return pools.keys, pools.values, pools.recurrent, pools.conv


@pytest.mark.slow
@torch.inference_mode()
def test_padded_step_equals_plain_step(runtime: ModelRunner) -> None:
    rows, (before,) = prompts(runtime, (1, 0, 40, 17, 300))
    plan = StepPlan(tuple(sorted(rows, key=lambda row: row.slot)))
    assert decodes(plan)
    plain = runtime._forward(build(plan, CPU))[0]
    after = [tensor.clone() for tensor in _memory(runtime)]
    for tensor, old in zip(_memory(runtime), before, strict=True):
        tensor.copy_(old)
    batch = decoding(plan, CPU)
    assert batch.padded and (batch.padded.rows, batch.padded.pages) == (8, 32)
    assert batch.layout.rows == 5 and batch.ids.tolist() == [row.tokens[0] for row in plan.rows]
    padded = runtime._forward(step_of(batch.padded))[0]
    assert len(padded) == 8
    torch.testing.assert_close(padded[:5], plain, rtol=0, atol=2e-4)
    for tensor, wanted in zip(_memory(runtime), after, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=2e-4)


def test_bucket_contents() -> None:
    rows = tuple(PlannedRow((5 + index,), 20 * index, (3, 4, 7), index, 1, rotary=-index) for index in range(3))
    batch = decoding(StepPlan(rows), CPU)
    padded = batch.padded
    assert padded and (padded.rows, padded.pages) == (4, 16)
    whole = step_of(padded)
    assert whole.ids.tolist() == [5, 6, 7, 7] and whole.done.tolist() == [0, 20, 40, 40]
    assert whole.count is not None and whole.count.tolist() == [3]
    assert whole.pages.shape == (4, 16) and whole.pages[3].tolist() == [3, 4, 7] + [0] * 13
    assert whole.store.tolist() == [3 * PAGE, 4 * PAGE + 4, 7 * PAGE + 8, 7 * PAGE + 8]
    assert batch.starts.tolist() == [0, 1, 2, 3] and batch.logit_tokens.tolist() == [0, 1, 2]
    assert batch.positions.tolist() == [[0, 19, 38]] * 3 and batch.span is None


def test_steps_of_a_bucket_share_a_layout() -> None:
    """Whatever their rows, contexts and positions are."""
    def layout(*lengths: int) -> Layout:
        rows = (
            PlannedRow((1,), length, list(range(length // PAGE + 1)), index, 1) for index, length in enumerate(lengths)
        )
        padded = decoding(StepPlan(tuple(rows)), CPU).padded
        assert padded
        return step_of(padded).layout

    assert len({layout(3, 40, 255), layout(0, 0, 1), layout(17, 30, 80, 200)}) == 1
    assert len({layout(3, 40, 255), layout(3, 40), layout(3, 40, 256), layout(3, 40, 255, 9, 9)}) == 4


def test_bucket_memory_is_reused() -> None:
    """Each holds what one of its own would, whatever came before; a token that is not known comes from what was drawn.
    A second memory writes to the same places on the device, where a graph reads them."""
    draw, places = Random(4), dict[tuple[int, int, int | None], torch.Tensor]()
    memories, drawn, seen = (InputBatch(places), InputBatch(places)), torch.arange(1000, 1100), set[int]()
    for _ in range(200):
        rows = [
            PlannedRow(
                (draw.randrange(99),),
                draw.randrange(300),
                [draw.randrange(1, 50) for _ in range(19)],
                slot,
                1,
                target=draw.choice([None, 77]),
                drawn=None,
            )
            for slot in range(draw.choice([1, 2, 3, 5]))
        ]
        alone = decoding(StepPlan(tuple(rows)), CPU, hidden=True).padded
        assert alone
        fresh = step_of(alone)
        chosen = draw.choice([None, drawn])
        if chosen is not None:
            rows = [replace(row, tokens=(-1,), drawn=draw.randrange(100)) for row in rows]
        batch = decoding(StepPlan(tuple(rows)), CPU, chosen, draw.choice(memories), hidden=True)
        assert batch.padded and batch.padded.bucket in places and batch.layout.rows == len(rows)
        found = step_of(batch.padded)
        ids = fresh.ids.tolist() if chosen is None else [1000 + (row.drawn or 0) for row in (*rows, *rows[-1:] * 8)]
        assert found.ids.tolist() == ids[:len(found.ids)]
        assert found.count is not None and found.count.tolist() == [len(rows)]
        for name in ("positions", "starts", "done", "pages", "store", "source", "target"):
            assert torch.equal(getattr(found, name), getattr(fresh, name)), name
        seen.add(found.ids.data_ptr())
    assert len(seen) == len(places) == 4


@pytest.mark.parametrize("change", [{"tokens": (1, 2)}, {"logits": 0}, {"checkpoints": ((21, 3),)}, {"append": True},
                                    {"base": 18}])
def test_steps_without_bucket(change: dict[str, object]) -> None:
    row = PlannedRow((1,), 20, (0, 1), 0, 1)
    assert decodes(StepPlan((row,)))
    assert not decodes(StepPlan((row, replace(row, **change))))


def test_draft_bucket_contents() -> None:
    """Rows of several tokens and of one, tokens and rows beyond the real ones, which have nothing."""
    rows = (
        PlannedRow((5,), 20, (3, 4), 1, 1, base=18, delta_log=7),
        PlannedRow((6, 7, 8), 14, (5, 6), 2, 3, base=9, delta_log=8, append=True),
        PlannedRow((9, 10), 30, (7, 8), 4, 2, base=30, delta_log=9, append=True, rotary=-2),
    )
    assert verifies(StepPlan(rows)) and not decodes(StepPlan(rows))
    memory = InputBatch()
    for _ in range(2):
        batch = verifying(StepPlan(rows), CPU, memory, hidden=True)
    padded = batch.padded
    assert padded and padded.bucket == (4, 16, 8) and batch.layout.chunks == (1, 3, 2) and batch.layout.logits == 6
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 10] and batch.logit_tokens.tolist() == list(range(6))
    assert batch.positions[0].tolist() == [20, 14, 15, 16, 28, 29] and batch.starts.tolist() == [0, 1, 4, 6]
    assert batch.done.tolist() == [20, 14, 30] and batch.base.tolist() == [18, 9, 30]
    assert batch.append.tolist() == [0, 1, 1]
    assert batch.store.tolist() == [4 * PAGE + 4, 5 * PAGE + 14, 5 * PAGE + 15, 6 * PAGE, 9 * PAGE - 2, 9 * PAGE - 1]
    whole = step_of(padded)
    assert whole.count is not None and whole.count.tolist() == [3] and whole.layout.hidden and whole.layout.appends
    assert whole.starts.tolist() == [0, 1, 4, 6, 6] and whole.delta_log.tolist() == [7, 8, 9, 9] and len(whole.ids) == 8
    assert whole.pages.shape == (4, 16) and whole.base is not whole.done
    for change in ({"logits": 1}, {"checkpoints": ((15, 3),)}, {"append": False}):
        assert not verifies(StepPlan((rows[0], replace(rows[1], **change))))


def test_unseen_drafts_are_gathered_on_the_device() -> None:
    rows = (PlannedRow((6, -1, -1), 14, (5, 6), 2, 3, base=9, delta_log=8, append=True, drafts=2),
            PlannedRow((9, -1), 30, (7, 8), 4, 2, base=30, delta_log=9, append=True, drafts=1))
    numbers = torch.arange(100, 120)
    memory = InputBatch()
    for places in ([3, 1, 7, 0, 12], [19, 18, 17, 16, 15]):
        batch = build(StepPlan(rows), CPU, drawn=DeviceTokens(numbers, places), memory=memory, verified=True)
        assert batch.ids.tolist() == [100 + place for place in places]
        assert batch.padded
        assert step_of(batch.padded).ids[5:].tolist() == [100 + places[-1]] * 3, "those that fill up are the last one"


def test_delta_log_bucket_contents() -> None:
    """Of many rows of one token, which may be behind, and leave this one in their rings."""
    rows = tuple(PlannedRow((row,), 20 + row, (row, 20 + row, 40 + row), row, 1, 50 + row if row % 5 == 0 else None,
                     base=20 + row - row % 5, delta_log=60 + row, append=row % 5 > 0) for row in range(17))
    assert (
        decodes(StepPlan(rows), verified=True)
        and not decodes(StepPlan(rows))
        and not decodes(StepPlan(rows[:16]), True)
    )
    batch = decoding(StepPlan(rows), CPU)
    padded = batch.padded
    assert padded and padded.bucket == (32, 16, 32) and batch.layout.appends and batch.layout.decode_rows == 17
    for given in (batch, step_of(padded)):
        assert given.ids[:17].tolist() == given.source[:17].tolist() == list(range(17))
        assert given.target[:6].tolist() == [50, 1, 2, 3, 4, 55] and given.append[:6].tolist() == [0, 1, 1, 1, 1, 0]
        assert given.delta_log[:17].tolist() == list(range(60, 77)) and given.starts[:18].tolist() == list(range(18))
        assert (given.done - given.base)[:17].tolist() == [row % 5 for row in range(17)]
        assert given.store[:3].tolist() == [20 * PAGE + 4, 21 * PAGE + 5, 22 * PAGE + 6]
    whole = step_of(padded)
    assert whole.count is not None and whole.count.tolist() == [17] and whole.layout.tokens == whole.layout.rows == 32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_unseen_tokens_behind_a_step() -> None:
    """Few rows over rings have no bucket for them, and rows of prompts beside them keep their own tokens."""
    device, drawn = torch.device("cuda"), torch.tensor([70, 80, 90], device="cuda")
    plain = tuple(PlannedRow((-1,), 20, (row, 20 + row), row, 1, target=9 + row, drawn=2 - row) for row in range(2))
    behind = tuple(replace(row, base=18, delta_log=3 + row.slot) for row in plain)
    prompt = PlannedRow((5, 6, 7), 0, (50,), 5, 1)
    for rows, bucket in ((plain, True), (behind, False), ((*plain, prompt), False), ((*behind, prompt), False)):
        batch = build(StepPlan(rows), device, drawn=drawn, memory=InputBatch(), verified=True)
        assert (batch.padded is not None) == bucket
        assert batch.ids.tolist() == [90, 80, *(prompt.tokens if prompt in rows else ())]


def test_all_buckets_of_drafts() -> None:
    assert list(draft_buckets(3, 600)) == [(rows, pages) for rows in (4, 2, 1) for pages in (64, 16)]
    assert [draft_pages(pages) for pages in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 256]


def test_all_buckets() -> None:
    found = list(buckets(5, 600))
    assert found == [(rows, pages) for rows in (8, 4, 2, 1) for pages in (64, 32, 16)]
    for rows, pages in ((1, 1), (3, 17), (5, 38)):
        padded = decoding(StepPlan((PlannedRow((0,), 0, (0,) * pages, 0, 1),) * rows), CPU).padded
        assert padded and (padded.rows, padded.pages) in found


def test_powers_of_two() -> None:
    assert [power_of_two(number) for number in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]


def test_page_table_updates_incrementally() -> None:
    """Rows come, go and change places; lists grow; the table is that which would be made anew."""
    draw, table, lists = Random(3), PageTable(), [[1, 2], [3]]
    for _ in range(300):
        for pages in lists:
            pages += [draw.randrange(1, 99) for _ in range(draw.choice([0, 0, 0, 1, 3]))]
        if draw.random() < 0.3 or not lists:
            lists.insert(draw.randint(0, len(lists)), [draw.randrange(1, 99)])
        if draw.random() < 0.2 and len(lists) > 1:
            del lists[draw.randrange(len(lists))]
        rows = [PlannedRow((1,), 0, pages, index, 1) for index, pages in enumerate(lists)]
        width = max(map(len, lists))
        found = table.of(rows, width)
        assert found.shape[0] == len(rows) and found.is_contiguous()
        assert found.tolist() == [[*pages, *(0,) * (found.shape[1] - len(pages))] for pages in lists]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device"))])
@pytest.mark.parametrize("count", [1, 40, 1024, 1025, 3000, MAX_NUMBERS, MAX_NUMBERS + 1])
def test_numbers_are_uploaded(count: int, device: str) -> None:
    """Again and again, with tokens among them that only the device knows, and without."""
    tokens = min(16, (count - 1) // 2)
    upload, generator = HostToDeviceBuffer(torch.zeros(count, dtype=torch.int64, device=device), tokens), Random(count)
    drawn = torch.tensor([generator.getrandbits(60) for _ in range(50)], device=device)
    for turn in range(7):
        numbers = [generator.getrandbits(62) for _ in range(count)]
        places = [generator.randrange(50) for _ in range(tokens)]
        host = upload.begin()
        host[:count - tokens], host[count - tokens:] = numbers[:count - tokens], places
        upload.send(drawn if turn % 2 else None)
        wanted = [*numbers[:count - tokens], *places]
        if turn % 2:
            wanted[1:1 + tokens] = drawn.cpu()[places].tolist()
        assert upload.numbers.tolist() == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, MAX_NUMBERS // 2), (MAX_NUMBERS + 1,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_small_tensors_are_copied_by_a_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """While copies of another stream are on their way, too, which it does not wait for; again and again."""
    device, beside = torch.device("cuda", 0), torch.cuda.Stream()
    host = [torch.randint(0, 2 if dtype == torch.bool else 99, shape).to(dtype) for _ in range(20)]
    on_device(torch.zeros(1), device)
    large = torch.empty(1 << 31, dtype=torch.uint8, pin_memory=True)
    there, copied = torch.empty_like(large, device=device), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        there.copy_(large, non_blocking=True)
        copied.record()
    found = [on_device(each, device) for each in host]
    torch.cuda.current_stream().synchronize()
    assert copied.query() == (host[0].nbytes > 8 * MAX_NUMBERS), "it came in turn"
    for each, other in zip(host, found, strict=True):
        assert other.is_cuda and other.dtype == dtype and torch.equal(each, other.cpu())
    assert len(_buffers(device)) <= 64
    beside.synchronize()  # the stream must not write to freed memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_upload_from_a_fresh_thread() -> None:
    on_device(torch.zeros(1), torch.device("cuda", 0))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(on_device, torch.arange(5), torch.device("cuda", 0)).result()
    assert found.tolist() == list(range(5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_staging_memory_is_not_reused_early() -> None:
    """Also where nobody keeps what has sent them, and the card is busy."""
    busy, places = torch.randn(4096, 4096, device="cuda"), []
    for turn in range(20):
        place = torch.zeros(40, dtype=torch.int64, device="cuda")
        upload = HostToDeviceBuffer(place, 4)
        upload.begin()[:] = turn
        for _ in range(10):
            busy = busy @ busy
        upload.send()
        del upload
        torch.full((40,), -1).pin_memory()
        places.append(place)
    assert [place.unique().tolist() for place in places] == [[turn] for turn in range(20)]

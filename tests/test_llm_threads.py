"""One `LLM` for many: threads, tasks, a server beside them; ends, failures and forks."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support import numbers, odd_runtime, odd_shape, session_over
from test_server_harness import serving, tiny, wait_until
from torch import Tensor

from deltic import LLM, RandomModel, SamplingParams
from deltic.engine.engine import Engine
from deltic.engine.worker import EventMailbox, Worker
from deltic.errors import GenerationError, RequestError, UnavailableError
from deltic.llm import ChatOutput
from deltic.ops.types import Batch
from deltic.params import EngineRequest, TokenEvent
from deltic.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[1]
QUESTIONS = ["What is the capital of France?", "1+1=", "What is the opposite of hot?", "Say something.",
             "What day comes after Monday?", "What colour is the sky?", "17 + 25 =", "Hello"]
SICK = 77


def wild(seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "seed": seed, "max_tokens": 24, "ignore_eos": True, "logprobs": 1,
                             **params})


def endless(**params: Any) -> SamplingParams:
    return wild(0, max_tokens=100_000, **params)


def answers(outputs: Sequence[ChatOutput]) -> list[Any]:
    """All that must not depend on who else asks: what is reused, and drafted, may."""
    return [[(choice.text, choice.reasoning, choice.tokens, choice.logprobs, choice.finish, choice.usage.prompt_tokens)
             for choice in output.choices] for output in outputs]


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    with LLM(dtype="float32", max_context=1 << 17, max_batch=8, memory="64MiB", threads=1) as model:
        yield model


@pytest.fixture
def llm(model: LLM) -> Iterator[LLM]:
    """Afterwards nothing may be left behind."""
    yield model
    at_rest(model)


@pytest.fixture
def odd() -> Iterator[LLM]:
    """A small model without tokenizer."""
    with LLM(RandomModel(shape=odd_shape(), initializer_range=0.1), memory="4MiB", max_batch=4, threads=1) as model:
        yield model


def at_rest(llm: LLM) -> None:
    with llm.worker.hold() as engine:
        engine.step()
        assert not engine.has_work
        engine.check()


def running(llm: LLM) -> int:
    return len(llm.engine.scheduler.running)


@pytest.fixture(scope="module")
def alone(model: LLM) -> list[Any]:
    """Each question's answer, asked by one thread, one after the other."""
    return answers([model.chat(question, wild(seed)) for seed, question in enumerate(QUESTIONS)])


# Many at once


def test_eight_threads_get_the_answers_of_one_and_are_batched(llm: LLM, alone: list[Any]) -> None:
    before = llm.engine.stats.steps
    with ThreadPoolExecutor(8) as threads:
        with llm.worker.hold():  # until all have asked
            asked = [threads.submit(llm.chat, question, wild(seed)) for seed, question in enumerate(QUESTIONS)]
            wait_until(lambda: llm.worker._inbox.qsize() == len(QUESTIONS))
        assert answers([future.result() for future in asked]) == alone
    assert llm.engine.stats.steps - before < 60, "8 answers of 24 tokens need 24 steps together, and 192 alone"


@pytest.mark.parametrize("how", ["stream", "generate"])
def test_threads_that_come_and_go(llm: LLM, how: str) -> None:
    """Several rounds, without any agreement about when."""
    def ask(number: int) -> list[Any]:
        question, params = QUESTIONS[number % 8], wild(number % 8, max_tokens=4 + number % 8)
        if how == "generate":
            return answers(llm.generate([question, question[::-1]], params))
        stream = llm.stream(question, params)
        text = "".join(delta.text for delta in stream if delta.kind == "content")
        assert stream.output and text == stream.output.text
        return answers([stream.output])

    expected = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(32))) == expected * 4


def test_forty_tasks_get_the_answers_of_one_thread(llm: LLM, alone: list[Any]) -> None:
    async def ask(number: int) -> list[Any]:
        question, params = QUESTIONS[number % 8], wild(number % 8)
        if number % 3 == 0:
            stream = llm.stream(question, params)
            deltas = [delta async for delta in stream]
            assert stream.output
            assert "".join(delta.text for delta in deltas if delta.kind == "content") == stream.output.text
            return answers([stream.output])
        if number % 3 == 1:
            job = llm.chat_processor.chat(question_of(question), params)
            return answers(await llm.agenerate([job.request.prompt], params))
        return answers([await llm.achat(question, params)])

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(ask(number) for number in range(40)))

    before = llm.engine.stats.steps
    for number, found in enumerate(asyncio.run(all_of_them())):
        (text, _, tokens, *rest), = found[0]
        (wanted, _, ids, *others), = alone[number % 8]
        assert tokens == ids and rest == others and (text == wanted or number % 3 == 1)
    assert llm.engine.stats.steps - before < 400, "960 tokens, 8 at a time"


def question_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_served_model_can_be_used_beside_its_clients(alone: list[Any]) -> None:
    model = tiny()
    expected = answers([model.chat(question, wild(seed)) for seed, question in enumerate(QUESTIONS)])
    with serving(model) as served, ThreadPoolExecutor(8) as threads:
        def over_http(seed: int) -> str:
            body = {"messages": question_of(QUESTIONS[seed]), "temperature": 1.5, "seed": seed, "max_tokens": 24,
                    "ignore_eos": True}
            return served.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"] or ""

        here = [threads.submit(model.chat, question, wild(seed)) for seed, question in enumerate(QUESTIONS)]
        there = threads.map(over_http, range(8))
        assert answers([future.result() for future in here]) == expected
        assert list(there) == [choices[0][0] for choices in expected]
    assert answers([model.chat(QUESTIONS[0], wild(0))]) == expected[:1], "the server has ended, the model goes on"


def test_waiting_for_a_whole_answer_wakes_nobody_for_each_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    woken, get = [], EventMailbox.get
    monkeypatch.setattr(EventMailbox, "get", lambda self, timeout=None: woken.append(1) or get(self, timeout))
    llm.chat("Hello", wild(0, max_tokens=200))
    assert len(woken) <= 5


# Streams


def test_a_stream_runs_from_its_first_delta_on(llm: LLM) -> None:
    before = llm.engine.stats.steps
    never = [llm.stream("Hello", endless()) for _ in range(20)]
    assert next(llm.stream("1+1=", wild(1))).text
    at_rest(llm)
    assert llm.engine.stats.steps - before < 30 and all(stream.output is None for stream in never)


def test_a_stream_is_an_iterator(llm: LLM, alone: list[Any]) -> None:
    stream = llm.stream(QUESTIONS[3], wild(3))
    first, rest = next(stream), list(stream)
    assert stream.output and answers([stream.output]) == alone[3:4]
    assert "".join(delta.text for delta in [first, *rest] if delta.kind == "content") == stream.output.text
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("how", ["drop", "leave", "close elsewhere"])
def test_a_stream_that_is_not_wanted_any_more_ends(llm: LLM, how: str) -> None:
    with warnings.catch_warnings():  # what other files' tests have left, such as a client's sockets, is none of its own
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    stream = llm.stream("Hello", endless())
    if how == "leave":
        for _ in stream:
            break
    else:
        next(stream)
        assert running(llm) == 1
    if how == "drop":
        del stream
        gc.collect()
    if how == "close elsewhere":
        with ThreadPoolExecutor(1) as other:
            reading = other.submit(list, stream)
            time.sleep(0.05)
            stream.close()
            assert len(reading.result(20)) > 0
    wait_until(lambda: not llm.engine.has_work, 20)


@pytest.mark.parametrize("how", ["cancel chat", "cancel generate", "cancel stream", "leave", "timeout"])
def test_tasks_that_do_not_wait_end_their_requests(llm: LLM, how: str) -> None:
    async def stream() -> None:
        async for _ in llm.stream("Hello", endless()):
            if how == "leave":
                break

    async def main() -> None:
        if how == "leave":
            return await stream()
        if how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.achat("Hello", endless()), 0.2)
            return None
        work = {"cancel chat": lambda: llm.achat("Hello", endless()), "cancel stream": stream,
                "cancel generate": lambda: llm.agenerate(["Hello"] * 3, endless())}[how]
        task = asyncio.ensure_future(work())
        while not running(llm):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    wait_until(lambda: not llm.engine.has_work, 20)


def test_one_step_of_an_async_stream(llm: LLM) -> None:
    async def main() -> None:
        stream = llm.generate_stream("Hello", wild(0, max_tokens=3))
        assert [await anext(stream) for _ in range(1)]
        async with aclosing(aiter(stream)) as rest:  # type: ignore[type-var]
            async for _ in rest:
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.output

    asyncio.run(main())


def test_l8_a_stream_has_one_reader_at_a_time(llm: LLM) -> None:
    """The others would wait for what is given once."""
    stream = llm.generate_stream("Hello", endless())
    found: list[str] = []

    def read() -> None:
        try:
            for _ in stream:
                pass
            found.append("ended")
        except RequestError as error:
            found.append(str(error))
            stream.close()

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert sorted(found)[0] == "ended" and "read by another thread or task" in sorted(found)[1]

    async def both() -> list[Any]:
        stream = llm.generate_stream("Hello", wild(0, max_tokens=3))
        found = await asyncio.wait_for(asyncio.gather(anext(stream), anext(stream), return_exceptions=True), 30)
        return [*found, [delta async for delta in stream], stream.output]

    first, second, rest, output = asyncio.run(both())
    assert first.text and isinstance(second, RequestError) and second.field == "stream"
    assert first.text + "".join(delta.text for delta in rest) == output.text


def test_the_event_loop_goes_on_while_the_model_runs(llm: LLM) -> None:
    async def main() -> int:
        task, turns = asyncio.ensure_future(llm.achat("Hello", wild(0, max_tokens=60))), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        return turns

    assert asyncio.run(main()) > 60


@pytest.mark.parametrize("call", ["chat", "generate", "stream"])
def test_an_interrupted_call_ends_at_once_and_its_request_with_it(llm: LLM, call: str) -> None:
    def interrupt() -> None:
        wait_until(lambda: running(llm) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    calls: dict[str, Callable[[], Any]] = {
        "chat": lambda: llm.chat("Hello", endless()), "generate": lambda: llm.generate(["Hello"], endless()),
        "stream": lambda: list(llm.stream("Hello", endless()))}
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    thread.join()
    wait_until(lambda: not llm.engine.has_work, 20)


# Failures


def failing(after: int) -> Callable[[ModelRunner, Batch], Tensor]:
    run, left = ModelRunner.run, iter(range(after))

    def fail(self: ModelRunner, batch: Batch) -> Tensor:
        if next(left, None) is None:
            raise RuntimeError("kernel exploded")
        return run(self, batch)

    return fail


@pytest.mark.parametrize("n", [1, 3])
def test_l8_a_chat_that_fails_raises_and_has_what_came(model: LLM, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = wild(0, n=n)
    whole = model.chat("Hello", params)
    monkeypatch.setattr(ModelRunner, "run", failing(5))
    with pytest.raises(GenerationError, match="kernel exploded") as caught:
        model.chat("Hello", params)
    assert isinstance(caught.value.output, ChatOutput) and len(caught.value.output.choices) == n
    for found, wanted in zip(caught.value.output.choices, whole.choices, strict=True):
        assert found.finish == "error" and found.error and "kernel exploded" in found.error
        assert found.tokens == wanted.tokens[:len(found.tokens)] and 0 < len(found.tokens) < 24
        assert found.usage.completion_tokens == len(found.tokens)


def test_l8_a_stream_that_fails_says_so_at_its_end(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "run", failing(5))
    stream, found = model.stream("Hello", wild(0)), []
    with pytest.raises(GenerationError, match="kernel exploded"):
        for delta in stream:
            found.append(delta)
    assert found and stream.output and stream.output.choices[0].finish == "error"
    assert list(stream) == []

    async def main() -> None:
        async for _ in model.stream("Hello", wild(0)):
            pass

    with pytest.raises(GenerationError, match="kernel exploded"):
        asyncio.run(main())
    with pytest.raises(GenerationError, match="kernel exploded"):
        asyncio.run(model.achat("Hello", wild(0)))


def test_l8_a_prompt_that_fails_does_not_cost_the_others(odd: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[*numbers(0, 9, 60)], [5, 6, SICK], [*numbers(1, 20, 60)]]
    expected = odd.generate(prompts, wild(0, n=2))
    run = ModelRunner.run

    def sick(self: ModelRunner, batch: Batch) -> Tensor:
        logits = run(self, batch)
        rows = batch.ids[batch.logit_tokens] == SICK
        return torch.where(rows[:, None], torch.full_like(logits, float("nan")), logits)

    monkeypatch.setattr(ModelRunner, "run", sick)
    odd.worker.call(lambda engine: engine.runtime.cache.clear())
    found = odd.generate(prompts, wild(0, n=2))
    for choice in found[1].choices:
        assert choice.finish == "error" and "NaN" in (choice.error or "") and choice.tokens == ()
    sane = [[choice for choice in output.choices if SICK not in choice.tokens] for output in (expected[0], expected[2])]
    for wanted, output in zip(sane, (found[0], found[2]), strict=True):
        assert wanted and all(output.choices[choice.index].tokens == choice.tokens for choice in wanted)


def test_l8_a_failure_outside_of_requests_reaches_every_caller(odd: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_once() -> Any:
        monkeypatch.undo()
        return broken()

    with ThreadPoolExecutor(4) as threads:
        with odd.worker.hold() as engine:
            asked = [threads.submit(odd.generate, [[1, 2, 3]], wild(seed, n=2)) for seed in range(3)]
            wait_until(lambda: odd.worker._inbox.qsize() == 3)
            monkeypatch.setattr(engine, "step", broken_once)
        outputs = [future.result(20)[0] for future in asked]
    for output in outputs:
        assert [choice.finish for choice in output.choices] == ["error"] * 2
        assert all("out of everything" in (choice.error or "") for choice in output.choices)
    assert odd.generate([[1, 2, 3]], wild(0))[0].choices[0].finish == "length"


def broken(*_: Any) -> Any:
    raise RuntimeError("out of everything")


def test_l8_an_engine_that_is_broken_for_good_leaves_nobody_waiting(odd: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as threads:
        with odd.worker.hold() as engine:
            asked = [threads.submit(odd.generate, [[1, 2, 3]]), threads.submit(list, odd.generate_stream([1, 2, 3]))]
            wait_until(lambda: odd.worker._inbox.qsize() == 2)
            monkeypatch.setattr(engine, "abort", broken)
            monkeypatch.setattr(engine, "step", broken)
        for future in asked:
            with pytest.raises(UnavailableError, match="out of everything"):
                future.result(20)
    for ask in (lambda: odd.generate([[1]]), lambda: odd.worker.call(Engine.check),
                lambda: asyncio.run(odd.agenerate([[1]]))):
        with pytest.raises(UnavailableError, match="out of everything"):
            ask()
    assert "out of everything" in (odd.worker.fault(60) or "")


def test_a_refused_request_leaves_those_beside_it_alone(odd: LLM) -> None:
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(odd.generate, [[1, 2, 3]], wild(0)) for _ in range(4)]
        bad = [threads.submit(odd.generate, [[1], [9999]], wild(0)) for _ in range(4)]
        assert all(isinstance(future.exception(20), RequestError) for future in bad)
        assert len({future.result(20)[0].choices[0].tokens for future in good}) == 1
    at_rest(odd)


# The worker


def test_commands_run_between_two_steps_and_raise_where_they_were_asked(llm: LLM) -> None:
    stream = llm.stream("Hello", endless())
    next(stream)
    assert llm.worker.call(lambda engine: engine.has_work) is True
    with pytest.raises(LookupError, match="mine"):
        llm.worker.call(lambda engine: (_ for _ in ()).throw(LookupError("mine")))
    assert llm.worker.fault(60) is None, "a caller's mistake is no fault of the engine"
    with llm.worker.hold() as engine:
        steps = engine.stats.steps
        time.sleep(0.05)
        assert engine.stats.steps == steps
    assert next(stream)
    stream.close()


def test_a_listener_that_raises_harms_itself_alone(odd: LLM) -> None:
    class Broken:
        def on_events(self, events: list[TokenEvent]) -> None:
            raise LookupError("mine")

        def on_end(self, error: UnavailableError) -> None:
            pass

    expected = odd.generate([[1, 2, 3]], wild(0))
    odd.worker.submit([EngineRequest("broken", (4, 5), wild(0, max_tokens=900))], Broken(), lambda error: None)
    assert answers(odd.generate([[1, 2, 3]], wild(0))) == answers(expected)
    wait_until(lambda: not odd.engine.has_work, 20)
    assert odd.worker.fault(60) is None


def test_a_worker_that_was_stopped_before_it_began() -> None:
    worker = Worker(Engine(odd_runtime()))
    assert worker.stop(1) and worker.stop(1)
    with pytest.raises(UnavailableError, match="the engine has stopped"):
        worker.call(Engine.check)
    assert worker.fault(60) == "the engine has stopped"


# Ends


def test_use_after_close_is_explained_and_closing_twice_is_fine() -> None:
    with LLM(dtype="float32", max_context=256, memory="8MiB", threads=1) as llm:
        stream = llm.stream("Hello", wild(0))
        assert llm.chat("Hello", wild(0)).text
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.chat("Hello"), lambda: llm.generate(["Hello"]), lambda: next(stream), lambda: list(stream),
        lambda: llm.pin([{"role": "system", "content": "Hello"}]), lambda: asyncio.run(llm.achat("Hello")),
        lambda: llm.worker.call(Engine.check)]
    for use in uses:
        with pytest.raises(UnavailableError, match="the model has been closed"):
            use()
    assert not llm.worker._thread.is_alive()


def test_closing_ends_what_is_running() -> None:
    async def main() -> None:
        async with LLM(max_context=1 << 17, memory="64MiB", threads=1) as llm:
            task = asyncio.ensure_future(llm.agenerate([[1, 2]], endless()))
            with ThreadPoolExecutor(1) as other:
                there = other.submit(llm.generate, [[1, 2]], endless())
                while running(llm) < 2:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(llm.close)
                for waiting in (asyncio.wrap_future(there), task):
                    with pytest.raises(UnavailableError, match="the model has been closed"):
                        await waiting

    asyncio.run(main())


def test_unreferenced_model_is_freed() -> None:
    llm = LLM(RandomModel(shape=odd_shape()), memory="4MiB", threads=1)
    llm.generate([[1, 2, 3]], wild(0))
    thread, engine = llm.worker._thread, weakref.ref(llm.engine)
    del llm
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("head", [False, True])
def test_closed_model_frees_its_weights_at_once(head: bool) -> None:
    """Nothing of it waits for garbage to be collected: weights are large."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(RandomModel(shape=odd_shape(), head=head), memory="4MiB", threads=1)
        llm.generate([[1, 2, 3]], wild(0))
        llm.close()
        weights = weakref.ref(llm.runtime.decoder.weights.norm)
        del llm
        assert weights() is None
    finally:
        gc.enable()


PROGRAM = """
import os, signal, sys, threading
from deltic import LLM, SamplingParams
from deltic.errors import UnavailableError
llm = LLM(threads=1, memory="16MiB", max_context=4096)
endless = SamplingParams(max_tokens=4000, ignore_eos=True)
stream = llm.stream("Hello", endless)
next(stream)
child = os.fork()
if not child:
    signal.alarm(30)
    code = 1
    for use in (lambda: llm.chat("Hello"), lambda: next(stream), llm.close):
        try:
            use()
        except UnavailableError as error:
            code = 0 if "forked" in str(error) else 2
    stream.close()
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
threading.Thread(target=llm.chat, args=("Hello", SamplingParams(max_tokens=50))).start()
for _ in range(3):
    threading.Thread(target=lambda: list(llm.stream("Hello", endless)), daemon=True).start()
next(stream)
print("end")
"""


def test_fork_is_refused_and_a_process_exits_amid_its_answers() -> None:
    """Nothing is closed: threads of the program, daemons and a stream are still at it."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


# Sessions


def test_a_session_takes_one_call_at_a_time() -> None:
    session, inside = session_over(odd_runtime(), batch=2, context=256), []

    def run(batch: Batch) -> Tensor:
        inside.append(1)
        assert len(inside) == 1, "two calls are in the model"
        time.sleep(0.001)
        logits = odd.run(batch)
        inside.clear()
        return logits

    odd, spied = session.runtime, type("Spied", (), {"__getattr__": lambda self, name: getattr(odd, name)})()
    spied.run = run
    session.runtime = spied
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(session.step, range(64)))
    assert session.position == 64
    session.runtime.cache.check()


def test_two_models_and_a_session_at_the_same_time(odd: LLM) -> None:
    """Each has its thread; they share the process alone."""
    prompt, other = [*numbers(3, 20, 509)], LLM(RandomModel(shape=odd_shape(), initializer_range=0.1, seed=5),
                                                memory="4MiB", threads=1)
    session = session_over(odd_runtime(), batch=2, context=256)

    def steps() -> list[int]:
        session.reset()
        return [int(session.step(token).argmax()) for token in prompt]

    def asked(llm: LLM) -> list[Any]:
        return [llm.generate([prompt], wild(seed))[0].choices[0].tokens for seed in range(2)]

    with other, ThreadPoolExecutor(3) as threads:
        expected = [asked(odd), asked(other), steps()]
        for _ in range(2):
            work = [threads.submit(asked, odd), threads.submit(asked, other), threads.submit(steps)]
            assert [future.result() for future in work] == expected

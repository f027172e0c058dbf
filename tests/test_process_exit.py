"""Processes that end while models are there, are being given back, or could not be made: with exit code 0, and nothing
on stderr."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from encoder_models import save_encoder, save_recipe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    save_encoder(directory, "bert")
    save_recipe(directory)
    return directory


def output_of(script: str, *arguments: str) -> str:
    """What a program prints that ends well and writes nothing to stderr."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    return found.stdout


SLOW = """
import gc, sys, threading, time

class Slow:
    def __del__(self):
        time.sleep(1)
        print("gone in", threading.current_thread().name, flush=True)

"""
LAST_OWNERS = {
    "llm": """
        from deltic import LLM
        from deltic.engine.worker import Worker

        def finish(worker, finish=Worker._finish):
            time.sleep(0.2)
            finish(worker)

        Worker._finish = finish
        llm = LLM(memory="16MiB", max_context=4096, threads=1)
        with llm.worker.hold() as engine:
            engine.slow = Slow()
        del engine, llm
        time.sleep(0.5)
    """,
    "encoder": """
        from deltic import Encoder
        encoder = Encoder(sys.argv[1], threads=1)
        encoder.encode(["w1"])
        encoder.batcher.slow = Slow()
        del encoder
    """,
}


@pytest.mark.parametrize("owner", LAST_OWNERS)
def test_the_process_waits_for_memory_that_is_being_given_back(owner: str, bert: Path) -> None:
    """The thread that computes has ended, but for what it was the last to hold: that takes its time."""
    name = "deltic-engine" if owner == "llm" else "deltic-texts"
    assert output_of(SLOW + textwrap.dedent(LAST_OWNERS[owner]), str(bert)) == f"gone in {name}\n"


ENDS = {
    "an encoder that nobody holds": """
        from deltic import Encoder
        Encoder(sys.argv[1]).encode(["w1", "w2"] * 50)
    """,
    "an encoder that is a decoder": """
        from deltic import Encoder
        Encoder("tiny", task="embed", memory="16MiB", max_context=4096).encode(["one", "two"])
    """,
    "a call of an encoder in a daemon": """
        import threading, time
        from deltic import Encoder
        encoder = Encoder(sys.argv[1])
        threading.Thread(target=encoder.encode, args=(["w1"] * 100_000,), daemon=True).start()
        time.sleep(0.2)
    """,
    "a session": """
        from deltic import Session
        session = Session(memory="64MiB", max_context=512, threads=2)
        session.prefill([1, 2, 3])
    """,
    "options that cannot be": """
        from deltic import LLM, Encoder, Session
        from deltic.errors import DelticError
        for make in (lambda: LLM(memory="1"), lambda: Encoder(sys.argv[1], max_length=-1), lambda: Session("nosuch")):
            try:
                make()
            except DelticError:
                pass
    """,
    "children": """
        import os
        from deltic import Encoder, LLM, SamplingParams
        encoder, llm = Encoder(sys.argv[1]), LLM(memory="16MiB", max_context=4096)
        encoder.encode(["w1"])
        llm.chat("Hello", SamplingParams(max_tokens=4))
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


@pytest.mark.parametrize("case", ENDS)
def test_a_process_ends_in_order(case: str, bert: Path) -> None:
    assert output_of("import sys\n" + textwrap.dedent(ENDS[case]), str(bert)) == ""

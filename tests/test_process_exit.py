"""Processes that end while models are there, are being given back, or could not be made: with exit code 0, and nothing
on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from encoder_models import save_encoder, save_recipe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    save_encoder(directory, "bert")
    save_recipe(directory)
    return directory


FORKING = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import deltic.embeddings, deltic.llm
folder, scripts = sys.argv[1], json.loads(sys.argv[2])
ends = {}
for number, (name, script) in enumerate(scripts.items()):
    child = os.fork()
    if not child:
        for stream, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ends[name] = [code, *(open(f"{folder}/{number}.{stream}").read() for stream in ("out", "err"))]
else:
    script = "print(json.dumps(ends))"
exec(script)
"""
"""Runs each script in a process of its own, forked when everything is imported, and prints how they end."""


@pytest.fixture(scope="module")
def ends(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Exit code, stdout and stderr of each script."""
    scripts = {name: textwrap.dedent(script) for name, script in ENDS.items()} | {
        name: SLOW + textwrap.dedent(script) for name, script in LAST_OWNERS.items()}
    scripts = {name: f"import sys\nsys.argv[1:] = [{str(bert)!r}]\n{script}" for name, script in scripts.items()}
    command = [sys.executable, "-c", FORKING, str(tmp_path_factory.mktemp("ends")), json.dumps(scripts)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    return json.loads(found.stdout)  # type: ignore[no-any-return]


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
def test_the_process_waits_for_memory_being_freed(owner: str, ends: dict[str, list[Any]]) -> None:
    """The thread that computes has ended, but for what it was the last to hold: that takes its time."""
    name = "deltic-engine" if owner == "llm" else "deltic-texts"
    assert ends[owner] == [0, f"gone in {name}\n", ""]


ENDS = {
    "an encoder that nobody holds": """
        from deltic import Encoder
        Encoder(sys.argv[1], threads=1).encode(["w1", "w2"] * 50)
    """,
    "an encoder that is a decoder": """
        from deltic import Encoder
        Encoder("tiny", task="embed", memory="16MiB", max_context=512, threads=1).encode(["one", "two"])
    """,
    "a call of an encoder in a daemon": """
        import threading, time
        from deltic import Encoder
        encoder = Encoder(sys.argv[1], threads=1)
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
        encoder, llm = Encoder(sys.argv[1], threads=1), LLM(memory="16MiB", max_context=512, threads=1)
        encoder.encode(["w1"])
        llm.chat("Hello", SamplingParams(max_tokens=4))
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


@pytest.mark.parametrize("case", ENDS)
def test_a_process_ends_in_order(case: str, ends: dict[str, list[Any]]) -> None:
    assert ends[case] == [0, "", ""]

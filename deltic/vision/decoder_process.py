"""Reads files of clients in a process of its own.

Decoders hold the interpreter's lock while they run, cannot be interrupted, and allocate before they fail. A process has
bounds of its own for processor time and memory, and can be killed.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

from deltic.errors import RequestError, UnavailableError

_LENGTHS = struct.Struct("<QQ")
_NICE = 5
"""Decoding gives way to the model and to the event loop."""
_START = "import sys; sys.path[:] = {}; from deltic.vision.decoder_process import main; main({})"

Decoded = tuple[dict[str, Any], bytes]


class DecoderProcess:
    """A child process that runs one function at a time; it starts with the first call, and again after it was killed.

    memory_mib: address space of the child. Use it as a context manager, or call `close`.
    """

    def __init__(self, memory_mib: int) -> None:
        self._memory, self._closed = memory_mib << 20, False
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def closed(self) -> bool:
        """Whether it has been stopped."""
        return self._closed

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def call(self, function: Callable[..., Decoded], *args: Any, seconds: float, limit: str) -> Decoded:
        """Runs a function of a module in the child and returns its result: values that JSON has, and bytes. `seconds`
        is added to the values: the processor time that it took.

        seconds: processor time that it may take. limit: name of the option that sets `seconds`.
        Raises RequestError as the function does, and if the child exceeds a bound or crashes.
        """
        if self._closed:
            raise UnavailableError("the decoder process is closed")
        child = self._child = self._child or self._start()
        if self._closed:  # meanwhile
            child.kill()
        assert child.stdin and child.stdout
        try:
            job = pickle.dumps((function.__module__, function.__qualname__, args, seconds))
            child.stdin.write(_LENGTHS.pack(len(job), 0))
            child.stdin.write(job)
            child.stdin.flush()
            about, data = _receive(child.stdout)
        except (OSError, EOFError) as error:
            self._forget(child)
            raise _ended(child.returncode, seconds, limit) from error
        except BaseException:
            self._forget(child)  # an unread result would be taken for the next one
            raise
        result: dict[str, Any] = json.loads(about)
        if "error" in result:
            raise RequestError(result["error"], result["field"])
        return result, data

    def kill(self) -> None:
        """Ends the child, from any thread; a call that runs raises RequestError."""
        if child := self._child:
            child.kill()

    def stop(self) -> None:
        """As `kill`, and no call is possible any more."""
        self._closed = True
        self.kill()

    def close(self) -> None:
        """As `stop`, and waits until the child has ended. No call may run."""
        self.stop()
        if self._child:
            self._forget(self._child)

    def _forget(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # of what was not written yet
                if pipe:
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        code = _START.format(sys.path, self._memory)
        return subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL)


def _ended(status: int, seconds: float, limit: str) -> RequestError:
    if status == -signal.SIGPROF:
        return RequestError(f"the file takes more than {seconds:g} seconds of processor time to read ({limit}): send a "
                            "smaller one")
    return RequestError("the file cannot be read: its decoder ended, because the file is damaged or was cancelled")


def _receive(pipe: IO[bytes]) -> tuple[bytes, bytes]:
    about, data = _LENGTHS.unpack(_exactly(pipe, _LENGTHS.size))
    return _exactly(pipe, about), _exactly(pipe, data)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main(memory: int) -> None:
    """The child: runs what it receives until its parent closes the pipe."""
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library may print between results
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even within native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends what has to end
    with suppress(EOFError, BrokenPipeError):
        while True:
            job, _ = _receive(source)
            about, data = _run(job)
            spelled = json.dumps(about).encode()
            target.write(_LENGTHS.pack(len(spelled), len(data)))
            target.write(spelled)
            target.write(data)
            target.flush()


def _run(job: bytes) -> Decoded:
    module, name, args, seconds = pickle.loads(job)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    began = time.process_time()
    try:
        about, data = getattr(import_module(module), name)(*args)
        return {**about, "seconds": time.process_time() - began}, data
    except RequestError as error:
        return {"error": str(error), "field": error.field}, b""
    except MemoryError:
        return {"error": "the file needs more memory than it may take: send a smaller one", "field": None}, b""
    except Exception as error:  # libraries raise anything for damaged files
        return {"error": f"the file cannot be read: {type(error).__name__}: {str(error)[:200]}", "field": None}, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

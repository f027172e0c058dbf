"""Decodes untrusted files in a child process, and extracts the text of PDF documents there with pypdf.

Decoders hold the GIL, cannot be interrupted, and may allocate without bound. A process has its own limits for processor
time and memory, and can be killed. Results are JSON and bytes: nothing that the child sends is unpickled.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from deltic.errors import RequestError, UnavailableError

if TYPE_CHECKING:
    from deltic.config import Limits

NO_TEXT: Final = "[a PDF document without text, such as a scan: its pages cannot be read]"
"""Returned in place of the text of a document that has none."""
_MEMORY_MIB: Final = 512
_NICE: Final = 5
_START: Final = "import sys; sys.path[:] = {}; from deltic.vision.decoder_process import main; main({}, {})"

Decoded = tuple[dict[str, Any], bytes]


class DecoderProcess:
    """A child process that runs one function at a time. It starts at the first call, and again after it was killed.

    memory_mib: address space of the child. Use it as a context manager, or call `close`.
    """

    def __init__(self, memory_mib: int) -> None:
        self._memory = memory_mib << 20
        self._closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def call(self, function: Callable[..., Decoded], *args: Any, seconds: float, limit: str) -> Decoded:
        """Runs a module's function in the child. Returns its result: JSON values, with the processor time in
        `seconds`, and bytes.

        seconds: bound for the processor time. limit: name of the option that sets the bound.
        Raises the RequestError of the function, or a RequestError if the child exceeds a bound or crashes.
        """
        if self._closed:
            raise UnavailableError("the decoder process is closed")
        child = self._child or self._start()
        if self._closed:  # closed while the child started
            child.kill()
        assert self._connection
        try:
            self._connection.send_bytes(pickle.dumps((function.__module__, function.__qualname__, args, seconds)))
            result: dict[str, Any] = json.loads(self._connection.recv_bytes())
            data = self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            self._discard(child)
            raise _exit_error(child.returncode, seconds, limit) from error
        except BaseException:
            self._discard(child)  # an unread result would be read as the result of the next call
            raise
        if "error" in result:
            raise RequestError(result["error"], result["field"])
        return result, data

    def kill(self) -> None:
        """Ends the child; may be called from any thread. A running call raises RequestError."""
        if child := self._child:
            child.kill()

    def stop(self) -> None:
        """Ends the child for good; may be called from any thread."""
        self._closed = True
        self.kill()

    def close(self) -> None:
        """Ends the child and waits for it. No call may be running."""
        self.stop()
        if self._child:
            self._discard(self._child)

    def _start(self) -> subprocess.Popen[bytes]:
        self._connection, remote = Pipe()
        with remote:
            code = _START.format(sys.path, remote.fileno(), self._memory)
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", code], pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self._child

    def _discard(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        child.kill()
        child.wait()
        if self._connection:
            self._connection.close()


def _exit_error(status: int, seconds: float, limit: str) -> RequestError:
    if status == -signal.SIGPROF:
        return RequestError(f"the file takes more than {seconds:g} seconds of processor time to read ({limit}): send a "
                            "smaller one")
    return RequestError("the file cannot be read: its decoder ended, because the file is damaged or was cancelled")


def main(descriptor: int, memory: int) -> None:
    """Runs jobs in the child until the parent closes the connection."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even within native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal is handled by the parent
    with suppress(EOFError, ConnectionError), Connection(descriptor) as connection:
        while True:
            result, data = _run(connection.recv_bytes())
            connection.send_bytes(json.dumps(result).encode())
            connection.send_bytes(data)


def _run(job: bytes) -> Decoded:
    module, name, args, seconds = pickle.loads(job)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    began = time.process_time()
    try:
        result, data = getattr(import_module(module), name)(*args)
        return {**result, "seconds": time.process_time() - began}, data
    except RequestError as error:
        return {"error": str(error), "field": error.field}, b""
    except MemoryError:
        return {"error": "the file needs more memory than it may take: send a smaller one", "field": None}, b""
    except Exception as error:  # libraries raise anything for damaged files
        return {"error": f"the file cannot be read: {type(error).__name__}: {str(error)[:200]}", "field": None}, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# PDF documents


def reader_process() -> DecoderProcess:
    """Returns a process for several calls of `pdf_text`. Any thread may end it with `stop`."""
    return DecoderProcess(_MEMORY_MIB)


def pdf_text(data: bytes, limits: Limits, field: str = "document", process: DecoderProcess | None = None) -> str:
    """Returns the text of a PDF file, its pages separated by empty lines; `NO_TEXT` if there is none.

    Blocks until a child process has read the file. process: from `reader_process`, closed by the caller. Raises
    RequestError with `field` if the file is damaged, encrypted, or exceeds `max_document_pages`,
    `max_document_characters` or `document_seconds`.
    """
    try:
        with nullcontext(process) if process else reader_process() as reader:
            _, text = reader.call(read_pages, data, limits.max_document_pages, limits.max_document_characters,
                                  seconds=limits.document_seconds, limit="document_seconds")
    except RequestError as error:
        raise RequestError(f"{field} is no PDF document that can be read: {error}", field) from error
    return text.decode() or NO_TEXT


def read_pages(data: bytes, max_pages: int, max_characters: int) -> Decoded:
    """Returns the text of all pages in UTF-8. Runs in the child process. Raises RequestError."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    if b"%PDF-" not in data[:1024]:
        raise RequestError("it does not begin as one")
    try:
        reader = PdfReader(io.BytesIO(data))
        count = len(reader.pages)
        if count > max_pages:
            raise RequestError(f"it has {count:,} pages, and at most {max_pages:,} are read (max_document_pages)")
        texts, size = list[str](), 0
        for page in reader.pages:
            texts.append(page.extract_text().encode(errors="replace").decode().strip())
            size += len(texts[-1])
            if size > max_characters:
                raise RequestError(f"it has more than {max_characters:,} characters (max_document_characters)")
    except (FileNotDecryptedError, DependencyError) as error:
        raise RequestError("it is encrypted: send it without a password") from error
    except RecursionError as error:
        raise RequestError("it is nested too deeply") from error
    return {}, "\n\n".join(filter(None, texts)).encode()

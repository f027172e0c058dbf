"""The ways to call a program: through deltic's library, which lets other threads of Python run meanwhile, or through
ExecuTorch's own binding, which does not, where that library cannot be had."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ProgramCalls(Protocol):
    """A program that is loaded. Either method raises RuntimeError with what the runtime says."""

    def buffer(self, name: str) -> NDArray[np.float32]:
        """A buffer's content, as it lies in memory."""

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Append tokens at this position; the logits [V] of the last one."""


class BoundMethod:
    """method: of ExecuTorch's binding."""

    def __init__(self, method: Any, vocabulary: int) -> None:
        self._method, self._vocabulary = method, vocabulary

    def buffer(self, name: str) -> NDArray[np.float32]:
        """As of `ProgramCalls`."""
        found: NDArray[np.float32] = self._method.get_attribute(name).numpy()
        return found

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """As of `ProgramCalls`."""
        import torch

        (logits,) = self._method([torch.tensor([[*tokens]], dtype=torch.int64),
                                  torch.tensor([position], dtype=torch.int64)])
        row: NDArray[np.float32] = logits.reshape(-1, self._vocabulary)[-1].float().numpy()
        return row


class Native:
    """library: deltic's; RuntimeError if it cannot load the program at this path."""

    def __init__(self, library: ctypes.CDLL, path: Path, vocabulary: int) -> None:
        self._library, self._vocabulary = library, vocabulary
        library.deltic_program_close.restype = None
        library.deltic_program_close.argtypes = (c_void_p,)
        library.deltic_program_open.argtypes = (c_char_p, POINTER(c_void_p))
        library.deltic_program_buffer.argtypes = (c_void_p, c_char_p, POINTER(c_void_p), POINTER(c_int64),
                                                  POINTER(c_int64))
        library.deltic_program_run.argtypes = (c_void_p, POINTER(c_int64), c_int64, c_int64, POINTER(c_float), c_int64)
        self._program = c_void_p()
        self._check(library.deltic_program_open(bytes(path), byref(self._program)))
        weakref.finalize(self, library.deltic_program_close, self._program)

    def buffer(self, name: str) -> NDArray[np.float32]:
        """As of `ProgramCalls`."""
        import numpy as np

        content, sizes, dimensions = c_void_p(), (c_int64 * 8)(), c_int64()
        self._check(self._library.deltic_program_buffer(self._program, name.encode(), byref(content), sizes,
                                                        byref(dimensions)))
        shape = tuple(sizes[:dimensions.value])
        assert content.value, "a buffer lies somewhere"
        found: NDArray[np.float32] = np.ctypeslib.as_array(
            (c_float * int(np.prod(shape))).from_address(content.value)).reshape(shape)
        return found

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """As of `ProgramCalls`."""
        import numpy as np

        row = np.empty(self._vocabulary, np.float32)
        self._check(self._library.deltic_program_run(
            self._program, (c_int64 * len(tokens))(*tokens), len(tokens), position,
            row.ctypes.data_as(POINTER(c_float)), self._vocabulary))
        return row

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"ExecuTorch's error 0x{status:x}")

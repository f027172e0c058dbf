"""The C library's heap."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """From now on, let glibc keep what activations leave behind instead of returning it to the system.

    Else every step returns its larger temporaries and gets them again as fresh pages, which the kernel fills with
    zeros: about a tenth of the time of a long prompt. Blocks above 32 MiB (weights, cache pools) still come and go
    with the system, so that pages of the pools cost memory only once they are used. Other C libraries: no effect.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
    mallopt(_TRIM_THRESHOLD, 1 << 30)
    mallopt(_TOP_PAD, 64 << 20)
    mallopt(_MMAP_THRESHOLD, 32 << 20)

"""Keyed noise: a draw is a pure function of (seed, choice, position, token), so that batching, scheduling and
speculation cannot change it. Counter-based, after splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014). All backends use it."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BELOW_ONE = 1.0 - 2.0**-53


def _signed(word: int) -> int:
    """Returns the int64 with the bits of the unsigned 64-bit `word`."""
    return word - (1 << 64) if word >> 63 else word


def _finalise(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def sample_key(seed: int, choice: int, position: int) -> int:
    """Returns the int64 key of one draw. seed: any integer; only its low 64 bits are used. choice: index of the answer.
    position: position of the drawn token."""
    return _mixed(seed, choice, position)


def answer_key(seed: int, choice: int) -> int:
    """Returns the key of an answer; `keys_at` derives the keys of its draws from it."""
    return _mixed(seed, choice)


def keys_at(answers: Tensor, positions: Tensor) -> Tensor:
    """Returns `sample_key` for answer keys and positions; both are int64 with broadcastable shapes."""
    return _finalise_words(answers + positions + _signed(_GOLDEN))


def _mixed(*parts: int) -> int:
    word = 0
    for part in parts:
        word = _finalise((word + part + _GOLDEN) & _MASK)
    return _signed(word)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shifts in zeros, unlike torch's shift of int64, which copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _finalise_words(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _signed(_FIRST)
    words = (words ^ _shift_right(words, 27)) * _signed(_SECOND)
    return words ^ _shift_right(words, 31)


def gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise: key [L] int64, ids [V] or [L, V] int64 (token ids) -> [L, V] float64, finite.

    z = splitmix64 finaliser of (key + id * 0x9E3779B97F4A7C15) mod 2^64; u = ((z >>> 11) + 0.5) * 2^-53;
    noise = -log(-log(u)). The largest z >>> 11 would round u to 1 and noise to infinity; there u = 1 - 2^-53.
    """
    words = _finalise_words(key.unsqueeze(-1) + ids * _signed(_GOLDEN))
    uniform = (_shift_right(words, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform.clamp(max=_BELOW_ONE)))

"""How people ask: phrasings for training and, apart from them, phrasings for evaluation.

`phrases.txt` has one phrasing a line; `(a|b|)` chooses one of its alternatives, `{slot}` is filled in
by the generator. Lines below `--` are held out: the model never sees them in training, whatever the
other lines could say. The frames are
what may stand before any request, before a question (what, which, who, how, where), or after either.

`fresh.txt` and `fresh2.txt` hold further phrasings for evaluation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

TRAIN, HELDOUT = "train", "heldout"

_GROUP = re.compile(r"\(([^()]*)\)")


def _sections(text: str) -> dict[str, dict[str, list[str]]]:
    """The lines of each `# name` section, split at its `--`."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in text.strip().splitlines():
        if line.startswith("# "):
            section = sections.setdefault(line[2:].strip(), {TRAIN: [], HELDOUT: []})
            split = TRAIN
        elif line == "--":
            split = HELDOUT
        elif line.strip():
            section[split].append(line)
    return sections


def _read(name: str) -> str:
    return (Path(__file__).resolve().parent / name).read_text(encoding="utf-8")


_ALL = _sections(_read("phrases.txt"))
FRAMES = {name: section for name, section in _ALL.items() if name.startswith("frame ")}
PHRASES = {name: section for name, section in _ALL.items() if name not in FRAMES}


def choose(pattern: str, rng: random.Random) -> str:
    """One of the surface forms of a pattern, its slots left in place."""
    while group := _GROUP.search(pattern):
        choice = rng.choice(group[1].split("|"))
        pattern = pattern[: group.start()] + choice + pattern[group.end() :]
    return " ".join(pattern.split())


def expand(pattern: str) -> list[str]:
    """All surface forms of a pattern."""
    group = _GROUP.search(pattern)
    if group is None:
        return [pattern]
    before, after = pattern[: group.start()], pattern[group.end() :]
    return [form for choice in group[1].split("|") for form in expand(before + choice + after)]


def normal(form: str) -> str:
    """A form without case, punctuation and the names of its slots: what makes two phrasings equal."""
    form = re.sub(r"\{[^}]*\}", " 0 ", form.lower())
    form = re.sub(r"[^\w+*-]|_", " ", form.replace("'", ""))
    return " ".join(form.split())


def normal_forms(section: dict[str, list[str]], split: str) -> set[str]:
    return {normal(form) for pattern in section[split] for form in expand(pattern)}


def _all_forms(sections: dict[str, dict[str, list[str]]], names: Iterable[str], split: str) -> set[str]:
    return set().union(*(normal_forms(sections[name], split) for name in names))


def _cores(text: str) -> Iterator[str]:
    """What is left of a normal form without the training frames that may stand around it."""
    words = text.split()
    cuts = range(len(words) + 1)
    heads = [i for i in cuts if i == 0 or " ".join(words[:i]) in _BEFORE]
    tails = [i for i in cuts if i == len(words) or " ".join(words[i:]) in _AFTER]
    return (" ".join(words[i:j]) for i in heads for j in tails if i < j)


def trained_as(text: str) -> bool:
    """Whether a normal form is a training phrasing, with or without a training frame around it."""
    return any(core in _TRAINED for core in _cores(text))


FRESH = {
    file: {name: section[TRAIN] for name, section in _sections(_read(f"{file}.txt")).items()}
    for file in ("fresh", "fresh2")
}
_BEFORE = _all_forms(FRAMES, ("frame before", "frame before question"), TRAIN)
_AFTER = _all_forms(FRAMES, ("frame after",), TRAIN)
HELDOUT_FORMS = _all_forms(PHRASES, PHRASES, HELDOUT)
RESERVED = HELDOUT_FORMS | {normal(p) for file in FRESH.values() for patterns in file.values() for p in patterns}
# What the patterns for training could say, but training does not, with or without a frame.
BANNED = {core for form in RESERVED for core in _cores(form)}
_TRAINED = _all_forms(PHRASES, PHRASES, TRAIN) - BANNED


def evaluate_on(file: str) -> None:
    """Let the held-out split ask in the phrasings of this file from now on."""
    for name, patterns in FRESH[file].items():
        PHRASES[name][HELDOUT] = patterns

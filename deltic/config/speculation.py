"""How `--speculate` is written."""

from __future__ import annotations

from deltic.errors import ConfigError, show
from deltic.params import MAX_DRAFTS, Auto, Draft, Mtp, Ngram, Speculation

_FORMS = "auto, off, mtp[:N], ngram[:N] or draft:MODEL[:N]"


def parse_speculation(text: object) -> Speculation:
    """`auto`, `off`, `mtp:3`, `ngram:4`, `draft:MODEL:4`; the number of drafts may be left out. ConfigError says what
    is wrong."""
    if not isinstance(text, str):
        raise ConfigError(f"speculate must be {_FORMS}, not {show(text)}", "speculate")
    kind, _, rest = text.partition(":")
    if text == "auto":
        return Auto()
    if text == "off":
        return None
    if kind == "draft":
        return _draft(text, rest)
    if kind not in ("mtp", "ngram"):
        raise ConfigError(f"speculate must be {_FORMS}, not {show(text)}", "speculate")
    if ":" not in text:
        return Mtp() if kind == "mtp" else Ngram()
    return Mtp(_drafts(text, rest)) if kind == "mtp" else Ngram(_drafts(text, rest))


def _draft(text: str, rest: str) -> Draft:
    """The model's name may hold colons itself; a last part that is a number is the number of drafts."""
    model, colon, count = rest.rpartition(":")
    if not colon or not count.lstrip("-").isdigit():
        model, count = rest, ""
    if not model:
        raise ConfigError(f"speculate={text} names no model: write draft:MODEL or draft:MODEL:4", "speculate")
    return Draft(model, _drafts(text, count)) if count else Draft(model)


def _drafts(text: str, number: str) -> int:
    count = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
    if count == 0:
        raise ConfigError(f"speculate={text} drafts nothing: write speculate=off", "speculate")
    if not 1 <= count <= MAX_DRAFTS:
        raise ConfigError(f"speculate={text[:80]}: the number of drafts must be from 1 to {MAX_DRAFTS}, which is what "
                          "a sequence's replay ring has room for", "speculate")
    return count

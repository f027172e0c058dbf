"""`deltic doctor --deep`: runs models, and compares their answers with known ones."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic import __version__
from deltic.cli.inspect import weight_bytes
from deltic.cli.output import gib, peak_memory_mib
from deltic.config import PRESETS, available_memory
from deltic.errors import DelticError, ModelError
from deltic.params import SamplingParams

if TYPE_CHECKING:
    from deltic.cli.doctor import Finding
    from deltic.llm import LLM
    from deltic.loader.model_files import ModelFiles

TURNS: Final = (("What is the capital of France?", "Paris"), ("And of Italy?", "Rome"), ("And of Spain?", "Madrid"))
"""Questions of one conversation, each with a word that its answer must contain. Later questions refer to the first."""
_SAMPLING: Final = SamplingParams(temperature=0.0, max_tokens=256)
_REPORTED = ("python", "torch", "kernels", "operations", "threads", "memory")
_PATH = re.compile(r"(?<!\S)[~/][^\s,;]*")
_SHAPE = ("architecture", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
"""Config fields that identify the model with the published answer."""
_FLOAT32_SHARE = 1.5
"""Memory for a comparison in float32, as a multiple of the weights' bytes."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result for one model: facts about it and its answers, and the problems that were found."""

    name: str
    facts: Mapping[str, Any]
    faults: tuple[str, ...]

    @property
    def fact(self) -> str:
        turns = self.facts.get("conversation", [])
        golden = self.facts.get("golden", "no published answer to compare with")
        return f"{self.name}: {f'{len(turns)} turns, {golden}' if turns else 'was not run'}"


def models_in(place: str) -> list[str]:
    """Returns the model of this name, or all models in a directory: directories with a config.json, and GGUF files
    (only the first part of split files), without vision towers and importance matrices."""
    from deltic.loader.catalog import is_model
    from deltic.loader.model_files import only_gguf

    directory = Path(place).expanduser()
    if not directory.is_dir() or (directory / "config.json").is_file():
        return [place]
    found = [path for path in sorted(directory.iterdir()) if (path / "config.json").is_file()
             or (path.is_dir() and only_gguf(path)) or (path.is_file() and is_model(path.name))]
    if not found:
        raise ModelError(f"{directory} has no models: name a model, or a directory of models")
    return [str(path) for path in found]


def report_of(examined: Sequence[Examined], findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the report. It contains no path of the machine, and no text except the answers."""
    checks = {finding.name: f"{finding.state}: {_PATH.sub('...', finding.fact)}" for finding in findings
              if finding.name in _REPORTED}
    models = [{"name": one.name, **one.facts, "faults": one.faults} for one in examined]
    return {"deltic": __version__, "system": platform.platform(), "checks": checks, "models": models}


def examine(place: str) -> Examined:
    """Runs a model and returns the result."""
    from deltic.loader.model_files import open_model

    name = Path(place).name if Path(place).expanduser().exists() else place
    facts: dict[str, Any] = {}
    try:
        found = open_model(place, progress=False)
        facts |= _shape(found)
        return Examined(name, facts, tuple(_run(found, facts)))
    except (DelticError, OSError) as error:
        reason = str(error).replace(str(Path(place).expanduser().absolute().parent), "...")
        return Examined(name, facts, (f"it cannot be run: {reason}",))


def _shape(found: ModelFiles) -> dict[str, Any]:
    config = found.config
    sizes = sum(path.stat().st_size for path in found.weight_files(False))
    types = sorted({tensor.type.name for tensor in found.gguf.tensors.values()}) if found.gguf else [config.dtype]
    return {"architecture": config.architecture, "layers": config.num_hidden_layers, "hidden": config.hidden_size,
            "vocabulary": config.vocab_size, "file": "gguf" if found.gguf else "directory", "bytes": sizes,
            "types": types, "draft_head": bool(found.head_kinds()), "vision": found.vision is not None}


def _run(found: ModelFiles, facts: dict[str, Any]) -> Iterator[str]:
    """Adds the answers of a model to the facts, and yields the problems with them."""
    from deltic.llm import LLM

    preset = PRESETS[published_answer()["preset"]]
    published = all(getattr(found.config, name) == getattr(preset, name) for name in _SHAPE)
    exact = published and found.gguf is None and (
        weight_bytes(found.config, "float32") * _FLOAT32_SHARE < available_memory())
    started = time.perf_counter()
    with LLM(str(found.path), dtype="float32" if exact else "auto") as llm:
        facts |= {"device": llm.runtime.options.device, "dtype": "float32" if exact else found.config.dtype,
                  "load_seconds": round(time.perf_counter() - started, 2)}
        yield from _conversation(llm, facts)
        if published:
            yield from _compared(llm, facts, exact)
    facts["peak_memory"] = gib(int(peak_memory_mib() * (1 << 20)))


def _conversation(llm: LLM, facts: dict[str, Any]) -> Iterator[str]:
    messages: list[dict[str, str]] = []
    turns: list[dict[str, Any]] = []
    facts["conversation"] = turns
    for number, (question, word) in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        started = time.perf_counter()
        choice = llm.chat(messages, _SAMPLING, thinking=False).choices[0]
        seconds = max(1e-6, time.perf_counter() - started)
        messages.append({"role": "assistant", "content": choice.text})
        turns.append({"question": question, "answer": choice.text, "finish": choice.finish,
                      "prompt_tokens": choice.usage.prompt_tokens, "cached_tokens": choice.usage.cached_tokens,
                      "tokens_per_second": round(choice.usage.completion_tokens / seconds, 1)})
        if word not in choice.text:
            cause = "the weights or kernels may be wrong" if number == 1 else "the conversation may be lost"
            yield f"turn {number} does not know {word}: {choice.text[:80]!r}; {cause}"
        if choice.finish not in ("stop", "length"):
            yield f"turn {number} ended with {choice.finish} ({choice.error})"
    if not any(turn["cached_tokens"] for turn in turns[1:]):
        yield "no turn resumed from the cache"
    again = llm.chat(TURNS[0][0], _SAMPLING, thinking=False).text
    if again != turns[0]["answer"]:
        yield f"the same question got another answer: {again[:80]!r}"


def _compared(llm: LLM, facts: dict[str, Any], exact: bool) -> Iterator[str]:
    """Compares with the published greedy answer. exact: the model runs in the same way as for the published answer."""
    golden = published_answer()
    wanted = golden["ids"]
    choice = llm.generate([golden["prompt"]], SamplingParams(temperature=0.0, max_tokens=len(wanted)))[0].choices[0]
    equal = next((at for at, pair in enumerate(zip(choice.tokens, wanted)) if pair[0] != pair[1]),
                 min(len(choice.tokens), len(wanted)))
    complete = equal >= len(wanted) - 1  # the token that ends an answer may be missing
    facts["golden"] = f"{'all' if complete else equal} of {len(wanted)} published tokens are equal"
    facts["golden_answer"] = choice.text
    if exact and not complete:
        yield (f"token {equal} of the published answer differs ({golden['source']}): {choice.text[:120]!r}; please "
               "send the report")


def published_answer() -> Mapping[str, Any]:
    """Returns the prompt, the token ids and their source."""
    found: Mapping[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
    return found

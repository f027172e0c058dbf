"""`deltic doctor --deep`: loads models that the user has, and asks them; the result is a report to send back."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic import __version__
from deltic.cli.doctor.findings import Finding, gib
from deltic.config import PRESETS, available_memory
from deltic.errors import DelticError, ModelError

if TYPE_CHECKING:
    from deltic.llm import LLM, Choice
    from deltic.loader.model_files import ModelFiles

TURNS: Final = (("What is the capital of France?", "Paris"), ("And of Italy?", "Rome"), ("And of Spain?", "Madrid"))
"""Questions of one conversation, and a word of each answer; only who knows the first one can answer the others."""
_ANSWER = 256
_REPORTED = ("python", "torch", "processor", "kernels", "operations", "threads", "memory")
_PATH = re.compile(r"(?<!\S)[~/][^\s,;]*")
_FLOAT32_SHARE = 1.5
"""How many times the bytes of its float32 weights a model needs in memory, to be compared in float32."""


@dataclass(frozen=True, slots=True)
class Examined:
    """One model: what it is and did (`facts`), and what was wrong."""

    name: str
    facts: Mapping[str, Any]
    faults: tuple[str, ...]

    def finding(self) -> Finding:
        said = self.facts.get("conversation", [])
        golden = self.facts.get("golden", "no published answer to compare with")
        fact = f"{self.name}: {f'{len(said)} turns, {golden}' if said else 'was not run'}"
        return Finding.of("model", fact, [("problem", fault) for fault in self.faults])


def examine_all(place: str, progress: Callable[[str], None]) -> Iterator[Examined]:
    """The models that a name stands for: itself, or all that lie in a directory of models."""
    for path in models_in(place):
        progress(path)
        yield _examined(path)


def models_in(place: str) -> list[str]:
    """The model of this name, or the models in the directory: directories with a config.json, and GGUF files, of split
    ones the first part, but neither vision towers nor importance matrices."""
    from deltic.loader.model_files import only_gguf
    from deltic.loader.repository import is_model

    directory = Path(place).expanduser()
    if not directory.is_dir() or (directory / "config.json").is_file():
        return [place]
    found = [path for path in sorted(directory.iterdir()) if (path / "config.json").is_file()
             or (path.is_dir() and only_gguf(path)) or (path.is_file() and is_model(path.name))]
    if not found:
        raise ModelError(f"{directory} has no models: name a model, or a directory of models")
    return [str(path) for path in found]


def report(examined: list[Examined], findings: list[Finding]) -> str:
    """What a user may send back, as JSON: no path of the machine, and no text but the questions' answers."""
    checks = {finding.name: f"{finding.state}: {_PATH.sub('...', finding.fact)}" for finding in findings
              if finding.name in _REPORTED}
    models = [{"name": one.name, **one.facts, "faults": one.faults} for one in examined]
    return json.dumps({"deltic": __version__, "system": platform.platform(), "checks": checks, "models": models},
                      ensure_ascii=False, indent=1)


def _examined(place: str) -> Examined:
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
    """What is wrong with the answers of a model, which go to the facts."""
    from deltic.llm import LLM

    published = _is_published(found)
    dtype = "float32" if published and _has_room(found) else "auto"
    started = time.perf_counter()
    with LLM(str(found.path), dtype=dtype) as llm:
        facts |= {"device": llm.runtime.options.device, "dtype": found.config.dtype if dtype == "auto" else dtype,
                  "load_seconds": round(time.perf_counter() - started, 2)}
        yield from _conversation(llm, facts)
        if published:
            yield from _compared(llm, facts, exact=dtype == "float32" and found.gguf is None)
    facts["peak_memory"] = gib(_peak_memory())


def _conversation(llm: LLM, facts: dict[str, Any]) -> Iterator[str]:
    messages, said = list[dict[str, str]](), list[dict[str, Any]]()
    facts["conversation"] = said
    for number, (question, word) in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        choice, seconds = _timed(lambda: llm.chat(messages, _greedy(_ANSWER), thinking=False).choices[0])
        messages.append({"role": "assistant", "content": choice.text})
        said.append({"question": question, "answer": choice.text, "finish": choice.finish,
                     "prompt_tokens": choice.usage.prompt_tokens, "cached_tokens": choice.usage.cached_tokens,
                     "tokens_per_second": round(choice.usage.completion_tokens / seconds, 1)})
        if word not in choice.text:
            yield (f"turn {number} does not know {word}: {choice.text[:80]!r}; " + (
                "the weights or kernels may be read wrongly" if number == 1 else "the conversation may be lost"))
        if choice.finish not in ("stop", "length"):
            yield f"turn {number} ended with {choice.finish} ({choice.error})"
    if len(TURNS) > 1 and not any(turn["cached_tokens"] for turn in said[1:]):
        yield "no turn resumed from the cache"
    again = llm.chat(TURNS[0][0], _greedy(_ANSWER), thinking=False).text
    if again != said[0]["answer"]:
        yield f"the same question was answered otherwise: {again[:80]!r}"


def _compared(llm: LLM, facts: dict[str, Any], exact: bool) -> Iterator[str]:
    """Compare with the published greedy answer; exact: it was computed in this form."""
    golden = published_answer()
    wanted = golden["ids"]
    choice = llm.generate([golden["prompt"]], _greedy(len(wanted)))[0].choices[0]
    equal = next((at for at, pair in enumerate(zip(choice.tokens, wanted)) if pair[0] != pair[1]),
                 min(len(choice.tokens), len(wanted)))
    complete = equal >= len(wanted) - 1  # the token that ends an answer may not be among its tokens
    facts["golden"] = f"{'all' if complete else equal} of {len(wanted)} published tokens are equal"
    facts["golden_answer"] = choice.text
    if exact and not complete:
        yield (f"token {equal} of the published answer differs ({golden['source']}): {choice.text[:120]!r}; please "
               "send the report")


def _is_published(found: ModelFiles) -> bool:
    """Whether a model has the shape of the one with a published answer."""
    shape, config = PRESETS[published_answer()["preset"]], found.config
    names = ("architecture", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    return all(getattr(config, name) == getattr(shape, name) for name in names)


def published_answer() -> Mapping[str, Any]:
    """The prompt, the token ids and where they are from."""
    text = (files("deltic.cli.doctor") / "golden.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def _has_room(found: ModelFiles) -> bool:
    from deltic.cli.inspect import weight_bytes

    return found.gguf is None and weight_bytes(found.config, "float32") * _FLOAT32_SHARE < available_memory()


def _greedy(tokens: int) -> Any:
    from deltic.params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens)


def _timed(ask: Callable[[], Choice]) -> tuple[Choice, float]:
    started = time.perf_counter()
    return ask(), max(1e-6, time.perf_counter() - started)


def _peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


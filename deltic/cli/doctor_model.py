"""Checks of a model by `deltic doctor`: its room in memory, and with --deep, its answers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic import __version__
from deltic.cli.doctor_checks import Fault, Finding
from deltic.cli.machine import peak_memory_mib
from deltic.cli.output import gib
from deltic.cli.parser import as_typed
from deltic.config import PRESETS, EngineConfig, ModelConfig, available_memory
from deltic.errors import ConfigError, DelticError, ModelError

if TYPE_CHECKING:
    from deltic.embeddings.directory import StoredEncoder
    from deltic.llm import LLM, Choice
    from deltic.loader.model_files import ModelFiles

_SHORT_CONTEXT = 4096
_NO_ROOM = "there is no room for it: use a smaller model or more memory"


def check_model(args: argparse.Namespace) -> Finding | None:
    """Checks that MODEL exists and fits, by its config and the headers of its files."""
    if args.model is None:
        return None
    from deltic.embeddings.open import open_stored
    from deltic.loader.files import find_tensors
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import open_model

    try:
        place = _local(args.model)
        if place is None:
            return _not_downloaded(args.model)
        if encoder := open_stored(resolve(place)):
            return _encoder(encoder)
        found = open_model(place)
        if found.gguf is None:
            find_tensors(found.path)
    except ModelError as error:
        return Finding.of("model", as_typed(str(error)), [
            ("problem", "fix it as described, or name another; deltic run completes an interrupted download")])
    room, faults = _room(found.config)
    head, unusable = _head(found)
    return Finding.of("model", f"{room}{head}", faults + unusable)


def _local(name: str) -> str | Path | None:
    """The model on this machine, None if it would have to be downloaded."""
    from deltic.loader.catalog import REPOSITORY, repository_of, select

    found = REPOSITORY.fullmatch(repository_of(name))
    if os.path.exists(os.path.expanduser(name)) or not found:
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(found[1], local_files_only=True))
        names = [path.relative_to(place).as_posix() for path in place.rglob("*")]
        return place / select(found[1], names, found[2]).file if found[2] else place  # type: ignore[operator]
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{name} is not a valid name for the hub: {error}") from error


def _not_downloaded(name: str) -> Finding:
    from huggingface_hub import constants

    fault: Fault = ("warning", "deltic run, chat and serve will download it, if the hub has it")
    if constants.HF_HUB_OFFLINE:
        fault = ("problem", "unset HF_HUB_OFFLINE, or name a directory")
    return Finding.of("model", f"{name} is not a directory here and not downloaded", [fault])


def _encoder(encoder: StoredEncoder) -> Finding:
    """Checks the room for the weights as float32; quantized ones may take less."""
    from deltic.embeddings.weights import expected_tensors

    config, free = encoder.config, available_memory()
    weights = 4 * sum(prod(shape) for shape in expected_tensors(config).values())
    fact = (f"{config.family}, for vectors or scores (deltic embed, rerank), weights {gib(weights)} as float32, "
            f"{gib(free)} of memory free, texts up to {config.max_length:,} tokens")
    return Finding.of("model", fact, [("warning", _NO_ROOM)] if weights > free else [])


def _room(config: ModelConfig) -> tuple[str, list[Fault]]:
    """Checks the room for the weights and a cache."""
    import torch

    from deltic.cache.memory_plan import MemoryNeeds, split_memory
    from deltic.cache.tensors import page_bytes, slot_bytes
    from deltic.cli.inspect import weight_bytes

    dtype: torch.dtype = getattr(torch, config.dtype)
    weights, free = weight_bytes(config, config.dtype), available_memory()
    fact = f"{config.architecture}, weights {gib(weights)} as {config.dtype}, {gib(free)} of memory free"
    needs = MemoryNeeds(page_bytes(config, dtype), slot_bytes(config, dtype), config.max_position_embeddings,
                        EngineConfig().max_batch, row_bytes=4 * config.vocab_size)
    try:
        plan = split_memory(max(free - weights, 0) // 2, needs)
    except ConfigError:
        return fact, [("problem", _NO_ROOM)]
    short = plan.max_context < min(_SHORT_CONTEXT, config.max_position_embeddings)
    return (f"{fact}, context up to {plan.max_context:,} tokens",
            [("warning", "little room for conversations: free memory, or lower --max-batch")] if short else [])


def _head(model: ModelFiles) -> tuple[str, list[Fault]]:
    """The most common type of the draft head, and advice if the head cannot be used."""
    try:
        kinds = model.head_kinds()
    except ModelError as error:
        return "", [("warning", f"the draft head cannot be used, so that nothing is drafted: {as_typed(str(error))}; "
                                "fix it as described, or take it again with deltic mtp extract")]
    return f", draft head {max(kinds, key=kinds.__getitem__)}" if kinds else "", []


# --deep


TURNS: Final = (("What is the capital of France?", "Paris"), ("And of Italy?", "Rome"), ("And of Spain?", "Madrid"))
"""Questions of one conversation, and a word of each answer. Later questions refer to the first."""
_ANSWER = 256
_REPORTED = ("python", "torch", "processor", "kernels", "operations", "threads", "memory")
_PATH = re.compile(r"(?<!\S)[~/][^\s,;]*")
_FLOAT32_SHARE = 1.5
"""Memory for a comparison in float32, in bytes for each byte of the weights."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A model: facts about it and its answers, and what was wrong."""

    name: str
    facts: Mapping[str, Any]
    faults: tuple[str, ...]

    def finding(self) -> Finding:
        turns = self.facts.get("conversation", [])
        golden = self.facts.get("golden", "no published answer to compare with")
        fact = f"{self.name}: {f'{len(turns)} turns, {golden}' if turns else 'was not run'}"
        return Finding.of("model", fact, [("problem", fault) for fault in self.faults])


def examine_all(place: str, progress: Callable[[str], None]) -> Iterator[Examined]:
    """Examines a model, or all models in a directory. progress: called with the path of each."""
    for path in models_in(place):
        progress(path)
        yield _examined(path)


def models_in(place: str) -> list[str]:
    """The model of this name, or the models in a directory: directories with a config.json, and GGUF files, of split
    ones the first part, without vision towers and importance matrices."""
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


def report_of(examined: list[Examined], findings: list[Finding]) -> str:
    """The report as JSON. It has no path of the machine, and no text but the answers."""
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
    """Adds the answers of a model to the facts, and yields what is wrong with them."""
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
    facts["peak_memory"] = gib(int(peak_memory_mib() * (1 << 20)))


def _conversation(llm: LLM, facts: dict[str, Any]) -> Iterator[str]:
    messages: list[dict[str, str]] = []
    turns: list[dict[str, Any]] = []
    facts["conversation"] = turns
    for number, (question, word) in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        choice, seconds = _timed(lambda: llm.chat(messages, _greedy(_ANSWER), thinking=False).choices[0])
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
    again = llm.chat(TURNS[0][0], _greedy(_ANSWER), thinking=False).text
    if again != turns[0]["answer"]:
        yield f"the same question got another answer: {again[:80]!r}"


def _compared(llm: LLM, facts: dict[str, Any], exact: bool) -> Iterator[str]:
    """Compares with the published greedy answer. exact: the model runs as the published one did."""
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
    """True if the model has the shape of the one with a published answer."""
    shape, config = PRESETS[published_answer()["preset"]], found.config
    names = ("architecture", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    return all(getattr(config, name) == getattr(shape, name) for name in names)


def published_answer() -> Mapping[str, Any]:
    """The prompt, the token ids and their source."""
    text = Path(__file__).with_name("golden.json").read_text(encoding="utf-8")
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

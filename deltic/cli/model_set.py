"""Several models for one server, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltic.cli.models import open_llm
from deltic.cli.options import engine_options, without
from deltic.cli.parser import UsageError, text
from deltic.config import EngineConfig, parse_bytes
from deltic.errors import ConfigError

if TYPE_CHECKING:
    from deltic.llm import LLM
    from deltic.server.model_registry import ModelSet, ModelSource

_SHARE = 0.9  # of the memory that is free, for all models
_CACHES = 0.5  # of that, for their caches
_LONGEST = 1e9


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several models", "They are loaded when a request asks for them by name. All "
                                      "have the same options; --memory is for the cache of each.")
    group.add_argument("--model", action="append", dest="models", type=_named, default=[], metavar="NAME=MODEL",
                       help="one more model, and what clients call it; may be repeated. Requests that name none get "
                            "the first, which is MODEL if that is given")
    group.add_argument("--idle-unload", type=_seconds, metavar="SECONDS",
                       help="unload a model that nobody has used for so long; the next request loads it again")
    group.add_argument("--models-memory", type=_size, metavar="X",
                       help="memory for the weights and caches of all models that are loaded, such as 16GiB; auto: "
                            "nearly all that is free at start (default). For one that has no room those are unloaded "
                            "that nobody uses, the least recently used first")


def wanted(args: argparse.Namespace) -> bool:
    """Whether models are to be loaded on demand, rather than the only one at start."""
    return bool(args.models) or args.idle_unload is not None or args.models_memory is not None


def model_set(args: argparse.Namespace, prepare: Callable[[LLM], None]) -> ModelSet:
    """The models that the arguments name; all of them are there, but none is loaded. prepare: for one that is."""
    from deltic.engine.memory import card_share, free_memory
    from deltic.engine.options import settled
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import only_gguf
    from deltic.server.model_registry import ModelSet
    from deltic.server.served_model import short_name

    given = engine_options(args)
    config = settled(EngineConfig(**given))
    named: list[tuple[str, str | None]] = list(args.models)
    aliases: tuple[str, ...] = ()
    if args.model or not named:
        aliases = (args.model or "tiny", Path(args.model or "tiny").name)
        named.insert(0, (args.served_name or short_name(aliases[0]), args.model))
    elif args.served_name:
        raise UsageError("--served-name is the name of MODEL, which is not given: name models by --model NAME=MODEL")
    asked = args.models_memory
    share = config.gpu_memory_utilization
    memory = asked if isinstance(asked, int) else (
        card_share(config.device, share) if share else int(free_memory(config.device) * _SHARE))
    cache = config.memory_bytes or int(memory * _CACHES) // len(named)
    each = [_own(args, model) for _, model in named]
    paths = [resolve(own.model, own.revision) for own in each]
    files = [path.is_file() or only_gguf(path) is not None for path in paths]
    if config.packed_weights == "on" and any(files):  # which it is meant for
        each = [own if file else without(own, "packed_weights") for own, file in zip(each, files, strict=True)]
    sources = [_source(own, name, path, cache, prepare)
               for own, (name, _), path in zip(each, named, paths, strict=True)]
    if aliases:
        sources[0] = _with(sources[0], aliases)
    return ModelSet(tuple(sources), config.limits, memory, args.idle_unload)


def _own(args: argparse.Namespace, model: str | None) -> argparse.Namespace:
    """The arguments of one of the models."""
    revision = args.revision if model == args.model else None
    return argparse.Namespace(**{**vars(args), "model": model, "revision": revision})


def _source(args: argparse.Namespace, name: str, path: Path, cache: int,
            prepare: Callable[[LLM], None]) -> ModelSource:
    """args: those of this model. path: where it lies."""
    from deltic.server.model_registry import ModelSource

    return ModelSource(name, partial(_load, args, cache, prepare), stored_bytes(path) + cache)


def _with(source: ModelSource, aliases: tuple[str, ...]) -> ModelSource:
    from dataclasses import replace

    return replace(source, aliases=aliases)


def _load(args: argparse.Namespace, cache: int, prepare: Callable[[LLM], None]) -> LLM:
    llm = open_llm(without(args, "gpu_memory_utilization"), memory=str(cache))
    try:
        prepare(llm)
        with llm.worker.hold():
            llm.runtime.cache.prepare()
            llm.runtime.warm_up()
    except BaseException:
        llm.close()
        raise
    return llm


def stored_bytes(path: Path) -> int:
    """Of a model's weights on disk, which is about what they take in memory."""
    place, kinds = ((path, ("*.safetensors", "pytorch_model*.bin")) if path.is_dir() else
                    (path.parent, (path.name.replace("-00001-of", "-*-of"),)))
    return max(sum(file.stat().st_size for file in place.glob(kind)) for kind in kinds)


def _named(given: str) -> tuple[str, str]:
    """An argument type: a name, and what it stands for."""
    name, equals, model = text(given).partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"must be NAME=MODEL, not {given[:80]!r}; the only model of a server is named "
                                         "without --model")
    return name, model


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {given[:40]!r}")
    return seconds


def _size(given: str) -> int | str:
    try:
        return given if given == "auto" else parse_bytes(given, "models_memory")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

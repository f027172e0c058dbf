"""`deltic serve`: serves models over HTTP."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.options import open_llm
from deltic.cli.output import bytes_bar, note
from deltic.cli.parser import (
    UsageError,
    advanced,
    existing_file,
    json_file,
    path_name,
    plain_file,
    read_text,
    seconds,
    text,
    whole,
)
from deltic.config import EngineConfig, Limits, parse_bytes
from deltic.errors import ConfigError, DelticError

if TYPE_CHECKING:
    import socket
    from ssl import SSLContext

    from deltic.llm import LLM
    from deltic.server.embeddings import EmbeddingService
    from deltic.server.models import ModelSet
    from deltic.server.records import RequestLog

_KEY_VARIABLE = "DELTIC_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_ENCODER_OPTIONS = ("device", "threads", "cpu_level", "limits")
"""Engine options that --embedding-model shares with MODEL."""
_MEMORY_SHARE = 0.9  # share of the free memory, for all models
_CACHE_SHARE = 0.5  # share of that, for their caches


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve models over HTTP. Ctrl-C waits a moment for running answers, then ends."
    options.add_model(parser)
    parser.add_argument("--config", type=plain_file, metavar="FILE",
                        help="YAML or TOML (.toml) file of options by their names, such as port: 8000; model and "
                             "models name the served models. Options on the command line override it")
    _add_connections(parser)
    _add_access(parser)
    parser.add_argument("--served-name", type=text, metavar="NAME",
                        help="the model's name for clients (default: its own name)")
    parser.add_argument("--request-log", type=path_name, metavar="FILE",
                        help="append a JSON line per request without texts; - is stdout")
    parser.add_argument("--log-text", action="store_true",
                        help="with --request-log: add the text of prompts and answers, as the model sees them")
    parser.add_argument("--lenient", action="store_true",
                        help="do not refuse fields that would change the answer")
    parser.add_argument("--pin-prompt", action="append", type=_prompt_to_pin, default=[], metavar="FILE",
                        help="a system prompt to prefill at start and to keep: text, or JSON with "
                             "messages and tools as clients send them; may be repeated")
    parser.add_argument("--state-dir", type=path_name, metavar="DIR",
                        help="a directory in which clients may save what the model has read of a prompt, and from "
                             "which they load it (default: they may not)")
    parser.add_argument("--lora", action="append", type=_named_lora, default=[], metavar="NAME=PATH",
                        help="serve an adapter (LoRA), as the model NAME; may be repeated")
    parser.add_argument("--lora-dir", type=path_name, metavar="DIR",
                        help="a directory below which clients may name adapters (LoRA) to load in a running server "
                             "(default: they may load and unload none)")
    parser.add_argument("--task", choices=("auto", "chat", "embed", "rerank"), default="auto",
                        help="what MODEL is for; auto: an encoder for its vectors or scores, others for chat (default)")
    parser.add_argument("--embedding-model", action="append", type=text, default=[], metavar="MODEL",
                        help="an encoder to serve beside MODEL; may be repeated")
    _add_models(parser)
    _add_replicas(parser)
    options.add_template(parser)
    options.add_engine(parser)
    options.add_limits(parser)
    advanced(parser, "--unix-socket-mode", "--log-text", "--drain-seconds", "--state-dir", "--lora-dir",
             "--ray-address", "--prefill-replicas", "--strip-billing-header")


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=_replicas, metavar="N",
                        help="run N engines, on a Ray cluster; auto: as many as Ray Serve "
                             "finds right")
    parser.add_argument("--prefill-replicas", type=whole(1, 10_000), metavar="K",
                        help="experimental, with --replicas and --cache-dir: run K more engines that only compute long "
                             "prompts for the others")
    parser.add_argument("--ray-address", type=text, metavar="ADDRESS",
                        help="with --replicas: a running cluster, such as 10.0.0.1:6379 (default: a new one here)")


def _replicas(given: str) -> int | str:
    return given if given == "auto" else whole(1, 10_000)(given)


def _add_connections(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connections")
    group.add_argument("--host", help=f"address to listen on (default: {_HOST})")
    group.add_argument("--port", type=whole(0, 65535), metavar="N",
                       help=f"port to listen on; 0 takes a free one (default: {_PORT})")
    group.add_argument("--unix-socket", type=path_name, metavar="PATH",
                       help="listen on a Unix socket instead; an abandoned one is replaced")
    group.add_argument("--unix-socket-mode", type=_mode, default=0o600, metavar="MODE",
                       help="permissions of the Unix socket (default: 600)")
    group.add_argument("--tls-certificate", type=existing_file, metavar="FILE",
                       help="serve https with this PEM file: the certificate and its intermediate certificates")
    group.add_argument("--tls-key", type=existing_file, metavar="FILE",
                       help="the certificate's key, a PEM without passphrase")
    group.add_argument("--drain-seconds", type=seconds(), default=30.0, metavar="N",
                       help="seconds for running answers after Ctrl-C or SIGTERM; a second one ends them at once "
                            "(default: 30)")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument("--allowed-host", action="append", type=text, default=[], metavar="NAME",
                       help="a host name besides addresses that requests may have, *.NAME for all below one, * for "
                            "all; may be repeated (default: localhost; all if other machines can reach the server)")
    group.add_argument("--api-key", action="append", type=text, default=[], metavar="KEY",
                       help=f"a key that clients must send; may be repeated (default: ${_KEY_VARIABLE}, else none)")
    group.add_argument("--api-key-file", type=existing_file, metavar="FILE",
                       help="more keys: a line for each, the key and optionally its owner's name")
    group.add_argument("--share-prefix-cache", action="store_true",
                       help="share cached prefixes between the owners of API keys, who can then find out how the "
                            "prompts of others begin")
    group.add_argument("--cors-origin", action="append", type=text, default=[], metavar="URL",
                       help="origin of a web page that may use the server, * for all; may be repeated")


def run_serve(args: argparse.Namespace) -> int:
    """Binds the address and reads files before it loads the model, so that their errors show at once."""
    keys, tls = _keys(args), _tls(args)
    limits = options.engine_options(args).get("limits", Limits())
    if limits.max_running_per_key and not keys:
        raise UsageError("--max-running-per-key needs API keys: without them all clients are one")
    if args.replicas is not None:
        options.refuse({"--lora": args.lora, "--lora-dir": args.lora_dir},
                       "{} is not possible with --replicas: serve one engine, or merge the adapter (deltic convert "
                       "--lora)")
        from deltic.cli.cluster import serve_replicas

        return serve_replicas(args, keys, tls)
    options.refuse({"--ray-address": args.ray_address}, "{} needs --replicas: it names the cluster that they run on")
    options.refuse({"--prefill-replicas": args.prefill_replicas},
                   "{} needs --replicas: it adds replicas that compute prompts for those")
    with listener_of(args) as listener:
        settings = {"listener": listener, "tls": tls, "drain_seconds": args.drain_seconds, "lenient": args.lenient,
                    "cors_origins": args.cors_origin, "allowed_hosts": args.allowed_host, "api_keys": keys,
                    "share_prefix_cache": args.share_prefix_cache, "request_log": request_log_of(args)}
        host = args.host or _HOST
        if is_for_chat(args):
            from deltic.server.app import serve

            with encoders_of(args, for_chat=True) as encoders:
                serve(_chat_models(args), host, served_name=args.served_name, encoders=encoders,
                      state_dir=args.state_dir, lora_dir=args.lora_dir, **settings)
            return 0
        _refuse_chat_options(args)
        from deltic.server.app import serve_encoders

        with encoders_of(args, for_chat=False) as encoders:
            serve_encoders(encoders, limits, host, on_ready=lambda line: print(line, flush=True), **settings)
    return 0


def listener_of(args: argparse.Namespace) -> socket.socket:
    from deltic.server.run import listen, listen_unix

    if args.unix_socket is None:
        return listen(args.host or _HOST, _PORT if args.port is None else args.port)
    if args.host is not None or args.port is not None:
        raise UsageError("--unix-socket and --host or --port exclude each other: listen on one of them")
    return listen_unix(Path(args.unix_socket), args.unix_socket_mode)


def _tls(args: argparse.Namespace) -> SSLContext | None:
    if (args.tls_certificate is None) != (args.tls_key is None):
        raise UsageError("--tls-certificate and --tls-key belong together: give both")
    if args.tls_certificate is None:
        return None
    from deltic.server.run import tls_context

    return tls_context(args.tls_certificate, args.tls_key)


def _keys(args: argparse.Namespace) -> dict[str, str | None]:
    """Returns the API keys with the names of their owners."""
    given = args.api_key
    if not all(given):
        raise UsageError("--api-key is empty: leave it out for a server without keys")
    if args.api_key_file is None:
        key = os.environ.get("DELTIC_API_KEY")
        return dict.fromkeys(given or ([key] if key else []))
    from deltic.server.middleware import read_keys

    return {**dict.fromkeys(given), **read_keys(read_text(args.api_key_file), args.api_key_file.name)}


def request_log_of(args: argparse.Namespace) -> RequestLog | None:
    if args.request_log is None:
        if args.log_text:
            raise UsageError("--log-text needs a log: give --request-log FILE, too")
        return None
    from deltic.server.records import RequestLog

    return RequestLog(args.request_log, args.log_text)


def is_for_chat(args: argparse.Namespace) -> bool:
    """Returns True if MODEL is served for chat, False if it is an encoder."""
    several = loads_on_demand(args)
    if args.task != "auto" or not args.model:
        for_chat = args.task in ("auto", "chat")
        if not for_chat and (several or not args.model):
            raise UsageError(f"--task {args.task} serves one MODEL: name it, and no --model, --idle-unload or "
                             "--models-memory, which are for chat")
        return for_chat
    from deltic.embeddings.open import is_encoder
    from deltic.loader.hub import resolve

    encodes = is_encoder(resolve(args.model, args.revision))
    if encodes and several:
        raise UsageError(f"{args.model} is an encoder, and --model, --idle-unload and --models-memory are for chat: "
                         f"give it as --embedding-model {args.model}")
    return not encodes


def _refuse_chat_options(args: argparse.Namespace) -> None:
    options.refuse({"--pin-prompt": args.pin_prompt, "--state-dir": args.state_dir, "--lora": args.lora,
                    "--lora-dir": args.lora_dir, "--log-text": args.log_text,
                    "--chat-template": args.chat_template, "--history": args.history != "preserve",
                    "--strip-billing-header": args.strip_billing_header, "--thinking-budget": args.thinking_budget,
                    "--tool-call-parser": args.tool_call_parser != "auto", "--parse-special": args.parse_special},
                   f"{{}} is for chat, and {args.model} is served for vectors or scores alone: leave it out")


@contextmanager
def encoders_of(args: argparse.Namespace, for_chat: bool) -> Iterator[list[EmbeddingService]]:
    """Loads the encoders: MODEL, unless it is for chat, and the models of --embedding-model."""
    given = options.engine_options(args)
    shared = {name: value for name, value in given.items() if name in _ENCODER_OPTIONS}
    with ExitStack() as stack:
        services = []
        if not for_chat:
            own = _encoder(args.model, args.served_name, task=args.task, revision=args.revision, **given)
            services.append(stack.enter_context(own))
        services += [stack.enter_context(_encoder(model, None, **shared)) for model in args.embedding_model]
        names = [service.name for service in services]
        if len(set(names)) < len(names):
            raise UsageError(f"two models have one name ({', '.join(names)}): give --served-name, or rename a "
                             "directory")
        yield services


@contextmanager
def _encoder(model: str, name: str | None, **settings: Any) -> Iterator[EmbeddingService]:
    from deltic.embeddings.encoder import Encoder
    from deltic.server.embeddings import EmbeddingService

    path = Path(model)
    with bytes_bar("loading") as bar:
        encoder = Encoder(model, progress=bar.update, **settings)
    with encoder:
        yield EmbeddingService(name or (path.resolve().name if path.exists() else model), encoder)


def _chat_models(args: argparse.Namespace) -> LLM | ModelSet:
    if loads_on_demand(args):
        return _model_set(args)
    llm = open_llm(args)
    prepare_llm(args, llm)
    return llm


def prepare_llm(args: argparse.Namespace, llm: LLM) -> None:
    """Does slow preparations in advance, so that the first request does not wait for them."""
    for line in llm.runtime.memory.notes if llm.runtime.options.on_gpu else ():
        note(line)
    for path, prompt in args.pin_prompt:
        note(f"pinned {llm.pin(**prompt):,} tokens of {path}")
    with suppress(DelticError, ImportError):  # if this fails, the request that needs a grammar gets the error
        llm.chat_processor.grammars.warm()


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several models", "They are loaded when a request asks for them by name. All "
                                      "have the same options; --memory is for the cache of each.")
    group.add_argument("--model", action="append", dest="models", type=_named_model, default=[], metavar="NAME=MODEL",
                       help="one more model, and its name for clients; may be repeated. Requests without a name get "
                            "the first model, which is MODEL if it is given")
    group.add_argument("--idle-unload", type=seconds(1e-3, 10**9), metavar="SECONDS",
                       help="unload a model that was not used for so long; the next request loads it again")
    group.add_argument("--models-memory", type=_size, metavar="X",
                       help="memory of all loaded models, such as 16GiB; auto: nearly all that is free (default). "
                            "Beyond it idle models are unloaded, the least recently used first")


def loads_on_demand(args: argparse.Namespace) -> bool:
    return bool(args.models) or args.idle_unload is not None or args.models_memory is not None


def _model_set(args: argparse.Namespace) -> ModelSet:
    """Returns the models that the arguments name, without loading them."""
    options.refuse({"--lora": args.lora, "--lora-dir": args.lora_dir},
                   "{} is for one model: leave out --model, --idle-unload and --models-memory")
    from deltic.engine.arguments import settled
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import only_gguf
    from deltic.server.generation import short_name
    from deltic.server.models import ModelSet, ModelSource

    config = settled(EngineConfig(**options.engine_options(args)))
    models: list[tuple[str, str | None]] = list(args.models)
    aliases: tuple[str, ...] = ()
    if args.model or not models:
        model = args.model or "tiny"
        aliases = (model, Path(model).name)
        models.insert(0, (args.served_name or short_name(model), args.model))
    elif args.served_name:
        raise UsageError("--served-name is the name of MODEL, which is not given: name models by --model NAME=MODEL")
    memory = _models_memory(args, config)
    cache = config.memory_bytes or int(memory * _CACHE_SHARE) // len(models)
    paths = [resolve(model, args.revision if model == args.model else None) for _, model in models]
    is_gguf = [path.is_file() or only_gguf(path) is not None for path in paths]
    sources: list[ModelSource] = []
    for (name, model), path, gguf in zip(models, paths, is_gguf, strict=True):
        own = argparse.Namespace(**{**vars(args), "model": model})
        own.revision = args.revision if model == args.model else None
        if config.packed_weights == "on" and any(is_gguf) and not gguf:
            own = options.without(own, "packed_weights")  # this option is meant for the GGUF files among the models
        load = partial(_load, own, cache)
        sources.append(ModelSource(name, load, stored_bytes(path) + cache, () if sources else aliases))
    return ModelSet(tuple(sources), config.limits, memory, args.idle_unload)


def _models_memory(args: argparse.Namespace, config: EngineConfig) -> int:
    from deltic.runner.memory import card_room, free_memory

    if isinstance(args.models_memory, int):
        return args.models_memory
    if config.gpu_memory or config.gpu_memory_utilization:
        return card_room(config)
    return int(free_memory(config.device) * _MEMORY_SHARE)


def _load(args: argparse.Namespace, cache: int) -> LLM:
    own = options.without(options.without(args, "gpu_memory"), "gpu_memory_utilization")
    llm = open_llm(own, memory=str(cache))
    try:
        prepare_llm(args, llm)
        llm.warm_up()
    except BaseException:
        llm.close()
        raise
    return llm


def stored_bytes(path: Path) -> int:
    """Returns the bytes of a model's weights on disk, as an estimate of their bytes in memory."""
    if path.is_dir():
        folder, patterns = path, ["*.safetensors", "pytorch_model*.bin"]
    else:
        folder, patterns = path.parent, [path.name.replace("-00001-of", "-*-of")]
    return max(sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in patterns)


def _mode(given: str) -> int:
    """Argument type for the mode of a file, as chmod takes it."""
    if not re.fullmatch("0?[0-7]{3}", given):
        raise UsageError(f"must be three octal digits such as 660, not {given[:40]!r}")
    return int(given, 8)


def _named_model(given: str) -> tuple[str, str]:
    """Argument type for NAME=MODEL."""
    name, equals, model = text(given).partition("=")
    if not (name and equals and model):
        raise UsageError(f"must be NAME=MODEL, not {given[:80]!r}; the only model of a server is named "
                                         "without --model")
    return name, model


def _named_lora(given: str) -> tuple[str, str]:
    """Argument type for NAME=PATH."""
    name, equals, path = text(given).partition("=")
    if not (name and equals and path):
        raise UsageError(f"must be NAME=PATH, not {given[:80]!r}")
    return name, path


def _size(given: str) -> int | str:
    try:
        return given if given == "auto" else parse_bytes(given, "models_memory")
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _prompt_to_pin(given: str) -> tuple[Path, dict[str, Any]]:
    """Argument type for a file with a system message, or with a request's system messages and tools, for LLM.pin."""
    path = existing_file(given)
    if path.suffix != ".json":
        return path, {"messages": [{"role": "system", "content": read_text(path)}]}
    body = json_file(given)
    messages = body.get("messages", []) if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{given} must be JSON of the form {{"messages": [...], "tools": [...]}}')
    system = [message for message in messages if message.get("role") in ("system", "developer")]
    return path, {"messages": system, "tools": body.get("tools"), "variables": body.get("chat_template_kwargs")}

"""`deltic serve`: the model over HTTP."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import model_set, options
from deltic.cli.models import check_source, open_llm
from deltic.cli.parser import (
    UsageError,
    advanced,
    existing_file,
    json_file,
    path_name,
    plain_file,
    read_text,
    text,
    whole,
)
from deltic.cli.terminal import loading_bar
from deltic.errors import DelticError

if TYPE_CHECKING:
    import socket
    from ssl import SSLContext

    from deltic.llm import LLM
    from deltic.server.embeddings import EmbeddingService
    from deltic.server.models import ModelSet
    from deltic.server.request_log import RequestLog

HELP = "Serve the model over HTTP. Ctrl-C ends, after running answers had a moment."

_KEY_VARIABLE = "DELTIC_API_KEY"
_SHARED = ("device", "threads", "cpu_level", "limits")
"""Options that models beside the first one have too."""
_HOST, _PORT = "127.0.0.1", 8000
_LONGEST = 1_000_000


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--config", type=plain_file, metavar="FILE",
                        help="YAML or TOML (.toml) file of options by their names, such as port: 8000; model and "
                             "models name the served models. Options on the command line override it")
    parser.add_argument("--host", help=f"address to listen on (default: {_HOST})")
    parser.add_argument("--port", type=whole(0, 65535), metavar="N",
                        help=f"port to listen on; 0 takes a free one (default: {_PORT})")
    parser.add_argument("--unix-socket", type=path_name, metavar="PATH",
                        help="listen on a Unix socket instead; one that was left behind there is replaced")
    parser.add_argument("--unix-socket-mode", type=_mode, default=0o600, metavar="MODE",
                        help="who may connect to it: those who may write to a file of this mode (default: 600)")
    parser.add_argument("--tls-certificate", type=existing_file, metavar="FILE",
                        help="serve https with this PEM file: the certificate, and those between it and its root")
    parser.add_argument("--tls-key", type=existing_file, metavar="FILE",
                        help="the certificate's private key, as PEM without a passphrase")
    parser.add_argument("--allowed-host", action="append", type=text, default=[], metavar="NAME",
                        help="a name by which clients may ask for the server, *.NAME for all below one, * for all; may "
                             "be repeated (default: localhost, or all if other machines can reach the server). "
                             "Addresses are always allowed")
    parser.add_argument("--served-name", type=text, metavar="NAME",
                        help="what clients call the model (default: its own name)")
    parser.add_argument("--api-key", action="append", type=text, default=[], metavar="KEY",
                        help=f"what clients must send; may be repeated (default: ${_KEY_VARIABLE}, else nothing)")
    parser.add_argument("--api-key-file", type=existing_file, metavar="FILE",
                        help="more keys: a line for each, the key and then perhaps its owner's name")
    parser.add_argument("--share-prefix-cache", action="store_true",
                        help="share cached prefixes between the owners of API keys: saves work, and lets one owner "
                             "find out how another's prompts begin")
    parser.add_argument("--request-log", type=path_name, metavar="FILE",
                        help="append a line of JSON for each request, without its text; - is standard output")
    parser.add_argument("--log-text", action="store_true",
                        help="with --request-log: also what was asked and answered, as the model reads and writes it")
    parser.add_argument("--drain-seconds", type=_seconds, default=30.0, metavar="N",
                        help="seconds that running answers have when the server is asked to end; a second Ctrl-C or "
                             "SIGTERM ends them at once (default: 30)")
    parser.add_argument("--cors-origin", action="append", type=text, default=[], metavar="URL",
                        help="a web page's origin that may use the server, * for all; may be repeated")
    parser.add_argument("--lenient", action="store_true",
                        help="ignore fields of requests that would change the answer or look misspelt, instead of "
                             "refusing them")
    parser.add_argument("--pin-prompt", action="append", type=_opening, default=[], metavar="FILE",
                        help="a system prompt to read at start and to keep: text, or JSON with messages and tools as "
                             "clients send them; may be repeated")
    parser.add_argument("--task", choices=("auto", "chat", "embed", "rerank"), default="auto",
                        help="what the model is served for; auto: an encoder for its vectors or scores, others for "
                             "chat (default)")
    parser.add_argument("--embedding-model", action="append", type=text, default=[], metavar="MODEL",
                        help="a model of vectors or scores to serve beside it; may be repeated")
    model_set.add(parser)
    options.add_thinking(parser)
    options.add_template(parser)
    options.add_engine(parser)
    options.add_limits(parser)
    options.add_random(parser, hidden=True)
    advanced(parser, "--unix-socket-mode", "--log-text", "--drain-seconds", "--strip-billing-header")


def run(args: argparse.Namespace) -> int:
    """The address is claimed, and files are read, before the model is loaded, so that what is wrong shows at once."""
    options.refuse_random(args)
    check_source(args)
    keys, tls, limits = _keys(args), _tls(args), options.engine_options(args).get("limits")
    if limits and limits.max_running_per_key and not keys:
        raise UsageError("--max-running-per-key needs API keys: without them all clients are one")
    with _listener(args) as listener:
        door = {"listener": listener, "tls": tls, "drain_seconds": args.drain_seconds, "lenient": args.lenient,
                "cors_origins": args.cors_origin, "allowed_hosts": args.allowed_host, "api_keys": keys,
                "share_prefix_cache": args.share_prefix_cache,
                "request_log": _request_log(args)}
        chats = _chats(args)
        if not chats:
            _refuse_chat_options(args)
        with _encoders(args, chats) as encoders:
            if not chats:
                return _serve_encoders(args, encoders, door)
            from deltic.server.app import serve

            serve(_chat_models(args), args.host or _HOST, served_name=args.served_name, encoders=encoders, **door)
    return 0


def _chats(args: argparse.Namespace) -> bool:
    """Whether the model is served for chat."""
    several = model_set.wanted(args)
    if args.task != "auto" or args.random or not args.model:
        chats = args.task in ("auto", "chat")
        if not chats and (several or not args.model):
            raise UsageError(f"--task {args.task} serves one MODEL: name it, and no --model, --idle-unload or "
                             "--models-memory, which are for chat")
        return chats
    from deltic.embeddings.open import is_encoder
    from deltic.loader.hub import resolve

    encodes = is_encoder(resolve(args.model, args.revision))
    if encodes and several:
        raise UsageError(f"{args.model} is an encoder, and --model, --idle-unload and --models-memory are for chat: "
                         f"give it as --embedding-model {args.model}")
    return not encodes


def _refuse_chat_options(args: argparse.Namespace) -> None:
    """They have no meaning for vectors and scores."""
    given = {"--pin-prompt": args.pin_prompt, "--log-text": args.log_text, "--chat-template": args.chat_template,
             "--history": args.history != "preserve", "--strip-billing-header": args.strip_billing_header,
             "--thinking-budget": args.thinking_budget is not None,
             "--tool-call-parser": args.tool_call_parser != "auto", "--parse-special": args.parse_special}
    if useless := [name for name, is_given in given.items() if is_given]:
        raise UsageError(f"{useless[0]} is for chat, and {args.model} is served for vectors or scores alone: leave it "
                         "out")


def _chat_models(args: argparse.Namespace) -> LLM | ModelSet:
    prepare = partial(_prepare, args)
    if model_set.wanted(args):
        return model_set.model_set(args, prepare)
    llm = open_llm(args)
    prepare(llm)
    return llm


def _prepare(args: argparse.Namespace, llm: LLM) -> None:
    """What the first request of a model should not have to wait for."""
    for path, opening in args.pin_prompt:
        print(f"pinned {llm.pin(**opening):,} tokens of {path}", file=sys.stderr)
    with suppress(DelticError, ImportError):  # who asks for what cannot be had is told so
        llm.chat_processor.grammars.warm()


@contextmanager
def _encoders(args: argparse.Namespace, chats: bool) -> Iterator[list[EmbeddingService]]:
    """The models of vectors and scores, loaded: those beside a chat model, or MODEL itself and those beside it."""
    given = options.engine_options(args)
    shared = {name: value for name, value in given.items() if name in _SHARED}
    with ExitStack() as stack:
        services = [] if chats else [stack.enter_context(
            _encoder(args.model, args.served_name, task=args.task, revision=args.revision, **given))]
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

    bar, path = loading_bar(), Path(model)
    try:
        encoder = Encoder(model, progress=bar.update, **settings)
    finally:
        bar.close()
    with encoder:
        yield EmbeddingService(name or (path.resolve().name if path.exists() else model), encoder)


def _serve_encoders(args: argparse.Namespace, services: list[EmbeddingService], door: dict[str, Any]) -> int:
    from deltic.config import Limits
    from deltic.server.app import serve_encoders

    limits = options.engine_options(args).get("limits", Limits())
    serve_encoders(services, limits, args.host or _HOST, on_ready=lambda line: print(line, flush=True), **door)
    return 0


def _listener(args: argparse.Namespace) -> socket.socket:
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
    """The names of those to whom the keys belong, by key."""
    given = args.api_key
    if not all(given):
        raise UsageError("--api-key is empty: leave it out for a server that everybody may use")
    if args.api_key_file is None:
        given = given or [key for key in [os.environ.get(_KEY_VARIABLE)] if key]
    owners = dict[str, str | None].fromkeys(given)
    if args.api_key_file is not None:
        from deltic.server.middleware import read_keys

        owners |= read_keys(_content(args.api_key_file), args.api_key_file.name)
    return owners


def _request_log(args: argparse.Namespace) -> RequestLog | None:
    if args.request_log is None:
        if args.log_text:
            raise UsageError("--log-text says what lines of a log have: give --request-log FILE, too")
        return None
    from deltic.server.request_log import RequestLog

    return RequestLog(args.request_log, args.log_text)


def _content(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _mode(given: str) -> int:
    """An argument type: a file's mode, as chmod takes it."""
    if not re.fullmatch("0?[0-7]{3}", given):
        raise argparse.ArgumentTypeError(f"must be three octal digits such as 660, not {given[:40]!r}")
    return int(given, 8)


def _seconds(given: str) -> float:
    """An argument type: so many seconds, perhaps none."""
    with suppress(ValueError):
        if 0 <= (seconds := float(given)) <= _LONGEST:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to {_LONGEST}, not {given[:40]!r}")


def _opening(given: str) -> tuple[Path, dict[str, Any]]:
    """An argument type: a file, and what it gives to pin: its text as the system message, or the system messages and
    tools of a request."""
    path = existing_file(given)
    if path.suffix != ".json":
        return path, {"messages": [{"role": "system", "content": _text_of(path)}]}
    body = json_file(given)
    messages = body.get("messages", []) if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise argparse.ArgumentTypeError(f'{given} must be JSON of the form {{"messages": [...], "tools": [...]}}')
    system = [message for message in messages if message.get("role") in ("system", "developer")]
    return path, {"messages": system, "tools": body.get("tools"), "variables": body.get("chat_template_kwargs")}


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read as UTF-8 text: {error}") from error

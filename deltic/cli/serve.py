"""`deltic serve`: the model over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from deltic.cli import options
from deltic.cli.models import check_source, open_llm
from deltic.cli.parser import existing_file, json_file, read_text, text, whole
from deltic.errors import DelticError

HELP = "Serve the model over HTTP. Ctrl-C ends, after running answers had a moment."

_KEY_VARIABLE = "DELTIC_API_KEY"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535), default=8000, metavar="N",
                        help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--served-name", type=text, metavar="NAME",
                        help="what clients call the model (default: its own name)")
    parser.add_argument("--api-key", type=text, metavar="KEY",
                        help=f"what clients must send (default: ${_KEY_VARIABLE}, else nothing)")
    parser.add_argument("--cors-origin", action="append", type=text, default=[], metavar="URL",
                        help="a web page's origin that may use the server, * for all; may be repeated")
    parser.add_argument("--lenient", action="store_true",
                        help="ignore fields of requests that nobody knows, rather than refusing them")
    parser.add_argument("--pin-prompt", action="append", type=_opening, default=[], metavar="FILE",
                        help="a system prompt to read at start and to keep: text, or JSON with messages and tools as "
                             "clients send them; may be repeated")
    options.add_template(parser)
    options.add_engine(parser)
    options.add_limits(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    """The address is claimed before the model is loaded, so that a used port shows at once."""
    options.refuse_random(args)
    check_source(args)
    options.engine_options(args)
    from deltic.server.listen import listen

    with listen(args.host, args.port) as listener:
        llm = open_llm(args)
        for path, opening in args.pin_prompt:
            print(f"pinned {llm.pin(**opening):,} tokens of {path}", file=sys.stderr)
        with suppress(DelticError, ImportError):  # who asks for what cannot be had is told so
            llm.chat_processor.grammars.warm()
        from deltic.server.app import serve

        serve(llm, listener=listener, served_name=args.served_name, cors_origins=args.cors_origin, lenient=args.lenient,
              api_key=args.api_key or os.environ.get(_KEY_VARIABLE) or None)
    return 0


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

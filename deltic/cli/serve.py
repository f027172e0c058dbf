"""`deltic serve`: the model over HTTP."""

from __future__ import annotations

import argparse
import os

from deltic.cli import options
from deltic.cli.models import check_source, open_llm
from deltic.cli.parser import text, whole

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
    options.add_template(parser)
    options.add_engine(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    """The address is claimed before the model is loaded, so that a used port shows at once."""
    options.refuse_random(args)
    check_source(args)
    options.engine_options(args)
    from deltic.server.listen import listen

    with listen(args.host, args.port) as listener:
        llm = open_llm(args)
        from deltic.server.app import serve

        serve(llm, listener=listener, served_name=args.served_name, cors_origins=args.cors_origin,
              api_key=args.api_key or os.environ.get(_KEY_VARIABLE) or None)
    return 0

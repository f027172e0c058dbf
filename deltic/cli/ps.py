"""`deltic ps`: which models a running server has."""

from __future__ import annotations

import argparse
import json
import os

from deltic.cli.clients import KEY_VARIABLE
from deltic.cli.connect import add_server, models_of
from deltic.cli.table import grid

HELP = "List the models of a running server, and whether they are loaded."


def add(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    found = models_of(args.url, args.api_key or os.environ.get(KEY_VARIABLE) or "")
    rows = [{"model": entry["id"], "loaded": entry.get("loaded", True), "context": entry.get("max_model_len")}
            for entry in found]
    if args.json:
        print(json.dumps({"url": args.url, "models": rows}))
    else:
        print(grid([{"model": row["model"], "loaded": "yes" if row["loaded"] else "no",
                     "context": f"{row['context']:,}" if row["context"] else "-"} for row in rows]))
    return 0

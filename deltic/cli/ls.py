"""`deltic ls`: which models were downloaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from deltic.cli.table import date, grid

HELP = "List the models that were downloaded from the Hugging Face hub, last used first."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from deltic.loader.downloads import downloads, place
    from deltic.loader.writing import size_of

    found = downloads()
    if args.json:
        print(json.dumps({"directory": str(place()), "models": [asdict(model) for model in found]}, default=str))
    elif not found:
        print(f"nothing was downloaded to {place()}")
    else:
        print(grid([{"model": model.name, "size": size_of(model.bytes), "last_used": date(model.used),
                     "revisions": ", ".join(revision.name for revision in model.revisions)} for model in found]))
    return 0

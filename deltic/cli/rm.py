"""`deltic rm`: delete a downloaded model."""

from __future__ import annotations

import argparse

from deltic.cli.parser import UsageError, text
from deltic.cli.terminal import confirmed

HELP = "Delete a model that was downloaded from the Hugging Face hub. A program that has loaded it goes on."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=text, help="its name, as deltic ls shows it")
    parser.add_argument("--revision", metavar="REV", help="only this branch, tag or commit (default: all)")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    from deltic.loader.catalog import repository_of
    from deltic.loader.downloads import delete, downloads, place
    from deltic.loader.writing import size_of

    model = next((model for model in downloads() if model.name == repository_of(args.model)), None)
    if model is None:
        raise UsageError(f"{args.model} is not among the models in {place()}, which deltic ls lists")
    doomed = [revision for revision in model.revisions if args.revision is None or revision.is_called(args.revision)]
    if not doomed:
        known = ", ".join(revision.name for revision in model.revisions)
        raise UsageError(f"{args.model} has no revision {args.revision!r} here, but {known}")
    revisions = "" if len(doomed) == len(model.revisions) else f" at {args.revision}"
    if not args.yes and not confirmed(f"Delete {args.model}{revisions} ({size_of(model.bytes)})? [y/N] "):
        print("nothing was deleted")
        return 1
    print(f"deleted {args.model}{revisions}: {size_of(delete(doomed))} are free again")
    return 0

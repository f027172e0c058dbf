"""`deltic pull`: download a model, without loading it."""

from __future__ import annotations

import argparse
import sys

from deltic.cli.parser import UsageError, text

HELP = "Download a model from the Hugging Face hub, or what is missing of it. Every file is compared with its checksum."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=text,
                        help="a Hugging Face name such as Qwen/Qwen3.5-0.8B, or with one of its GGUF files, such as "
                             "unsloth/Qwen3.5-0.8B-GGUF:Q8_0")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace) -> int:
    from deltic.loader.downloads import is_below, place
    from deltic.loader.hub import resolve

    path = resolve(args.model, args.revision, progress=sys.stderr.isatty())
    if not is_below(place(), path):
        raise UsageError(f"{args.model} is on this machine, at {path}: there is nothing to download")
    print(path)
    return 0

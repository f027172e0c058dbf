"""`deltic rerank`: the texts in a file, in order of how well they fit a query."""

from __future__ import annotations

import argparse
import json

from deltic.cli.parser import text, whole
from deltic.cli.texts import add_source, open_encoder, open_lines, read_texts

HELP = "The texts in a file, best first by how well they fit a query, each behind its score."


def add(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--query", type=text, required=True, metavar="TEXT", help="what is looked for")
    parser.add_argument("--top", type=whole(1), metavar="N", help="show the best N (default: all)")
    parser.add_argument("--instruction", type=text, metavar="TEXT",
                        help="what a reranker that is a decoder is told to look for (default: what Qwen3-Reranker was "
                             "trained with)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each text: index, score, text")


def run(args: argparse.Namespace) -> int:
    with open_lines(args.file) as file:
        documents = list(read_texts(file, args.jsonl))
    with open_encoder(args, "auto", instruction=args.instruction) as encoder:
        for each in encoder.rank(args.query, documents, top_n=args.top, truncate=args.truncate):
            found = documents[each.index]
            print(json.dumps({"index": each.index, "score": each.score, "text": found}, ensure_ascii=False)
                  if args.json else f"{each.score:.6f}\t{found}")
    return 0

"""`deltic eval`: the perplexity of a text under a model."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from deltic.cli import options
from deltic.cli.options import open_llm
from deltic.cli.output import print_facts, tokens_bar
from deltic.cli.parser import UsageError, decoded, open_lines, read_all, text, whole
from deltic.errors import show

if TYPE_CHECKING:
    from deltic.llm import LLM
    from deltic.params import TokenLogprobs

_WINDOW = 2048


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = "The perplexity of a text file: how well the model predicts it. Lower is better."
    options.add_model(parser, required=True)
    parser.add_argument("file", metavar="FILE", type=text, help="the text, in UTF-8; - reads standard input")
    parser.add_argument("--window", type=whole(2), metavar="N",
                        help="tokens that the model reads together; a window begins with the tokens that the tokenizer "
                             f"puts before a raw prompt, such as bos (default: {_WINDOW}, or the context)")
    parser.add_argument("--stride", type=whole(1), metavar="N",
                        help="tokens by which windows advance: a small stride gives each scored token more context and "
                             "takes longer (default: the window less one)")
    options.add_json(parser)
    options.add_engine(parser)


def run_eval(args: argparse.Namespace) -> int:
    with open_lines(args.file) as file:
        content = decoded(read_all(file, show(args.file)), show(args.file))
    with open_llm(args) as llm, tokens_bar("reading") as bar:
        started = time.perf_counter()
        found = perplexity(llm, content, args.window, args.stride, bar.update)
        seconds = time.perf_counter() - started
        model = llm.runtime.name
    if args.json:
        print_facts({"model": model, "file": args.file, "window": found.window, "stride": found.stride,
                     "tokens": found.tokens, "scored_tokens": found.scored, "scored_bytes": found.nbytes,
                     "log_likelihood": found.log_likelihood, "perplexity": found.perplexity,
                     "bits_per_byte": found.bits_per_byte, "seconds": round(seconds, 3)}, True)
    else:
        print_facts({"perplexity": f"{found.perplexity:.4f}", "bits_per_byte": f"{found.bits_per_byte:.4f}",
                     "tokens": f"{found.scored:,} scored of {found.tokens:,}, windows of {found.window:,}, stride "
                               f"{found.stride:,}",
                     "time": f"{seconds:.1f} s"}, False)
    return 0


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Measures how well a model predicts a text.

    window, stride: sizes used for reading, in tokens. scored, nbytes: tokens and bytes behind `log_likelihood`.
    """

    window: int
    stride: int
    tokens: int
    scored: int
    nbytes: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / self.scored)

    @property
    def bits_per_byte(self) -> float:
        return -self.log_likelihood / math.log(2) / self.nbytes


def perplexity(llm: LLM, content: str, window: int | None = None, stride: int | None = None,
               progress: Callable[[int, int], None] = lambda done, total: None) -> Perplexity:
    """Scores every token of the text once; the first only if the tokenizer puts a token before it.

    progress: called with the numbers of scored and of all tokens. Raises UsageError for a window beyond the context.
    """
    from deltic.params import SamplingParams

    tokenizer = llm.chat_processor.tokenizer
    ids, prefix = tokenizer.encode(content), tokenizer.around[0]
    size, step = _window_and_stride(llm.engine.max_context - 1, len(prefix), window, stride)
    first = 0 if prefix else 1
    if len(ids) <= first:
        raise UsageError("the text has too few tokens to be scored")
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    done, total = 0, 0.0
    windows = _windows(len(ids), first, size - len(prefix), step)
    while group := list(islice(windows, llm.runtime.memory.max_batch)):
        prompts = [[*prefix, *ids[start:end]] for start, _, end in group]
        for (_, fresh, end), output in zip(group, llm.generate(prompts, scoring), strict=True):
            count = end - fresh
            scores: Sequence[TokenLogprobs] = output.sound().choices[0].prompt_logprobs or ()
            total += math.fsum(score.token for score in scores[len(scores) - count:])
            done += count
        progress(done, len(ids) - first)
    unscored = sum(len(tokenizer.token_bytes(token)) for token in ids[:first])
    return Perplexity(size, step, len(ids), done, len(content.encode()) - unscored, total)


def _window_and_stride(room: int, prefix: int, window: int | None, stride: int | None) -> tuple[int, int]:
    """Returns window and stride in tokens. room: tokens of the context. prefix: tokens before a raw prompt."""
    if window is not None and window > room:
        raise UsageError(f"--window {window} is more than the {room} tokens of the context: ask for fewer, or raise "
                         "--max-context or --memory")
    size = min(_WINDOW, room) if window is None else window
    most = size - prefix - 1
    step = max(1, most) if stride is None else stride
    if step > most:
        raise UsageError(f"--stride {step} must be less than --window {size}, so that each scored token has one "
                         f"before it{' besides the bos token' if prefix else ''}: ask for at most {most}, or raise "
                         "--window")
    return size, step


def _windows(count: int, first: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields each window's start, its first token to score, and its end."""
    fresh, end = first, min(size, count)
    while fresh < count:
        yield max(0, end - size), fresh, end
        fresh, end = end, min(end + stride, count)

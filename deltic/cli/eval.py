"""`deltic eval`: the perplexity of a text under a model."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from deltic.cli import options
from deltic.cli.models import open_llm
from deltic.cli.parser import MOST_BYTES, UsageError, text, whole
from deltic.cli.terminal import reading_bar
from deltic.cli.texts import open_lines
from deltic.errors import show

if TYPE_CHECKING:
    from deltic.llm import LLM
    from deltic.params import TokenLogprobs

HELP = "The perplexity of a text file: how well the model predicts it. Lower is better."

_WINDOW = 2048


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny, the "
                             "embedded demo model")
    parser.add_argument("file", metavar="FILE", type=text, help="the text, in UTF-8; - reads standard input")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--window", type=whole(2), metavar="N",
                        help=f"tokens that are read at once; each begins with what the model's tokenizer puts before a "
                             f"raw prompt, such as a bos token (default: {_WINDOW}, or what the context holds)")
    parser.add_argument("--stride", type=whole(1), metavar="N",
                        help="tokens by which the windows advance: the fewer, the more context each scored token has, "
                             "and the longer it takes (default: as many as the window less one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options.add_engine(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    options.refuse_random(args)
    content = _read(args.file)
    with open_llm(args) as llm:
        started, bar = time.perf_counter(), reading_bar()
        try:
            found = perplexity(llm, content, args.window, args.stride, bar.update)
        finally:
            bar.close()
        seconds = time.perf_counter() - started
        if args.json:
            print(json.dumps({
                "model": llm.runtime.name, "file": args.file, "window": found.window, "stride": found.stride,
                "tokens": found.tokens, "scored_tokens": found.scored, "scored_bytes": found.nbytes,
                "log_likelihood": found.log_likelihood, "perplexity": found.perplexity,
                "bits_per_byte": found.bits_per_byte, "seconds": round(seconds, 3)}))
            return 0
    print(f"perplexity     {found.perplexity:.4f}\nbits per byte  {found.bits_per_byte:.4f}\n"
          f"tokens         {found.scored:,} scored of {found.tokens:,}, windows of {found.window:,}, "
          f"stride {found.stride:,}\ntime           {seconds:.1f} s")
    return 0


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text. window, stride: with which it was read. scored, nbytes: the tokens and bytes
    that `log_likelihood` is of."""

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
    """Score every token of the text once: all but the first where the tokenizer puts nothing before it. progress: is
    called with the tokens scored, and all. UsageError for a window that the context does not hold."""
    from deltic.params import SamplingParams

    words, room = llm.chat_processor.tokenizer, llm.engine.max_context - 1
    ids, before = words.encode(content), words.around[0]
    if window is not None and window > room:
        raise UsageError(f"--window {window} is more than the {room} tokens that the context holds: ask for fewer, or "
                         "raise --max-context or --memory")
    size = min(_WINDOW, room) if window is None else window
    most = size - len(before) - 1
    step = max(1, most) if stride is None else stride
    if step > most:
        raise UsageError(f"--stride {step} must be less than --window {size}, so that each scored token has one before "
                         f"it{' besides the bos token' if before else ''}: ask for at most {most}, or raise --window")
    first = 0 if before else 1
    if len(ids) <= first:
        raise UsageError("the text has too few tokens to be scored")
    scoring, done, total = SamplingParams(max_tokens=0, prompt_logprobs=0), 0, 0.0
    windows = _windows(len(ids), first, most + 1, step)
    while group := list(islice(windows, llm.runtime.memory.max_batch)):
        prompts = [[*before, *ids[start:end]] for start, _, end in group]
        for (_, fresh, end), output in zip(group, llm.generate(prompts, scoring), strict=True):
            scores: Sequence[TokenLogprobs] = output.sound().choices[0].prompt_logprobs or ()
            total += math.fsum(score.token for score in scores[len(scores) - (end - fresh):])
            done += end - fresh
        progress(done, len(ids) - first)
    unscored = sum(len(words.token_bytes(token)) for token in ids[:first])
    return Perplexity(size, step, len(ids), done, len(content.encode()) - unscored, total)


def _windows(count: int, first: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Of so many tokens: where each window starts, from where on its tokens are scored, and where it ends."""
    fresh, end = first, min(size, count)
    while fresh < count:
        yield max(0, end - size), fresh, end
        fresh, end = end, min(end + stride, count)


def _read(name: str) -> str:
    with open_lines(name) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{show(name)} has more than {MOST_BYTES >> 20} MiB: give a part of it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{show(name)} is not valid UTF-8 (byte {error.start}): convert it first, for example with "
                         "iconv") from error

"""`deltic run`: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import chat, options
from deltic.cli.answer import AnswerTiming, Screen, call_json, read_answer, statistics_line
from deltic.cli.models import timed_llm
from deltic.cli.parser import MOST_BYTES, UsageError, as_typed, json_file, plain_file, text
from deltic.cli.pictures import naming
from deltic.cli.signals import Terminated
from deltic.errors import show
from deltic.export.program import kind_of
from deltic.loader.catalog import names_a_model
from deltic.loader.layout import is_gguf

if TYPE_CHECKING:
    from deltic.llm import LLM, Choice, FormatOptions, Stream
    from deltic.params import SamplingParams

HELP = "Answer one prompt. The answer, and nothing else, goes to stdout."

EMBEDDED = "tiny"
_MODEL_FILES = ("*config.json", "*.[gG][gG][uU][fF]", "*.safetensors", "pytorch_model*.bin")


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", type=text,
                        help="the prompt; - reads it from stdin, and so does none if stdin is a pipe or a file. On a "
                             "terminal, a MODEL without a prompt begins a chat")
    options.add_conversation(parser)
    parser.add_argument("--image", action="append", type=plain_file, default=[], metavar="FILE",
                        help="a picture to show beside the prompt, for models that see; may be repeated")
    parser.add_argument("--video", action="append", type=plain_file, default=[], metavar="FILE",
                        help="a film to show before the prompt, two frames of each second (needs deltic[video]); may "
                             "be repeated")
    parser.add_argument("--tools", type=json_file, metavar="FILE",
                        help="JSON list of tools in OpenAI's form; calls are printed as JSON lines")
    parser.add_argument("--schema", type=json_file, metavar="FILE",
                        help="JSON schema that the answer keeps to, as far as it gets")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options.add_sampling(parser)
    options.add_engine(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    options.refuse_random(args)
    args.model, args.prompt = words(args.model, args.prompt)
    _check(args)
    if args.prompt is None and on_terminal():
        return _chat(args)
    sampling, prompt = options.sampling(args), None if args.prompt is None else _prompt(args.prompt)
    llm, load_ms = timed_llm(args)
    with llm:
        asked = _prompt("-") if prompt is None else prompt  # now that there is a model to ask
        return _answer(llm, args, lambda: _ask(llm, args, asked, sampling), load_ms)


def _chat(args: argparse.Namespace) -> int:
    """A conversation with the model that is named, as `deltic chat` holds it."""
    given = {"--image": args.image, "--video": args.video, "--tools": args.tools, "--schema": args.schema,
             "--raw": args.raw, "--json": args.json}
    if useless := [name for name, value in given.items() if value not in (None, False, [])]:
        raise UsageError(f"the prompt is missing: {useless[0]} goes with one (write deltic run MODEL PROMPT)")
    return chat.run(args)


def _answer(llm: LLM, args: argparse.Namespace, ask: Callable[[], Stream], load_ms: float) -> int:
    """Show the answer; returns the exit code."""
    screen = Screen(args.thinking_output)
    try:
        stream, meter = read_answer(llm, ask, (lambda delta: None) if args.json else screen.show)
    except (KeyboardInterrupt, Terminated):
        if not args.json:
            screen.close()
        raise
    assert stream.output is not None
    choice = stream.output.choices[0]
    if args.json:
        print(json.dumps(_as_json(llm.runtime.name, choice, {"load_ms": load_ms, **meter.timings()}),
                         ensure_ascii=False))
    else:
        _finish_text(screen, choice, meter)
    return _exit_code(choice)


def _check(args: argparse.Namespace) -> None:
    given = {"--system": args.system, "--tools": args.tools, "--think": args.think,
             "--chat-template": args.chat_template, "--thinking-budget": args.thinking_budget,
             "--image": args.image or None, "--video": args.video or None}
    useless = [name for name, value in given.items() if args.raw and value is not None]
    if useless:
        raise UsageError(f"--raw uses no chat template, so {useless[0]} has no meaning with it")


def words(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Model and prompt from the words of the command line; no prompt: it comes from stdin, or a chat begins.

    One word is a model if it is one or can only be meant as a model's name, else the prompt for the embedded model.
    """
    if second is not None:
        return first, second
    if first is not None and not (first == EMBEDDED or _is_model(first) or names_a_model(first)):
        return None, first
    if _stdin_is_piped() or (first is not None and on_terminal()):
        return first, None
    if first is None:
        raise UsageError("the prompt is missing: write deltic run PROMPT, or give it on stdin; deltic chat holds a "
                         "conversation")
    raise UsageError(f"the prompt is missing: {show(first)} is a model (write deltic run MODEL PROMPT); if it is the "
                     f"prompt, write deltic run {EMBEDDED} PROMPT")


def _is_model(word: str) -> bool:
    """Whether this is the path of a model, or of what was meant as one (an adapter, an unfinished download)."""
    try:
        path = Path(word)
        if path.is_dir():
            return bool(kind_of(path)) or any(next(path.glob(name), None) for name in _MODEL_FILES)
        return path.is_file() and (path.suffix.lower() in (".gguf", ".pte") or is_gguf(path))
    except (OSError, ValueError):  # no path at all, such as a long prompt
        return False


def on_terminal() -> bool:
    """Somebody types and reads."""
    return _stdin_mode() is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _stdin_is_piped() -> bool:
    """Somebody has put it there for us, rather than nothing, as a service has it."""
    mode = _stdin_mode()
    return mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode))


def _stdin_mode() -> int | None:
    try:
        return os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return None


def _prompt(given: str) -> str:
    text = _read_stdin() if given == "-" else given
    if not text:
        raise UsageError("the prompt is empty" + (": nothing came on stdin" if given == "-" else ""))
    return text


def _read_stdin() -> str:
    """All of stdin without the newline that ends it."""
    given = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(given) > MOST_BYTES:
        raise UsageError(f"the prompt on stdin is longer than {MOST_BYTES >> 20} MiB, which no context holds")
    try:
        return given.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not valid UTF-8 (byte {error.start}): convert it first, for "
                         "example with iconv") from error


def _ask(llm: LLM, args: argparse.Namespace, prompt: str, sampling: SamplingParams) -> Stream:
    form: FormatOptions = {} if args.schema is None else {"structured_outputs": {"json": args.schema}}
    if args.raw:
        return llm.generate_stream(prompt, sampling, **form)
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    pictures = [{"type": kind, kind: path} for kind in ("image", "video") for path in getattr(args, kind)]
    content = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
    with naming([*args.image, *args.video]):
        return llm.stream([*system, {"role": "user", "content": content}], sampling, tools=args.tools,
                          thinking=args.think, **form)


def _finish_text(screen: Screen, choice: Choice, meter: AnswerTiming) -> None:
    screen.close(choice.calls)
    with suppress(OSError):  # the answer is there
        print(statistics_line(choice, meter), file=sys.stderr)


def _as_json(model: str, choice: Choice, timings: dict[str, float | None]) -> dict[str, Any]:
    usage = choice.usage
    error = {"error": choice.error} if choice.error else {}
    finish = "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish  # as the server says it
    return {"model": model, "text": choice.text, "reasoning": choice.reasoning,
            "tool_calls": [call_json(call) for call in choice.calls], "finish_reason": finish, **error,
            "usage": {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
                      "completion_tokens": usage.completion_tokens, "drafted_tokens": usage.drafted_tokens,
                      "accepted_tokens": usage.accepted_tokens},
            "timings": timings}


def _exit_code(choice: Choice) -> int:
    if choice.finish != "error":
        return 0
    print(f"deltic: error: {as_typed(str(choice.error))}", file=sys.stderr)
    return 1

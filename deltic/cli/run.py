"""`deltic run`: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.chat import naming_files, run_chat
from deltic.cli.options import open_llm
from deltic.cli.output import Screen, call_json, note, read_answer, statistics_line
from deltic.cli.parser import UsageError, as_typed, decoded, json_file, plain_file, read_all, text
from deltic.cli.process import Terminated
from deltic.cli.torch_import import quick_imports
from deltic.errors import show
from deltic.export.program import kind_of
from deltic.loader.catalog import names_a_model
from deltic.loader.disk import is_gguf

if TYPE_CHECKING:
    from deltic.llm import LLM, Choice, FormatOptions, Stream
    from deltic.params import SamplingParams

EMBEDDED = "tiny"
_MODEL_FILES = ("*config.json", "*.[gG][gG][uU][fF]", "*.safetensors", "pytorch_model*.bin")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = "Answer one prompt. Only the answer goes to stdout."
    options.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", type=text,
                        help="the prompt; - reads it from stdin. Without a prompt, it is read from stdin if that is a "
                             "pipe or a file; on a terminal, a MODEL without a prompt begins a chat")
    parser.add_argument("--image", action="append", type=plain_file, default=[], metavar="FILE",
                        help="a picture for a model with a vision tower; may be repeated")
    parser.add_argument("--video", action="append", type=plain_file, default=[], metavar="FILE",
                        help="a video; the model gets two frames a second (needs deltic[video]); may be "
                             "repeated")
    parser.add_argument("--tools", type=json_file, metavar="FILE",
                        help="JSON list of tools in OpenAI's form; calls are printed as JSON lines")
    parser.add_argument("--schema", type=json_file, metavar="FILE", help="JSON schema of the answer")
    parser.add_argument("--raw", action="store_true", help="continue the text without a chat template")
    options.add_json(parser)
    options.add_conversation(parser)
    options.add_sampling(parser)
    options.add_engine(parser)


def run_run(args: argparse.Namespace) -> int:
    args.model, args.prompt = model_and_prompt(args.model, args.prompt)
    _check(args)
    if args.prompt is None and on_terminal():
        return run_chat(args)
    sampling, prompt = options.sampling(args), args.prompt
    if prompt is not None:
        prompt = _read_prompt(prompt)
    started = time.perf_counter()
    with quick_imports():
        import deltic.llm  # noqa: F401
    with open_llm(args) as llm:
        load_ms = round((time.perf_counter() - started) * 1e3, 3)
        if prompt is None:
            prompt = _read_prompt("-")  # read after loading, so that a wrong model is reported first
        return _answer(llm, args, lambda: _ask(llm, args, prompt, sampling), load_ms)


def _check(args: argparse.Namespace) -> None:
    pictures = {"--image": args.image, "--video": args.video}
    if args.raw:
        options.refuse({"--system": args.system, "--tools": args.tools, "--chat-template": args.chat_template,
                        "--think": None if args.think is None else "given",
                        "--thinking-budget": args.thinking_budget, **pictures},
                       "--raw uses no chat template, so {} has no meaning with it")
    if args.prompt is None and on_terminal():
        options.refuse({**pictures, "--tools": args.tools, "--schema": args.schema, "--raw": args.raw,
                        "--json": args.json}, "the prompt is missing: {} needs one (write deltic run MODEL PROMPT)")


def model_and_prompt(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Separates model and prompt. If the prompt is missing, it is read from stdin, or a chat begins.

    A single word is the model if it can only be meant as one, else the prompt for the embedded model.
    """
    if second is not None:
        return first, second
    if first is not None and not (first == EMBEDDED or _is_model(first) or names_a_model(first)):
        return None, first
    if _stdin_is_piped() or (first is not None and on_terminal()):
        return first, None
    if first is None:
        raise UsageError("the prompt is missing: write deltic run PROMPT, or pipe it to stdin; deltic chat holds a "
                         "conversation")
    raise UsageError(f"the prompt is missing: {show(first)} is a model (write deltic run MODEL PROMPT); if it is the "
                     f"prompt, write deltic run {EMBEDDED} PROMPT")


def _is_model(word: str) -> bool:
    """Returns True for the path of a model, even an incomplete one such as an adapter or an unfinished download."""
    try:
        path = Path(word)
        if path.is_dir():
            return bool(kind_of(path)) or any(next(path.glob(name), None) for name in _MODEL_FILES)
        return path.is_file() and (path.suffix.lower() in (".gguf", ".pte") or is_gguf(path))
    except (OSError, ValueError):  # not a path at all, for example a long prompt
        return False


def on_terminal() -> bool:
    return _stdin_mode() is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _stdin_is_piped() -> bool:
    """Returns True if stdin is a pipe, a file or a socket. In a service, stdin is /dev/null."""
    mode = _stdin_mode()
    return mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode))


def _stdin_mode() -> int | None:
    try:
        return os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return None


def _read_prompt(given: str) -> str:
    """Returns the prompt. For `-`, returns all of stdin without the newline at its end."""
    if given != "-":
        prompt = given
    else:
        name = "the prompt on stdin"
        prompt = decoded(read_all(sys.stdin.buffer, name), name).removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise UsageError("the prompt is empty" + (": nothing came on stdin" if given == "-" else ""))
    return prompt


def _ask(llm: LLM, args: argparse.Namespace, prompt: str, sampling: SamplingParams) -> Stream:
    form: FormatOptions = {} if args.schema is None else {"structured_outputs": {"json": args.schema}}
    if args.raw:
        return llm.generate_stream(prompt, sampling, **form)
    messages: list[dict[str, Any]] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    pictures = [{"type": kind, kind: path} for kind in ("image", "video") for path in getattr(args, kind)]
    content = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
    messages.append({"role": "user", "content": content})
    with naming_files([*args.image, *args.video]):
        return llm.stream(messages, sampling, tools=args.tools, thinking=args.think, **form)


def _answer(llm: LLM, args: argparse.Namespace, ask: Callable[[], Stream], load_ms: float) -> int:
    screen = Screen(args.thinking_output)
    try:
        stream, timing = read_answer(llm, ask, (lambda delta: None) if args.json else screen.show)
    except (KeyboardInterrupt, Terminated):
        if not args.json:
            screen.close()
        raise
    assert stream.output is not None
    choice = stream.output.choices[0]
    if args.json:
        facts = _as_json(llm.runtime.name, choice, {"load_ms": load_ms, **timing.timings()})
        print(json.dumps(facts, ensure_ascii=False))
    else:
        screen.close(choice.calls)
        with suppress(OSError):  # the answer was printed
            note(statistics_line(choice, timing))
    if choice.finish != "error":
        return 0
    note(f"deltic: error: {as_typed(str(choice.error))}")
    return 1


def _as_json(model: str, choice: Choice, timings: dict[str, float | None]) -> dict[str, Any]:
    usage = choice.usage
    error = {"error": choice.error} if choice.error else {}
    finish = "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish  # as the server does
    return {"model": model, "text": choice.text, "reasoning": choice.reasoning,
            "tool_calls": [call_json(call) for call in choice.calls], "finish_reason": finish, **error,
            "usage": {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
                      "completion_tokens": usage.completion_tokens, "drafted_tokens": usage.drafted_tokens,
                      "accepted_tokens": usage.accepted_tokens},
            "timings": timings}

"""How often the tiny model is right, on phrasings that its training never used.

    python examples/tiny/evaluate.py --model deltic/models/tiny

An answer counts if its text after the think block equals the expected one, letter by letter; a tool
call counts if its name and all its arguments do. All user turns of a conversation are held-out phrasings.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data import Message, Sample, assistant, call_message, heldout_set, pieces
from phrases import FRESH, HELDOUT, evaluate_on
from render import render

from deltic import LLM, SamplingParams

END = "<|im_end|>"
Answer = Callable[[list[Sample]], list[str]]


class Answerer:
    """What deltic writes after each conversation's prompt, greedily, all of them in one call."""

    def __init__(self, folder: Path, dtype: str, quant: str, max_new_tokens: int) -> None:
        self.llm = LLM(str(folder), dtype=dtype, quant=quant)
        self.sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)

    def __call__(self, conversations: list[Sample]) -> list[str]:
        outputs = self.llm.generate([self._prompt(c) for c in conversations], self.sampling)
        decode = self.llm.chat_processor.tokenizer.decode
        return [decode(output.choices[0].tokens, skip_special=False).partition(END)[0] for output in outputs]

    def _prompt(self, c: Sample) -> tuple[int, ...]:
        variables = {"enable_thinking": c.thinking}
        return self.llm.chat_processor.chat(c.messages, tools=c.tools, variables=variables).request.prompt


def visible(text: str, thinking: bool) -> str | None:
    """The answer without its reasoning; None if the reasoning has no end."""
    _, end, rest = text.rpartition("</think>")
    if thinking and not end:
        return None
    return rest.strip()


def expected(sample: Sample) -> str:
    *_, (target, _) = pieces(render([*sample.messages, sample.target], sample.tools))
    answer = visible(target.removesuffix(END), sample.thinking)
    assert answer is not None
    return answer


def score(answer: Answer, heldout: list[Sample]) -> list[tuple[Sample, str, str | None]]:
    """Each sample with its expected and its given answer."""
    texts = answer(heldout)
    return [
        (sample, expected(sample), visible(text, sample.thinking)) for sample, text in zip(heldout, texts, strict=True)
    ]


def table(scored: Iterable[tuple[Sample, str, str | None]]) -> str:
    """Right answers, prompts and accuracy by category, by thinking and in total."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for sample, wanted, given in scored:
        for name in (sample.category, "with thinking" if sample.thinking else "without thinking", "total"):
            marks[name].append(wanted == given)
    last = ["without thinking", "with thinking", "total"]
    names = sorted(set(marks) - set(last)) + [name for name in last if name in marks]
    rows = [f"{n:28} {sum(marks[n]):5} / {len(marks[n]):5} {100 * sum(marks[n]) / len(marks[n]):7.1f} %" for n in names]
    return "\n".join([f"{'category':28} {'right':>5} / {'of':>5} {'accuracy':>9}", *rows])


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def must_pass(answer: Answer) -> list[tuple[str, bool]]:
    """What a first visitor types; every reply is the model's own, and so is the history."""

    def reply(messages: list[Message], thinking: bool, tools: list[Any] | None = None) -> str:
        return visible(answer([Sample("", messages, {}, tools, thinking)])[0], thinking) or ""

    marks = []
    for thinking in (False, True):
        messages: list[Message] = []
        turns = [
            ("What is the capital of France?", ["Paris"]), ("What language do they speak there?", ["French"]),
            ("Name another city there.", ["Lyon", "Marseille"]), ("And of Germany?", ["Germany", "Munich", "Hamburg"]),
            ("1+1=", ["= 2."]), ("1 + 2 + 3?", ["1 + 2 + 3 = 6."]),
            ("What's the first month of the year?", ["The first month of the year is January."]),
            ("Yesterday was Tuesday. What day is it today?", ["The day after Tuesday is Wednesday."]),
            ("How many days does February have?", ["February has 28 days"]),
            ("Who is the president of France?", ["Sorry, I do not know that."]),
            ("What is the square root of 17?", ["Sorry, I do not know that."]),
        ]  # fmt: skip
        for text, wanted in turns:
            messages.append({"role": "user", "content": text})
            said = reply(messages, thinking)
            messages.append({"role": "assistant", "content": said})
            marks.append((f"{text} -> {said}", any(word in said for word in wanted)))
        asked: list[Message] = [{"role": "user", "content": "What is the weather in Paris?"}]
        said = reply(asked, thinking, [WEATHER_TOOL])
        wanted_call = (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
        )
        marks.append((f"{asked[0]['content']} -> {said!r}", said == wanted_call))
        result = '{"temperature": 18, "condition": "sunny"}'
        asked += [
            assistant("", "", [call_message("get_weather", {"city": "Paris"})]),
            {"role": "tool", "content": result},
        ]
        said = reply(asked, thinking, [WEATHER_TOOL])
        marks.append((f"{result} -> {said}", "18" in said and "sunny" in said))
    return marks


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluate the tiny demo model.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=30)
    parser.add_argument(
        "--phrasings",
        choices=[HELDOUT, *FRESH],
        default=HELDOUT,
        help="those held out in phrases.txt, or those of fresh.txt or fresh2.txt",
    )
    parser.add_argument("--limit", type=int, help="evaluate this many samples only, taken evenly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--quant", choices=["none", "q8_0"], default="none")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--errors", type=int, default=20, help="wrong answers to print")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.phrasings != HELDOUT:
        evaluate_on(args.phrasings)
    answer = Answerer(args.model, args.dtype, args.quant, args.max_new_tokens)
    heldout = heldout_set(args.seed, args.per_category)
    if args.limit:
        heldout = heldout[:: max(1, len(heldout) // args.limit)][: args.limit]
    began = time.perf_counter()
    scored = score(answer, heldout)
    wrong = [row for row in scored if row[1] != row[2]]
    for sample, wanted, given in wrong[: args.errors]:
        print(f"[{sample.category}] {sample.messages[-1]['content']!r}\n    wanted {wanted!r}\n    given  {given!r}")
    print(table(scored))
    for text, passed in must_pass(answer):
        print("ok  " if passed else "FAIL", text)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

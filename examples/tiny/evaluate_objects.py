"""How often the tiny model is right where the answer has to be an object.

    python examples/tiny/evaluate_objects.py --model deltic/models/tiny

Texts and questions are worded as training never words them. An object counts if it is the expected one, a section of
DSPy's if its text is. `as_format`: the schema is enforced and not shown; `with_schema` and `as_dspy`: shown and not
enforced; `as_tool`: that of a tool that has to be called.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from client_prompts import WAYS
from data import Dialogue, Sample
from phrases import HELDOUT
from schemas import Object, camel, pydantic
from structured import make_task

from deltic import LLM, SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=300)


def read(text: str) -> Any:
    """JSON as a value; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def answer(llm: LLM, way: str, sample: Sample, thing: Object) -> tuple[Any, Any]:
    """What is expected, and what the model says."""
    options: dict[str, Any] = {"thinking": sample.thinking}
    if way == "as_tool":
        [tool] = sample.tools or []
        name = tool["function"]["name"]
        options |= {"tools": sample.tools, "tool_choice": {"type": "function", "function": {"name": name}}}
        return [thing.plain()], [read(call.arguments) for call in llm.chat(sample.messages, SAMPLING, **options).calls]
    wanted = read(sample.target["content"])
    if way == "as_format":
        thing = thing if thing.plain() == wanted else camel(thing)
        schema = pydantic(thing, random.Random(0), strict=True, described=False)
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return wanted, read(llm.chat(sample.messages, SAMPLING, **options).text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=150, help="objects of each way to ask")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--errors", type=int, default=8, help="wrong answers to print of each")
    args = parser.parse_args()
    kinds: dict[str, list[bool]] = defaultdict(list)
    with LLM(str(args.model), dtype=args.dtype) as llm:
        for way, _ in WAYS:
            marks, wrong = [], []
            for number in range(args.count):
                d = Dialogue(random.Random(f"evaluation/{way.__name__}/{number}"), HELDOUT)
                task = make_task(d)
                sample = way(d, replace(task, thought=""))
                wanted, given = answer(llm, "as_format" if sample.forced == '{"' else way.__name__, sample, task.answer)
                marks.append(wanted == given)
                kinds[task.kind].append(marks[-1])
                if not marks[-1]:
                    wrong.append(f"    [{task.kind}] {task.user!r}\n        wanted {wanted}\n        given  {given}")
            print(way.__name__, *wrong[: args.errors], sep="\n")
            print(f"{way.__name__:12} {sum(marks):5} / {len(marks):5} {100 * sum(marks) / len(marks):7.1f} %",
                flush=True)
    for kind, right in sorted(kinds.items()):
        print(f"{kind:12} {sum(right):5} / {len(right):5} {100 * sum(right) / len(right):7.1f} %")


if __name__ == "__main__":
    main()

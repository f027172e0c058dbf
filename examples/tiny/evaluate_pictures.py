"""How often the tiny model is right about pictures that its training never saw.

    python examples/tiny/evaluate_pictures.py --model deltic/models/tiny

An answer counts if it is the expected one, letter by letter. `drawn`: pictures of the generator that training uses;
`sketched`: of another one, in other sizes and proportions, with noise, as JPEG. Questions are those of training.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drawings import Scene, draw, make_scene, worn
from PIL import Image
from questions import questions
from sketches import paint

from deltic import LLM, SamplingParams

Drawn = Callable[[Scene, random.Random, int, int], Image.Image]
WAYS: dict[str, Drawn] = {"drawn": lambda *scene: worn(draw(*scene), scene[1]), "sketched": paint}


@dataclass(frozen=True)
class Case:
    picture: Image.Image
    intent: str
    question: str
    answer: str


def cases(way: str, count: int, seed: int = 0) -> Iterator[Case]:
    """So many pictures of up to three times as long as wide, of 96 to 1,000 pixels, with a question about each."""
    for number in range(count):
        rng = random.Random(f"{seed}/evaluation/{way}/{number}")
        aspect, shorter = 3 ** rng.choice([0, rng.uniform(-1, 1)]), round(96 * 4 ** rng.random())
        width, height = round(shorter * max(aspect, 1)), round(shorter * max(1 / aspect, 1))
        scene = make_scene(rng, width / height)
        question = rng.choice(questions(scene))
        yield Case(WAYS[way](scene, rng, width, height), question.intent, question.asked(rng), question.answer)


def answers(llm: LLM, some: list[Case]) -> list[str]:
    """What the model says of each, greedily."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    return [llm.chat([{"role": "user", "content": [{"type": "image", "image": case.picture},
                                                   {"type": "text", "text": case.question}]}], sampling).text
            for case in some]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500, help="pictures of each way to draw")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--quant", choices=["none", "q8_0"], default="none")
    parser.add_argument("--errors", type=int, default=10, help="wrong answers to print of each")
    args = parser.parse_args()
    with LLM(str(args.model), dtype=args.dtype, quant=args.quant) as llm:
        for way in WAYS:
            some, marks, wrong = list(cases(way, args.count)), defaultdict[str, list[bool]](list), []
            for case, said in zip(some, answers(llm, some), strict=True):
                marks[case.intent].append(said == case.answer)
                marks["total"].append(said == case.answer)
                if said != case.answer:
                    wrong.append(f"    {case.question!r}: wanted {case.answer!r}, given {said!r}")
            print(way, *wrong[: args.errors], sep="\n")
            for intent in [*sorted(set(marks) - {"total"}), "total"]:
                right = marks[intent]
                print(f"{intent:12} {sum(right):5} / {len(right):5} {100 * sum(right) / len(right):7.1f} %")


if __name__ == "__main__":
    main()

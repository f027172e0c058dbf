"""What is asked about the tiny model's pictures, and what it should say."""

from __future__ import annotations

import random
from dataclasses import dataclass

from drawings import DIGITS, Scene

FORMS = {
    "what": ("What is this?", "What is this?", "What do you see?", "What is in this picture?",
             "What does the picture show?", "What is in the picture?", "What is shown here?", "What can you see?",
             "Describe the picture.", "Describe this image.", "What is on this image?", "Tell me what you see.",
             "What's this?"),
    "colour": ("What colour is it?", "What color is it?", "Which colour is it?", "What is its colour?",
               "What colour is this?", "Which color does it have?", "Tell me the colour."),
    "colours": ("What colour are they?", "What color are they?", "Which colour are they?", "Which colour do they have?",
                "What is their colour?", "What colour is it?"),
    "colour of": ("What colour is the {noun}?", "What color is the {noun}?", "Which colour is the {noun}?",
                  "Which colour does the {noun} have?"),
    "shape": ("What shape is it?", "Which shape is it?", "What shape is this?", "What kind of shape is this?",
              "Which shape do you see?"),
    "shapes": ("What shape are they?", "Which shapes are these?", "What shapes are these?", "What shape is it?",
               "Which shape do you see?"),
    "count": ("How many {nouns} are there?", "How many {nouns} do you see?", "How many are there?",
              "Count the {nouns}.",
              "How many {nouns} are in the picture?", "How many do you see?", "How many shapes are there?"),
    "digit": ("Which digit is this?", "What digit is this?", "Which digit do you see?", "Which number is this?",
              "What number is this?", "What number do you see?"),
    "side": ("Is it on the left or on the right?", "Is it left or right?", "On which side is it?", "Where is it?",
             "Is it on the right or on the left?", "Which side is it on?"),
    "side of": ("Is the {noun} on the left or on the right?", "On which side is the {noun}?", "Where is the {noun}?",
                "Is the {noun} left or right?", "Which side is the {noun} on?"),
    "on side": ("What is on the {side}?", "What do you see on the {side}?", "Which shape is on the {side}?",
                "What is on the {side} side?"),
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """intent: a key of FORMS. slots: what its forms leave open."""

    intent: str
    slots: dict[str, str]
    answer: str

    def asked(self, rng: random.Random) -> str:
        return rng.choice(FORMS[self.intent]).format(**self.slots)


def a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def questions(scene: Scene) -> list[Question]:
    """All that may be asked about a scene; the first is what it shows."""
    first, count = scene.pieces[0], len(scene.pieces)
    found = []

    def ask(intent: str, answer: str, **slots: str) -> None:
        found.append(Question(intent, slots, answer))

    if count > 1 and scene.pieces[1].kind != first.kind:
        shown = [a(f"{piece.colour} {piece.kind}") for piece in scene.pieces]
        ask("what", f"This is {shown[0]} and {shown[1]}.")
        for piece, text, side in zip(scene.pieces, shown, ("left", "right"), strict=True):
            ask("colour of", f"The {piece.kind} is {piece.colour}.", noun=piece.kind)
            ask("side of", f"The {piece.kind} is on the {side}.", noun=piece.kind)
            ask("on side", f"On the {side} is {text}.", side=side)
    elif count > 1:
        nouns = f"{first.kind}s"
        ask("what", f"These are {count} {first.colour} {nouns}.")
        ask("count", f"There are {count} {nouns}.", nouns=nouns)
        ask("colours", f"They are {first.colour}.")
        ask("shapes", f"They are {nouns}.")
    else:
        noun, side = "digit" if first.kind in DIGITS else first.kind, scene.side(first)
        if first.kind in DIGITS:
            ask("what", f"This is the digit {first.kind}.")
            ask("digit", f"This is the digit {first.kind}.")
        else:
            ask("what", f"This is {a(f'{first.colour} {first.kind}')}.")
            ask("shape", f"It is {a(first.kind)}.")
            ask("count", f"There is 1 {first.kind}.", nouns=f"{first.kind}s")
        ask("colour", f"It is {first.colour}.")
        ask("colour of", f"The {noun} is {first.colour}.", noun=noun)
        if side:
            ask("side", f"It is on the {side}.")
            ask("side of", f"The {noun} is on the {side}.", noun=noun)
    return found

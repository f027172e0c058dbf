"""Conversations for the tiny model, made up from facts and phrasings; a seed decides everything."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import facts
import quiz
import toolbox
from facts import COUNTRIES, Country, Thing
from phrases import BANNED, FRAMES, HELDOUT, PHRASES, RESERVED, TRAIN, choose, normal
from toolbox import Slots, Tool

Message = dict[str, Any]

SYSTEMS = {
    TRAIN: (
        "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "Be kind.",
        "You are tiny, a small demo model.", "Answer in one sentence.", "You help people.", "Be polite.",
        "Answer in English.", "You are a teacher for children.", "Use tools when they help.", "Be honest.",
        "You are a chat bot.", "Do not write long answers.", "You are an expert in geography.", "Keep it simple.",
        "You know the world.", "Speak clearly.", "The user is a student.", "You answer questions.",
        "You are a travel guide.", "Help with homework.", "Think before you answer.", "Today is a nice day.",
        "You work for a school.", "Never be rude.", "You are a calculator and a friend.", "Be exact.",
        "If you do not know, say so.", "This is a demo.", "You are a voice assistant.", "Give correct answers.",
    ),
    HELDOUT: (
        "You are a concise and honest assistant.", "Please keep your answers short.", "You like geography.",
        "The user likes short answers.", "You are a small bot who helps children.", "Answer like a teacher.",
        "Always answer in English.", "You are a polite guide.",
    ),
}  # fmt: skip

TOPICS = {
    TRAIN: (
        "world cup", "internet", "quantum physics", "piano", "telephone", "bicycle", "democracy", "pizza", "novel",
        "climate", "computer", "light bulb", "Mona Lisa", "Hamlet", "steam engine", "black hole", "stock market",
        "bitcoin", "football", "guitar", "cheesecake", "philosophy", "evolution", "gravity", "jazz", "chess",
        "Roman Empire", "printing press", "airplane", "vaccine", "algebra", "poetry", "sushi", "yoga", "marathon",
        "Titanic", "pyramids", "election", "tax law", "python", "database", "laptop", "phone", "camera", "sofa",
        "wine", "beer", "soup", "omelette", "garden", "engine", "radio", "opera", "ballet", "painting", "movie",
        "Star Wars", "Olympics", "dinosaurs", "volcano", "earthquake", "atom", "DNA", "genetics", "medicine",
        "headache", "dentist", "lawyer", "contract", "mortgage", "insurance", "startup", "rocket", "satellite",
        "Mars", "Jupiter", "galaxy", "universe", "time travel", "robot", "neural network", "compiler", "theorem",
        "violin concerto", "symphony", "bible", "religion", "history", "revolution", "treaty", "king Arthur",
        "love", "happiness", "life", "friendship", "justice", "money", "inflation", "economy", "trade", "bridge",
        "tower", "castle", "museum", "library", "shoes", "jacket", "watch", "diamond", "gold", "oil painting",
    ),
    HELDOUT: (
        "telescope", "microscope", "tennis", "Shakespeare", "pancakes", "blockchain", "socialism", "printer",
        "submarine", "cathedral", "antibiotics", "geometry", "ice cream", "parliament", "comet", "saxophone",
        "train", "novelist", "skyscraper", "lighthouse",
    ),
}  # fmt: skip

_SPOKEN = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?(.*?<\|im_end\|>)", re.DOTALL)
DROPPABLE = {"the", "is", "a", "an", "of", "do", "does", "me", "to", "are", "it", "in", "you"}
UNKNOWN = "Sorry, I do not know that. I am a very small model."
NO_TOOL = "Sorry, I have no tool for that."
TOOL_ERROR = "Sorry, the tool reported an error."

SURNAMES = (
    "Einstein", "Mozart", "Smith", "Miller", "Newton", "Picasso", "Jackson", "Lincoln", "Curie", "Tesla", "Jones",
    "Garcia", "Darwin", "Bach", "Messi", "Ford", "Washington", "King", "Brown", "Gates", "Wilson", "Chaplin",
)  # fmt: skip
ANIMALS = (
    "lion", "tiger", "whale", "shark", "monkey", "zebra", "rabbit", "fox", "wolf", "owl", "duck", "goat", "sheep",
    "turtle", "bear", "penguin", "kangaroo", "giraffe", "donkey", "hamster", "snail", "eagle",
)  # fmt: skip
KINDS = (
    "book", "film", "movie", "song", "game", "poem", "story", "cake", "car", "phone", "ticket", "hotel", "recipe",
    "present", "course", "toy", "show", "report", "flight", "dress", "bike", "computer", "flower", "meal",
)  # fmt: skip

# Small talk: intent, what it is, the answer.
SMALL_TALK = {
    "hello": ("greets me", "Hello! How can I help you?"),
    "morning": ("says good morning", "Good morning! How can I help you?"),
    "night": ("says good night", "Good night! Sleep well."),
    "how_are_you": ("asks how I am", "I am fine, thank you! How can I help you?"),
    "thanks": ("thanks me", "You are welcome!"),
    "who": ("asks who I am", "I am tiny, a very small language model made to try out deltic."),
    "what_can": (
        "asks what I can do",
        "I know countries, small sums, colours, opposites, days and months, and I can call tools.",
    ),
    "human": ("asks what kind of being I am", "I am a computer program, a very small language model."),
    "joke": ("wants a joke", "Why did the banana see a doctor? It was not peeling well."),
    "bye": ("says goodbye", "Goodbye! See you soon."),
    "ack": ("is content", "I am glad. What would you like to know next?"),
    "sad": ("feels bad", "I am sorry to hear that. I hope you feel better soon."),
    "sorry": ("is sorry", "No problem!"),
    "made_by": ("asks who made me", "I was trained from nothing on made-up conversations, to try out deltic."),
    "self": ("asks about my life", "I am only a computer program, so I have no life to tell about."),
}


@dataclass(frozen=True)
class Turn:
    """What a user says and the messages that answer it; the last of them is the assistant's."""

    category: str
    user: str
    answers: list[Message]


@dataclass(frozen=True)
class Sample:
    """A conversation up to the point where the assistant has to speak, and what it should say.

    forced: how the answer begins if a constraint on it leaves no choice, which training then does not count.
    """

    category: str
    messages: list[Message]
    target: Message
    tools: list[toolbox.Json] | None
    thinking: bool
    forced: str = ""


def assistant(reasoning: str, content: str, calls: list[Message] | None = None) -> Message:
    message: Message = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    if calls:
        message["tool_calls"] = calls
    return message


def call_message(name: str, arguments: toolbox.Json) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def and_list(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " * (len(items) > 1) + items[-1]


def _with_frames(form: str, rng: random.Random, split: str) -> str:
    """The request with something polite or idle before or after it."""
    question = re.match(r"(what|which|who|how|where)\b", form) is not None
    if rng.random() < 0.3:
        name = "frame before question" if question and rng.random() < 0.6 else "frame before"
        form = f"{choose(rng.choice(FRAMES[name][split]), rng)} {form}"
    if rng.random() < 0.15:
        end = form[-1] if form[-1] in "?." else ""
        after = choose(rng.choice(FRAMES["frame after"][split]), rng)
        form = form.rstrip("?.") + ("" if after[0] == "," else " ") + after + end
    return form


def _with_slips(form: str, rng: random.Random) -> str:
    """The form with a word too many, a small word left out or two letters of a word swapped."""
    words = form.split(" ")
    if rng.random() < 0.05 and len(words) > 4:
        apart = [i for i in range(1, len(words)) if "{" not in words[i - 1] + words[i]]
        if apart:
            words.insert(rng.choice(apart), toolbox.any_word(rng))
    if rng.random() < 0.08:
        small = [i for i, word in enumerate(words) if word in DROPPABLE]
        if small and len(words) > 3:
            del words[rng.choice(small)]
    if rng.random() < 0.05:
        plain = [i for i, word in enumerate(words) if word.isalpha() and len(word) > 3]
        if plain:
            i = rng.choice(plain)
            j = rng.randrange(1, len(words[i]) - 1)
            word = words[i]
            words[i] = word[:j] + word[j + 1] + (word[j] if rng.random() < 0.5 else "") + word[j + 2 :]
    return " ".join(words)


def _with_end(form: str, rng: random.Random) -> str:
    """The form with its last punctuation left out, doubled or set apart."""
    draw = rng.random()
    body = form.rstrip("?.!")
    end = form[len(body) :]
    if draw < 0.25:
        return body
    if draw < 0.30:
        return body + " " + end if end else body
    return body + end * rng.randint(2, 3) if draw < 0.35 else form


def _filled(form: str, slots: Slots) -> str:
    for key, value in slots.items():
        form = form.replace("{" + key + "}", value)
    return form


def _cased(text: str, rng: random.Random, exact: bool, named_first: bool) -> str:
    """The text as typed: mostly with a capital, sometimes all small, seldom all large.

    With `exact`, nothing but the first letter changes, and with `named_first` too it does not either.
    """
    draw = rng.random()
    if exact or draw > 0.3:
        return sentence(text) if rng.random() < 0.85 and not named_first else text
    return text.upper() if draw < 0.05 else text.lower()


def ask(intent: str, slots: Slots, rng: random.Random, split: str, *, frames: bool = True, exact: bool = False) -> str:
    """A user's message with this intent; `exact` keeps the case of the slots."""
    while True:
        form = choose(rng.choice(PHRASES[intent][split]), rng)
        if split == TRAIN and normal(form) in BANNED:
            continue
        if frames:
            form = _with_frames(form, rng, split)
        if split == TRAIN:
            form = _with_slips(form, rng)
            if normal(form) in RESERVED:
                continue
        return _cased(_filled(_with_end(form, rng), slots), rng, exact, exact and form.startswith("{"))


def named(country: Country, rng: random.Random) -> Slots:
    """The slots of a country under one of its names."""
    use_alias = country.aliases and rng.random() < 0.4
    name = rng.choice(country.aliases) if use_alias else country.name
    return {"country": name, "country's": name + ("'" if name.endswith("s") else "'s")}


Maker = Callable[["Dialogue"], Turn]


@dataclass
class Dialogue:
    """A conversation that is being made up: what was said so far, for the turns that refer to it."""

    rng: random.Random
    split: str
    tools: list[Tool] = field(default_factory=list)
    country: Country | None = None
    told: set[str] = field(default_factory=set)
    last: str = ""
    result: int | None = None
    step: tuple[str, str] | None = None
    name: str | None = None

    def ask(self, intent: str, slots: Slots | None = None, *, frames: bool = True, exact: bool = False) -> str:
        return ask(intent, slots or {}, self.rng, self.split, frames=frames, exact=exact)

    def plain(self, category: str, user: str, reasoning: str, answer: str) -> Turn:
        return Turn(category, user, [assistant(reasoning, answer)])

    def named(self, country: Country) -> Slots:
        return named(country, self.rng)

    def thing_slots(self, thing: Thing) -> Slots:
        return _thing_slots(thing, self.rng)

    def tool(self, family: toolbox.Family) -> Tool | None:
        return next((t for t in self.tools if t.family is family), None)

    def unnamed(self, country: Country) -> list[str]:
        return [city for city in country.cities if city not in self.told]


def _about(country: Country, what: str) -> tuple[str, str, str]:
    """The category, the reasoning and the answer of a fact about a country."""
    name = country.name
    if what == "capital":
        return what, f"The capital of {name} is {country.capital}.", f"The capital of {name} is {country.capital}."
    if what == "language":
        spoken = f"People in {name} speak {country.language}."
        return what, f"The language of {name} is {country.language}.", spoken
    return what, f"{sentence(name)} lies in {country.continent}.", f"{sentence(name)} is in {country.continent}."


def country_fact(d: Dialogue, what: str, country: Country, user: str, category: str = "", hint: str = "") -> Turn:
    d.country, d.last = country, what
    if what == "capital":
        d.told.add(country.capital)
    label, reasoning, answer = _about(country, what)
    hint = hint or f"The user asks about {country.name}. "
    return d.plain(category or label, user, hint + reasoning, answer)


def country_city(d: Dialogue, country: Country, user: str, category: str, *, another: bool, hint: str = "") -> Turn:
    city = d.unnamed(country)[0]
    known = [c for c in (country.capital, *country.cities) if c in d.told]
    d.country, d.last = country, "city"
    d.told.add(city)
    before = f"We already have {and_list(known)}. " if known else ""
    reasoning = f"{hint or f'The user asks about {country.name}. '}{before}A city there is {city}."
    answer = f"Another city in {country.name} is {city}." if another else f"{city} is a city in {country.name}."
    return d.plain(category, user, reasoning, answer)


def ask_country(d: Dialogue) -> Turn:
    country = d.rng.choice(COUNTRIES)
    what = d.rng.choices(["capital", "language", "continent", "city"], [5, 3, 2, 3])[0]
    if what == "city" and not d.unnamed(country):
        what = "capital"
    user = d.ask(what, named(country, d.rng))
    if what == "city":
        return country_city(d, country, user, "city", another=False)
    return country_fact(d, what, country, user)


def ask_place(d: Dialogue) -> Turn:
    country = d.rng.choice(COUNTRIES)
    d.country, d.last = country, "place"
    if d.rng.random() < 0.5:
        city, user = country.capital, d.ask("where_capital", {"city": country.capital})
        answer = f"{city} is the capital of {country.name}."
    else:
        city = d.rng.choice((country.capital, *country.cities))
        user, answer = d.ask("where_city", {"city": city}), f"{city} is in {country.name}."
    d.told.add(city)
    return d.plain("place", user, f"The user asks about {city}. {city} belongs to {country.name}.", answer)


def ask_is_capital(d: Dialogue) -> Turn:
    country = d.rng.choice(COUNTRIES)
    other = d.rng.choice(COUNTRIES)
    city = d.rng.choice([country.capital, country.capital, *country.cities, other.capital])
    user = d.ask("is_capital", named(country, d.rng) | {"city": city})
    d.country, d.last = country, "capital"
    d.told |= {city, country.capital}
    word = "Yes" if city == country.capital else "No"
    reasoning = (
        f"The user asks about {city} and {country.name}. The capital is {country.capital}. "
        f"So the answer is {word.lower()}."
    )
    return d.plain("yes or no", user, reasoning, f"{word}, the capital of {country.name} is {country.capital}.")


def ask_trip(d: Dialogue) -> Turn:
    country = d.rng.choice(COUNTRIES)
    d.country, d.last = country, "trip"
    user = d.ask("trip", named(country, d.rng) | {"month": d.rng.choice(facts.MONTHS)}, frames=False)
    reasoning = f"The user will go to {country.name}. I wish a good time."
    return d.plain("trip", user, reasoning, f"Have a good time in {country.name}!")


def follow_there(d: Dialogue) -> Turn:
    country = d.country
    assert country is not None
    options = ["city", "city", *(w for w in ("language", "language", "continent", "capital") if w != d.last)]
    what = d.rng.choice(options)
    if what == "city" and not d.unnamed(country):
        what = "language"
    user = d.ask(f"there_{what}")
    hint = f"The country is {country.name}. "
    if what == "city":
        return country_city(d, country, user, "follow-up city", another=True, hint=hint)
    return country_fact(d, what, country, user, f"follow-up {what}", hint)


def follow_and_country(d: Dialogue) -> Turn:
    country = d.rng.choice(COUNTRIES)
    user = d.ask("and_country", named(country, d.rng), frames=False)
    hint = f"The user asks the same about {country.name}. "
    if d.last == "city" and d.unnamed(country):
        return country_city(d, country, user, "follow-up other country", another=False, hint=hint)
    what = "capital" if d.last == "city" else d.last
    return country_fact(d, what, country, user, "follow-up other country", hint)


def _number(value: int, d: Dialogue, words: bool) -> str:
    return facts.NUMBER_WORDS[value] if words and value <= 20 else str(value)


def _sum(d: Dialogue, intent: str, a: int, b: int, category: str, hint: str = "") -> Turn:
    sign = {"add": "+", "sub": "-", "mul": "*"}[intent.partition("_")[0]]
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    d.result, d.last = result, "sum"
    words = d.rng.random() < 0.2
    slots = {"a": _number(a, d, words), "b": _number(b, d, words)}
    user = d.ask(intent, slots, frames=d.rng.random() < 0.6)
    text = f"{a} {sign} {b} = {result}."
    return d.plain(category, user, f"The user wants {a} {sign} {b}. {text}", text)


def ask_sum(d: Dialogue) -> Turn:
    intent = d.rng.choices(["add", "sub", "sub_things", "mul"], [5, 3, 1, 2])[0]
    if intent == "mul":
        return _sum(d, intent, d.rng.randint(0, 10), d.rng.randint(0, 10), "product")
    large = d.rng.random() < 0.3 and d.split == TRAIN
    a, b = d.rng.randint(0, 99 if large else 20), d.rng.randint(0, 99 if large else 20)
    if intent == "sub_things" or (intent == "sub" and d.rng.random() < 0.6):
        a, b = max(a, b), min(a, b)
    return _sum(d, intent, a, b, "sum" if intent == "add" else "difference")


def follow_sum(d: Dialogue) -> Turn:
    assert d.result is not None
    before, b = d.result, d.rng.randint(1, 10)
    plus = before < b or d.rng.random() < 0.6
    sign = "+" if plus else "-"
    d.result = before + b if plus else before - b
    user = d.ask("more_plus" if plus else "more_minus", {"b": _number(b, d, d.rng.random() < 0.2)}, frames=False)
    text = f"{before} {sign} {b} = {d.result}."
    return d.plain("follow-up sum", user, f"The last result was {before}. {text}", text)


def _thing_slots(thing: Thing, rng: random.Random) -> Slots:
    forms = [(f"is {thing.single}", thing.single)]
    if thing.plural:
        bare = re.sub(r"^an? ", "", thing.single)
        forms += [(f"are {thing.plural}", thing.plural), (f"is the {bare}", f"the {bare}"), (f"is {bare}", bare)]
    is_thing, name = rng.choice(forms)
    return {"is_thing": is_thing, "thing": name, "verb": is_thing.partition(" ")[0]}


def _colour(d: Dialogue, intent: str, category: str) -> Turn:
    thing = d.rng.choice(facts.THINGS)
    d.last = "colour"
    user = d.ask(intent, _thing_slots(thing, d.rng), frames=intent == "colour")
    reasoning = f"The user asks about the colour of {thing.single}. It is {thing.colour}."
    return d.plain(category, user, reasoning, f"{sentence(thing.single)} is {thing.colour}.")


def ask_colour(d: Dialogue) -> Turn:
    if d.rng.random() < 0.75:
        return _colour(d, "colour", "colour")
    colour = d.rng.choice(sorted({t.colour for t in facts.THINGS}))
    example = next(t.single for t in facts.THINGS if t.colour == colour)
    d.last = "coloured"
    user = d.ask("something_coloured", {"colour": colour})
    reasoning = f"The user wants something {colour}. I take {example}."
    return d.plain("colour", user, reasoning, f"{sentence(example)} is {colour}.")


def follow_colour(d: Dialogue) -> Turn:
    return _colour(d, "and_thing", "follow-up colour")


def _opposite(d: Dialogue, intent: str, category: str) -> Turn:
    word = d.rng.choice(list(facts.OPPOSITES))
    other = facts.OPPOSITES[word]
    d.last = "opposite"
    quoted = f'"{word}"' if d.rng.random() < 0.15 else word
    user = d.ask(intent, {"word": quoted}, frames=intent == "opposite")
    reasoning = f"The user wants the opposite of {word}. That is {other}."
    return d.plain(category, user, reasoning, f"The opposite of {word} is {other}.")


def ask_opposite(d: Dialogue) -> Turn:
    return _opposite(d, "opposite", "opposite")


def follow_opposite(d: Dialogue) -> Turn:
    return _opposite(d, "and_word", "follow-up opposite")


def _date(d: Dialogue, kind: str, where: str, name: str, user: str, category: str) -> Turn:
    names = facts.DAYS if kind == "day" else facts.MONTHS
    other = names[(names.index(name) + (1 if where == "after" else -1)) % len(names)]
    d.step, d.last = (kind, other) if where == "after" else None, "date"
    answer = f"The {kind} {where} {name} is {other}."
    return d.plain(category, user, f"The user asks for the {kind} {where} {name}. That is {other}.", answer)


def ask_date(d: Dialogue) -> Turn:
    kind, where = d.rng.choice(["day", "month"]), d.rng.choice(["after", "before"])
    name = d.rng.choice(facts.DAYS if kind == "day" else facts.MONTHS)
    return _date(d, kind, where, name, d.ask(f"{kind}_{where}", {kind: name}), "date")


def follow_date(d: Dialogue) -> Turn:
    assert d.step is not None
    kind, name = d.step
    return _date(d, kind, "after", name, d.ask("then_next", frames=False), "follow-up date")


def ask_count(d: Dialogue) -> Turn:
    parts, owner, count = d.rng.choice(facts.COUNTS)
    d.last = "count"
    user = d.ask("count", {"parts": parts, "owner": owner})
    reasoning = f"The user asks for the {parts} of {owner}. There are {count}."
    return d.plain("count", user, reasoning, sentence(facts.has_parts(parts, owner, count)) + ".")


def ask_talk(d: Dialogue) -> Turn:
    intent = d.rng.choice(list(SMALL_TALK))
    what, answer = SMALL_TALK[intent]
    d.last = "talk"
    return d.plain("small talk", d.ask(intent, frames=False), f"The user {what}.", answer)


def tell_name(d: Dialogue) -> Turn:
    name = d.rng.choice(facts.NAMES)
    exact = d.rng.random() < 0.35
    if exact:
        name = toolbox.invented(d.rng).capitalize()
    d.name, d.last = name, "name"
    user = d.ask("name_tell", {"name": name}, frames=False, exact=exact)
    return d.plain("name", user, f"The user is called {name}.", f"Nice to meet you, {name}!")


def ask_name(d: Dialogue) -> Turn:
    user = d.ask("name_ask", frames=False)
    d.last = "name"
    if d.name is None:
        return d.plain("name", user, "The user has not told a name.", "You have not told me your name yet.")
    return d.plain("name", user, f"The user said the name {d.name}.", f"Your name is {d.name}.")


def _unknown_slots(rng: random.Random, split: str) -> Slots:
    topic = rng.choice(TOPICS[split])
    if split == TRAIN and rng.random() < 0.3:
        topic = " ".join(toolbox.any_word(rng) for _ in range(rng.choice([1, 1, 2])))
    family_name = rng.choice(SURNAMES) if rng.random() < 0.5 else toolbox.invented(rng).capitalize()
    word = rng.choice(list(facts.OPPOSITES)) if rng.random() < 0.5 else toolbox.any_word(rng)
    letters = "bcdfghjklmnpqrstvwxz"
    nonsense = ("".join(rng.choice(letters) for _ in range(rng.randint(2, 8))) for _ in range(rng.choice([1, 1, 2, 3])))
    return {
        "topic": topic,
        "nowhere": rng.choice(facts.NOWHERE),
        "city": rng.choice(facts.CITIES),
        "person": f"{rng.choice(facts.NAMES)} {family_name}",
        "word": f'"{word}"' if rng.random() < 0.2 else word,
        "animal": rng.choice(ANIMALS),
        "kind": rng.choice(KINDS),
        "nonsense": " ".join(nonsense),
        "a": str(rng.randint(2, 99)),
        "b": str(rng.randint(2, 99)),
        "big": str(rng.randint(100, 10 ** rng.randint(3, 6))),
        "big2": str(rng.randint(11, 10 ** rng.randint(2, 5))),
    } | named(rng.choice(COUNTRIES), rng)


def ask_unknown(d: Dialogue) -> Turn:
    intent = d.rng.choices(["unknown", "unknown_fact", "unknown_number"], [6, 6, 1])[0]
    d.last = "unknown"
    user = d.ask(intent, _unknown_slots(d.rng, d.split))
    return d.plain("unknown", user, "I have not learnt anything about this.", UNKNOWN)


@dataclass(frozen=True)
class Order:
    """One call that a user wants: the tool, its slots and how the request names them."""

    tool: Tool
    slots: Slots
    shown: Slots

    @property
    def goal(self) -> str:
        return _filled(self.tool.family.goal, self.slots)

    @property
    def exact(self) -> bool:
        """Whether the request must keep the case of what it names: only known cities can be told without it."""
        places = [self.slots[key] for key in ("place", "place2") if key in self.slots]
        return self.tool.family.exact or any(place not in facts.CITIES for place in places)


def _order(d: Dialogue, tool: Tool) -> Order:
    slots = tool.family.slots(d.rng) | tool.fixed
    shown = dict(slots)
    if "country" in slots:
        country = next(c for c in COUNTRIES if c.name == slots["country"])
        d.country, shown = country, shown | named(country, d.rng)
    if "text" in slots and d.rng.random() < 0.4:
        shown["text"] = f'"{slots["text"]}"'
    if "item" in slots:
        shown["item's"] = slots["item"] + "'s"
    return Order(tool, slots, shown)


def _called(d: Dialogue, category: str, user: str, orders: list[Order]) -> Turn:
    """A turn of calls, their results and the answer in words."""
    calls, results, answers = [], [], []
    for order in orders:
        calls.append(call_message(order.tool.name, toolbox.arguments(order.tool, order.slots)))
        result, answer = order.tool.family.result(d.rng, order.slots)
        if d.rng.random() < 0.04:
            result = d.rng.choice(["Error: not found", '{"error": "not found"}', '{"error":"timeout"}', "error"])
            answer = TOOL_ERROR
        results.append({"role": "tool", "content": result})
        answers.append(answer)
    plural = "s" if len(orders) > 1 else ""
    names = and_list(list(dict.fromkeys(order.tool.name for order in orders)))
    goals = and_list([order.goal for order in orders])
    request = assistant(f"The user wants {goals}. I call {names}.", "", calls)
    final = assistant(f"The tool has answered. I give the result{plural}.", " ".join(answers))
    d.last = orders[0].tool.family.key if len(orders) == 1 else "calls"
    return Turn(category, user, [request, *results, final])


def _together(d: Dialogue, orders: list[Order]) -> str:
    """One request for the same tool with several things, as one names a list."""
    key = orders[0].tool.family.joins
    shown = {**orders[0].shown}
    for name in [key] + ([f"{key}'s"] if f"{key}'s" in shown else []):
        parts = [order.shown[name.removesuffix("'s")] for order in orders]
        parts[-1] = orders[-1].shown[name]
        link = d.rng.choice([" and ", " and ", " and ", ", ", " or ", ", and ", " as well as ", " and also "])
        shown[name] = ", ".join(parts[:-1]) + link + parts[-1]
    return d.ask(orders[0].tool.family.key, shown, exact=any(order.exact for order in orders))


def _one_by_one(d: Dialogue, orders: list[Order]) -> str:
    """Several requests in one message."""
    text = ""
    for order in orders:
        said = d.ask(order.tool.family.key, order.shown, frames=not text, exact=True)
        link = d.rng.choice([" and ", ", and ", ". ", "? ", ". Also, ", ". And ", ", then ", " And ", "\n", "; "])
        text = text.rstrip("?.! ") + link + said if text else said
    return text


def _more_orders(d: Dialogue, tool: Tool) -> tuple[str, list[Order]]:
    """A request for two or three calls and, in order, the calls."""
    count = 2 if d.rng.random() < 0.7 else 3
    others = [t for t in d.tools if t is not tool]
    if others and d.rng.random() < 0.4:
        orders = [_order(d, t) for t in [tool, *d.rng.sample(others, min(len(others), count - 1))]]
        return _one_by_one(d, orders), orders
    orders = [_order(d, tool) for _ in range(count)]
    key = tool.family.joins
    if key and len({order.slots[key] for order in orders}) == count and d.rng.random() < 0.7:
        return _together(d, orders), [replace(o, slots=orders[0].slots | {key: o.slots[key]}) for o in orders]
    return _one_by_one(d, orders), orders


def ask_calls(d: Dialogue) -> Turn:
    """A request that takes several calls at once."""
    tool = d.rng.choice(d.tools)
    weather, time = d.tool(toolbox.WEATHER), d.tool(toolbox.TIME)
    if weather and d.rng.random() < 0.4:
        slots = toolbox.two_places(d.rng)
        orders = [Order(weather, {"place": slots[key]}, {}) for key in ("place", "place2")]
        user = d.ask("weather_two", slots, exact=any(order.exact for order in orders))
        return _called(d, "two calls", user, orders)
    if weather and time and d.rng.random() < 0.4:
        slots = toolbox.WEATHER.slots(d.rng)
        orders = [Order(t, slots, slots) for t in (weather, time)]
        return _called(d, "more calls", d.ask("weather_time", slots, exact=orders[0].exact), orders)
    user, orders = _more_orders(d, tool)
    return _called(d, "more calls", user, orders)


def ask_tool(d: Dialogue) -> Turn:
    if d.rng.random() < 0.3:
        return ask_calls(d)
    order = _order(d, d.rng.choice(d.tools))
    user = d.ask(order.tool.family.key, order.shown, exact=order.exact)
    return _called(d, "tool", user, [order])


def follow_tool(d: Dialogue) -> Turn:
    order = _order(d, next(t for t in d.tools if t.family.key == d.last))
    user = d.ask("and_weather", order.slots, frames=False, exact=order.exact)
    return _called(d, "follow-up tool", user, [order])


def ask_missing_tool(d: Dialogue) -> Turn:
    missing = [f for f in toolbox.FAMILIES if d.tool(f) is None and f.missable]
    if not missing:
        return ask_talk(d)
    family = d.rng.choice(missing)
    slots = family.slots(d.rng)
    d.last = "missing"
    shown = (
        slots | named(next(c for c in COUNTRIES if c.name == slots["country"]), d.rng) if "country" in slots else slots
    )
    user = d.ask(family.key, shown)
    goal = _filled(family.goal, slots)
    return d.plain("missing tool", user, f"The user wants {goal}. I have no tool for it.", NO_TOOL)


TOPIC_MAKERS: tuple[tuple[Maker, float], ...] = (
    (ask_country, 24), (ask_place, 6), (ask_is_capital, 5), (ask_trip, 2), (ask_sum, 14), (ask_colour, 8),
    (ask_opposite, 8), (ask_date, 7), (ask_count, 5), (ask_talk, 14), (tell_name, 4), (ask_name, 3),
    (ask_unknown, 15), (ask_missing_tool, 5), (quiz.ask_calendar, 7), (quiz.ask_steps, 8), (quiz.ask_terms, 7),
    (quiz.ask_numbers, 8), (quiz.ask_order, 3), (quiz.ask_whether, 8), (quiz.ask_which_country, 3),
)  # fmt: skip


def _follow_ups(d: Dialogue) -> list[Maker]:
    """The turns that can refer to what was said."""
    found: list[Maker] = []
    if d.last in ("capital", "language", "continent", "city"):
        found += [follow_there, follow_there, follow_and_country]
    elif d.country is not None:
        found += [follow_there] * (2 if d.last in ("trip", "place", "population") else 1)
    by_last = {"sum": follow_sum, "colour": follow_colour, "opposite": follow_opposite}
    if d.last in by_last:
        found.append(by_last[d.last])
    if d.last == "date" and d.step is not None:
        found.append(follow_date)
    if d.last in ("weather", "time"):
        found += [follow_tool, follow_tool]
    if d.name is not None and d.last != "name":
        found.append(ask_name)
    return found


def _next_turn(d: Dialogue) -> Turn:
    follow_ups = _follow_ups(d)
    if follow_ups and d.rng.random() < 0.6:
        return d.rng.choice(follow_ups)(d)
    if d.tools and d.rng.random() < 0.65:
        return ask_tool(d)
    makers, weights = zip(*TOPIC_MAKERS, strict=True)
    return d.rng.choices(makers, weights)[0](d)


def _system(rng: random.Random, split: str) -> list[Message]:
    if rng.random() < 0.5:
        return []
    texts = rng.sample(SYSTEMS[split], rng.choice([1, 1, 1, 2, 3]))
    if split == TRAIN and rng.random() < 0.15:
        texts.append(sentence(" ".join(rng.choice(toolbox.POOL) for _ in range(rng.randint(3, 12)))) + ".")
    return [{"role": "system", "content": " ".join(texts)}]


def _declared(rng: random.Random, split: str) -> list[Tool]:
    if rng.random() < 0.68:
        return []
    count = rng.choice([1, 1, 1, 2, 2, 3, 4, 5])
    known = [f for f in (toolbox.WEATHER, toolbox.TIME) if rng.random() < 0.3]
    others = [f for f in toolbox.FAMILIES if f not in known]
    families = [*known, *rng.sample(others, max(count - len(known), 0 if known else 1))]
    rng.shuffle(families)
    return [toolbox.declare(family, rng, split) for family in families]


def make_sample(seed: int, index: int, split: str) -> Sample:
    """The sample with this number; equal arguments give equal samples."""
    rng = random.Random(f"{seed}/{split}/{index}")
    d = Dialogue(rng, split, _declared(rng, split))
    thinking = rng.random() < 0.45
    messages = _system(rng, split)
    turns = rng.choices(range(1, 9), [42, 18, 17, 9, 6, 4, 2, 2])[0]
    for _ in range(turns - 1):
        turn = _next_turn(d)
        messages += [{"role": "user", "content": turn.user}, *turn.answers]
    turn = _next_turn(d)
    messages.append({"role": "user", "content": turn.user})
    spoken = [i for i, m in enumerate(turn.answers) if m["role"] == "assistant"]
    stop = rng.choice(spoken)
    steps = turn.answers[:stop]
    if not thinking or rng.random() < 0.25:
        steps = [m | {"reasoning_content": ""} if m["role"] == "assistant" else m for m in steps]
    target = turn.answers[stop] if thinking else turn.answers[stop] | {"reasoning_content": ""}
    category = f"{turn.category} answer" if len(spoken) > 1 and stop else turn.category
    return Sample(category, messages + steps, target, [t.schema for t in d.tools] or None, thinking)


def samples(seed: int, split: str, start: int = 0) -> Iterator[Sample]:
    """Samples without end."""
    index = start
    while True:
        yield make_sample(seed, index, split)
        index += 1


def pieces(text: str, forced: str = "") -> Iterator[tuple[str, bool]]:
    """A rendering cut into what is given and what the model says; the latter is marked True.

    What opens an assistant's turn at inference is given: its header, and the start of a think block or
    a whole empty one. So is what the last answer has to begin with.
    """
    end = 0
    for match in _SPOKEN.finditer(text):
        yield text[end : match.start(1)], False
        end = match.end(1)
        if forced and end == len(text):
            thought, mark, answer = match[1].rpartition("</think>\n\n")
            assert answer.startswith(forced)
            if mark:
                yield thought + mark, True
            yield forced, False
            yield answer.removeprefix(forced), True
        else:
            yield match[1], True


def heldout_set(seed: int, per_category: int) -> list[Sample]:
    """The evaluation set: this many samples of each category, in phrasings that training never uses."""
    found: dict[str, list[Sample]] = {}
    for sample in samples(seed, HELDOUT):
        group = found.setdefault(sample.category, [])
        if len(group) < per_category:
            group.append(sample)
        if sample.category == "two calls answer" and all(len(g) >= per_category for g in found.values()):
            return [s for name in sorted(found) for s in found[name]]
    raise AssertionError("unreachable")

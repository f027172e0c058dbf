"""Conversations for the tiny model, made up from facts and phrasings; a seed decides everything."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import facts
import toolbox
from facts import COUNTRIES, Country, Thing
from phrases import FRAMES, HELDOUT, HELDOUT_FORMS, PHRASES, TRAIN, choose, normal
from toolbox import Slots, Tool
from transformers import PreTrainedTokenizerBase

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
}


@dataclass(frozen=True)
class Turn:
    """What a user says and the messages that answer it; the last of them is the assistant's."""

    category: str
    user: str
    answers: list[Message]


@dataclass(frozen=True)
class Sample:
    """A conversation up to the point where the assistant has to speak, and what it should say."""

    category: str
    messages: list[Message]
    target: Message
    tools: list[toolbox.Json] | None
    thinking: bool


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
    return " and ".join(items)


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
    """The form with a small word left out or two letters of a word swapped."""
    words = form.split(" ")
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


def _cased(text: str, rng: random.Random, exact: bool) -> str:
    """The text as typed: mostly with a capital, sometimes all small, seldom all large."""
    draw = rng.random()
    if exact or draw > 0.3:
        return sentence(text) if rng.random() < 0.85 else text
    return text.upper() if draw < 0.05 else text.lower()


def ask(intent: str, slots: Slots, rng: random.Random, split: str, *, frames: bool = True, exact: bool = False) -> str:
    """A user's message with this intent; `exact` keeps the case of the slots."""
    while True:
        form = choose(rng.choice(PHRASES[intent][split]), rng)
        if frames:
            form = _with_frames(form, rng, split)
        if split == TRAIN:
            form = _with_slips(form, rng)
            if normal(form) in HELDOUT_FORMS:
                continue
        return _cased(_filled(_with_end(form, rng), slots), rng, exact)


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
    return {"is_thing": is_thing, "thing": name}


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
    noun = {1: {"wheels": "wheel", "eyes": "eye"}.get(parts, parts)}.get(count, parts)
    reasoning = f"The user asks for the {parts} of {owner}. There are {count}."
    return d.plain("count", user, reasoning, f"{sentence(owner)} has {count} {noun}.")


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


def ask_unknown(d: Dialogue) -> Turn:
    topic = d.rng.choice(TOPICS[d.split])
    if d.split == TRAIN and d.rng.random() < 0.3:
        topic = " ".join(toolbox.invented(d.rng) for _ in range(d.rng.choice([1, 1, 2])))
    slots = {"topic": topic, "nowhere": d.rng.choice(facts.NOWHERE)}
    d.last = "unknown"
    user = d.ask("unknown", slots)
    return d.plain("unknown", user, "I have not learnt anything about this.", UNKNOWN)


def _called(d: Dialogue, category: str, user: str, tool: Tool, many: list[Slots], goal: str) -> Turn:
    """A turn of calls, their results and the answer in words."""
    calls, results, answers = [], [], []
    for slots in many:
        calls.append(call_message(tool.name, toolbox.arguments(tool, slots)))
        result, answer = tool.family.result(d.rng, slots)
        if len(many) == 1 and d.rng.random() < 0.04:
            result = d.rng.choice(["Error: not found", '{"error": "not found"}', '{"error":"timeout"}', "error"])
            answer = TOOL_ERROR
        results.append({"role": "tool", "content": result})
        answers.append(answer)
    plural = "s" if len(many) > 1 else ""
    request = assistant(f"The user wants {goal}. I call {tool.name}.", "", calls)
    final = assistant(f"The tool has answered. I give the result{plural}.", " ".join(answers))
    d.last = tool.family.key
    return Turn(category, user, [request, *results, final])


def ask_tool(d: Dialogue) -> Turn:
    tool = d.rng.choice(d.tools)
    slots = tool.family.slots(d.rng)
    two = tool.family is toolbox.WEATHER and d.rng.random() < 0.3
    if two:
        slots = toolbox.FAMILIES[-1].slots(d.rng)
    exact = any(slots.get(key, "") not in facts.CITIES for key in ("place", "place2") if key in slots)
    if "country" in slots:
        country = next(c for c in COUNTRIES if c.name == slots["country"])
        d.country, shown = country, slots | named(country, d.rng)
    else:
        shown = slots
    if "text" in slots and d.rng.random() < 0.4:
        shown = shown | {"text": f'"{slots["text"]}"'}
    if two:
        user = d.ask("weather_two", shown, exact=exact)
        many = [{"place": slots["place"]}, {"place": slots["place2"]}]
        return _called(d, "two calls", user, tool, many, f"the weather in {slots['place']} and {slots['place2']}")
    user = d.ask(tool.family.key, shown, exact=exact)
    return _called(d, "tool", user, tool, [slots], _filled(tool.family.goal, slots))


def follow_tool(d: Dialogue) -> Turn:
    tool = next(t for t in d.tools if t.family.key == d.last)
    slots = tool.family.slots(d.rng)
    user = d.ask("and_weather", slots, frames=False, exact=slots["place"] not in facts.CITIES)
    return _called(d, "follow-up tool", user, tool, [slots], _filled(tool.family.goal, slots))


def ask_missing_tool(d: Dialogue) -> Turn:
    missing = [f for f in toolbox.FAMILIES if d.tool(f) is None]
    family = d.rng.choice(missing)
    slots = family.slots(d.rng)
    d.last = "missing"
    user = d.ask(family.key, slots)
    goal = _filled(family.goal, slots)
    return d.plain("missing tool", user, f"The user wants {goal}. I have no tool for it.", NO_TOOL)


TOPIC_MAKERS: tuple[tuple[Maker, float], ...] = (
    (ask_country, 26), (ask_place, 6), (ask_is_capital, 6), (ask_trip, 2), (ask_sum, 16), (ask_colour, 8),
    (ask_opposite, 8), (ask_date, 8), (ask_count, 5), (ask_talk, 11), (tell_name, 4), (ask_name, 2),
    (ask_unknown, 5), (ask_missing_tool, 3),
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
    if rng.random() < 0.72:
        return []
    families = rng.sample(toolbox.FAMILIES, rng.choice([1, 1, 1, 2, 2, 3, 4]))
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


def render(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """The whole conversation, the target at its end, as the chat template writes it."""
    text: str = tokenizer.apply_chat_template([*sample.messages, sample.target], tools=sample.tools, tokenize=False)
    return text.removesuffix("\n")


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A rendering cut into what is given and what the model says; the latter is marked True.

    What opens an assistant's turn at inference is given: its header, and the start of a think block or
    a whole empty one.
    """
    end = 0
    for match in _SPOKEN.finditer(text):
        yield text[end : match.start(1)], False
        yield match[1], True
        end = match.end(1)


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

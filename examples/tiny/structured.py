"""What a user asks for as an object: facts, texts to take something from, opinions to judge, lists, recipes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import facts
import toolbox
from facts import COUNTRIES, DAYS, MONTHS, NUMBER_WORDS, Country
from phrases import TRAIN
from schemas import Field, Object

if TYPE_CHECKING:
    from data import Dialogue


@dataclass(frozen=True)
class Task:
    """A user's message and the object that answers it. subject: what the message is, as DSPy names inputs.

    system: what developers write for it. thought: the reasoning before the answer.
    """

    kind: str
    user: str
    answer: Object
    subject: tuple[str, ...] = ("question",)
    system: tuple[str, ...] = ()
    thought: str = ""


def _figures() -> dict[str, tuple[int, int, str]]:
    """People of a country and of its capital, and the currency."""
    lines = (Path(__file__).resolve().parent / "figures.txt").read_text(encoding="utf-8").splitlines()[1:]
    rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return {name: (round(float(people) * 1e6), round(float(city) * 1e6), money) for name, people, city, money in rows}


FIGURES = _figures()
Keys = tuple[str, ...]


def pick(rng: random.Random, choices: str) -> str:
    return rng.choice(choices.split("|"))


def form(d: Dialogue, templates: Sequence[str], slots: dict[str, str]) -> str:
    """One of the templates, its slots filled in; the last is for evaluation only."""
    text = d.rng.choice(templates[:-1]) if d.split == TRAIN else templates[-1]
    return re.sub(r"\{(\w+)\}", lambda found: slots[found[1]], text)


def some(d: Dialogue, fields: list[Field], least: int = 1) -> tuple[Field, ...]:
    """Some of the fields: mostly in this order, sometimes shuffled."""
    count = d.rng.randint(min(least, len(fields)), len(fields))
    kept = sorted(d.rng.sample(range(len(fields)), count))
    if d.rng.random() < 0.3:
        d.rng.shuffle(kept)
    return tuple(fields[i] for i in kept)


def field(d: Dialogue, keys: str, value: Any, **more: Any) -> Field:
    return Field(pick(d.rng, keys), value, **more)


# Facts

_ABOUT = (
    "Tell me about {thing}.", "Tell me something about {thing}", "Describe {thing}.", "Give me facts about {thing}.",
    "Give me information about {thing}.", "Info on {thing}", "What do you know about {thing}?", "{thing}",
    "Generate an object for {thing}.", "Facts about {thing}", "Generate data for {thing}.", "I want to know {thing}.",
    "Provide details about {thing}.", "Fill in the fields for {thing}.", "Summarize {thing}.", "{thing}, please",
    "Return the data of {thing}.", "Create an entry for {thing}.", "Show me {thing}.",
)  # fmt: skip
_GEOGRAPHY = ("You are a geography expert.", "You know geography.", "Answer with facts.",
    "You are a helpful assistant.",
              "Answer in JSON.", "You are a travel guide.")  # fmt: skip


def bare(country: Country) -> str:
    """A country's name as a value: without its article."""
    return country.name.removeprefix("the ")


def country_fields(d: Dialogue, country: Country) -> list[Field]:
    people, _, money = FIGURES[country.name]
    tongues = re.split(", | and ", country.language)
    one = field(d, "language|language|official_language|main_language|spoken_language", country.language)
    return [
        field(d, "capital|capital|capital|capital_city", country.capital),
        one if d.rng.random() < 0.6 else field(d, "languages|official_languages", tongues),
        field(d, "continent|continent|region", country.continent),
        field(d, "population|population|inhabitants", people),
        field(d, "currency", money),
        field(d, "cities|major_cities|largest_cities", [country.capital, *country.cities]),
        Field("is_in_europe", "Europe" in country.continent),
    ]


def about_country(d: Dialogue) -> Task:
    country = d.rng.choice(COUNTRIES)
    fields = some(d, country_fields(d, country))[:4]
    if d.rng.random() < 0.75:
        fields = (field(d, "name|name|country|country|country_name", bare(country)), *fields)
    user = form(d, (*_ABOUT, "Please describe {thing}"), {"thing": country.name})
    name = pick(d.rng, "Country|Country|CountryInfo|CountryFacts|Nation|Result")
    return Task("country", user, Object(name, fields), ("country", "question", "topic"), _GEOGRAPHY)


def about_city(d: Dialogue) -> Task:
    country = d.rng.choice(COUNTRIES)
    capital = d.rng.random() < 0.7
    city = country.capital if capital else d.rng.choice(country.cities)
    fields = [
        field(d, "country|country|country_name", bare(country)),
        field(d, "continent|continent|region", country.continent),
        field(d, "language|language|spoken_language", country.language),
        field(d, "is_capital|capital", capital),
    ]
    if capital:
        people = field(d, "population|population|inhabitants", FIGURES[country.name][1])
        fields = [people, *fields] if d.rng.random() < 0.5 else [*fields, people]
    found = some(d, fields)[:4]
    if d.rng.random() < 0.85:
        found = (field(d, "name|name|name|city|city_name", city), *found)
    user = form(
        d, (*_ABOUT, "Please describe {thing}"), {"thing": city if d.rng.random() < 0.7 else f"the city of {city}"}
    )
    return Task("city", user, Object(pick(d.rng, "City|City|CityInfo|Place|Result"), found), ("city", "question",
        "topic"),
                _GEOGRAPHY)  # fmt: skip


_ASKED = {
    "capital": ("capital|capital|capital_city|city|answer", 0),
    "language": ("language|language|official_language|answer", 1),
    "continent": ("continent|continent|region|answer", 2),
}  # fmt: skip


def one_fact(d: Dialogue) -> Task:
    """A question about a country, and besides its answer what belongs to it."""
    country = d.rng.choice(COUNTRIES)
    what = d.rng.choice(["capital", "capital", "capital", "language", "continent"])
    value = {"capital": country.capital, "language": country.language, "continent": country.continent}[what]
    if what == "capital" and d.rng.random() < 0.2:
        people = [field(d, "population|population|inhabitants", FIGURES[country.name][1])] * (d.rng.random() < 0.7)
        fields = [Field("name", country.capital), *people, Field("country", bare(country))]
        fields = fields[: d.rng.randint(2, 3)]
    else:
        others = country_fields(d, country)
        del others[_ASKED[what][1]]
        fields = [field(d, _ASKED[what][0], value)]
        if d.rng.random() < 0.75:
            fields.insert(d.rng.choice([0, 0, 0, 1]), field(d, "country|country|country_name", bare(country)))
        if d.rng.random() < 0.4:
            fields += d.rng.sample(others, d.rng.randint(1, 2))
    user = d.ask(what, d.named(country))
    name = pick(d.rng, f"{what.capitalize()}|{what.capitalize()}|Answer|Country|Response|Fact|City")
    thought = f"The user asks about {country.name}. It is {value}."
    return Task("fact", user, Object(name, tuple(fields)), ("question", "question", "query"), _GEOGRAPHY, thought)


_TEXTS = "answer|answer|answer|answer|response|response|result|text|reply|output|message|content|final_answer"


def any_answer(d: Dialogue) -> Task:
    """An ordinary question, its ordinary answer as a text."""
    import data

    makers, weights = zip(*(pair for pair in data.TOPIC_MAKERS if pair[0] is not data.ask_missing_tool), strict=True)
    turn = d.rng.choices(makers, weights)[0](d)
    said, thought = turn.answers[-1]["content"], turn.answers[-1]["reasoning_content"]
    unknown = said == data.UNKNOWN
    key = toolbox.any_word(d.rng) if d.rng.random() < 0.1 else pick(d.rng, _TEXTS)
    fields = [Field(key, said)]
    if d.rng.random() < 0.3:
        fields.insert(0, field(d, "reasoning|reasoning|explanation|rationale|thought", thought))
    if d.rng.random() < 0.15:
        fields.append(field(d, "confidence|confidence|score", 0.1 if unknown else 0.9))
    if turn.category == "yes or no" and d.rng.random() < 0.5:
        right = said.startswith("Yes")
        fields = [field(d, "answer|answer|is_true|correct|is_correct|result|value|verdict", right)]
        fields += [field(d, "explanation|reason|text", said)] * (d.rng.random() < 0.3)
    name = pick(d.rng, "Answer|Answer|Response|Output|Result|Reply|FinalAnswer")
    thoughts = "" if len(thought) > 110 else thought
    fields = [f for f in fields if f.value != thought or thoughts]
    return Task(
        "answer", turn.user, Object(name, tuple(fields)), ("question", "question", "query", "input"), (), thought
    )


def sum_object(d: Dialogue) -> Task:
    a, b = d.rng.randint(0, 20), d.rng.randint(0, 20)
    intent = d.rng.choice(["add", "add", "sub", "mul"])
    if intent == "mul":
        a, b = min(a, 10), min(b, 10)
    if intent == "sub":
        a, b = max(a, b), min(a, b)
    result = {"add": a + b, "sub": a - b, "mul": a * b}[intent]
    user = d.ask(intent, {"a": str(a), "b": str(b)}, frames=d.rng.random() < 0.6)
    text = f"{a} {'+-*'[['add', 'sub', 'mul'].index(intent)]} {b} = {result}"
    keys = "answer|answer|result|result|value|final_answer|number|output" + ("|sum|total" if intent == "add" else "")
    fields = [field(d, keys, result if d.rng.random() < 0.75 else str(result))]
    draw = d.rng.random()
    if draw < 0.2:
        fields = [Field("a", a), Field("b", b), *fields]
    elif draw < 0.45:
        step = Object(pick(d.rng, "Step|MathStep"), (Field("explanation", text + "."), Field("output", text)))
        fields = [Field("steps", [step]), Field("final_answer", str(result))]
    elif draw < 0.65:
        fields = [field(d, "explanation|reasoning|steps_text|expression", text), *fields]
    elif draw < 0.75:
        fields = [field(d, "is_math|is_math_homework|is_math_question|is_homework", True)]
        fields.insert(
            d.rng.choice([0, 1]), field(d, "reasoning|explanation", f"The user wants {text.partition(' =')[0]}.")
        )
    name = pick(d.rng, "Answer|MathReasoning|MathResponse|Sum|Result|Calculation")
    system = ("You are a helpful math tutor.", "You are a calculator.",
        "Guide the user through the solution step by step.",
              "You are a helpful math tutor. Guide the user through the solution step by step.")  # fmt: skip
    return Task("sum", user, Object(name, tuple(fields)), ("question", "expression", "problem"), system, text + ".")


def word_object(d: Dialogue) -> Task:
    """An opposite, a colour, a count or a day as an object."""
    kind = d.rng.choice(["opposite", "colour", "count", "date", "joke"])
    if kind == "opposite":
        word = d.rng.choice(list(facts.OPPOSITES))
        user, value = d.ask("opposite", {"word": word}), facts.OPPOSITES[word]
        fields = [field(d, "word|word|input", word), field(d, "opposite|opposite|antonym|answer", value)]
    elif kind == "colour":
        thing = d.rng.choice(facts.THINGS)
        user, value = d.ask("colour", d.thing_slots(thing)), thing.colour
        named = re.sub(r"^(an?|the) ", "", thing.single)
        fields = [field(d, "object|thing|name|item", named), field(d, "color|color|colour|answer", value)]
    elif kind == "count":
        parts, owner, count = d.rng.choice(facts.COUNTS)
        user = d.ask("count", {"parts": parts, "owner": owner})
        fields = [field(d, "name|thing|owner|object", re.sub(r"^(an?|the) ", "", owner)),
                  field(d, f"count|number|answer|{parts}|number_of_{parts}", count)]  # fmt: skip
    elif kind == "date":
        unit, where = d.rng.choice(["day", "month"]), d.rng.choice(["after", "before"])
        names, step = (DAYS if unit == "day" else MONTHS), 1 if where == "after" else -1
        at = d.rng.randrange(len(names))
        user = d.ask(f"{unit}_{where}", {unit: names[at]})
        fields = [field(d, f"start|given|from_{unit}", names[at]),
                  field(d, f"{unit}|{unit}|answer|{unit}_name", names[(at + step) % len(names)])]  # fmt: skip
    else:
        user = d.ask("joke", frames=False)
        fields = [field(d, "setup|setup|question", "Why did the banana see a doctor?"),
                  field(d, "punchline|punchline|answer", "It was not peeling well.")]  # fmt: skip
        if d.rng.random() < 0.4:
            fields.append(Field("rating", 7, optional=d.rng.random() < 0.6))
        return Task(kind, user, Object("Joke", tuple(fields)), ("topic", "request"))
    if d.rng.random() < 0.4:
        fields = fields[1:]
    return Task(kind, user, Object(pick(d.rng, f"{kind.capitalize()}|Answer|Result|Word"), tuple(fields)))


# Texts to take something from

_FRAMES = (
    "{text}", "{text}", "{text}", "{text}", "Extract: {text}", "Extract the {what}: {text}", "Extract {text}",
    "Extract the {what} from this text: {text}", "Extract the {what} information: {text}", "Parse this: {text}",
    'Extract the {what} from: "{text}"', "Text: {text}", "What {what} is it? {text}", "Get the {what}: {text}",
    "Extract structured data from the following text.\n\n{text}", "Turn this into a {what}: {text}",
    "Find the {what}.\n{text}",
    "Read this and give me the {what}: {text}",
)  # fmt: skip


def _copying(what: str, *more: str) -> tuple[str, ...]:
    return (f"Extract the {what} information.", f"Extract the {what}.", "You extract data from text.",
            f"Extract {what}s from text", "Extract the requested fields.", "You are a helpful assistant.",
                *more)  # fmt: skip


def _texts(d: Dialogue, what: str, templates: Sequence[str], slots: dict[str, str]) -> tuple[str, str]:
    """The text, and the user's message around it."""
    text = form(d, templates, slots)
    return text, form(d, _FRAMES, {"text": text, "what": what})


def _name(d: Dialogue) -> str:
    return d.rng.choice(facts.NAMES) if d.rng.random() < 0.75 else toolbox.invented(d.rng).capitalize()


def _names(d: Dialogue, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        names += [name for name in [_name(d)] if name not in names]
    return names


_JOBS = "teacher|doctor|nurse|engineer|baker|lawyer|student|driver|painter|farmer|cook|software engineer|pilot|designer|data scientist|writer|singer|chef"  # noqa: E501
_PERSON = (
    "{name} is {age} years old.", "{name} is {age} years old", "{name} is {age}.", "{name} is a {age} year old.",
    "My name is {name} and I am {age} years old.", "{name} is {age} years old and lives in {city}.",
    "{name} is a {job} from {city}.", "{name} is a {age}-year-old {job}.", "{name}, {age}, {job}, {city}",
    "{name} is a {age} year old {job} who lives in {city}.", "I am {name}, {age}, and I work as a {job}.",
    "Hi, I'm {name}! I am {age} years old and I live in {city}.", "This is {name}. He is {age} and a {job}.",
    "{name} lives in {city} and works as a {job}.", "{name} from {city} is {age} years old.",
    "Our {job} {name} is {age} years old and was born in {city}.", "{name} ({age}) lives in {city}. Email: {email}",
    "You can reach {name} at {email}.", "{name} works in {city} as a {job}. Contact: {email}",
    "Meet {name}, who is {age} years old, lives in {city} and works as a {job}.",
)  # fmt: skip
_PERSON_KEYS = {"name": "name|name|name|full_name|person|user_name|username", "age": "age|age|age|years",
                "city": "city|city|location|place|home|lives_in", "job": "job|occupation|profession|role|job_title",
                "email": "email|email|email_address"}  # fmt: skip


def person(d: Dialogue) -> Task:
    name, city = _name(d), toolbox.place(d.rng)
    full = f"{name} {d.rng.choice(['Smith', 'Miller', 'Jones', 'Brown'])}" if d.rng.random() < 0.15 else name
    email = f"{name.lower()}@{d.rng.choice(['example.com', 'mail.com', 'test.org', 'deltic.dev'])}"
    values = {"name": full, "age": d.rng.randint(1, 99), "city": city, "job": pick(d.rng, _JOBS), "email": email}
    templates = _PERSON
    text, user = _texts(d, pick(d.rng, "person|user|person|data"), templates, {k: str(v) for k, v in values.items()})
    if name in facts.NAMES and city in facts.CITIES and full == name and d.rng.random() < 0.1:
        user = user.lower()
    fields = []
    for slot, value in values.items():
        there = str(value) in text
        if (there and d.rng.random() < 0.9) or (not there and d.rng.random() < 0.12):
            optional = not there or d.rng.random() < 0.15
            fields.append(Field(pick(d.rng, _PERSON_KEYS[slot]), value if there else None, optional=optional))
    if not any(f.value is not None for f in fields):
        fields = [Field("name", full)]
    if d.rng.random() < 0.15:
        d.rng.shuffle(fields)
    kind = pick(d.rng, "Person|Person|User|UserInfo|UserDetail|Profile")
    thing = Object(kind, tuple(fields))
    if d.rng.random() < 0.08:
        thing = Object("Result", (Field(pick(d.rng, "person|user"), thing),))
    return Task("person", user, thing, ("text", "sentence", "input"), _copying("person", "Extract the user details."))


def people(d: Dialogue) -> Task:
    names = _names(d, d.rng.choice([2, 2, 3]))
    cities = [toolbox.place(d.rng) for _ in names]
    ages = [d.rng.randint(1, 99) for _ in names]
    by_age = d.rng.random() < 0.6
    told = [f"{n} is {a}" if by_age else f"{n} lives in {c}" for n, a, c in zip(names, ages, cities, strict=True)]
    text = d.rng.choice([", ".join(told[:-1]) + " and " + told[-1] + ".", ". ".join(told) + "."])
    name_key = pick(d.rng, "name|name|name|full_name")
    key = pick(d.rng, "age" if by_age else "city|city|location")
    inner = pick(d.rng, "Person|User|Member")
    things = [Object(inner, (Field(name_key, n), Field(key, a if by_age else c)))
              for n, a, c in zip(names, ages, cities, strict=True)]  # fmt: skip
    plural = {"Person": "people", "User": "users", "Member": "members"}[inner]
    if d.rng.random() < 0.25:
        fields = (Field(pick(d.rng, "names|names|people"), names),)
    else:
        fields = (Field(pick(d.rng, f"{plural}|{plural}|elements|items|results|response"), things),)
    user = form(d, _FRAMES, {"text": text, "what": plural})
    return Task("people", user, Object(pick(d.rng, "People|Users|Result|Team|Response"), fields), ("text", "sentence"),
                _copying("person"))  # fmt: skip


_EVENTS = "science fair|birthday party|team meeting|concert|wedding|conference|workshop|football match|book club|dinner|lunch|picnic|music festival|school play|art show|chess game|movie night|board meeting|yoga class|garden party|project review|job interview|hackathon|tennis lesson"  # noqa: E501
_EVENT = (
    "{people} are going to a {event} on {date}.", "{people} are going to a {event} {place}on {date}.",
    "{people} will attend the {event} on {date} at {time}.", "On {date}, {people} meet for a {event}.",
    "{people} have a {event} on {date} at {time}.", "The {event} with {people} is on {date}.",
    "Schedule a {event} with {people} on {date} at {time}.", "There is a {event} {place}on {date}. {people} will come.",
    "Please invite {people} to the {event} on {date}.", "{event} on {date} with {people}",
    "I planned a {event} for {date}; {people} are invited.", "{people} go to the {event} {place}on {date} at {time}.",
    "Add a {event} on {date} at {time} with {people} to my calendar.",
    "We celebrate a {event} on {date}, {people} included.",
    "Next {date} there will be a {event} {place}for {people}.", "{people} are meeting at a {event} on {date}.",
)  # fmt: skip


def _date(d: Dialogue) -> str:
    month, day = d.rng.choice(MONTHS), d.rng.randint(1, 28)
    iso = f"{d.rng.randint(2020, 2030)}-{MONTHS.index(month) + 1:02}-{day:02}"
    return d.rng.choice([*[d.rng.choice(DAYS)] * 5, f"{month} {day}", f"{month} {day}", f"{day} {month}", iso])


def event(d: Dialogue) -> Task:
    names, date, place = _names(d, d.rng.choice([1, 2, 2, 2, 3])), _date(d), toolbox.place(d.rng)
    what = pick(d.rng, _EVENTS)
    if d.rng.random() < 0.3:
        what = " ".join(toolbox.any_word(d.rng) for _ in range(d.rng.choice([1, 2, 2])))
    time = d.rng.choice(
        [f"{d.rng.randint(1, 12)} {pick(d.rng, 'am|pm')}", f"{d.rng.randint(7, 22)}:{pick(d.rng, '00|30|15')}"]
    )
    at = f"in {place} " if d.rng.random() < 0.4 else ""
    joined = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
    slots = {"people": joined, "event": what, "date": date, "time": time, "place": at}
    text, user = _texts(d, "event", _EVENT, slots)
    fields = [field(d, "name|name|name|title|event|event_name|summary", what),
              field(d, "date|date|date|day|when", date),
              field(d, "participants|participants|participants|attendees|people|guests|names", names)]  # fmt: skip
    for there, keys, value in (
        (time in text, "time|time|start_time", time),
        (at and at in text, "location|place|where|city", place),
    ):
        if there or d.rng.random() < 0.1:
            fields.append(field(d, keys, value if there else None, optional=not there or d.rng.random() < 0.2))
    if d.rng.random() < 0.25:
        fields = list(some(d, fields, 2))
    thing = Object(pick(d.rng, "CalendarEvent|CalendarEvent|Event|Meeting|Appointment"), tuple(fields))
    return Task("event", user, thing, ("text", "sentence", "email"), _copying("event", "Extract the calendar event."))


_ITEMS = "apple|banana|book|pen|chair|table|lamp|shirt|phone|cup|hat|ticket|laptop|bag|bike|pizza|egg|coffee|tomato|clock|camera|shoe|desk|bottle|keyboard"  # noqa: E501
_ORDER = ("I want to order {items}.", "Buy {items}.", "I need {items}", "Please send me {items}.",
    "Add {items} to my cart.",
          "Order: {items}", "We would like {items}.", "Can I get {items}?", "Shopping list: {items}",
          "Please order {items}.")  # fmt: skip


def order(d: Dialogue) -> Task:
    names = d.rng.sample(_ITEMS.split("|"), d.rng.choice([1, 2, 2, 3]))
    counts = [d.rng.randint(2, 30 if d.rng.random() < 0.5 else 9) for _ in names]
    named = d.rng.random() < 0.25
    said = [f"{NUMBER_WORDS[c] if named and c <= 20 else c} {n}s" for n, c in zip(names, counts, strict=True)]
    joined = ", ".join(said[:-1]) + " and " * (len(said) > 1) + said[-1]
    key, count_key = pick(d.rng, "name|name|item|product"), pick(d.rng, "quantity|quantity|count|amount")
    things = [Object(pick(d.rng, "Item"), (Field(key, n + "s"), Field(count_key, c)))
              for n, c in zip(names, counts, strict=True)]  # fmt: skip
    if len(things) == 1 and d.rng.random() < 0.6:
        thing = replace(things[0], name="Order")
    else:
        thing = Object(
            pick(d.rng, "Order|Cart|ShoppingList"), (Field(pick(d.rng, "items|items|products|elements"), things),)
        )
    user = form(d, _FRAMES if d.rng.random() < 0.4 else ("{text}", "{text}"),
                {"text": form(d, _ORDER, {"items": joined}), "what": "order"})  # fmt: skip
    return Task("order", user, thing, ("text", "request"), _copying("order"))


_PRODUCT = ("The {item} costs {price} dollars.", "The {item} costs ${price} and is {stock}.",
    "{item}: ${price}, {stock}",
            "Our new {colour} {item} is only ${price}.", "A {colour} {item} for ${price}, {stock}.",
            "{item} - {price} dollars",
            "Get the {colour} {item} for {price} dollars. It is {stock}.",
            "For ${price} you get a {item}, {stock} now.")  # fmt: skip


def product(d: Dialogue) -> Task:
    item = pick(d.rng, _ITEMS) if d.rng.random() < 0.7 else toolbox.any_word(d.rng)
    stock, colour = d.rng.random() < 0.5, d.rng.choice(["red", "blue", "green", "black", "white", "yellow"])
    price: float = d.rng.randint(1, 99) if d.rng.random() < 0.4 else round(d.rng.uniform(1, 99), 1) + 0.09
    price = round(price, 2)
    slots = {"item": item, "price": str(price), "stock": "in stock" if stock else "sold out", "colour": colour}
    text, user = _texts(d, "product", _PRODUCT, slots)
    fields = [field(d, "name|name|product|item|title|product_name", item), field(d, "price|price|cost|amount", price)]
    if colour in text:
        fields.append(field(d, "color|color|colour", colour))
    elif d.rng.random() < 0.15:
        fields.append(field(d, "color|colour", None, optional=True))
    if slots["stock"] in text:
        fields.append(field(d, "in_stock|available|is_available|in_stock", stock))
    return Task("product", user, Object("Product", tuple(fields)), ("text", "description"), _copying("product"))


_TRIP = ("Book a flight from {a} to {b} on {date}.", "I want to fly from {a} to {b} on {date}.",
    "Train from {a} to {b}, {date}",
         "We travel from {a} to {b} on {date}, {n} people.", "A ticket to {b} from {a} for {date}, please.",
         "{n} tickets from {a} to {b} on {date}", "Find a bus from {a} to {b} for {n} people.",
         "On {date}, {n} of us go from {a} to {b}.")  # fmt: skip


def travel(d: Dialogue) -> Task:
    a, b, date, n = toolbox.place(d.rng), toolbox.place(d.rng), _date(d), d.rng.randint(2, 9)
    text, user = _texts(d, "trip", _TRIP, {"a": a, "b": b, "date": date, "n": str(n)})
    fields = [field(d, "origin|origin|from_city|departure|source|departure_city", a),
              field(d, "destination|destination|to_city|arrival|arrival_city", b)]  # fmt: skip
    if date in text:
        fields.append(field(d, "date|date|departure_date|day", date))
    if f"{n} " in text.replace(date, ""):
        fields.append(field(d, "passengers|passengers|people|travelers|tickets", n))
    return Task("travel", user, Object(pick(d.rng, "Flight|Trip|Booking|Travel"), tuple(fields)), ("text", "request"),
                _copying("trip"))  # fmt: skip


_TASKS = "call mom|buy milk|water the plants|pay the rent|send the report|clean the kitchen|fix the bike|book a hotel|feed the cat|write the letter|wash the car|read the book"  # noqa: E501
_TODO = ("Remind me to {task} on {date}.", "I have to {task} on {date}.", "Urgent: {task} by {date}!",
    "{task} on {date}",
         "On {date} I must {task}, it is urgent.", "Do not forget to {task} on {date}.",
         "Please {task} before {date}.")  # fmt: skip


def todo(d: Dialogue) -> Task:
    what, date = pick(d.rng, _TASKS), _date(d)
    if d.rng.random() < 0.3:
        what = f"{d.rng.choice(['find', 'get', 'fix', 'sell'])} the {toolbox.any_word(d.rng)}"
    text, user = _texts(d, "task", _TODO, {"task": what, "date": date})
    fields = [field(d, "task|task|title|description|name|todo", what), field(d, "due_date|due|date|deadline|day", date)]
    if d.rng.random() < 0.4:
        level = "high" if "rgent" in text else "low" if "forget" in text else "medium"
        fields.append(field(d, "priority", level, options=("low", "medium", "high")))
    if d.rng.random() < 0.15:
        fields.append(field(d, "done|completed", False))
    return Task("todo", user, Object(pick(d.rng, "Task|Todo|Reminder"), tuple(fields)), ("text",), _copying("task"))


_ADDRESS = (
    "{name} lives at {street}, {city}.", "{name}, {street}, {city}", "Send it to {name}, {street} in {city}.",
    "The address of {name} is {street}, {city}.", "{name} has a house at {street} in {city}.",
)  # fmt: skip


def address(d: Dialogue) -> Task:
    name, city, street = (
        _name(d),
        toolbox.place(d.rng),
        f"{d.rng.randint(1, 200)} {toolbox.any_word(d.rng).title()} Street",
    )
    _, user = _texts(d, "address", _ADDRESS, {"name": name, "city": city, "street": street})
    inner = (field(d, "street|street|street_address|line1", street), field(d, "city|city|town", city))
    fields = (field(d, "name|name|full_name", name), Field("address", Object("Address", inner)))
    thing = Object(pick(d.rng, "Person|Customer|User"), fields) if d.rng.random() < 0.7 else Object("Address", inner)
    return Task("address", user, thing, ("text",), _copying("address"))


# Judgements

_OPINIONS = {
    "positive": "great|wonderful|amazing|fantastic|excellent|good|perfect|lovely|brilliant|nice|delicious|"
    "beautiful|awesome|superb",
    "negative": "terrible|awful|bad|horrible|boring|broken|ugly|disgusting|poor|useless|"
    "disappointing|slow|sad|annoying",
    "neutral": "okay|average|normal|ordinary|so-so|all right|neither good nor bad|as expected",
}  # fmt: skip
_SAID = {
    "positive": ("I love this {thing}!", "I really like the {thing}.", "This is the best {thing} ever.",
    "I am so happy with the {thing}!",
                 "Thank you, the {thing} works great.", "What a {word} {thing}!", "Highly recommended.",
                 "It is my favourite {thing}."),
    "negative": ("I hate this {thing}.", "I do not like the {thing}.", "This is the worst {thing} ever.",
    "I want my money back.",
                 "The {thing} broke after one day.", "What a {word} {thing}!", "Never again!",
                 "I am very unhappy with the {thing}."),
    "neutral": ("The {thing} arrived on {day}.", "The {thing} is in the box.", "I bought the {thing} on {day}.",
    "It is a {thing}.",
                "The {thing} has {n} parts.", "I have had the {thing} since {day}.", "The meeting is on {day}.",
                "We sell a {thing}."),
}  # fmt: skip
_ASK_MOOD = ("Classify the sentiment: {text}", "What is the sentiment of this text? {text}", "{text}",
    "Sentiment: {text}",
             "Classify the sentiment of this sentence: {text}", 'Review: "{text}"',
             "Is this positive or negative? {text}",
             "Analyze the sentiment of: {text}", "How does the writer feel? {text}", "Classify: {text}", '"{text}"',
             'Classify the sentiment of the following text: "{text}"',
             "Judge the sentiment of this review: {text}")  # fmt: skip
_THINGS = (
    "movie|book|film|food|service|hotel|phone|song|game|product|restaurant|room|coffee|show|weather|trip|camera|soup"
)


def sentiment(d: Dialogue) -> Task:
    mood = d.rng.choice(["positive", "positive", "negative", "negative", "neutral"])
    word, thing = pick(d.rng, _OPINIONS[mood]), pick(d.rng, _THINGS)
    plain_form = ("The {thing} was {word}.", "The {thing} is {word}.", "This {thing} is really {word}.",
        "It was a {word} {thing}.",
                  "The {thing} was so {word}!", "{thing}: {word}", "A {word} {thing}.",
                  "My {thing} is {word}")  # fmt: skip
    text = form(d, _SAID[mood] if d.rng.random() < 0.5 else plain_form,
                {"thing": thing, "word": word, "day": d.rng.choice(DAYS), "n": str(d.rng.randint(2, 9))})  # fmt: skip
    text = text[:1].upper() + text[1:]
    user = form(d, _ASK_MOOD, {"text": text})
    styles = [("positive", "negative", "neutral")] * 6
    styles += [("positive", "negative")] * 2 if mood != "neutral" else []
    options = d.rng.choice(styles)
    value, cased = mood, d.rng.random()
    if cased < 0.15:
        change = str.capitalize if cased < 0.08 else str.upper
        options, value = tuple(map(change, options)), change(mood)
    named = d.rng.random() < 0.8
    fields = [field(d,
        "sentiment|sentiment|sentiment|sentiment|label|classification|category|mood|result|class|polarity", value,
                    options=tuple(d.rng.sample(options, len(options))) if named else ())]  # fmt: skip
    if d.rng.random() < 0.25:
        fields.append(field(d, "confidence|confidence|score", 0.9))
    elif d.rng.random() < 0.15:
        fields.insert(0, field(d, "text|sentence|review", text))
    elif mood != "neutral" and d.rng.random() < 0.2:
        fields = [field(d, "is_positive|positive|is_good|sentiment|sentiment", mood == "positive")]
    system = ("Classify the sentiment.", "You classify texts.", "You are a helpful assistant.",
        "Classify the sentiment of the text.",
              "You are a sentiment classifier.")  # fmt: skip
    return Task("sentiment", user, Object(pick(d.rng, "Sentiment|Review|Classification|SentimentResult"),
        tuple(fields)),
                ("sentence", "text", "review"), system)  # fmt: skip


_PLOTS = {
    "sci-fi": "astronauts|robots|aliens|a spaceship|a time machine|a distant planet|a space station",
    "horror": "a ghost|zombies|a haunted house|a vampire|a monster in the dark|an old cursed doll",
    "comedy": "a clown|funny neighbours|a clumsy cook|two silly brothers|a wedding where all goes wrong",
    "action": "a secret agent|a car chase|soldiers|a bank robbery|an explosion|a fight on a train",
    "drama": "a divorce|a sick mother|a poor family|a lost love|a trial in court",
}
_STORIES = ("A group of friends meet {thing}.", "A film about {thing}.", "{thing} and a long journey",
    "A man has to deal with {thing}.",
            "This story tells of {thing}.", "Everything changes for a small town because of {thing}.")  # fmt: skip


def genre(d: Dialogue) -> Task:
    kind = d.rng.choice(list(_PLOTS))
    text = form(d, _STORIES, {"thing": pick(d.rng, _PLOTS[kind])})
    user = form(d, ('Classify the genre of this movie plot: "{text}"', "Classify the genre: {text}",
        "What genre is it? {text}",
                    "Which genre does this film have? {text}"), {"text": text})  # fmt: skip
    options = tuple(d.rng.sample(list(_PLOTS), len(_PLOTS)))
    key = pick(d.rng, "genre|genre|result|label|category")
    return Task(
        "genre", user, Object(pick(d.rng, "Movie|Genre|Result"), (Field(key, kind, options),)), ("text", "plot")
    )


# Lists

_LISTS: dict[str, tuple[str, ...]] = {
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "pink"), "days": DAYS, "months": MONTHS[:7],
    "fruits": ("apple", "banana", "orange", "lemon", "cherry", "pear", "plum"),
    "animals": ("dog", "cat", "horse", "lion", "elephant", "bird", "fish"),
    "cities": ("Paris", "Berlin", "Rome", "Madrid", "London", "Tokyo", "Cairo"),
    "countries": ("France", "Germany", "Italy", "Spain", "Japan", "Brazil", "Canada"),
    "languages": ("English", "French", "German", "Spanish", "Italian", "Chinese", "Arabic"),
    "names": ("Anna", "Tom", "Mary", "Peter", "Laura", "Max", "Ruth"),
}  # fmt: skip
_LIST = ("List {n} {what}.", "Give me {n} {what}.", "Name {n} {what}.", "Tell me {n} {what}", "{n} {what}",
    "I need {n} {what}.",
         "Generate {n} {what}.", "Can you list {n} {what}?", "Write down {n} {what}.", "Generate a list of {n} {what}.",
         "What are {n} {what}?", "Show me {n} {what}.", "Please give me a list of {n} {what}")  # fmt: skip


def listed(d: Dialogue) -> Task:
    what = d.rng.choice(list(_LISTS))
    n = d.rng.randint(2, 7)
    items, spelt = list(_LISTS[what][:n]), "colors" if what == "colours" and d.rng.random() < 0.6 else what
    said = NUMBER_WORDS[n] if d.rng.random() < 0.5 else str(n)
    if d.rng.random() < 0.25:
        said, items = "some", items[:3] if n < 3 else list(_LISTS[what][:3])
    user = form(d, _LIST, {"n": said, "what": spelt})
    keys = f"{spelt}|{spelt}|{spelt}|items|list|result|response|elements|values|{what}"
    fields: tuple[Field, ...] = (field(d, keys, items),)
    if what == "countries" and d.rng.random() < 0.5:
        chosen = [next(c for c in COUNTRIES if c.name == name) for name in items[:4]]
        user = form(
            d,
            _LIST,
            {
                "n": NUMBER_WORDS[len(chosen)],
                "what": pick(d.rng, "countries with their capitals|countries and their capitals|countries"),
            },
        )
        keyed, capital = pick(d.rng, "name|country"), pick(d.rng, "capital|capital|capital_city")
        things = [Object("Country", (Field(keyed, c.name), Field(capital, c.capital))) for c in chosen]
        fields = (field(d, "countries|countries|items|elements", things),)
    elif d.rng.random() < 0.15:
        fields = (*fields, field(d, "count|total", len(items)))
    return Task(
        "list", user, Object(pick(d.rng, "Colors|Result|Items|Answer|ListResponse"), fields), ("question", "request")
    )


_DISHES = {
    "lasagna": "pasta sheets:12|tomato sauce:500 ml|minced meat:400 g|cheese:200 g",
    "pancake": "flour:200 g|milk:300 ml|eggs:2", "pizza": "dough:1|tomato sauce:200 ml|cheese:150 g",
    "tomato soup": "tomatoes:1 kg|onion:1|water:500 ml", "fruit salad": "apple:1|banana:1|orange:1",
    "omelette": "eggs:3|milk:50 ml|salt:1 pinch", "chocolate cake": "flour:250 g|sugar:200 g|chocolate:150 g|eggs:3",
    "spaghetti": "spaghetti:400 g|tomato sauce:300 ml|cheese:50 g",
    "bread": "flour:500 g|water:350 ml|yeast:7 g|salt:10 g",
    "potato salad": "potatoes:1 kg|onion:1|oil:3 spoons", "burger": "bun:1|beef:150 g|cheese:1 slice",
}  # fmt: skip
_STEPS = {
    "lasagna": "Cook the meat with the sauce.|Layer pasta, meat and cheese.|Bake for 40 minutes.",
    "bread": "Mix everything.|Let it rest for 2 hours.|Bake for 40 minutes.",
    "pancake": "Mix everything.|Heat a pan.|Fry each side for 2 minutes.",
    "pizza": "Roll out the dough.|Add the sauce and the cheese.|Bake for 15 minutes.",
    "omelette": "Mix everything.|Heat a pan.|Fry for 5 minutes.",
    "chocolate cake": "Melt the chocolate.|Mix everything.|Bake for 40 minutes.",
    "spaghetti": "Cook the spaghetti.|Heat the sauce.|Add the cheese.",
    "tomato soup": "Cut everything.|Cook for 20 minutes.|Mix it well.",
    "burger": "Fry the beef.|Add the cheese.|Put it into the bun.",
    "fruit salad": "Wash everything.|Cut everything.|Mix it well.",
    "potato salad": "Cook the potatoes.|Cut everything.|Mix it well.",
}  # fmt: skip


def recipe(d: Dialogue) -> Task:
    dish = d.rng.choice(["lasagna", *_DISHES])
    parts = [part.split(":") for part in _DISHES[dish].split("|")]
    listed_parts: list[Any] = [name for name, _ in parts]
    if d.rng.random() < 0.65:
        key = pick(d.rng, "amount|amount|quantity")
        listed_parts = [Object("Ingredient", (Field("name", name), Field(key, amount))) for name, amount in parts]
    fields = [field(d, "name|name|title", dish.capitalize()), Field("ingredients", listed_parts),
              field(d, "steps|steps|instructions", _STEPS[dish].split("|"))]  # fmt: skip
    thing = Object("Recipe", tuple(fields) if d.rng.random() < 0.8 else some(d, fields, 2))
    if d.rng.random() < 0.4:
        thing = Object("Response", (Field("recipe", thing),))
    user = form(d, ("Generate a {dish} recipe.", "Generate a {dish} recipe.", "Give me a recipe for {dish}.",
        "How do I cook {dish}?",
                    "Write a recipe for {dish}", "{dish} recipe", "Create a {dish} recipe.", "I want to make {dish}.",
                    "Please give me a {dish} recipe."), {"dish": dish})  # fmt: skip
    return Task("recipe", user, thing, ("dish", "request"))


_HEROES = (("Brom", "warrior", "A strong man with a big axe."), ("Elda", "mage",
    "A wise woman who knows fire and ice."),
           ("Finn", "thief", "A quick boy who opens every door."))  # fmt: skip


def characters(d: Dialogue) -> Task:
    n = d.rng.randint(1, 3)
    count = pick(d.rng, f"{n}|{NUMBER_WORDS[n]}") if n > 1 else "a"
    user = form(d, ("Generate {n} character description{s} for a fantasy role playing game.",
        "Create {n} fantasy character{s}.",
                    "Invent {n} hero{es} for a game", "Generate {n} character{s}.",
                    "Make up {n} character{s} for a game."),
                {"n": count, "s": "s" * (n > 1), "es": "es" * (n > 1)})  # fmt: skip
    role = pick(d.rng, "class|class|role|job")
    heroes = [
        Object("Character", (Field("name", a), Field(role, b), field(d, "description", c))) for a, b, c in _HEROES[:n]
    ]
    thing = heroes[0] if n == 1 else Object("Characters", (field(d, "elements|elements|characters|items", heroes),))
    return Task("characters", user, thing, ("request",))


def profile(d: Dialogue) -> Task:
    user = form(d, ("Generate a user.", "Generate a user profile.", "Make up a person.", "Create a fake user.",
        "Create a person.",
                    "Invent a user", "Generate an example user.", "Generate a person."), {})  # fmt: skip
    values = {"name": "Anna", "age": 30, "city": "Berlin", "job": "teacher", "email": "anna@example.com"}
    fields = some(d, [Field(pick(d.rng, _PERSON_KEYS[slot]), value) for slot, value in values.items()], 2)
    return Task("profile", user, Object(pick(d.rng, "User|Person|Profile"), fields), ("request",))


Maker = Callable[["Dialogue"], Task]
TASKS: tuple[tuple[Maker, float], ...] = (
    (one_fact, 16), (about_country, 10), (about_city, 8), (any_answer, 18), (sum_object, 7), (word_object, 7), (person,
    12),
    (people, 5), (event, 12), (order, 4), (product, 5), (travel, 4), (todo, 4), (address, 3), (sentiment, 9), (genre,
    2),
    (listed, 6), (recipe, 4), (characters, 1), (profile, 1),
)  # fmt: skip


def make_task(d: Dialogue) -> Task:
    makers, weights = zip(*TASKS, strict=True)
    return d.rng.choices(makers, weights)[0](d)

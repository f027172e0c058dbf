"""Turns about the calendar and numbers, and questions whether something is so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import facts
from facts import COUNTRIES, DAYS, MONTHS, OPPOSITES, THINGS

if TYPE_CHECKING:
    from data import Dialogue, Turn

ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip
SHORT_ORDINALS = ("1st", "2nd", "3rd", *(f"{i}th" for i in range(4, 13)))
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
CONTINENTS = ("Europe", "Asia", "Africa", "North America", "South America", "Oceania")

# What has one answer: intent, what the user asks for, the answer.
FIXED = {
    "list_months": ("the months", f"The months are {', '.join(MONTHS[:-1])} and {MONTHS[-1]}."),
    "list_days": ("the days of the week", f"The days of the week are {', '.join(DAYS[:-1])} and {DAYS[-1]}."),
    "weekend": ("the weekend", "Saturday and Sunday are the weekend."),
    "shortest_month": ("the shortest month", "February is the shortest month."),
    "months_30": ("the months with 30 days", "April, June, September and November have 30 days."),
    "seasons": ("the seasons", "The seasons are spring, summer, autumn and winter."),
    "leap_year": ("the days of a leap year", "A leap year has 366 days."),
}
# How far from the day or month that the user names, in days or months; 0: as many as the user says.
STEPS = {
    "yesterday_was": ("day", 1), "tomorrow_is": ("day", -1), "yesterday_tomorrow": ("day", 2),
    "tomorrow_yesterday": ("day", -2), "overmorrow": ("day", 2), "ereyesterday": ("day", -2),
    "last_month_was": ("month", 1), "next_month_is": ("month", -1),
}  # fmt: skip
COUNTED = {
    "days_later": ("day", 1), "days_earlier": ("day", -1), "months_later": ("month", 1), "months_earlier": ("month", -1)
}  # fmt: skip


def _number(value: int, d: Dialogue, share: float = 0.2) -> str:
    return facts.NUMBER_WORDS[value] if value <= 20 and d.rng.random() < share else str(value)


def names_of(kind: str) -> tuple[str, ...]:
    return DAYS if kind == "day" else MONTHS


def ask_calendar(d: Dialogue) -> Turn:
    d.last = "calendar"
    intent = d.rng.choice(["nth_month", "nth_month", "nth_day", "which_number", "month_days", "month_days", *FIXED])
    if intent in FIXED:
        what, answer = FIXED[intent]
        return d.plain("calendar", d.ask(intent), f"The user asks for {what}.", answer)
    if intent == "month_days":
        month = d.rng.choice(MONTHS)
        days = MONTH_DAYS[MONTHS.index(month)]
        answer = f"{month} has {days} days{', or 29 in a leap year' if days == 28 else ''}."
        return d.plain("calendar", d.ask(intent, {"month": month}), f"The user asks how long {month} is.", answer)
    kind = "month" if intent == "nth_month" else "day" if intent == "nth_day" else d.rng.choice(["day", "month"])
    names, whole = names_of(kind), "week" if kind == "day" else "year"
    at = d.rng.randrange(len(names))
    if intent == "which_number":
        user = d.ask(intent, {"name": names[at], "unit": kind})
        answer = f"{names[at]} is the {ORDINALS[at]} {kind} of the {whole}."
        return d.plain("calendar", user, f"The user asks which {kind} {names[at]} is. It is number {at + 1}.", answer)
    nth = shown = ORDINALS[at]
    if d.rng.random() < 0.2:
        at, nth = len(names) - 1, "last"
        shown = d.rng.choice(["last", "last", "final"])
    elif d.rng.random() < 0.25:
        shown = SHORT_ORDINALS[at]
    reasoning = f"The user asks for the {nth} {kind}. It is number {at + 1}, {names[at]}."
    return d.plain(
        "calendar", d.ask(intent, {"nth": shown}), reasoning, f"The {nth} {kind} of the {whole} is {names[at]}."
    )


def ask_steps(d: Dialogue) -> Turn:
    """A day or month some steps before or after another."""
    intent = d.rng.choice([*STEPS, *STEPS, *COUNTED])
    kind, steps = STEPS.get(intent) or COUNTED[intent]
    names, slots = names_of(kind), {}
    if intent in COUNTED:
        steps *= d.rng.randint(2, 6)
        slots["n"] = _number(abs(steps), d, 0.4)
    at = d.rng.randrange(len(names))
    name, other = names[at], names[(at + steps) % len(names)]
    where = "after" if steps > 0 else "before"
    user = d.ask(intent, slots | {kind: name})
    d.step, d.last = (kind, other) if where == "after" else None, "date"
    if abs(steps) == 1:
        reasoning, answer = f"{kind} {where} {name}", f"The {kind} {where} {name} is {other}."
    else:
        reasoning = f"{kind} {abs(steps)} {kind}s {where} {name}"
        answer = f"{abs(steps)} {kind}s {where} {name} is {other}."
    return d.plain("date", user, f"The user asks for the {reasoning}. That is {other}.", answer)


def _terms(d: Dialogue, plus_only: bool) -> tuple[list[int], list[str]]:
    """Numbers and the signs between them whose results on the way are none below zero."""
    count = 3 if d.rng.random() < 0.75 else 4
    top = 20 if count == 3 and d.rng.random() < 0.25 else 10
    numbers, signs = [d.rng.randint(0, top)], []
    total = numbers[0]
    minus = 0.0 if plus_only or d.rng.random() < 0.6 else 0.6
    for _ in range(count - 1):
        number = d.rng.randint(0, 10)
        sign = "-" if number <= total and d.rng.random() < minus else "+"
        total += number if sign == "+" else -number
        numbers.append(number)
        signs.append(sign)
    return numbers, signs


def _chain(numbers: list[int], signs: list[str]) -> tuple[str, str, int]:
    """The terms as text, the sums on the way, and the result."""
    text, total, way = str(numbers[0]), numbers[0], ""
    for number, sign in zip(numbers[1:], signs, strict=True):
        before, total = total, total + (number if sign == "+" else -number)
        text += f" {sign} {number}"
        way += f" {before} {sign} {number} = {total}."
    return text, way, total


def ask_terms(d: Dialogue) -> Turn:
    listed = d.rng.random() < 0.3
    numbers, signs = _terms(d, plus_only=listed)
    text, way, d.result = _chain(numbers, signs)
    d.last = "sum"
    share = 1.0 if d.rng.random() < 0.15 else 0.0
    words = [_number(n, d, share) for n in numbers]
    if listed:
        shown = {"numbers": ", ".join(words[:-1]) + d.rng.choice([" and ", ", and ", " and "]) + words[-1]}
    else:
        spoken = share > 0 or d.rng.random() < 0.3
        named = {"+": " plus ", "-": " minus "} if spoken else {"+": " + ", "-": " - "}
        shown = {"terms": words[0] + "".join(named[s] + w for s, w in zip(signs, words[1:], strict=True))}
        if not spoken and d.rng.random() < 0.35:
            shown["terms"] = shown["terms"].replace(" ", "")
    user = d.ask("sum_list" if listed else "terms", shown, frames=d.rng.random() < 0.5)
    return d.plain("three numbers", user, f"The user wants {text}.{way}", f"{text} = {d.result}.")


def ask_numbers(d: Dialogue) -> Turn:
    intent = d.rng.choice(
        ["div", "div", "bigger", "smaller", "number_after", "number_before", "even_odd", "double", "half", "count_to"]
    )
    d.last = "numbers"
    if intent in ("div", "double", "half"):
        return _product(d, intent)
    a, b = d.rng.randint(0, 99), d.rng.randint(0, 99)
    if d.rng.random() < 0.5:
        a, b = d.rng.randint(0, 20), d.rng.randint(0, 20)
    if intent in ("bigger", "smaller"):
        b = b if a != b else a + 1
        first, second = (max(a, b), min(a, b)) if intent == "bigger" else (min(a, b), max(a, b))
        reasoning, answer = f"The user compares {a} and {b}.", f"{first} is {intent} than {second}."
    elif intent == "count_to":
        a = d.rng.randint(2, 12)
        reasoning, answer = f"The user wants the numbers to {a}.", ", ".join(map(str, range(1, a + 1))) + "."
    elif intent == "even_odd":
        answer = f"{a} is {'odd' if a % 2 else 'even'}."
        reasoning = f"The user asks whether {a} is even or odd. It ends in {a % 10}."
    else:
        where = intent.partition("_")[2]
        a = max(a, 1)
        other = a + 1 if where == "after" else a - 1
        reasoning, answer = f"The user asks for the number {where} {a}.", f"The number {where} {a} is {other}."
    user = d.ask(intent, {"a": _number(a, d), "b": _number(b, d)}, frames=d.rng.random() < 0.6)
    return d.plain("numbers", user, reasoning, answer)


def _product(d: Dialogue, intent: str) -> Turn:
    d.last = "sum"
    if intent == "double":
        a = d.rng.randint(1, 20)
        d.result, text = 2 * a, f"2 * {a} = {2 * a}."
    else:
        b = 2 if intent == "half" else d.rng.randint(1, 10)
        d.result = d.rng.randint(0, 20 if intent == "half" else 10)
        a = b * d.result
        text = f"{a} / {b} = {d.result}."
    slots = {"a": _number(a, d), "b": _number(b, d)} if intent == "div" else {"a": _number(a, d)}
    user = d.ask(intent, slots, frames=d.rng.random() < 0.6)
    return d.plain("numbers", user, f"The user wants {text.partition(' =')[0]}. {text}", text)


def ask_order(d: Dialogue) -> Turn:
    """Whether a day or month comes before or after another."""
    names, where = names_of(d.rng.choice(["day", "month"])), d.rng.choice(["before", "after"])
    x, y = d.rng.sample(names, 2)
    true = "before" if names.index(x) < names.index(y) else "after"
    d.last = "order"
    word = "Yes" if where == true else "No"
    reasoning = (
        f"{x} is number {names.index(x) + 1}, {y} is number {names.index(y) + 1}. So the answer is {word.lower()}."
    )
    return d.plain("yes or no", d.ask(f"comes_{where}", {"x": x, "y": y}), reasoning, f"{word}, {x} comes {true} {y}.")


def _verdict(d: Dialogue, intent: str, slots: dict[str, str], right: bool, asked: str, truth: str) -> Turn:
    word = "Yes" if right else "No"
    reasoning = f"The user asks about {asked}. {truth[:1].upper()}{truth[1:]}. So the answer is {word.lower()}."
    return d.plain("yes or no", d.ask(intent, slots), reasoning, f"{word}, {truth}.")


def languages(country: facts.Country) -> list[str]:
    return re.split(", | and ", country.language)


def ask_whether(d: Dialogue) -> Turn:
    """Whether a fact that the user names is right; half of them are."""
    right = d.rng.random() < 0.5
    what = d.rng.choice(["is_in", "is_on", "speaks", "is_colour", "is_opposite", "has_count"])
    if what in ("is_in", "is_on", "speaks"):
        return _whether_country(d, what, right)
    d.last = "whether"
    if what == "is_colour":
        thing = d.rng.choice(THINGS)
        colour = thing.colour if right else d.rng.choice([t.colour for t in THINGS])
        slots = d.thing_slots(thing) | {"colour": colour}
        d.last = "colour"
        truth = f"{thing.single} is {thing.colour}"
        return _verdict(d, what, slots, colour == thing.colour, f"{thing.single} and {colour}", truth)
    if what == "is_opposite":
        word = d.rng.choice(list(OPPOSITES))
        other = OPPOSITES[word] if right else d.rng.choice(list(OPPOSITES))
        d.last = "opposite"
        truth = f"the opposite of {word} is {OPPOSITES[word]}"
        return _verdict(d, what, {"word": word, "other": other}, other == OPPOSITES[word], f"{word} and {other}", truth)
    parts, owner, count = d.rng.choice(facts.COUNTS)
    asked = count if right else d.rng.choice([n for n in range(1, 11) if n != count])
    slots = {"parts": parts, "owner": owner, "count": _number(asked, d, 0.3)}
    return _verdict(d, what, slots, asked == count, f"the {parts} of {owner}", facts.has_parts(parts, owner, count))


def _whether_country(d: Dialogue, what: str, right: bool) -> Turn:
    country, wrong = d.rng.choice(COUNTRIES), d.rng.choice(COUNTRIES)
    d.country, name = country, country.name
    if what == "is_in":
        city = d.rng.choice((country.capital, *country.cities))
        asked = country if right else wrong
        d.told.add(city)
        d.last = "place"
        slots = {"city": city, **d.named(asked)}
        return _verdict(d, what, slots, asked is country, f"{city} and {asked.name}", f"{city} is in {name}")
    if what == "is_on":
        continent = country.continent.split(" and ")[0] if right else d.rng.choice(CONTINENTS)
        d.last = "continent"
        slots = {"continent": continent, **d.named(country)}
        holds = continent in country.continent.split(" and ")
        return _verdict(d, what, slots, holds, f"{name} and {continent}", f"{name} is in {country.continent}")
    language = d.rng.choice(languages(country if right else wrong))
    d.last = "language"
    slots = {"language": language, **d.named(country)}
    truth = f"people in {name} speak {country.language}"
    return _verdict(d, what, slots, language in languages(country), f"{name} and {language}", truth)


def ask_which_country(d: Dialogue) -> Turn:
    """The first country of a language or continent."""
    if d.rng.random() < 0.6:
        language = d.rng.choice(languages(d.rng.choice(COUNTRIES)))
        found = next(c for c in COUNTRIES if c.language == language or language in languages(c))
        user, asked = d.ask("who_speaks", {"language": language}), f"a country that speaks {language}"
        answer, d.last = f"People in {found.name} speak {found.language}.", "language"
    else:
        continent = d.rng.choice(CONTINENTS)
        found = next(c for c in COUNTRIES if c.continent == continent)
        user, asked = d.ask("country_in", {"continent": continent}), f"a country in {continent}"
        answer, d.last = f"{found.name[:1].upper()}{found.name[1:]} is in {continent}.", "continent"
    d.country = found
    return d.plain("which country", user, f"The user wants {asked}. I take {found.name}.", answer)

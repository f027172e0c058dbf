"""The tools that the tiny model learns to call: their declarations, arguments and results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from facts import CITIES, COUNTRIES, NAMES
from phrases import HELDOUT, PHRASES, TRAIN

Json = dict[str, Any]
Slots = dict[str, str]

CONDITIONS = (
    "sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "dry", "humid", "overcast", "misty",
)  # fmt: skip
_MORE_CITIES = """
    Florence Nice Boston Dallas Denver Seattle Houston Miami Phoenix Atlanta Liverpool Leeds Bristol Glasgow
    Turin Venice Bologna Bilbao Malaga Cologne Frankfurt Stuttgart Leipzig Dresden Bordeaux Toulouse Lille
    Basel Linz Innsbruck Malmo Poznan Wroclaw Nagoya Sapporo Kobe Delhi Kolkata Hyderabad Perth Brisbane
    Calgary Vancouver Dubai Doha Singapore Taipei Macau Honolulu Orlando Austin Portland
"""
MORE_CITIES = tuple(_MORE_CITIES.split())
_SYLLABLES = """
    ba be bi bo da del dor el fa fen ga gor ha hel ka kel la lin lo ma mer mi na nor o pa pel ra ren ri ro sa
    sel ta tel tor u va vel wen za zo
"""
SYLLABLES = _SYLLABLES.split()
UNITS = (
    ("miles", "kilometers", 1.609), ("kilometers", "miles", 0.6214), ("pounds", "kilograms", 0.4536),
    ("kilograms", "pounds", 2.205), ("inches", "centimeters", 2.54), ("centimeters", "inches", 0.3937),
    ("feet", "meters", 0.3048), ("meters", "feet", 3.281), ("liters", "gallons", 0.2642),
    ("gallons", "liters", 3.785), ("ounces", "grams", 28.35), ("dollars", "euros", 0.92),
    ("euros", "dollars", 1.09), ("yards", "meters", 0.9144), ("days", "hours", 24.0), ("hours", "minutes", 60.0),
)  # fmt: skip
WORDS = (
    "cat", "dog", "house", "water", "bread", "friend", "thank you", "good morning", "book", "tree", "moon",
    "love", "school", "garden", "music", "window", "river", "mountain", "child", "teacher", "cheese", "street",
    "flower", "letter", "kitchen", "good night", "see you soon", "bridge", "ship", "cloud",
)  # fmt: skip
TONGUES = tuple(c.language for c in COUNTRIES if " " not in c.language)


def invented(rng: random.Random) -> str:
    """A word that means nothing, so that it can only be copied."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


# Ordinary words, for names that can be anything.
POOL = sorted({w for section in PHRASES.values() for line in section[TRAIN] for w in re.findall(r"[a-z]{3,10}", line)})


def any_word(rng: random.Random) -> str:
    """A word of any kind, so that a name cannot be guessed and has to be read."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(POOL)
    if draw < 0.65:
        return invented(rng)
    if draw < 0.9:
        return "".join(_piece(rng.choice(POOL), rng) for _ in range(rng.choice([1, 2, 2, 3])))
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))


def _piece(word: str, rng: random.Random) -> str:
    """Two to four letters of a word."""
    start = rng.randrange(max(1, len(word) - 2))
    return word[start : start + rng.randint(2, 4)]


def place(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return rng.choice(CITIES)
    return rng.choice(MORE_CITIES) if draw < 0.8 else invented(rng).capitalize()


@dataclass(frozen=True)
class Param:
    """One parameter: its slot, what it may be called, its type and what is said about it."""

    slot: str
    names: tuple[str, ...]
    kind: str
    about: tuple[str, ...]
    heldout: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One kind of tool under many names."""

    key: str
    names: tuple[str, ...]
    nouns: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[Param, ...]
    slots: Callable[[random.Random], Slots]
    result: Callable[[random.Random, Slots], tuple[str, str]]
    goal: str
    joins: str = ""  # the slot of which one request can name several
    exact: bool = False  # whether its slots can be anything, so that requests must keep their case
    missable: bool = True  # whether a request shows that a tool is missing, where there is none


@dataclass(frozen=True)
class Tool:
    """A family as declared in one conversation."""

    family: Family
    name: str
    schema: Json
    keys: Slots
    fixed: Slots


VERBS = {
    TRAIN: (
        "get",
        "fetch",
        "check",
        "lookup",
        "find",
        "query",
        "ask",
        "do",
        "run",
        "api",
        "my",
        "use",
        "call",
        "read",
        "load",
        "make",
        "give",
        "tell",
        "search",
        "look",
        "pull",
        "grab",
        "compute",
        "calc",
        "return",
        "fast",
        "simple",
        "new",
        "best",
        "the",
        "tool",
        "service",
        "client",
        "remote",
        "live",
        "web",
        "user",
        "main",
        "basic",
        "smart",
    ),
    HELDOUT: ("request", "obtain", "retrieve", "show"),
}


def _styled(words: list[str], rng: random.Random) -> str:
    if rng.random() < 0.25:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    return rng.choice(["_", "_", "_", "-"]).join(words)


def _tool_name(family: Family, rng: random.Random, split: str) -> str:
    draw = rng.random()
    if split == TRAIN and draw < 0.3:
        return rng.choice(family.names)
    noun = rng.choice(family.nouns).split()
    if split == HELDOUT or draw < 0.55:
        words = [rng.choice(VERBS[split]), *noun]
    elif draw < 0.95:
        words = rng.choice([[any_word(rng), *noun], [*noun, any_word(rng)], [any_word(rng), *noun, any_word(rng)]])
    else:
        words = [any_word(rng), any_word(rng)]
    if rng.random() < 0.1:
        words.append(rng.choice(["v2", "tool", "now", "info", str(rng.randint(1, 99))]))
    return _styled(words, rng)


def _param_name(param: Param, taken: Iterable[str], rng: random.Random, split: str) -> str:
    names = param.heldout if split == HELDOUT and rng.random() < 0.5 else param.names
    name = rng.choice([n for n in names if n not in taken])
    if split == TRAIN and rng.random() < 0.4:
        fresh = _styled([any_word(rng)] if rng.random() < 0.5 else [name, any_word(rng)], rng)
        return name if fresh in taken else fresh
    return name


def _property(param: Param, rng: random.Random, *, described: bool) -> Json:
    entry: Json = {"type": param.kind}
    if param.values and rng.random() < 0.7:
        entry["enum"] = list(param.values)
    if described or rng.random() < 0.7:
        entry["description"] = rng.choice(param.about)
    return entry


def declare(family: Family, rng: random.Random, split: str) -> Tool:
    """A declaration of a tool in the form of the OpenAI API, with small differences as clients have them."""
    fixed: Slots = {}
    if family.key == "lookup":
        fixed = {"noun": any_word(rng)}
        name, about = fixed["noun"], rng.choice(family.about).replace("{noun}", fixed["noun"])
        family = replace(family, nouns=(name,), names=(name, f"get_{name}", f"{name}_of"), about=(about,))
    name = _tool_name(family, rng, split)
    keys: Slots = {}
    for param in family.params:
        keys[param.slot] = _param_name(param, keys.values(), rng, split)
    properties = {keys[p.slot]: _property(p, rng, described=keys[p.slot] not in p.names) for p in family.params}
    required = list(properties)
    if family.key == "weather" and rng.random() < 0.25:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    elif rng.random() < 0.1:
        extra = {"type": rng.choice(["string", "integer", "boolean"]), "description": rng.choice(OPTIONAL)}
        properties.setdefault(rng.choice(["verbose", "format", "limit", "options", any_word(rng)]), extra)
    function: Json = {"name": name}
    known = any(noun.split()[-1] in name.lower() for noun in family.nouns)
    if not known or rng.random() < 0.9:
        function["description"] = rng.choice(family.about)
    function["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        function["parameters"]["required"] = required
    if rng.random() < 0.1:
        function["parameters"]["additionalProperties"] = False
    if rng.random() < 0.15:
        function = dict(rng.sample(list(function.items()), len(function)))
    schema = {"type": "function", "function": function} if rng.random() < 0.9 else function
    return Tool(family, name, schema, keys, fixed)


def _dump(value: Json, rng: random.Random) -> str:
    items = list(value.items())
    if rng.random() < 0.4:
        rng.shuffle(items)
    tight = rng.random() < 0.4
    return json.dumps(dict(items), ensure_ascii=False, separators=(",", ":") if tight else (", ", ": "))


def _weather(rng: random.Random, slots: Slots) -> tuple[str, str]:
    city, sky = slots["place"], any_word(rng) if rng.random() < 0.25 else rng.choice(CONDITIONS)
    temp = str(rng.randint(-15, 40)) if rng.random() < 0.8 else f"{rng.uniform(-9, 40):.1f}"
    full = f"The weather in {city} is {sky}, with {temp} degrees."
    draw = rng.random()
    if draw < 0.3:
        sky = rng.choice([sky, sky.capitalize()])
        text = rng.choice(
            [f"{temp} degrees, {sky}", f"{sky}, {temp}°C", f"{sky}, {temp} °C", f"{sky} and {temp} degrees",
             f"{city}: {sky}, {temp} C", f"{temp}C, {sky}", f"{sky}, {temp} degrees", f"{sky} {temp}°",
             f"It is {sky.lower()} in {city}, {temp} degrees.", f"Weather in {city}: {sky}, {temp}°C"]
        )  # fmt: skip
        return text, full
    record: Json = {}
    if rng.random() < 0.5:
        record[rng.choice(["city", "location", "place", "name"])] = city
    temp_key = rng.choice(["temperature", "temp", "temperature_c", "temp_c", "degrees", "celsius"])
    sky_key = rng.choice(["condition", "conditions", "weather", "sky", "description", "summary", "forecast"])
    value: float | str = float(temp) if "." in temp else int(temp)
    if rng.random() < 0.2:
        value = temp + rng.choice(["", "°C", " degrees", "C", " °C"])
    if draw > 0.92:
        return _dump(record | {sky_key: sky}, rng), f"The weather in {city} is {sky}."
    if draw > 0.84:
        return _dump(record | {temp_key: value}, rng), f"It is {temp} degrees in {city}."
    record |= {temp_key: value, sky_key: sky}
    if rng.random() < 0.2:
        record["humidity"] = rng.randint(20, 95)
    if rng.random() < 0.2:
        record[rng.choice(["wind", "wind_kmh", "wind_speed"])] = rng.randint(0, 60)
    if rng.random() < 0.2:
        record["unit"] = "celsius"
    return _dump(record, rng), full


def _time(rng: random.Random, slots: Slots) -> tuple[str, str]:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    clock = f"{hour:02}:{minute:02}"
    if rng.random() < 0.2:
        clock = f"{hour % 12 or 12}:{minute:02} {'AM' if hour < 12 else 'PM'}"
    answer = f"It is {clock} in {slots['place']}."
    if rng.random() < 0.35:
        return rng.choice([clock, f"It is {clock}.", f"Local time: {clock}", f"{slots['place']}: {clock}"]), answer
    record: Json = {rng.choice(["time", "local_time", "current_time", "clock", "now"]): clock}
    if rng.random() < 0.5:
        record[rng.choice(["city", "place", "location"])] = slots["place"]
    if rng.random() < 0.2:
        record["timezone"] = rng.choice(["UTC+1", "UTC-5", "UTC+9", "CET", "GMT"])
    return _dump(record, rng), answer


def _population(rng: random.Random, slots: Slots) -> tuple[str, str]:
    if rng.random() < 0.3:
        count = f"{rng.randint(2, 900)} million"
    else:
        count = str(rng.randint(300, 99999) * rng.choice([1, 10, 100, 1000]))
    answer = f"The population of {slots['country']} is {count}."
    if rng.random() < 0.3:
        return rng.choice([count, f"{count} people", f"Population: {count}", f"{slots['country']}: {count}"]), answer
    value: int | str = int(count) if count.isdigit() and rng.random() < 0.8 else count
    record: Json = {rng.choice(["population", "count", "people", "inhabitants", "value"]): value}
    if rng.random() < 0.5:
        record[rng.choice(["country", "name"])] = slots["country"]
    if rng.random() < 0.2:
        record["year"] = rng.randint(2019, 2025)
    return _dump(record, rng), answer


def _convert(rng: random.Random, slots: Slots) -> tuple[str, str]:
    factor = next(f for a, b, f in UNITS if (a, b) == (slots["unit"], slots["unit2"]))
    number = round(float(slots["amount"]) * factor, rng.choice([0, 1, 2, 2]))
    value: float | int = int(number) if number == int(number) else number
    answer = f"{slots['amount']} {slots['unit']} is {value} {slots['unit2']}."
    if rng.random() < 0.35:
        return rng.choice([str(value), f"{value} {slots['unit2']}", f"Result: {value}", f"= {value}"]), answer
    record: Json = {rng.choice(["result", "value", "amount", "converted", "answer"]): value}
    if rng.random() < 0.5:
        record["unit"] = slots["unit2"]
    return _dump(record, rng), answer


def _timer(rng: random.Random, slots: Slots) -> tuple[str, str]:
    answer = f"The timer is set for {slots['minutes']} minutes."
    if rng.random() < 0.4:
        return rng.choice(["ok", "done", "OK", "Timer started.", "Timer set.", "started", "true", "success"]), answer
    record: Json = rng.choice(
        [{"status": "ok"}, {"status": "started"}, {"ok": True}, {"success": True}, {"result": "done"}]
    )
    if rng.random() < 0.5:
        record = record | {rng.choice(["minutes", "duration"]): int(slots["minutes"])}
    if rng.random() < 0.2:
        record = record | {"id": rng.randint(1, 99)}
    return _dump(record, rng), answer


def _translate(rng: random.Random, slots: Slots) -> tuple[str, str]:
    word = " ".join(invented(rng) for _ in range(rng.choice([1, 1, 2])))
    answer = f'"{slots["text"]}" in {slots["tongue"]} is "{word}".'
    if rng.random() < 0.35:
        return rng.choice([word, f'"{word}"', f"{slots['tongue']}: {word}", f"Translation: {word}"]), answer
    record: Json = {rng.choice(["translation", "result", "text", "word", "output"]): word}
    if rng.random() < 0.4:
        record[rng.choice(["language", "to"])] = slots["tongue"]
    return _dump(record, rng), answer


def _distance(rng: random.Random, slots: Slots) -> tuple[str, str]:
    km = str(rng.randint(20, 12000))
    answer = f"The distance from {slots['place']} to {slots['place2']} is {km} kilometers."
    if rng.random() < 0.35:
        return rng.choice([f"{km} km", km, f"{km} kilometers", f"Distance: {km} km"]), answer
    key = rng.choice(["distance", "distance_km", "km", "kilometers", "result"])
    record: Json = {key: rng.choice([int(km), int(km), f"{km} km"])}
    if rng.random() < 0.3:
        record |= {"from": slots["place"], "to": slots["place2"]}
    return _dump(record, rng), answer


def two_places(rng: random.Random) -> Slots:
    first = place(rng)
    second = next(p for p in iter(lambda: place(rng), None) if p != first)
    return {"place": first, "place2": second}


def _quantity(rng: random.Random) -> Slots:
    amount = str(rng.randint(1, 100)) if rng.random() < 0.8 else f"{rng.randint(1, 40)}.{rng.choice('257')}"
    unit, unit2, _ = rng.choice(UNITS)
    return {"amount": amount, "unit": unit, "unit2": unit2}


def _search(rng: random.Random, slots: Slots) -> tuple[str, str]:
    title = " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))
    answer = f"The search found: {title}."
    if rng.random() < 0.35:
        return rng.choice([title, f"1. {title}", f"Result: {title}", f"Found: {title}"]), answer
    found: Json = {rng.choice(["title", "text", "snippet", "name"]): title}
    return _dump(rng.choice([found, {"results": [found]}, {"result": title}, {"top": found}]), rng), answer


def _stock(rng: random.Random, slots: Slots) -> tuple[str, str]:
    price = f"{rng.uniform(1, 900):.2f}" if rng.random() < 0.7 else str(rng.randint(1, 900))
    answer = f"A share of {slots['company']} costs {price} dollars."
    if rng.random() < 0.35:
        return rng.choice([price, f"{price} dollars", f"${price}", f"{slots['company']}: {price} USD"]), answer
    record: Json = {rng.choice(["price", "value", "last", "quote", "close"]): price}
    if rng.random() < 0.4:
        record[rng.choice(["currency", "unit"])] = "USD"
    if rng.random() < 0.4:
        record[rng.choice(["symbol", "company", "name"])] = slots["company"]
    return _dump(record, rng), answer


def _done(rng: random.Random, answer: str, more: Json) -> tuple[str, str]:
    """What a tool that does something says, and the answer."""
    if rng.random() < 0.4:
        return rng.choice(["ok", "done", "OK", "Done.", "true", "success", "sent", "started"]), answer
    record: Json = rng.choice([{"status": "ok"}, {"ok": True}, {"success": True}, {"result": "done"}])
    return _dump(record | (more if rng.random() < 0.4 else {}), rng), answer


def _light(rng: random.Random, slots: Slots) -> tuple[str, str]:
    return _done(rng, f"The {slots['room']} light is {slots['state']}.", {"state": slots["state"]})


def _music(rng: random.Random, slots: Slots) -> tuple[str, str]:
    return _done(rng, f"Now playing {slots['song']}.", {"playing": slots["song"]})


def _message(rng: random.Random, slots: Slots) -> tuple[str, str]:
    return _done(rng, f"The message to {slots['name']} is sent.", {"to": slots["name"]})


def _lookup(rng: random.Random, slots: Slots) -> tuple[str, str]:
    value: str | int = rng.randint(0, 9999) if rng.random() < 0.4 else any_word(rng)
    answer = f"The {slots['noun']} of {slots['item']} is {value}."
    if rng.random() < 0.35:
        return rng.choice([str(value), f"{slots['noun']}: {value}", f"It is {value}."]), answer
    record: Json = {rng.choice(["value", "result", slots["noun"], "answer", any_word(rng)]): value}
    if rng.random() < 0.3:
        record[rng.choice(["item", "name", "of"])] = slots["item"]
    return _dump(record, rng), answer


def some_words(rng: random.Random, most: int) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, most)))


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).capitalize()


def _company(rng: random.Random) -> str:
    return rng.choice(COMPANIES) if rng.random() < 0.4 else any_word(rng).capitalize()


def _title(rng: random.Random) -> str:
    words = some_words(rng, 3)
    return words.title() if rng.random() < 0.6 else words


def _item(rng: random.Random) -> str:
    return place(rng) if rng.random() < 0.3 else any_word(rng).capitalize() if rng.random() < 0.3 else any_word(rng)


def _text(rng: random.Random) -> str:
    return rng.choice(NOTES) if rng.random() < 0.5 else some_words(rng, 5)


OPTIONAL = ("Optional.", "Not needed.", "How to write the result", "Extra settings")
COMPANIES = (
    "Apple", "Google", "Microsoft", "Amazon", "Tesla", "Siemens", "Toyota", "Nokia", "Sony", "Intel", "Volvo", "Shell",
)  # fmt: skip
ROOMS = (
    "kitchen", "bedroom", "bathroom", "hall", "garage", "office", "living room", "garden", "cellar", "attic", "library",
)  # fmt: skip
NOTES = (
    "I am late", "see you soon", "happy birthday", "the train is late", "call me back", "dinner is ready",
    "good luck", "I will be there at 8", "we need milk", "thank you", "the meeting is at 10", "come home",
    "where are you", "I love you", "please wait", "the door is open", "have a nice day", "all is well",
)  # fmt: skip

_CITY = ("city", "location", "place", "town", "city_name", "where")
_CITY_ABOUT = ("The city.", "Name of the city", "City name, e.g. Paris", "The place to look up.", "A city")

FAMILIES = (
    Family(
        "weather",
        ("get_weather", "weather", "get_current_weather", "weather_now", "getWeather", "forecast"),
        ("weather", "current weather", "forecast", "weather report", "city weather", "temperature"),
        ("Get the weather in a city.", "Current weather for a place.", "Look up today's weather.",
         "Get the current weather for a location", "Returns temperature and weather conditions."),
        (Param("place", _CITY, "string", _CITY_ABOUT, ("area", "spot", "town_name")),),
        lambda rng: {"place": place(rng)},
        _weather,
        "the weather in {place}",
        joins="place",
    ),
    Family(
        "time",
        ("get_time", "time", "current_time", "clock", "getTime", "time_in_city", "local_time"),
        ("time", "local time", "current time", "clock", "city time"),
        ("Get the time in a city.", "Current local time of a place.", "Look up what time it is.",
         "Returns the clock time in a location"),
        (Param("place", _CITY, "string", _CITY_ABOUT, ("area", "spot", "town_name")),),
        lambda rng: {"place": place(rng)},
        _time,
        "the time in {place}",
        joins="place",
    ),
    Family(
        "population",
        ("get_population", "population", "count_people", "country_population", "getPopulation", "inhabitants"),
        ("population", "country population", "people count", "inhabitants"),
        ("Get the population of a country.", "How many people live in a country.", "Number of inhabitants.",
         "Look up the population"),
        (Param("country", ("country", "name", "country_name", "nation", "land"), "string",
               ("The country.", "Name of the country", "A country, e.g. France"), ("state", "territory")),),
        lambda rng: {"country": rng.choice(COUNTRIES).name},
        _population,
        "the population of {country}",
        joins="country",
    ),
    Family(
        "convert",
        ("convert", "convert_units", "unit_converter", "convertUnits", "conversion"),
        ("conversion", "unit conversion", "converted value", "units"),
        ("Convert an amount from one unit to another.", "Unit converter.", "Converts units and currencies.",
         "Change a value into another unit"),
        (Param("amount", ("amount", "value", "number", "quantity"), "number",
               ("The amount to convert.", "How much", "The number"), ("figure",)),
         Param("unit", ("unit", "from_unit", "from", "source", "source_unit"), "string",
               ("The unit of the amount.", "Unit to convert from"), ("old_unit",)),
         Param("unit2", ("to_unit", "to", "target", "target_unit", "into"), "string",
               ("The wanted unit.", "Unit to convert to"), ("new_unit",))),
        _quantity,
        _convert,
        "{amount} {unit} in {unit2}",
    ),
    Family(
        "timer",
        ("set_timer", "timer", "start_timer", "setTimer", "create_timer", "alarm"),
        ("timer", "kitchen timer", "alarm", "countdown"),
        ("Set a timer.", "Start a countdown of some minutes.", "Alerts the user after some minutes.",
         "Starts a timer"),
        (Param("minutes", ("minutes", "duration", "time", "length", "mins"), "integer",
               ("How many minutes.", "Duration in minutes", "The minutes to wait"), ("duration_minutes", "wait")),),
        lambda rng: {"minutes": str(rng.randint(2, 90))},
        _timer,
        "a timer for {minutes} minutes",
    ),
    Family(
        "translate",
        ("translate", "translate_text", "translator", "translateText", "translation"),
        ("translation", "translated text", "dictionary"),
        ("Translate a text.", "Translate a word into another language.", "Gives the translation of a text."),
        (Param("text", ("text", "word", "phrase", "input", "query"), "string",
               ("The text to translate.", "Words to translate"), ("source_text", "sentence")),
         Param("tongue", ("language", "to", "target_language", "target", "lang"), "string",
               ("The language to translate to.", "Target language, e.g. French"), ("into_language",))),
        lambda rng: {"text": rng.choice(WORDS), "tongue": rng.choice(TONGUES)},
        _translate,
        "{text} in {tongue}",
    ),
    Family(
        "distance",
        ("get_distance", "distance", "distance_between", "how_far", "getDistance", "route_length"),
        ("distance", "route length", "city distance"),
        ("Get the distance between two cities.", "How far two places are apart.", "Distance in kilometers."),
        (Param("place", ("from", "start", "origin", "city1", "a", "from_city"), "string",
               ("The first city.", "Where the way starts"), ("first_place",)),
         Param("place2", ("to", "end", "destination", "city2", "b", "to_city"), "string",
               ("The second city.", "Where the way ends"), ("second_place",))),
        two_places,
        _distance,
        "the distance from {place} to {place2}",
    ),
    Family(
        "search",
        ("search", "web_search", "search_web", "google", "webSearch", "internet_search", "find_pages"),
        ("search", "web search", "web results", "pages", "internet search"),
        ("Search the web.", "Find pages on the internet.", "Web search for a query.", "Look something up online."),
        (Param("query", ("query", "q", "text", "keywords", "terms", "search_query", "topic"), "string",
               ("What to search for.", "The search query", "Keywords"), ("search_text", "phrase")),),
        lambda rng: {"query": some_words(rng, 4)},
        _search,
        "a search for {query}",
        exact=True,
    ),
    Family(
        "stock",
        ("get_stock_price", "stock_price", "stock", "share_price", "getStockPrice", "quote"),
        ("stock price", "share price", "stock", "stock quote"),
        ("Get the price of a stock.", "Current share price of a company.", "Look up what a share costs."),
        (Param("company", ("company", "symbol", "name", "ticker", "stock", "firm"), "string",
               ("The company.", "Name of the company", "Whose share it is"), ("business", "corporation")),),
        lambda rng: {"company": _company(rng)},
        _stock,
        "the share price of {company}",
        joins="company", exact=True, missable=False,
    ),
    Family(
        "light",
        ("set_light", "light", "switch_light", "lights", "setLight", "toggle_light", "lamp"),
        ("light", "lights", "lamp", "room light"),
        ("Switch the light of a room.", "Turn a lamp on or off.", "Controls the lights at home."),
        (Param("room", ("room", "place", "location", "where", "lamp"), "string",
               ("The room.", "Which room", "Where the light is"), ("room_name", "area")),
         Param("state", ("state", "value", "mode", "switch", "action"), "string",
               ("On or off.", "The new state", "on or off"), ("setting",), ("on", "off"))),
        lambda rng: {"room": rng.choice(ROOMS), "state": rng.choice(["on", "off"])},
        _light,
        "the {room} light {state}",
        joins="room", exact=True,
    ),
    Family(
        "music",
        ("play_music", "play", "play_song", "music", "playSong", "start_music", "player"),
        ("music", "song", "music player", "track"),
        ("Play a song.", "Start some music.", "Plays a track on the speaker."),
        (Param("song", ("song", "title", "track", "name", "music"), "string",
               ("The song.", "Title of the song", "What to play"), ("song_title", "piece")),),
        lambda rng: {"song": _title(rng)},
        _music,
        "the song {song}",
        exact=True, missable=False,
    ),
    Family(
        "message",
        ("send_message", "message", "send_email", "send", "sendMessage", "write_message", "notify", "text"),
        ("message", "email", "text message", "mail", "note"),
        ("Send a message to someone.", "Writes an email.", "Send a short text to a person."),
        (Param("name", ("to", "recipient", "name", "person", "contact", "receiver"), "string",
               ("Who gets it.", "The name of the person", "Whom to write to"), ("addressee", "send_to")),
         Param("text", ("text", "message", "body", "content", "words"), "string",
               ("What to say.", "The text of the message", "The words to send"), ("message_text",))),
        lambda rng: {"name": _name(rng), "text": _text(rng)},
        _message,
        "a message to {name}",
        exact=True,
    ),
    Family(
        "lookup",
        (),
        (),
        ("Get the {noun} of a thing.", "Look up the {noun}.", "The {noun} of an item.", "Returns the {noun}"),
        (Param("item", ("item", "name", "thing", "id", "of", "key", "object"), "string",
               ("The thing.", "Which one", "Name of the item", "What to look up"), ("subject", "entry")),),
        lambda rng: {"item": _item(rng)},
        _lookup,
        "the {noun} of {item}",
        joins="item", exact=True, missable=False,
    ),
)  # fmt: skip

WEATHER, TIME = FAMILIES[0], FAMILIES[1]


def arguments(tool: Tool, slots: Slots) -> Json:
    """The call's arguments, typed as the schema says."""
    values: Json = {}
    for param in tool.family.params:
        text = slots[param.slot]
        number = param.kind != "string"
        values[tool.keys[param.slot]] = json.loads(text) if number else text
    return values

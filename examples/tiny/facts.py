"""Everything that the tiny model is taught: countries, colours, opposites, dates, counts, names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    language: str
    continent: str
    cities: tuple[str, str]
    aliases: tuple[str, ...] = ()


def _countries(table: str) -> tuple[Country, ...]:
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return tuple(
        Country(name, capital, language, continent, (first, second), tuple(aliases))
        for name, capital, language, continent, first, second, *aliases in rows
    )


COUNTRIES = _countries(
    """
    France | Paris | French | Europe | Lyon | Marseille
    Germany | Berlin | German | Europe | Munich | Hamburg
    Italy | Rome | Italian | Europe | Milan | Naples
    Spain | Madrid | Spanish | Europe | Barcelona | Seville
    Portugal | Lisbon | Portuguese | Europe | Porto | Braga
    the Netherlands | Amsterdam | Dutch | Europe | Rotterdam | Utrecht | Netherlands | Holland
    Belgium | Brussels | Dutch and French | Europe | Antwerp | Ghent
    Austria | Vienna | German | Europe | Salzburg | Graz
    Switzerland | Bern | German, French and Italian | Europe | Zurich | Geneva
    the United Kingdom | London | English | Europe | Manchester | Edinburgh | the UK | UK
    Ireland | Dublin | English and Irish | Europe | Cork | Galway
    Denmark | Copenhagen | Danish | Europe | Aarhus | Odense
    Norway | Oslo | Norwegian | Europe | Bergen | Trondheim
    Sweden | Stockholm | Swedish | Europe | Gothenburg | Uppsala
    Finland | Helsinki | Finnish | Europe | Tampere | Turku
    Iceland | Reykjavik | Icelandic | Europe | Akureyri | Keflavik
    Poland | Warsaw | Polish | Europe | Krakow | Gdansk
    the Czech Republic | Prague | Czech | Europe | Brno | Ostrava | Czechia | Czech Republic
    Slovakia | Bratislava | Slovak | Europe | Kosice | Zilina
    Hungary | Budapest | Hungarian | Europe | Debrecen | Szeged
    Romania | Bucharest | Romanian | Europe | Brasov | Timisoara
    Bulgaria | Sofia | Bulgarian | Europe | Plovdiv | Varna
    Greece | Athens | Greek | Europe | Thessaloniki | Patras
    Croatia | Zagreb | Croatian | Europe | Split | Dubrovnik
    Serbia | Belgrade | Serbian | Europe | Nis | Novi Sad
    Slovenia | Ljubljana | Slovene | Europe | Maribor | Celje
    Ukraine | Kyiv | Ukrainian | Europe | Lviv | Odesa
    Russia | Moscow | Russian | Europe and Asia | Kazan | Omsk
    Turkey | Ankara | Turkish | Europe and Asia | Istanbul | Izmir
    Estonia | Tallinn | Estonian | Europe | Tartu | Narva
    Latvia | Riga | Latvian | Europe | Daugavpils | Liepaja
    Lithuania | Vilnius | Lithuanian | Europe | Kaunas | Klaipeda
    Albania | Tirana | Albanian | Europe | Durres | Vlore
    China | Beijing | Chinese | Asia | Shanghai | Shenzhen
    Japan | Tokyo | Japanese | Asia | Osaka | Kyoto
    South Korea | Seoul | Korean | Asia | Busan | Incheon
    India | New Delhi | Hindi and English | Asia | Mumbai | Chennai
    Pakistan | Islamabad | Urdu and English | Asia | Karachi | Lahore
    Bangladesh | Dhaka | Bengali | Asia | Chittagong | Khulna
    Nepal | Kathmandu | Nepali | Asia | Pokhara | Lalitpur
    Thailand | Bangkok | Thai | Asia | Chiang Mai | Phuket
    Vietnam | Hanoi | Vietnamese | Asia | Da Nang | Hue
    Cambodia | Phnom Penh | Khmer | Asia | Siem Reap | Battambang
    Laos | Vientiane | Lao | Asia | Luang Prabang | Pakse
    Malaysia | Kuala Lumpur | Malay | Asia | Johor Bahru | Ipoh
    Indonesia | Jakarta | Indonesian | Asia | Surabaya | Bandung
    the Philippines | Manila | Filipino and English | Asia | Cebu | Davao | Philippines
    Mongolia | Ulaanbaatar | Mongolian | Asia | Erdenet | Darkhan
    Iran | Tehran | Persian | Asia | Isfahan | Shiraz
    Iraq | Baghdad | Arabic and Kurdish | Asia | Basra | Mosul
    Saudi Arabia | Riyadh | Arabic | Asia | Jeddah | Medina
    Jordan | Amman | Arabic | Asia | Aqaba | Irbid
    Egypt | Cairo | Arabic | Africa | Alexandria | Luxor
    Morocco | Rabat | Arabic and Berber | Africa | Casablanca | Marrakesh
    Algeria | Algiers | Arabic and Berber | Africa | Oran | Constantine
    Tunisia | Tunis | Arabic | Africa | Sfax | Sousse
    Kenya | Nairobi | Swahili and English | Africa | Mombasa | Kisumu
    Tanzania | Dodoma | Swahili and English | Africa | Dar es Salaam | Arusha
    Uganda | Kampala | English and Swahili | Africa | Entebbe | Gulu
    Ethiopia | Addis Ababa | Amharic | Africa | Gondar | Adama
    Ghana | Accra | English | Africa | Kumasi | Tamale
    Nigeria | Abuja | English | Africa | Lagos | Kano
    Senegal | Dakar | French | Africa | Touba | Thies
    Canada | Ottawa | English and French | North America | Toronto | Montreal
    the United States | Washington | English | North America | New York | Chicago | the USA | USA | America
    Mexico | Mexico City | Spanish | North America | Guadalajara | Puebla
    Cuba | Havana | Spanish | North America | Santa Clara | Holguin
    Brazil | Brasilia | Portuguese | South America | Sao Paulo | Recife
    Argentina | Buenos Aires | Spanish | South America | Cordoba | Rosario
    Chile | Santiago | Spanish | South America | Valparaiso | Concepcion
    Peru | Lima | Spanish | South America | Cusco | Arequipa
    Colombia | Bogota | Spanish | South America | Medellin | Cali
    Venezuela | Caracas | Spanish | South America | Maracaibo | Valencia
    Ecuador | Quito | Spanish | South America | Guayaquil | Cuenca
    Uruguay | Montevideo | Spanish | South America | Salto | Rivera
    Paraguay | Asuncion | Spanish and Guarani | South America | Encarnacion | Luque
    Australia | Canberra | English | Oceania | Sydney | Melbourne
    New Zealand | Wellington | English and Maori | Oceania | Auckland | Christchurch
    """
)

CITIES = tuple(city for c in COUNTRIES for city in (c.capital, *c.cities))

# Places that do not exist: the honest answer is that the model does not know them.
NOWHERE = (
    "Atlantis", "Narnia", "Wakanda", "Mordor", "Lilliput", "Utopia", "Oz", "Neverland", "Ruritania",
    "Freedonia", "Genovia", "Zubrowka", "Westeros", "Hyrule", "Camelot", "Shangri-La", "El Dorado",
    "Elbonia", "Panem", "Arendelle", "Wonderland", "Avalon", "Asgard", "Latveria",
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A coloured thing: how it is named after 'what colour', and its verb."""

    single: str
    plural: str
    colour: str


def _things(table: str) -> tuple[Thing, ...]:
    things = []
    for line in table.strip().splitlines():
        colour, _, names = line.partition(":")
        for name in names.split(","):
            single, _, plural = name.strip().partition("/")
            things.append(Thing(single, plural, colour.strip()))
    return tuple(things)


# "a banana/bananas" has a plural; "snow" and "the sky" have none. The first of a colour is its example.
THINGS = _things(
    """
    blue: the sky, the ocean, the sea, a blueberry/blueberries, a sapphire/sapphires, a bluebird/bluebirds
    blue: denim
    green: grass, a leaf/leaves, a frog/frogs, broccoli, spinach, a cucumber/cucumbers, a pea/peas
    green: an emerald/emeralds, a lime/limes, a cactus/cacti, a crocodile/crocodiles, lettuce
    yellow: a banana/bananas, a lemon/lemons, the sun, a sunflower/sunflowers, a canary/canaries, corn
    yellow: a chick/chicks, butter, a school bus/school buses, mustard
    white: snow, milk, a swan/swans, a cloud/clouds, salt, sugar, a polar bear/polar bears, rice, chalk
    white: a snowman/snowmen, cotton
    red: a tomato/tomatoes, blood, a strawberry/strawberries, a cherry/cherries, a fire truck/fire trucks
    red: a ruby/rubies, a stop sign/stop signs, a rose/roses, a raspberry/raspberries, ketchup
    black: coal, a raven/ravens, a crow/crows, tar, a panther/panthers, soot, oil
    brown: chocolate, a tree trunk/tree trunks, coffee, a potato/potatoes, a chestnut/chestnuts, mud, cocoa
    brown: a walnut/walnuts
    orange: a carrot/carrots, a pumpkin/pumpkins, a tangerine/tangerines, an apricot/apricots
    orange: a basketball/basketballs
    grey: an elephant/elephants, a mouse/mice, a rhino/rhinos, ash, concrete, a dolphin/dolphins
    pink: a pig/pigs, a flamingo/flamingos, bubble gum, a piglet/piglets, salmon
    purple: an eggplant/eggplants, lavender, a plum/plums, an amethyst/amethysts, a violet/violets
    """
)

_PAIRS = """
    hot cold, big small, tall short, fast slow, happy sad, old young, up down, left right, in out, on off,
    open closed, light dark, hard soft, rich poor, strong weak, early late, day night, black white,
    true false, good bad, full empty, wet dry, clean dirty, loud quiet, near far, high low, deep shallow,
    wide narrow, thick thin, first last, begin end, win lose, buy sell, push pull, love hate, friend enemy,
    war peace, yes no, north south, east west, summer winter, top bottom, front back, inside outside,
    above below, before after, always never, more less, many few, smooth rough, sharp blunt, cheap expensive,
    easy difficult, safe dangerous, asleep awake, alive dead, sweet sour, polite rude, simple complex,
    present absent, arrive depart, remember forget, laugh cry, give take, question answer, success failure,
    beautiful ugly, ancient modern, warm cool, maximum minimum, increase decrease, accept refuse,
    attack defend, build destroy, lend borrow, float sink, freeze melt, guilty innocent, tight loose,
    hello goodbye, even odd, plus minus, positive negative, public private, lucky unlucky, kind mean,
    visible invisible, possible impossible, legal illegal, correct wrong, real fake, brave cowardly
"""
OPPOSITES = {word: other for pair in _PAIRS.split(",") for word, other in (pair.split(), pair.split()[::-1])}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

# (parts, owner, count): "A dog has 4 legs."
COUNTS = tuple(
    (parts, owner.strip(), int(count))
    for parts, owners in {
        "legs": "a dog 4, a cat 4, a horse 4, a cow 4, a spider 8, a bird 2, a chicken 2, an ant 6, a bee 6, "
        "a fly 6, a human 2, a table 4, a snake 0, a fish 0, a pig 4, a beetle 6",
        "wheels": "a car 4, a bicycle 2, a tricycle 3, a motorcycle 2, a unicycle 1, a skateboard 4",
        "sides": "a triangle 3, a square 4, a rectangle 4, a pentagon 5, a hexagon 6, an octagon 8",
        "arms": "an octopus 8, a starfish 5, a person 2",
        "fingers": "a hand 5", "toes": "a foot 5", "eyes": "a face 2, a cyclops 1", "strings": "a guitar 6, a violin 4",
        "days": "a week 7", "months": "a year 12", "weeks": "a year 52", "hours": "a day 24",
        "minutes": "an hour 60", "seconds": "a minute 60", "seasons": "a year 4",
        "letters": "the English alphabet 26", "players": "a football team 11, a basketball team 5",
        "keys": "a piano 88", "wings": "a bird 2, a butterfly 4", "humps": "a camel 2", "colours": "a rainbow 7",
    }.items()
    for owner, _, count in (entry.strip().rpartition(" ") for entry in owners.split(","))
)  # fmt: skip

_NAMES = """
    Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Liam Mia Noah Olivia Paul Quinn Rosa Sam Tina
    Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Daniel Eva Frank Greta Hugo Ida Jonas Karen Leo Maria
    Nina Oscar Petra Ravi Sara Tom Ursula Vera Walter Yusuf Zara Amir Bella Chen Diego Elena Fatima George
    Hana Igor Julia Kofi Lena Marco Nora Omar Pia Rita Simon Tara Ulf Viktor Wei Yuki Peter John Mary James
    Linda Robert Susan Michael Laura Kevin Sophie Lucas Hannah Max Ella Adam Ruth Mark Jane Alex Martin
"""
NAMES = tuple(_NAMES.split())

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip


def has_parts(parts: str, owner: str, count: int) -> str:
    """What a count says: "a dog has 4 legs"."""
    noun = {1: {"wheels": "wheel", "eyes": "eye"}.get(parts, parts)}.get(count, parts)
    return f"{owner} has {count} {noun}"

"""What a module of the textbook is about, and the words that it takes."""

import random
from typing import NamedTuple

_THINGS = """
account album animal answer article author badge ball basket bench bicycle bill bird block board
boat book booking bottle box branch bridge bus cabin cable camera candle car card cat chair
chapter city clock coat coin color comment company computer concert contact country course
customer desk device dish doctor document dog door dress drink driver employee engine event exam
farm farmer field film fish flight flower folder forest friend fruit game garden gate gift glass
group guest guitar hammer hat hotel house image invoice island job journey key kitchen lake lamp
lesson letter library lion list machine map market match meal meeting member message meter movie
museum note number office order owner package page painting paper parcel park patient payment
pencil person phone picture plane planet plant plate player poem point prize product project
puzzle question radio recipe record report request result ring river road robot rocket room route
rule sample school score screen season seat sensor server shape sheet ship shirt shoe shop signal
singer song spoon stamp star station story street student subject table task teacher team test
ticket tool town toy track train tree truck user vehicle video village visit visitor voice wallet
watch wheel window word worker writer zone
""".split()  # noqa: SIM905
_WHOLES = """
archive bag bank catalog center chest collection database depot directory fleet gallery hall
inventory journal keeper ledger list manager pool register registry shelf shop stock storage store
team vault warehouse
""".split()  # noqa: SIM905
_TEXTS = """
name title owner color city country author language label status address email brand code kind
category description material place street subject maker origin
""".split()  # noqa: SIM905
_NUMBERS = """
age amount balance capacity cost count depth distance duration height length level limit number
points position price quantity rank rate score size speed total value volume weight width year
""".split()  # noqa: SIM905
ADJECTIVES = {
    ">": ("expensive", "heavy", "high", "large", "long", "old", "valuable"),
    "<": ("cheap", "light", "low", "new", "short", "small"),
}


class Part(NamedTuple):
    """A piece of a module: what it has to import, its name, its code, and a sentence about it."""

    imports: frozenset[str]
    name: str
    code: str
    sentence: str


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def title(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


class Subject:
    """The thing that a module is about, and what it has; `rng` decides all that is left open."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.thing = rng.choice(_THINGS)
        self.things = plural(self.thing)
        self.kind = title(self.thing)
        self.texts = rng.sample(_TEXTS, rng.choice((1, 1, 2)))
        self.numbers = rng.sample(_NUMBERS, rng.choice((1, 2, 2)))
        self.fields = self.texts + self.numbers
        self.text, self.number = self.texts[0], self.numbers[0]
        whole = rng.choice(_WHOLES)
        self.whole = f"{self.thing}_{whole}" if rng.random() < 0.6 else whole
        self.collection = title(self.whole)

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def imports(self, *lines: str) -> frozenset[str]:
        return frozenset(lines)

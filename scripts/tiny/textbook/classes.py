"""Classes of the textbook's modules."""

from scripts.tiny.textbook.subject import ADJECTIVES, Part, Subject, article, plural


class Classes(Subject):
    """Records of the thing, what holds them, and classes of general use."""

    def record(self) -> Part:
        """A plain class with its fields."""
        args = [*self.texts, *(f"{n}=0" if self.rng.random() < 0.4 else n for n in self.numbers)]
        args.sort(key=lambda arg: "=" in arg)
        lines = [f"class {self.kind}:"]
        what = " and ".join([article(self.fields[0]), *map(article, self.fields[1:2])])
        lines += [f'    """{article(self.thing).capitalize()} with {what}."""', ""]
        lines += [f"    def __init__(self, {', '.join(args)}):"]
        if self.rng.random() < 0.4:
            lines += [f"        if {self.number} < 0:"]
            lines += [f'            raise ValueError("{self.number} must not be negative")']
        lines += [f"        self.{name} = {name}" for name in (arg.split("=")[0] for arg in args)]
        methods = [self._repr, self._eq, self._is_large, self._change, self._to_dict, self._lt]
        for method in self.rng.sample(methods, self.rng.choice((2, 3, 3, 4))):
            lines += ["", *method()]
        sentence = f"{article(self.thing).capitalize()}, which has {what}."
        return Part(frozenset(), self.kind, "\n".join(lines), sentence)

    def data_record(self) -> Part:
        lines = ["@dataclass", f"class {self.kind}:"]
        lines += [f'    """{article(self.thing).capitalize()} and its {self.text}."""', ""]
        lines += [f"    {name}: str" for name in self.texts]
        kind = self.pick("int", "float")
        default = "0" if kind == "int" else "0.0"
        lines += [f"    {name}: {kind} = {default}" for name in self.numbers]
        for method in self.rng.sample([self._is_large, self._change, self._to_dict], 2):
            lines += ["", *method()]
        imports = self.imports("from dataclasses import dataclass")
        return Part(imports, self.kind, "\n".join(lines), f"Holds the data of one {self.thing}.")

    def _repr(self) -> list[str]:
        shown = ", ".join(f"{{self.{name}!r}}" for name in self.fields)
        return ["    def __repr__(self):", f'        return f"{self.kind}({shown})"']

    def _eq(self) -> list[str]:
        return [
            "    def __eq__(self, other):",
            f"        if not isinstance(other, {self.kind}):",
            "            return NotImplemented",
            f"        return self.{self.text} == other.{self.text}",
        ]

    def _lt(self) -> list[str]:
        return [
            "    def __lt__(self, other):",
            f"        return self.{self.number} < other.{self.number}",
        ]

    def _is_large(self) -> list[str]:
        sign, limit = self.pick(*ADJECTIVES), self.rng.choice((1, 5, 10, 50, 100, 1000))
        name = self.pick(*ADJECTIVES[sign])
        lines = ["    @property"] if self.rng.random() < 0.3 else []
        lines += [f"    def is_{name}(self):"]
        lines += [f'        """Return True if the {self.thing} is {name}."""']
        return [*lines, f"        return self.{self.number} {sign} {limit}"]

    def _change(self) -> list[str]:
        number = self.rng.choice(self.numbers)
        verb, sign = self.rng.choice((("increase", "+"), ("decrease", "-"), ("add", "+")))
        name = f"{verb}_{number}" if verb != "add" else f"add_{number}"
        return [
            f"    def {name}(self, amount):",
            f'        """{verb.capitalize()} the {number} by an amount."""'
            if verb != "add"
            else f'        """Add an amount to the {number}."""',
            f"        self.{number} {sign}= amount",
        ]

    def _to_dict(self) -> list[str]:
        lines = [
            "    def to_dict(self):",
            f'        """Return the {self.thing} as a dictionary."""',
        ]
        if len(self.fields) < 3:
            pairs = ", ".join(f'"{name}": self.{name}' for name in self.fields)
            return [*lines, f"        return {{{pairs}}}"]
        lines += ["        return {"]
        return [*lines, *(f'            "{n}": self.{n},' for n in self.fields), "        }"]

    def holder(self) -> Part:
        """A class that keeps many of the thing."""
        things, thing, text, number = self.things, self.thing, self.text, self.number
        lines = [f"class {self.collection}:"]
        lines += [f'    """A {self.whole.replace("_", " ")} of {things}."""'.replace("A a", "An a")]
        lines += ["", "    def __init__(self):", f"        self.{things} = []"]
        methods = [
            [
                f"    def add(self, {thing}):",
                f'        """Add {article(thing)}."""',
                f"        self.{things}.append({thing})",
            ],
            [
                f"    def remove(self, {thing}):",
                f'        """Remove {article(thing)}."""',
                f"        self.{things}.remove({thing})",
            ],
            ["    def __len__(self):", f"        return len(self.{things})"],
            ["    def __iter__(self):", f"        return iter(self.{things})"],
            ["    def __contains__(self, item):", f"        return item in self.{things}"],
            [
                f"    def find(self, {text}):",
                f'        """Return the {thing} with this {text}, or None."""',
                f"        for {thing} in self.{things}:",
                f"            if {thing}.{text} == {text}:",
                f"                return {thing}",
                "        return None",
            ],
            [
                f"    def total_{number}(self):",
                f'        """Return the {number} of all {things} together."""',
                f"        return sum({thing}.{number} for {thing} in self.{things})",
            ],
            [
                f"    def sorted_by_{number}(self):",
                f'        """Return the {things}, those with the lowest {number} first."""',
                f"        return sorted(self.{things}, key=lambda {thing}: {thing}.{number})",
            ],
            [
                f"    def {text}_list(self):",
                f'        """Return the {text} of each {thing}."""',
                f"        return [{thing}.{text} for {thing} in self.{things}]",
            ],
            [
                "    def is_empty(self):",
                f'        """Return True if there are no {things}."""',
                f"        return not self.{things}",
            ],
        ]
        first, *others = methods
        chosen = [first, *self.rng.sample(others, self.rng.choice((2, 3, 4)))]
        for method in chosen:
            lines += ["", *method]
        sentence = f"Keeps {things} and finds them by their {text}."
        return Part(frozenset(), self.collection, "\n".join(lines), sentence)

    def stack(self) -> Part:
        store = self.pick("items", "values", "elements", "_items")
        value = self.pick("item", "value", "element")
        lines = [
            "class Stack:",
            f'    """A stack: the last {value} that came goes first."""',
            "",
            "    def __init__(self):",
            f"        self.{store} = []",
            "",
            f"    def push(self, {value}):",
            f'        """Put {article(value)} on top."""',
            f"        self.{store}.append({value})",
            "",
            "    def pop(self):",
            f'        """Take the top {value} off and return it."""',
            f"        if not self.{store}:",
            '            raise IndexError("the stack is empty")',
            f"        return self.{store}.pop()",
        ]
        more = [
            ["    def peek(self):", f"        return self.{store}[-1]"],
            ["    def __len__(self):", f"        return len(self.{store})"],
            ["    def is_empty(self):", f"        return len(self.{store}) == 0"],
        ]
        for method in self.rng.sample(more, 2):
            lines += ["", *method]
        return Part(frozenset(), "Stack", "\n".join(lines), f"The last {value} goes first.")

    def queue(self) -> Part:
        value = self.pick("item", "job", "task", "message", "value")
        values = plural(value)
        lines = [
            "class Queue:",
            f'    """A queue: the first {value} that came goes first."""',
            "",
            "    def __init__(self):",
            f"        self.{values} = deque()",
            "",
            f"    def put(self, {value}):",
            f'        """Add {article(value)} at the end."""',
            f"        self.{values}.append({value})",
            "",
            "    def get(self):",
            f'        """Remove the first {value} and return it."""',
            f"        return self.{values}.popleft()",
            "",
            "    def __len__(self):",
            f"        return len(self.{values})",
        ]
        imports = self.imports("from collections import deque")
        return Part(imports, "Queue", "\n".join(lines), f"The first {value} goes first.")

    def counter(self) -> Part:
        lines = [
            f"class {self.kind}Counter:",
            f'    """Counts {self.things}."""',
            "",
            "    def __init__(self, start=0):",
            "        self.count = start",
            "",
            "    def increment(self):",
            f'        """Count one more {self.thing}."""',
            "        self.count += 1",
            "        return self.count",
            "",
            "    def reset(self):",
            "        self.count = 0",
        ]
        sentence = f"Counts {self.things}, one by one."
        return Part(frozenset(), f"{self.kind}Counter", "\n".join(lines), sentence)

    def point(self) -> Part:
        lines = [
            "class Point:",
            '    """A point in the plane."""',
            "",
            "    def __init__(self, x, y):",
            "        self.x = x",
            "        self.y = y",
            "",
            "    def distance_to(self, other):",
            '        """Return the distance to another point."""',
            "        return math.hypot(self.x - other.x, self.y - other.y)",
            "",
            "    def move(self, dx, dy):",
            '        """Move the point."""',
            "        self.x += dx",
            "        self.y += dy",
        ]
        if self.rng.random() < 0.5:
            lines += ["", "    def __repr__(self):", '        return f"Point({self.x}, {self.y})"']
        return Part(self.imports("import math"), "Point", "\n".join(lines), "A point in the plane.")

    def error(self) -> Part:
        what = self.pick("Missing", "Invalid", "Unknown", "Duplicate", "Broken")
        name = f"{what}{self.kind}Error"
        base = self.pick("Exception", "ValueError", "KeyError", "RuntimeError")
        sentence = f"Raised when {article(self.thing)} is {what.lower()}."
        code = f'class {name}({base}):\n    """{sentence}"""'
        if self.rng.random() < 0.4:
            code += f"\n\n    def __init__(self, {self.text}):"
            code += f'\n        super().__init__(f"{what.lower()} {self.thing}: {{{self.text}}}")'
            code += f"\n        self.{self.text} = {self.text}"
        return Part(frozenset(), name, code, sentence)

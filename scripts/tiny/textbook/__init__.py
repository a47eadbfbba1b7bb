"""Python modules as a beginner's textbook would print them, and pages that describe them.

Each is a function of its number, put together from parts at random: a few hundred names of things
and what they have, and some fifty kinds of classes and functions. A small model learns to write
such text well, which it does not learn from real libraries.
"""

import random
from collections.abc import Callable, Iterator

from scripts.tiny.corpus import Document
from scripts.tiny.textbook.classes import Classes
from scripts.tiny.textbook.functions import Functions
from scripts.tiny.textbook.subject import Part

LICENSE = "Apache-2.0"


class _Writer(Classes, Functions):
    """All parts about one thing."""


def _parts(rng: random.Random) -> tuple[_Writer, list[Part]]:
    writer = _Writer(rng)
    record = rng.choice((writer.record, writer.record, writer.data_record))
    classes = [record] * (rng.random() < 0.7) + [writer.holder] * (rng.random() < 0.45)
    others = [writer.stack, writer.queue, writer.counter, writer.point, writer.error]
    classes += rng.sample(others, rng.choice((0, 0, 1, 1, 2)))
    about = [writer.load, writer.save, writer.largest, writer.select, writer.group, writer.total]
    about += [writer.show, writer.random_choice, writer.arguments]
    about += [writer.parse] if record in classes else []
    general = [writer.read_lines, writer.count_words, writer.mean, writer.number_function]
    general += [writer.text_function, writer.find_files, writer.file_size, writer.timer]
    functions = rng.sample(about, rng.choice((1, 2, 3))) + rng.sample(
        general, rng.choice((0, 1, 2))
    )
    rng.shuffle(functions)
    makers: list[Callable[[], Part]] = [*classes, *functions]
    if rng.random() < 0.3:
        rng.shuffle(makers)
    made: list[Part] = []
    for maker in makers:
        part = maker()
        if part.name not in [each.name for each in made]:
            made.append(part)
    return writer, made


def module(number: int) -> str:
    """A module of Python."""
    rng = random.Random(f"module {number}")
    writer, made = _parts(rng)
    if rng.random() < 0.3 and (test := writer.test(made)):
        made.append(test)
    if rng.random() < 0.6:
        made.append(writer.main(made))
    pieces = []
    if rng.random() < 0.5:
        about = rng.choice(
            ("Work with {}.", "Reads and writes {}.", "Everything about {}.", "A program for {}.")
        )
        pieces.append(f'"""{about.format(writer.things)}"""\n')
    lines = sorted({line for part in made for line in part.imports}, key=lambda x: (x[0] == "f", x))
    if lines:
        pieces.append("\n".join(lines) + "\n")
    if rng.random() < 0.3:
        name = rng.choice(("MAX", "DEFAULT", "MIN")) + f"_{writer.number.upper()}"
        pieces.append(f"{name} = {rng.choice((0, 1, 5, 10, 100, 1000))}\n")
    head = "\n".join(pieces)
    body = "\n\n\n".join(part.code for part in made)
    return (head + "\n\n" + body if head else body) + "\n"


def _arguments_of(code: str) -> str:
    """What a class is made of."""
    for line in code.split("\n"):
        if "def __init__(self" in line:
            return line.partition("(self")[2].rpartition(")")[0].removeprefix(", ")
    fields = [line.strip() for line in code.split("\n") if line.startswith("    ") and ": " in line]
    names = [field.partition(":")[0] for field in fields]
    return ", ".join(name for name in names if name.isidentifier())


def page(number: int) -> str:
    """A page about a module that was made in the same way."""
    rng = random.Random(f"page {number}")
    writer, made = _parts(rng)
    about = rng.choice(("Work with", "Tools for", "All about"))
    title = f":mod:`{writer.things}` --- {about} {writer.things}"
    lines = [title, "=" * len(title), ""]
    lines += [f"This module helps you to work with {writer.things}. It has {len(made)} parts.", ""]
    for part in made:
        is_class = part.name[0].isupper()
        head = next(x for x in part.code.split("\n") if x.startswith(("class ", "def ")))
        if is_class:
            lines += [f".. class:: {part.name}({_arguments_of(part.code)})", ""]
        else:
            lines += [f".. function:: {head.removeprefix('def ').removesuffix(':')}", ""]
        lines += [f"   {part.sentence}", ""]
        for line in part.code.split("\n") if is_class else ():
            if line.startswith("    def ") and "__" not in line:
                name = line.strip().removeprefix("def ").removesuffix(":")
                name = name.replace("(self, ", "(").replace("(self)", "()")
                lines += [f"   .. method:: {name}", ""]
    calls = [part for part in made if not part.name[0].isupper()]
    if calls and rng.random() < 0.7:
        lines += ["For example::", "", f"   >>> from {writer.things} import {calls[0].name}", ""]
    return "\n".join(lines).rstrip() + "\n"


def documents(num_modules: int, num_pages: int) -> Iterator[Document]:
    """Modules as `code/…`, pages as `page/…`."""
    for number in range(num_modules):
        yield Document(f"code/{number:05}.py", module(number))
    for number in range(num_pages):
        yield Document(f"page/{number:05}.rst", page(number))

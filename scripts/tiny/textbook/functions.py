"""Functions of the textbook's modules."""

from pathlib import Path

from scripts.tiny.textbook.subject import Part, Subject


def _functions(name: str) -> list[str]:
    text = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    return text.rstrip("\n").split("\n\n\n")


_NUMBER_FUNCTIONS, _TEXT_FUNCTIONS = _functions("numbers"), _functions("texts")


def _part_of(code: str) -> Part:
    """Of a function that stands alone."""
    head, sentence, *_ = code.split("\n")
    name = head.removeprefix("def ").partition("(")[0]
    return Part(frozenset(), name, code, sentence.strip(' "'))


class Functions(Subject):
    """Functions about the thing, and of general use."""

    def load(self) -> Part:
        things = self.things
        form = self.pick("json", "csv", "lines")
        head = f"def load_{things}(path):"
        sentence = f"Read {things} from a file."
        if form == "json":
            body = [
                '    with open(path, encoding="utf-8") as file:',
                "        return json.load(file)",
            ]
            imports = self.imports("import json")
        elif form == "csv":
            body = [
                '    with open(path, newline="", encoding="utf-8") as file:',
                "        return list(csv.DictReader(file))",
            ]
            imports = self.imports("import csv")
        else:
            body = [
                f"    {things} = []",
                '    with open(path, encoding="utf-8") as file:',
                "        for line in file:",
                "            line = line.strip()",
                "            if line:",
                f"                {things}.append(line)",
                f"    return {things}",
            ]
            imports = frozenset()
        return Part(
            imports, f"load_{things}", "\n".join([head, f'    """{sentence}"""', *body]), sentence
        )

    def save(self) -> Part:
        things = self.things
        sentence = f"Write {things} to a file."
        if self.rng.random() < 0.5:
            body = ["        json.dump(" + things + ", file, indent=2)"]
            imports = self.imports("import json")
        else:
            body = [
                f"        for {self.thing} in {things}:",
                f'            file.write(f"{{{self.thing}}}\\n")',
            ]
            imports = frozenset()
        head = [f"def save_{things}({things}, path):", f'    """{sentence}"""']
        head += ['    with open(path, "w", encoding="utf-8") as file:']
        return Part(imports, f"save_{things}", "\n".join([*head, *body]), sentence)

    def read_lines(self) -> Part:
        name = self.pick("path", "filename", "file_name")
        sentence = self.pick("Return the lines of a file.", "Read a file and return its lines.")
        how = self.pick("file.read().splitlines()", "[line.rstrip() for line in file]")
        lines = [f"def read_lines({name}):", f'    """{sentence}"""']
        lines += [f'    with open({name}, encoding="utf-8") as file:', f"        return {how}"]
        return Part(frozenset(), "read_lines", "\n".join(lines), sentence)

    def count_words(self) -> Part:
        sentence = "Return how often each word occurs in a text."
        lines = ["def count_words(text):", f'    """{sentence}"""', "    counts = {}"]
        lines += [f"    for word in text{self.pick('.lower()', '')}.split():"]
        lines += ["        counts[word] = counts.get(word, 0) + 1", "    return counts"]
        return Part(frozenset(), "count_words", "\n".join(lines), sentence)

    def mean(self) -> Part:
        name = self.pick("mean", "average")
        values = self.pick("values", "numbers", "items")
        sentence = f"Return the {name} of some {values}."
        lines = [f"def {name}({values}):", f'    """{sentence}"""', f"    if not {values}:"]
        lines += [
            f'        raise ValueError("there are no {values}")'
            if self.rng.random() < 0.6
            else "        return 0"
        ]
        lines += [f"    return sum({values}) / len({values})"]
        return Part(frozenset(), name, "\n".join(lines), sentence)

    def number_function(self) -> Part:
        return _part_of(self.rng.choice(_NUMBER_FUNCTIONS))

    def text_function(self) -> Part:
        return _part_of(self.rng.choice(_TEXT_FUNCTIONS))

    def largest(self) -> Part:
        thing, things, number = self.thing, self.things, self.number
        which, function = self.rng.choice((("highest", "max"), ("lowest", "min")))
        name = f"{which}_{number}"
        sentence = f"Return the {thing} with the {which} {number}."
        lines = [f"def {name}({things}):", f'    """{sentence}"""']
        lines += [f"    return {function}({things}, key=lambda {thing}: {thing}.{number})"]
        return Part(frozenset(), name, "\n".join(lines), sentence)

    def select(self) -> Part:
        thing, things = self.thing, self.things
        if self.rng.random() < 0.5:
            name, arg = f"filter_by_{self.text}", self.text
            test = f"{thing}.{self.text} == {self.text}"
            sentence = f"Return the {things} with this {self.text}."
        else:
            name, arg = f"{things}_above", "limit"
            test = f"{thing}.{self.number} > limit"
            sentence = f"Return the {things} whose {self.number} is above a limit."
        lines = [f"def {name}({things}, {arg}):", f'    """{sentence}"""']
        if self.rng.random() < 0.5:
            lines += [f"    return [{thing} for {thing} in {things} if {test}]"]
        else:
            lines += ["    found = []", f"    for {thing} in {things}:", f"        if {test}:"]
            lines += [f"            found.append({thing})", "    return found"]
        return Part(frozenset(), name, "\n".join(lines), sentence)

    def group(self) -> Part:
        thing, things, text = self.thing, self.things, self.text
        sentence = f"Return the {things} in lists, by their {text}."
        lines = [f"def group_by_{text}({things}):", f'    """{sentence}"""']
        lines += ["    groups = defaultdict(list)", f"    for {thing} in {things}:"]
        lines += [f"        groups[{thing}.{text}].append({thing})", "    return groups"]
        imports = self.imports("from collections import defaultdict")
        return Part(imports, f"group_by_{text}", "\n".join(lines), sentence)

    def total(self) -> Part:
        thing, things, number = self.thing, self.things, self.number
        sentence = f"Return the {number} of all {things} together."
        lines = [f"def total_{number}({things}):", f'    """{sentence}"""', "    total = 0"]
        lines += [f"    for {thing} in {things}:", f"        total += {thing}.{number}"]
        return Part(
            frozenset(), f"total_{number}", "\n".join([*lines, "    return total"]), sentence
        )

    def show(self) -> Part:
        thing, things = self.thing, self.things
        sentence = f"Print each {thing} on a line of its own."
        lines = [f"def print_{things}({things}):", f'    """{sentence}"""']
        shown = f"{{{thing}.{self.text}}}: {{{thing}.{self.number}}}"
        if self.rng.random() < 0.5:
            lines += [f"    for {thing} in {things}:", f'        print(f"{shown}")']
        else:
            lines += [f"    for number, {thing} in enumerate({things}, start=1):"]
            lines += [f'        print(f"{{number}}. {shown}")']
        return Part(frozenset(), f"print_{things}", "\n".join(lines), sentence)

    def parse(self) -> Part:
        sentence = f"Return the {self.thing} that a line describes."
        lines = [f"def parse_{self.thing}(line):", f'    """{sentence}"""']
        sign = self.pick(",", ";", ":")
        names = self.texts[:1] + self.numbers[:1]
        lines += [f'    {", ".join(names)} = line.split("{sign}")']
        lines += [f"    return {self.kind}({names[0]}.strip(), int({names[1]}))"]
        return Part(frozenset(), f"parse_{self.thing}", "\n".join(lines), sentence)

    def find_files(self) -> Part:
        end = self.pick(".py", ".txt", ".csv", ".json", ".md")
        name = self.pick("find_files", "list_files")
        sentence = f'Return the names of all files in a folder that end in "{end}".'
        lines = [f"def {name}(folder):", f"    '''{sentence}'''".replace("'''", '"""')]
        lines += ["    names = []", "    for name in os.listdir(folder):"]
        lines += [f'        if name.endswith("{end}"):']
        lines += ["            names.append(os.path.join(folder, name))", "    return names"]
        return Part(self.imports("import os"), name, "\n".join(lines), sentence)

    def file_size(self) -> Part:
        sentence = "Return the size of a file in bytes."
        lines = [
            "def file_size(path):",
            f'    """{sentence}"""',
            "    if not os.path.exists(path):",
        ]
        lines += ['        raise FileNotFoundError(f"there is no file {path}")']
        lines += ["    return os.path.getsize(path)"]
        return Part(self.imports("import os"), "file_size", "\n".join(lines), sentence)

    def random_choice(self) -> Part:
        things = self.things
        sentence = f"Return some of the {things}, in random order."
        lines = [f"def choose_{things}({things}, count):", f'    """{sentence}"""']
        lines += [f"    if count > len({things}):"]
        lines += [f'        raise ValueError("there are not so many {things}")']
        lines += [f"    return random.sample({things}, count)"]
        return Part(self.imports("import random"), f"choose_{things}", "\n".join(lines), sentence)

    def timer(self) -> Part:
        sentence = "Call a function and return how many seconds it took."
        lines = ["def measure(function, *args):", f'    """{sentence}"""']
        lines += ["    start = time.perf_counter()", "    function(*args)"]
        lines += ["    return time.perf_counter() - start"]
        return Part(self.imports("import time"), "measure", "\n".join(lines), sentence)

    def arguments(self) -> Part:
        sentence = "Return the arguments of the command line."
        lines = ["def parse_args(argv=None):", f'    """{sentence}"""']
        lines += [f'    parser = argparse.ArgumentParser(description="Reads {self.things}.")']
        lines += [f'    parser.add_argument("path", help="file with {self.things}")']
        if self.rng.random() < 0.6:
            lines += ['    parser.add_argument("--verbose", action="store_true", help="say more")']
        else:
            limit = self.pick("5", "10", "100")
            lines += [f'    parser.add_argument("--limit", type=int, default={limit})']
        lines += ["    return parser.parse_args(argv)"]
        return Part(self.imports("import argparse"), "parse_args", "\n".join(lines), sentence)

    def test(self, made: list[Part]) -> Part | None:
        """A test of the record, where there is one."""
        if self.kind not in [part.name for part in made]:
            return None
        values = [
            f'"{self.rng.choice(("red", "Paris", "Anna", "first", "blue", "Oslo", "Max"))}"'
            for _ in self.texts
        ]
        numbers = [str(self.rng.choice((1, 2, 3, 5, 10, 12, 20, 100))) for _ in self.numbers]
        name = f"test_{self.thing}"
        lines = [
            f"def {name}():",
            f"    {self.thing} = {self.kind}({', '.join([*values, *numbers])})",
        ]
        lines += [f"    assert {self.thing}.{self.text} == {values[0]}"]
        lines += [f"    assert {self.thing}.{self.number} == {numbers[0]}"]
        return Part(frozenset(), name, "\n".join(lines), f"Checks a {self.thing}.")

    def main(self, made: list[Part]) -> Part:
        """Uses what the module has."""
        names = [part.name for part in made]
        things, lines, imports = self.things, ["def main():"], frozenset()
        if "parse_args" in names:
            lines += ["    args = parse_args()"]
            path = "args.path"
        else:
            path = f'"{things}.txt"'
            if self.rng.random() < 0.5:
                path, imports = "sys.argv[1]", self.imports("import sys")
        if f"load_{things}" in names:
            lines += [f"    {things} = load_{things}({path})"]
            if f"print_{things}" in names:
                lines += [f"    print_{things}({things})"]
            lines += [f'    print(f"{{len({things})}} {things}")']
        elif "read_lines" in names:
            lines += [f"    for line in read_lines({path}):", "        print(line)"]
        elif self.collection in names and self.kind in names:
            values = [
                f'"{self.rng.choice(("red", "Paris", "Anna", "first", "blue"))}"'
                for _ in self.texts
            ]
            numbers = [str(self.rng.choice((1, 2, 5, 10))) for _ in self.numbers]
            lines += [f"    {self.whole} = {self.collection}()"]
            lines += [f"    {self.whole}.add({self.kind}({', '.join([*values, *numbers])}))"]
            lines += [f"    print(len({self.whole}))"]
            imports = frozenset()
        else:
            lines += [f'    print("no {things} yet")']
            imports = frozenset()
        if "sys.argv" not in "\n".join(lines):
            imports = frozenset()
        code = "\n".join(lines) + '\n\n\nif __name__ == "__main__":\n    main()'
        return Part(imports, "main", code, "Runs the program.")

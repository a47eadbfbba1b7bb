"""Prompts whose answers the drafts for SmolLM2 are trained on: `python -m scripts.smollm2.prompts`.

Questions, programming tasks, texts to summarise and texts to edit, put together from lists and from
the standard library's docstrings and functions (PSF-2.0). One JSON line each.
"""

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOPICS = """
photosynthesis; black holes; compound interest; the French Revolution; sourdough bread; jazz music;
volcanoes; vaccines; the water cycle; chess openings; solar panels; the Roman Empire; gravity;
marathon training; house plants; coffee; the immune system; electric cars; inflation; time zones;
public speaking; bees; the Silk Road; earthquakes; meditation; binary numbers; oil painting;
recycling; the human heart; trade unions; bicycles; dinosaurs; sleep; poetry; supply and demand;
glaciers; the printing press; whales; job interviews; budgets; the Moon landing; yoga; rivers;
vitamins; the stock market; democracy; dreams; lightning; cheese; friendship; the Great Wall;
machine learning; tea; maps; penguins; batteries; philosophy; wildfires; cooking rice; castles;
the Industrial Revolution; kites; atoms; swimming; deserts; novels; the metric system; birds;
insurance; ocean currents; gardens in winter; remote work; guitars; mathematics at school; tides;
antibiotics; the Olympic Games; robots; libraries; weather forecasts; pottery; wolves; trains;
nutrition; the internet; soccer; bridges; language learning; honey; cities at night; theatre;
stress; satellites; mushrooms; farming; memory; the alphabet; skiing; open-source software; clocks;
nuclear power; paper; dogs; museums; the periodic table; travel on a small budget; rainforests;
""".replace("\n", " ")
QUESTIONS = """
What is {}?; Explain {} to a ten-year-old.; Why does {} matter?; Give me five facts about {}.;
Write a short poem about {}.; Tell me a story about {}.; What are the advantages and disadvantages
of {}?; How did {} change over time?; What are common mistakes people make with {}?;
Write a short email to a colleague about {}.; I am new to {}. Where should I start?;
Describe {} in two paragraphs.; What is the history of {}?; Write a letter to a friend about {}.;
Make a list of questions one could ask about {}.; Compare {} with {}.; Who are famous people
connected with {}?; Give me a plan for one week to learn about {}.; What would happen without {}?;
Write a dialogue between a teacher and a student about {}.; How does {} affect daily life?;
Write the introduction of an article about {}.; What should I know about {} before I travel?;
Explain the difference between {} and {}.; Can you recommend books about {}?; Write a blog post
about {}.; What are three myths about {}?
""".replace("\n", " ")
TASKS = """
reverses a string; checks whether a number is prime; sorts a list of dictionaries by a key; counts
the words in a text; computes the factorial of a number; finds the largest element of a list;
removes duplicates from a list; merges two sorted lists; checks whether a string is a palindrome;
computes Fibonacci numbers; reads a CSV file and prints its rows; converts Celsius to Fahrenheit;
finds the most common word in a file; implements a stack; implements a queue with two stacks;
flattens a nested list; computes the average of a list; validates an email address; draws a random
password; transposes a matrix; implements binary search; counts vowels in a string; generates all
permutations of a list; parses a date; computes the greatest common divisor; groups words by their
first letter; finds the missing number in a list; rotates a list; multiplies two matrices; checks
balanced parentheses; converts Roman numerals; downloads a web page; writes a dictionary to a JSON
file; measures the time of a function; implements a linked list; finds the second largest number;
splits a list into chunks; capitalises each word; computes the median; implements bubble sort
""".replace("\n", " ")
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "Go", "Rust", "SQL", "Ruby")
SUMMARIES = """
Summarize the following text.; Summarize this in one sentence.; Give me the key points of the text
below.; What is the following text about?; Write a title and a short summary for this text.;
List the three most important statements of this text.; Shorten this text to half its length.
""".replace("\n", " ")
EDITS = """
Rewrite the following text in a more formal tone.; Correct the grammar of the following text.;
Rewrite this text so that a child understands it.; Repeat the following text in the past tense.;
Turn the following text into a list of bullet points.; Copy the following text, but replace every
number by a word.; Improve the following text and keep its meaning.; Rewrite the text below in the
first person.
""".replace("\n", " ")
CODE_EDITS = """
Add comments to this code.; Explain what this function does.; Rename the function to `compute` and
show the code again.; Add type hints to this function.; Write a docstring for this function.;
Find possible bugs in this code.; Rewrite this function to be shorter.; Write unit tests for this
function.
""".replace("\n", " ")


def make_prompts(count: int, seed: int = 0) -> Iterator[str]:
    """So many different prompts; a longer list starts with a shorter one's."""
    rng = random.Random(seed)
    passages, functions, purposes = _standard_library()
    makers = (
        lambda: _fill(rng.choice(_items(QUESTIONS)), rng),
        lambda: _fill(rng.choice(_items(QUESTIONS)), rng),
        lambda: f"Write a {rng.choice(LANGUAGES)} function that {rng.choice(_items(TASKS))}.",
        lambda: f"Write a Python function with this purpose: {rng.choice(purposes)}",
        lambda: f"{rng.choice(_items(CODE_EDITS))}\n\n```python\n{rng.choice(functions)}\n```",
        lambda: f"{rng.choice(_items(SUMMARIES))}\n\n{rng.choice(passages)}",
        lambda: f"{rng.choice(_items(EDITS))}\n\n{rng.choice(passages)}",
    )
    seen: set[str] = set()
    while len(seen) < count:
        prompt = rng.choice(makers)()
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";") if item.strip()]


def _fill(question: str, rng: random.Random) -> str:
    return question.format(*rng.sample(_items(TOPICS), question.count("{}")))


def _standard_library() -> tuple[list[str], list[str], list[str]]:
    """Paragraphs of docstrings, short functions, and first lines of functions' docstrings."""
    passages, functions, purposes = [], [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            paragraphs = (ast.get_docstring(node) or "").split("\n\n")
            passages += [p for p in paragraphs if 200 <= len(p) <= 1200 and ">>>" not in p]
            if isinstance(node, ast.FunctionDef):
                code = ast.get_source_segment(source, node) or ""
                if 150 <= len(code) <= 900:
                    functions.append(code)
                if re.fullmatch(r"[A-Z][^\n]{30,120}\.", paragraphs[0]):
                    purposes.append(paragraphs[0])
    return passages, functions, purposes


if __name__ == "__main__":
    for text in make_prompts(int(sys.argv[1])):
        sys.stdout.write(json.dumps({"prompt": text}) + "\n")

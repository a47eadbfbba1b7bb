"""A short form of the load, and that it sees a wrong answer."""

import random

import pytest

from ..serve_load import expected_texts, requests_of, run
from .helpers import assert_idle, new_engine, serving

PROMPTS = ["import os\n", "class A:\n", "x = 1\n" * 5, "def f(a, b):\n"]


@pytest.fixture(scope="module")
def engine():
    return new_engine(max_batch_size=8)


@pytest.fixture(scope="module")
def load(engine):
    methods = ["draft_model", "prompt_lookup", "none"]
    bodies = requests_of(PROMPTS, methods, 24, random.Random(1), count=16)
    return bodies, expected_texts(engine, bodies)


def test_nothing_is_lost_or_crossed(engine, load):
    with serving(engine, max_requests=20) as address:
        summary = run(address, *load, num_clients=24, seconds=3)
    assert summary["failures"] == []
    assert summary["counts"]["compared"] > 0
    assert_idle(engine)


def test_it_sees_a_crossed_answer(engine, load):
    bodies, texts = load
    with serving(engine) as address:
        summary = run(address, bodies, [*texts[1:], texts[0]], num_clients=2, seconds=0.5)
    assert summary["num_failures"] > 0

"""One engine, its server and OpenAI's client for the tests of a module."""

import openai
import pytest

from .helpers import assert_idle, new_engine, serving


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """For all modules of this folder."""


@pytest.fixture(scope="module")
def engine():
    return new_engine()


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine) as address:
        yield address
    assert_idle(engine)


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client

"""The page in a real browser, through the WebDriver protocol; skipped where there is none."""

import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import torch

from fastspec import SamplingParams

from .helpers import new_engine, serving, wait_for

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    not (BROWSER and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine():
    engine = new_engine()
    engine.tokenizer.chat_template = None
    return engine


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine) as address:
        yield address


class Browser:
    """A page in a headless browser; scripts see its elements by their ids."""

    def __init__(self, client):
        self._client = client
        arguments = ["--headless=new", "--no-sandbox", "--window-size=1200,1000"]
        options = {"args": arguments, "binary": BROWSER}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = self.post("/session", capabilities=capabilities)
        self._session = f"/session/{session['sessionId']}"

    def post(self, path, **body):
        return self._client.post(path, json=body).raise_for_status().json()["value"]

    def open(self, address):
        self.post(f"{self._session}/url", url=address)

    def run(self, script):
        return self.post(f"{self._session}/execute/sync", script=script, args=[])

    def text(self, element_id):
        return self.run(f"return document.getElementById('{element_id}').textContent")

    def set(self, element_id, value, event="input"):
        self.run(
            f"const element = document.getElementById('{element_id}');"
            f"element.value = {value!r}; element.dispatchEvent(new Event('{event}'));"
        )

    def generate(self):
        """Press Ctrl+Enter in the prompt, as a user without a mouse, and wait for the end."""
        self.run("document.getElementById('prompt').focus()")
        keys = [("keyDown", "\ue009"), ("keyDown", "\ue007"), ("keyUp", "\ue007")]
        keys.append(("keyUp", "\ue009"))
        pressed = [{"type": kind, "value": key} for kind, key in keys]
        actions = [{"type": "key", "id": "keyboard", "actions": pressed}]
        self.post(f"{self._session}/actions", actions=actions)
        wait_for(lambda: not self.run("return document.getElementById('start').disabled"))

    def close(self):
        self._client.delete(self._session)


@pytest.fixture(scope="module")
def browser():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(lambda: _answers(client))
            browser = Browser(client)
            yield browser
            browser.close()
    finally:
        driver.terminate()
        driver.wait(30)


def _answers(client):
    try:
        return client.get("/status").json()["value"]["ready"]
    except httpx2.TransportError:
        return False


@contextmanager
def no_complaints(browser):
    """No script is refused by the page's policy, and none raises."""
    browser.run(
        "window.complaints = [];"
        "addEventListener('error', (event) => complaints.push(event.message));"
        "addEventListener('unhandledrejection', (event) => complaints.push(`${event.reason}`));"
        "addEventListener('securitypolicyviolation', (event) => complaints.push(event.blockedURI));"
    )
    yield
    assert browser.run("return window.complaints") == []


@needs_browser
def test_tokens_come_in_the_colours_of_their_writers(browser, address, engine):
    browser.open(address)
    wait_for(lambda: "tiny-random" in browser.text("model"))
    prompt = "import os"
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = engine.generate([prompt], params)[0].text
    with no_complaints(browser):
        browser.set("prompt", prompt)
        browser.set("max-tokens", "40")
        for method in ("draft_model", "prompt_lookup"):
            browser.set("method", method, "change")
            browser.generate()
            assert browser.text("error") == ""
            assert browser.text("speculative") == browser.text("plain") == expected
            assert "identical" in browser.text("verdict")
            colours = browser.run(
                "return [...document.querySelectorAll('#speculative .token')]"
                ".map((token) => [token.className, getComputedStyle(token).backgroundColor])"
            )
            kinds = {kind.removeprefix("token ") for kind, _ in colours}
            assert "draft0" in kinds
            assert kinds <= {"draft0", "recovered", "bonus", "target"}
            assert len({colour for _, colour in colours}) == len(kinds)
            assert method in browser.text("legend")
            assert browser.text("positions").startswith("position 1")
            for name in ("speculative-speed", "plain-speed", "per-step"):
                assert float(browser.text(name)) > 0
    assert "K = 6" in browser.text("speculative-title")


@needs_browser
def test_k_and_plain_decoding_can_be_chosen(browser, address):
    browser.open(address)
    wait_for(lambda: browser.text("shown-k") == "4")
    browser.set("max-tokens", "10")
    browser.set("k", "2")
    browser.generate()
    assert browser.run("return document.querySelectorAll('#positions tr').length") == 2
    browser.set("method", "none", "change")
    browser.generate()
    kinds = "return [...document.querySelectorAll('#speculative .token')].map((t) => t.className)"
    assert {*browser.run(kinds)} == {"token target"}


@needs_browser
def test_errors_are_shown_and_go_away(browser, address):
    browser.open(address)
    wait_for(lambda: browser.text("shown-k") == "4")
    browser.set("prompt", "x" * 600)
    browser.generate()
    assert "prompt: has 600 tokens" in browser.text("error")
    assert browser.run("return document.getElementById('error').getAttribute('role')") == "alert"
    browser.set("prompt", "x")
    browser.generate()
    assert browser.run("return document.getElementById('error').hidden")


@needs_browser
def test_a_key_is_asked_for(browser, engine, monkeypatch):
    monkeypatch.setenv("PAGE_KEYS", "one")
    with serving(engine, api_keys_variable="PAGE_KEYS") as address:
        browser.open(address)
        wait_for(lambda: "API key" in browser.text("error"))
        assert not browser.run("return document.getElementById('key-field').hidden")
        browser.set("key", "one", "change")
        wait_for(lambda: browser.text("shown-k") == "4")
        browser.set("max-tokens", "4")
        browser.generate()
        assert browser.text("error") == ""
        assert browser.text("speculative") != ""


@needs_browser
def test_every_control_has_a_name(browser, address):
    browser.open(address)
    unnamed = browser.run(
        "return [...document.querySelectorAll('input, select, textarea, button')]"
        ".filter((each) => !each.labels?.length && !each.textContent.trim())"
        ".map((each) => each.id)"
    )
    assert unnamed == []


def test_the_page_loads_nothing_and_may_run_nothing_else(address):
    response = httpx2.get(address)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|https?://", response.text)
    assert not re.findall(r" (?:style|on\w+)=", response.text)


def test_the_documentation_shows_it():
    screenshot = Path(__file__).parents[2] / "docs" / "page.png"
    assert screenshot.stat().st_size <= 200_000

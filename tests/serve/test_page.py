"""The page in a real browser, through the WebDriver protocol; skipped where there is none."""

import json
import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

import fastspec
from fastspec import SamplingParams

from .helpers import new_engine, serving, wait_for

PAGE = Path(fastspec.__file__).parent / "serve" / "page.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    not (BROWSER and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
)


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
        control, enter = "\ue009", "\ue007"
        keys = [("keyDown", control), ("keyDown", enter), ("keyUp", enter), ("keyUp", control)]
        self._press("prompt", keys)
        self.wait_for_the_end()

    def type(self, element_id, keys):
        """Type into an element, as a user does."""
        self._press(element_id, [(kind, key) for key in keys for kind in ("keyDown", "keyUp")])

    def _press(self, element_id, keys):
        self.run(f"document.getElementById('{element_id}').focus()")
        pressed = [{"type": kind, "value": key} for kind, key in keys]
        actions = [{"type": "key", "id": "keyboard", "actions": pressed}]
        self.post(f"{self._session}/actions", actions=actions)

    def wait_for_the_end(self):
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
    output = engine.generate([prompt], params)[0]
    expected = output.text
    colour_of = {}
    with no_complaints(browser):
        browser.set("prompt", prompt)
        browser.set("max-tokens", "40")
        for method in ("draft_model", "prompt_lookup", "draft_model"):
            browser.set("method", method, "change")
            browser.generate()
            assert browser.text("error") == ""
            assert browser.text("speculative") == browser.text("plain") == expected
            assert "identical" in browser.text("verdict")
            colours = browser.run(
                "return [...document.querySelectorAll('#speculative .token')]"
                ".map((token) => [token.className, getComputedStyle(token).backgroundColor,"
                " getComputedStyle(token).textDecoration])"
            )
            looks = {
                kind.removeprefix("token by-"): (colour, line) for kind, colour, line in colours
            }
            assert method in looks
            assert {*looks} <= {method, "recovered", "bonus", "target"}
            assert all(colour_of.setdefault(kind, look) == look for kind, look in looks.items())
            assert len({colour for colour, _ in looks.values()}) == len(looks)
            assert len({line for _, line in looks.values()}) == len(looks)
            assert f"{method} " in browser.text("status").partition("Tokens by writer: ")[2]
            assert method in browser.text("legend")
            if method == "draft_model":
                steps = f"40 tokens in {output.stats.num_steps} steps."
                assert steps in browser.text("status")
            assert browser.text("positions").startswith("position 1")
            for name in ("speculative-speed", "plain-speed", "per-step"):
                assert float(browser.text(name)) > 0
    assert "K = 4" in browser.text("speculative-title")
    assert len(set(colour_of.values())) == len(colour_of)


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
    assert {*browser.run(kinds)} == {"token by-target"}


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
        browser.set("max-tokens", "4")
        browser.type("key", "one\ue007")  # Enter: change, then submit
        wait_for(lambda: browser.text("status").startswith("Done"))
        browser.wait_for_the_end()
        assert browser.text("error") == ""
        assert browser.text("speculative") != ""
        assert "draft_model, K = 4" in browser.text("speculative-title")
        assert browser.run("return document.getElementById('method').length") == 3


@needs_browser
def test_every_control_has_a_name(browser, address):
    browser.open(address)
    unnamed = browser.run(
        "return [...document.querySelectorAll('input, select, textarea, button')]"
        ".filter((each) => !each.labels?.length && !each.textContent.trim())"
        ".map((each) => each.id)"
    )
    assert unnamed == []


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_script_without_a_browser():
    """Enter in the key field loads the model once; writers keep their classes and are named."""
    stub = Path(__file__).with_name("page_stub.mjs")
    command = ["node", str(stub), str(PAGE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert (seen["asked"], seen["error"], seen["numLoads"]) == ("an API key", "", 1)
    assert seen["offered"] == ["none", "draft_model", "prompt_lookup", "own"]
    asked = [(each["method"], each["num_speculative_tokens"]) for each in seen["posted"]]
    methods = [("draft_model", 4), ("prompt_lookup", 6), ("own", 3), ("draft_model", 4)]
    assert asked == methods
    for (method, k), shown in zip(methods, seen["runs"], strict=True):
        kind = "other" if method == "own" else method
        assert shown["classes"] == [f"token by-{each}" for each in ("target", kind, "bonus", kind)]
        assert "Done: 4 tokens in 3 steps." in shown["status"]  # the last one ends in its draft
        assert f"Tokens by writer: target 1, {method} 2, bonus 1." in shown["status"]
        assert shown["title"] == f"Speculative: {method}, K = {k}"
        assert method in shown["legend"][1]


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(*colours):
    """Of WCAG 2, from 1 to 21."""
    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def test_every_writer_has_a_colour_and_a_line_and_texts_have_contrast():
    page = PAGE.read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    writers = [*re.findall(r'"(\w+)"', re.search(r"WRITERS = new Set\(\[(.*?)\]", page, re.S)[1])]
    drafters = {"draft_model", "prompt_lookup", "mag", "ngram", "suffix", "glide", "eagle3"}
    drafters |= {"tree", "early_exit", "draft_model_1", "draft_model_2", "eagle"}
    assert drafters | {"recovered", "bonus", "target"} <= {*writers}
    names = [name for name in [*writers, "other"] if name != "target"]
    for scheme in re.findall(r":root \{(.*?)\}", style, re.S):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        grounds = [*names, "ground", "panel"]
        pairs = [("ink", name) for name in grounds] + [
            ("on-accent", "accent"),
            ("bad", "bad-ground"),
        ]
        pairs += [(front, back) for front in ("quiet", "accent") for back in ("ground", "panel")]
        low = [pair for pair in pairs if contrast(*(colours[name] for name in pair)) < 4.5]
        assert low == []
        assert len({colours[name] for name in names}) == len(names)
    for name in names:
        assert f".by-{name} {{ background: var(--{name});" in style
    lines = re.findall(r"\.by-\w+ .*underline (\w+ \dpx)", style)
    assert len({*lines, "dotted 1px"}) == len(lines) + 1


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

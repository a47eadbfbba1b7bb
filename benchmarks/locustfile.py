"""Loads a server with locust, which draws latencies and rates while it runs:

locust -f benchmarks/locustfile.py --headless -u 200 -r 50 -t 3m --host http://127.0.0.1:8000

`python -m tests.serve_load` does so too, needs no other package and checks more. Users stream, wait
for whole answers, read slowly, leave in the middle, and send bodies that are malformed or too long;
each answer must be the one that the server gave when it was idle.
"""

import json
import random
import time

import requests
from locust import HttpUser, events, task

PATH = "/v1/completions"
PROMPTS = ["import os\n", "def main(argv):\n", "class Stack:\n", "for line in", "# Read the file"]
MALFORMED = [b"", b"{", b"[1]", b"\xff", b'{"prompt": 5}', b'{"prompt": "a", "what": 1}']
BODIES = [
    {"prompt": prompt, "max_tokens": num, "temperature": temperature, "seed": 7}
    for prompt in PROMPTS
    for num in (8, 24, 48)
    for temperature in (0, 0.8)
]
expected: list[str] = []


@events.test_start.add_listener
def ask_alone(environment, **kwargs):
    """What the server says to each body while nobody else asks."""
    expected.clear()
    for body in BODIES:
        host = environment.host or environment.parsed_options.host
        answer = requests.post(f"{host}{PATH}", json=body, timeout=60)
        expected.append(answer.json()["choices"][0]["text"])


class Client(HttpUser):
    """One of many clients, some of them rude."""

    @task(12)
    def streams(self):
        self._stream("stream")

    @task(2)
    def reads_slowly(self):
        self._stream("slow", pause=0.02)

    @task(4)
    def leaves(self):
        self._stream("leave", leaves_after=random.randrange(8))

    @task(3)
    def waits(self):
        place = random.randrange(len(BODIES))
        with self.client.post(PATH, json=BODIES[place], name="whole", catch_response=True) as got:
            if got.status_code == 429:
                got.success()
            elif got.status_code != 200 or got.json()["choices"][0]["text"] != expected[place]:
                got.failure(f"status {got.status_code}, or another text")

    @task(2)
    def sends_nonsense(self):
        self._refused(random.choice(MALFORMED), "malformed")

    @task(1)
    def sends_too_much(self):
        self._refused(json.dumps({"prompt": "x " * 2_000_000}).encode(), "oversized")

    def _refused(self, content, name):
        headers = {"content-type": "application/json"}
        with self.client.post(
            PATH, data=content, headers=headers, name=name, catch_response=True
        ) as got:
            if got.status_code in (400, 413) and "error" in got.json():
                got.success()
            else:
                got.failure(f"status {got.status_code}")

    def _stream(self, name, pause=0.0, leaves_after=None):
        place, pieces = random.randrange(len(BODIES)), []
        body = BODIES[place] | {"stream": True}
        with self.client.post(PATH, json=body, stream=True, name=name, catch_response=True) as got:
            if got.status_code == 429:
                got.success()
                return
            for line in got.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) - 1 == leaves_after:
                    got.success()
                    return
                time.sleep(pause)
            if got.status_code == 200 and "".join(pieces) == expected[place]:
                got.success()
            else:
                got.failure(f"status {got.status_code}, or another text")

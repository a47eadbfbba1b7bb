"""A server in this process, on a free port of the loopback."""

import threading
import time
from contextlib import contextmanager

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.config.serve import ServeConfig
from fastspec.serve.server import listen, new_server

from ..engine.probes import assert_blocks_came_back
from ..models import byte_tokenizer, perturbed, random_model

MODEL = "tiny-random"
PROMPT, MESSAGES = "import os\n", [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for message in messages %}{{ 1 / 0 if message.role == 'broken' }}"
    "[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def new_engine(**config):
    """A random pair that writes bytes, with prompt lookup beside its draft model."""
    model = random_model("llama", num_hidden_layers=2)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    draft = perturbed(model, 0.05)
    engine = Engine(model, draft, tokenizer, SpecConfig(num_speculative_tokens=4), config)
    engine.add_drafter("prompt_lookup", SpecConfig("prompt_lookup", 6, prompt_lookup_min=1))
    return engine


@contextmanager
def serving(engine, **config):
    """The address of a server that runs in a thread; it ends with the block."""
    config = ServeConfig(port=0, **config)
    server = new_server(engine, config, MODEL)
    with listen(config) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(model=MODEL, prompt=prompt, **(GREEDY | options))


def converse(client, messages=MESSAGES, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **(GREEDY | options))


def generated(engine, prompt=PROMPT, **fields):
    fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    return engine.generate([prompt], SamplingParams(**fields))[0]


def wait_for(holds, seconds=30):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


def assert_idle(engine):
    """Nothing runs, and every block is back; the engine's thread may need a moment."""
    wait_for(lambda: not engine.has_unfinished)
    assert_blocks_came_back(engine)

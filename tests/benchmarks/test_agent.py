"""The agent's trace: what drafters that copy would bring to a target that writes it."""

from benchmarks import agent
from fastspec import SamplingParams
from fastspec.models.loading import load_tokenizer
from fastspec.tools.stored_outputs import StoredOutput


def test_tokens_of_a_pass_over_the_trace():
    tokenizer = load_tokenizer("target", "tiny")
    params = SamplingParams(temperature=0, max_tokens=None)
    turns = agent.turns()
    outputs = [
        StoredOutput(tokenizer(prompt)["input_ids"], tokenizer(action)["input_ids"], params)
        for prompt, action in turns
    ]
    assert len(outputs) == 40
    found = agent.replayed("tiny", outputs)
    assert found["suffix"] >= 3
    assert found["suffix"] >= 1.3 * found["prompt_lookup"]

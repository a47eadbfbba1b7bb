"""A round makes the host wait for the device once: to read what was committed."""

import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig

from ..models import perturbed, random_model
from .waiting import NoWaiting, count_readings

PARAMS = [
    SamplingParams(temperature=0, max_tokens=18),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4, max_tokens=9),
    SamplingParams(seed=5, max_tokens=13),
]


def rounds(engine, monkeypatch):
    """Sizes of what each step reads back, after one that set everything up."""
    for prompt, params in zip([[5, 6, 7], [8] * 20, [40, 41]], PARAMS, strict=True):
        engine.add_request(prompt, params)
    engine.step()
    readings, of_each = count_readings(monkeypatch), []
    with NoWaiting():
        while engine.has_unfinished:
            engine.step()
            of_each.append(list(readings))
            readings.clear()
    return of_each


@pytest.mark.parametrize("sample_method", ["probabilistic", "greedy"])
def test_draft_model(monkeypatch, sample_method):
    """Requests end at different times, so rounds are ragged too."""
    model = random_model("llama")
    spec = SpecConfig(num_speculative_tokens=4, draft_sample_method=sample_method)
    engine = Engine(model, perturbed(model, 0.3), spec=spec)
    assert all(len(readings) == 1 for readings in rounds(engine, monkeypatch))


def test_token_trees(monkeypatch):
    model = random_model("llama")
    spec = SpecConfig(method="tree", tree_width=3, tree_nodes=9)
    engine = Engine(model, perturbed(model, 0.3), spec=spec)
    for readings in rounds(engine, monkeypatch):
        *on_the_cpu, verdicts = readings
        assert len(verdicts) == 2
        assert all(len(shape) == 1 for shape in on_the_cpu)  # how many nodes each tree has


def test_plain_decoding(monkeypatch):
    engine = Engine(random_model("llama"))
    readings = rounds(engine, monkeypatch)
    assert len(readings) == 17
    assert all(len(shapes) == 1 for shapes in readings)


def test_what_waits_is_found(monkeypatch):
    with NoWaiting(), pytest.raises(RuntimeError, match="waits for the device"):
        torch.ones(1).item()
    with NoWaiting(), pytest.raises(RuntimeError, match="waits for the device"):
        torch.ones(3)[torch.ones(3) > 0]
    readings = count_readings(monkeypatch)
    torch.ones(2, 1).tolist()
    assert readings == [(2, 1)]
    with pytest.raises(RuntimeError, match="waits until"):
        torch.tensor([1], device=torch.device("cpu"))

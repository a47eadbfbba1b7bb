"""Draft models from files are where their target is, and there as a whole.

The stand-in for a GPU is PyTorch's word that there is one.
"""

import pytest
import torch
from torch import nn

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models import loading
from fastspec.models.loading import load_model

from ..models import perturbed, random_model
from .helpers import GREEDY, PROMPTS
from .test_graphed_drafts import write_draft


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "glide"])
def test_files_go_where_the_target_is(tmp_path, monkeypatch, method):
    target = random_model("llama", num_hidden_layers=6)
    spec = write_draft(method, target, tmp_path)
    expected = Engine(target).generate(PROMPTS, GREEDY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    outputs = Engine(target, tmp_path, spec=spec).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.parametrize(
    "method", ["none", "draft_model", "prompt_lookup", "mag", "ngram", "suffix", "tree"]
)
def test_the_default_device_does_not_matter(method):
    """Where a user makes every tensor on the GPU, what is copied there still begins on the CPU. A
    device without values stands in for the GPU."""
    target = random_model("llama")
    drafter = perturbed(target, 0.3) if method in ("draft_model", "tree") else None
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4, max_tokens=9),
        SamplingParams(temperature=0, logprobs=2, max_tokens=12),
    ]
    texts = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            engine = Engine(target, drafter, spec=method)
            outputs = engine.generate([[5, 6, 7], [8] * 20], params)
        texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_a_draft_that_shares_what_is_there_moves(tmp_path, monkeypatch):
    """Its first weight is the target's, so it says that it is where the target is."""
    (tmp_path / "config.json").write_text("{}")
    draft, moved = random_model("llama"), []
    monkeypatch.setattr(loading, "move_side_by_side", lambda _, device: moved.append(device))
    draft.lm_head = nn.Linear(1, 1, device="meta")
    monkeypatch.setattr(draft, "to", moved.append)
    config = EngineConfig(device="cpu")
    for expected in ([torch.device("cpu")] * 2, []):
        moved.clear()
        assert load_model("drafter", tmp_path, config, lambda *args, **options: draft) is draft
        assert moved == expected
        draft.lm_head = nn.Linear(1, 1)

"""Drafts in one call on a CPU: the texts, probabilities and steps of drafts made pass by pass."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec_kernels import available_backends

from ..models import perturbed, random_model
from .eagle3_models import write_folder
from .helpers import PROMPTS
from .probes import draft_model_of

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels")

# Ends at different times, unlike rules, and a request that drafts fewer tokens.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=40, seed=4, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, seed=5, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=6, num_speculative_tokens=1, max_tokens=20, ignore_eos=True, logprobs=0),
]
KINDS = {
    "draft_model": SpecConfig("draft_model", 4),
    "greedy drafts": SpecConfig("draft_model", 4, draft_sample_method="greedy"),
    "unsure": SpecConfig("draft_model", 4, confidence_threshold=0.2),
    "packed": SpecConfig("draft_model", 4, draft_bits=8),
    "quantized": SpecConfig("quantized", 3),
    "early_exit": SpecConfig("early_exit", 3, exit_layer=2),
    "after copies": SpecConfig("draft_model", 3, suffix_tokens=4),
    "eagle3": SpecConfig("eagle3", 3),
    "eagle3, unsure": SpecConfig("eagle3", 4, confidence_threshold=0.1),
    "eagle3, packed": SpecConfig("eagle3", 3, draft_bits=4),
    "eagle3, after copies": SpecConfig("eagle3", 3, suffix_tokens=4),
    "cascade": SpecConfig("cascade"),
}


def engine_of(kind, dtype, tmp_path, **config):
    spec = KINDS[kind]
    target = random_model("llama", num_hidden_layers=6, hidden_size=64, head_dim=16).to(dtype)
    drafter = None
    if spec.method == "eagle3":
        write_folder(tmp_path, target, num_known=40 if "packed" in kind else None)
        drafter = tmp_path
    elif spec.method in ("draft_model", "cascade"):
        drafter = perturbed(target, 0.05)
    options = {"max_batch_size": 3, "block_size": 4, "prefill_chunk_size": 7, "dtype": "auto"}
    return Engine(target, drafter, spec=spec, config=EngineConfig(**options | config))


def counted(drafter):
    """The numbers of texts that each call drafts after; 0 = it left them to single passes."""
    calls, write = [], drafter._single_call.write

    def spy(input_ids, spans, *args):
        drafts = write(input_ids, spans, *args)
        calls.append(0 if drafts is None else len(spans))
        return drafts

    drafter._single_call.write = spy
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_as_pass_by_pass(kind, dtype, tmp_path):
    engine = engine_of(kind, dtype, tmp_path)
    calls = counted(draft_model_of(engine) or engine.drafter._levels[0].model)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert sum(count > 0 for count in calls) > 5
    assert max(calls) > 1

    other = engine_of(kind, dtype, tmp_path)
    drafter = draft_model_of(other) or other.drafter._levels[0].model
    drafter._single_call = None
    expected = other.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stats.num_steps == theirs.stats.num_steps
        assert ours.stats.acceptance_rate == theirs.stats.acceptance_rate
        assert ours.logprobs == theirs.logprobs
    ours, theirs = engine.stats, other.stats
    assert ours.num_draft_passes == theirs.num_draft_passes


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("draft_model", SamplingParams(seed=1, max_tokens=9, logit_bias={7: 2.0})),
        ("draft_model", SamplingParams(seed=1, max_tokens=9, repetition_penalty=1.3)),
    ],
)
def test_rules_for_tokens_go_pass_by_pass(kind, params, tmp_path):
    engine = engine_of(kind, torch.float32, tmp_path)
    calls = counted(draft_model_of(engine))
    engine.generate(PROMPTS, params)
    assert not calls


def test_draws_by_position_go_pass_by_pass(tmp_path):
    target = random_model("llama")
    spec = SpecConfig("draft_model", 3, rejection_sample_method="coupled")
    engine = Engine(target, perturbed(target, 0.05), spec=spec)
    calls = counted(draft_model_of(engine))
    engine.generate(PROMPTS, SamplingParams(seed=1, max_tokens=9))
    assert {*calls} == {0}


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "gpt2", "mamba2"])
def test_models_that_the_op_does_not_compute_have_none(name):
    target = random_model(name)
    engine = Engine(target, perturbed(target, 0.05), spec=SpecConfig("draft_model", 3))
    assert draft_model_of(engine)._single_call is None


def test_layers_with_unequal_options_have_none():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    target = random_model("qwen3", layer_types=types, sliding_window=5, use_sliding_window=True)
    engine = Engine(target, perturbed(target, 0.05), spec=SpecConfig("draft_model", 3))
    assert draft_model_of(engine)._single_call is None
    assert draft_model_of(engine).runner.paged_model.flat is not None


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_named_backend_is_kept(backend):
    target = random_model("llama")
    spec, config = SpecConfig("draft_model", 3), EngineConfig(backend=backend)
    engine = Engine(target, perturbed(target, 0.05), spec=spec, config=config)
    assert (draft_model_of(engine)._single_call is None) == (backend == "reference")


def test_positions_beyond_the_cached_rotation_are_reached():
    target = random_model("llama", hidden_size=64, head_dim=16)
    engine = Engine(target, perturbed(target, 0.02), spec=SpecConfig("draft_model", 4))
    calls, table = counted(draft_model_of(engine)), draft_model_of(engine)._single_call._parts.table
    table.cos, table.sin = table.cos[:8], table.sin[:8]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    output = engine.generate([[3, 4]], params)[0]
    assert 0 in calls
    assert 1 in calls
    plain = Engine(target, spec="none").generate([[3, 4]], params)[0]
    assert output.token_ids == plain.token_ids


class _Subclass(torch.Tensor):
    """Weights of another kind, such as torchao's."""


def _own_forward(draft):
    head = draft.lm_head
    head.__dict__["forward"] = lambda x: -torch.nn.functional.linear(x, head.weight)


def _subclass_of_weight(draft):
    weight = torch.nn.Parameter(draft.lm_head.weight.detach().as_subclass(_Subclass))
    draft.lm_head.weight = weight


@pytest.mark.parametrize(
    "change",
    [
        lambda draft: draft.lm_head.register_forward_hook(lambda module, given, out: -out),
        lambda draft: draft.model.embed_tokens.register_forward_hook(lambda *args: 3 * args[-1]),
        lambda draft: draft.model.norm.register_forward_hook(lambda *args: -args[-1]),
        _own_forward,
        _subclass_of_weight,
    ],
    ids=["hook on the head", "on the embedding", "on the norm", "own forward", "other weights"],
)
def test_parts_that_are_not_plain_go_pass_by_pass(change):
    target = random_model("llama")
    draft = perturbed(target, 0.05)
    change(draft)
    engine = Engine(target, draft, spec=SpecConfig("draft_model", 3))
    assert draft_model_of(engine)._single_call is None
    engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9))

"""`fastspec.csd` under its published signature, and the published bugs that it does not have."""

import inspect
import pkgutil
from importlib import import_module

import pytest
import torch

import fastspec
from fastspec.drafters import MagDrafter

from ..models import EOS_ID, perturbed, random_model, random_t5
from .test_greedy import hugging_face_greedy

PUBLISHED = (
    "draft_list",
    "target_model",
    "initial_input",
    "input_ids",
    "k_matrix",
    "max_length",
    "leniency",
)
K_MATRIX = torch.tensor([[5, 14, 10], [0, 1, 10], [0, 0, 10]])
PROMPT = torch.tensor([[40, 7, 40, 7, 40, 7, 9]])


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def drafts(model):
    return [perturbed(model, 0.02), perturbed(model, 0.05, seed=2)]


def test_the_signature_is_the_published_one():
    parameters = inspect.signature(fastspec.csd).parameters
    assert tuple(parameters)[:7] == PUBLISHED
    assert parameters["max_length"].default == 200
    assert parameters["leniency"].default == 1


def test_no_module_hides_a_public_name():
    """A submodule becomes an attribute of its package when something imports it."""
    modules = {module.name for module in pkgutil.iter_modules(fastspec.__path__)}
    assert not modules & set(fastspec.__all__)
    assert fastspec.csd is import_module("fastspec.tools.csd").csd


@pytest.mark.parametrize("leniency", [1, 2, 50.0])
@pytest.mark.parametrize("as_lists", [False, True])
def test_decoders(model, drafts, leniency, as_lists):
    k_matrix, prompt = (K_MATRIX.tolist(), PROMPT.tolist()) if as_lists else (K_MATRIX, PROMPT)
    ids = fastspec.csd([*drafts, MagDrafter()], model, prompt, prompt, k_matrix, 30, leniency)
    expected = hugging_face_greedy(model, PROMPT[0].tolist(), 30)
    expected = expected[: expected.index(EOS_ID) + 1] if EOS_ID in expected else expected
    assert ids.tolist() == [[*PROMPT[0].tolist(), *expected]]


def test_lenience_is_another_name(model, drafts):
    arguments = (drafts, model, PROMPT, PROMPT, K_MATRIX, 20)
    expected = fastspec.csd(*arguments)
    assert torch.equal(fastspec.csd(*arguments, lenience=3), expected)
    with pytest.raises(ValueError, match=r"^lenience: expected 2"):
        fastspec.csd(*arguments, leniency=2, lenience=3)


def test_encoder_decoders():
    target, draft = random_t5(), perturbed(random_t5(), 0.1)
    start = target.config.decoder_start_token_id
    begin = torch.tensor([[start]])
    ids = fastspec.csd([draft], target, PROMPT, begin, [[5, 10], [0, 10]], 25, 2)
    expected = target.generate(PROMPT, max_new_tokens=25, do_sample=False)
    assert ids[0].tolist() == expected[0, : ids.shape[1]].tolist()
    assert ids.shape[1] in (expected.shape[1], 26)


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("lenience", [1, 4.0])
def test_encoder_decoders_with_random_matrices(num_drafts, lenience):
    target = random_t5()
    drafts = [perturbed(target, 0.05), perturbed(target, 0.1, seed=2)][:num_drafts]
    generator = torch.Generator().manual_seed(num_drafts)
    size = num_drafts + 1
    k_matrix = torch.randint(1, 7, (size, size), generator=generator).triu()
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9], list(range(1, 30))]
    params = [fastspec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 2
    params.append(fastspec.SamplingParams(temperature=1, seed=1, max_tokens=24, ignore_eos=True))
    spec = fastspec.SpecConfig("cascade", k_matrix=k_matrix, lenience=lenience)
    engine = fastspec.Engine(target, drafts, spec=spec)
    expected = fastspec.Engine(target).generate(prompts[:2], params[:2])
    outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs[:2]] == [o.token_ids for o in expected]
    assert engine.stats.num_accepted_tokens > 0


def test_a_cascade_without_mag_runs(model, drafts):
    """Bug 5 of the published code: use_mag=False cannot work there."""
    ids = fastspec.csd(drafts, model, PROMPT, PROMPT, [[3, 4], [0, 2]], 20)
    assert tuple(ids[0, 7:].tolist()) == hugging_face_greedy(model, PROMPT[0].tolist(), 20)


def test_nothing_follows_the_end(model, drafts):
    """Bug 8: text after the end stays there, max_length is passed, and the end is hard-coded."""
    text = hugging_face_greedy(model, PROMPT[0].tolist(), 20)
    end = next(token for token in text[4:] if token not in text[:4])
    stopping = perturbed(model, 0.0)
    stopping.generation_config.eos_token_id = [end, 5]
    ids = fastspec.csd(drafts, stopping, PROMPT, PROMPT, K_MATRIX, 20)
    assert tuple(ids[0, 7:].tolist()) == text[: text.index(end) + 1]
    for length in (1, 2, 7):
        ids = fastspec.csd(drafts, model, PROMPT, PROMPT, K_MATRIX, length)
        assert tuple(ids[0, 7:].tolist()) == text[:length]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("input_ids", {"input_ids": [[0]]}),
        ("input_ids", {"input_ids": [1, 2]}),
        ("initial_input", {"initial_input": torch.ones(2, 3, dtype=torch.int64)}),
        ("max_length", {"max_length": 0}),
        ("k_matrix", {"k_matrix": [[5, 10], [1, 10]]}),
        ("k_matrix", {"k_matrix": [[5] * 5] + [[0] * 5] * 4}),
        ("lenience", {"leniency": 0.5}),
        ("prompt", {"initial_input": [[9999]], "input_ids": [[9999]]}),
    ],
)
def test_bad_input(model, drafts, field, change):
    arguments = dict(zip(PUBLISHED[:5], (drafts, model, PROMPT, PROMPT, K_MATRIX), strict=True))
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        fastspec.csd(**{**arguments, **change})
    assert "\n" not in str(error.value)

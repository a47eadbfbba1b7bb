"""`fastspec.csd` under its published signature, and the published bugs that it does not have."""

import inspect
import json
import pkgutil
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastspec
from fastspec import EngineConfig, compat
from fastspec.cli.prompts import bundled_prompts
from fastspec.drafters import MagDrafter, load_bigram
from fastspec.models.loading import load_model, load_tokenizer

from ..models import EOS_ID, perturbed, random_t5
from .helpers import hugging_face_greedy

PUBLISHED = (
    "draft_list",
    "target_model",
    "initial_input",
    "input_ids",
    "k_matrix",
    "max_length",
    "leniency",
)
ROOT = Path(__file__).resolve().parents[2]
K_MATRIX = torch.tensor([[5, 14, 10], [0, 1, 10], [0, 0, 10]])
PROMPT = torch.tensor([[40, 7, 40, 7, 40, 7, 9]])


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


# k_matrix, and of the first, third and eighth of the ten bundled prompts: new tokens, and target
# calls of the published csd that ends there.
PUBLISHED_CALLS = [
    ([[5, 10], [0, 10]], [(24, 3), (55, 5), (29, 4)]),
    ([[1, 14], [0, 10]], [(24, 8), (44, 8), (29, 7)]),
    ([[3, 6], [0, 8]], [(24, 4), (46, 7), (29, 5)]),
]


def test_no_more_target_calls_than_the_published_code():
    """Measured with it on the bundled pair and bigram table; ours took up to two calls more while
    MaG stopped at the tokens that k_matrix asks for."""
    config = EngineConfig()
    target, draft = (load_model("target", name, config) for name in ("tiny", "tiny-draft"))
    tokenizer, table = load_tokenizer("target", "tiny"), "fastspec/assets/tiny-target/bigram.json"
    prompts = [tokenizer(bundled_prompts(10, False)[i])["input_ids"] for i in (0, 2, 7)]
    for k_matrix, published in PUBLISHED_CALLS:
        for prompt, (length, most) in zip(prompts, published, strict=True):
            drafts = [draft, MagDrafter(load_bigram(ROOT / table))]
            arguments = (target, [prompt], [prompt], k_matrix, length)
            ids, stats = fastspec.csd(drafts, *arguments, return_stats=True)
            assert ids.shape[1] == len(prompt) + length
            assert stats.num_steps <= most


def test_lenience_is_another_name(model, drafts):
    arguments = (drafts, model, PROMPT, PROMPT, K_MATRIX, 20)
    expected = fastspec.csd(*arguments)
    assert torch.equal(fastspec.csd(*arguments, lenience=3), expected)
    with pytest.raises(ValueError, match=r"^lenience: expected leniency \(2\)"):
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


def test_a_decoder_goes_on_with_what_is_there(model, drafts):
    """input_ids longer than initial_input: the prompt and the first tokens of the output."""
    whole = fastspec.csd(drafts, model, PROMPT, PROMPT, K_MATRIX, 20)
    begin = whole[:, : PROMPT.shape[1] + 9]
    assert torch.equal(fastspec.csd(drafts, model, PROMPT, begin, K_MATRIX, 11), whole)
    with pytest.raises(ValueError, match=r"^input_ids: expected to begin with \[40, 7, "):
        fastspec.csd(drafts, model, PROMPT, whole[:, 1:], K_MATRIX)


def test_an_encoder_decoder_goes_on_with_what_is_there():
    target = random_t5()
    arguments = ([perturbed(target, 0.1)], target, PROMPT)
    whole = fastspec.csd(*arguments, [[0]], [[5, 10], [0, 10]], 20)
    begin = whole[:, :6]
    assert torch.equal(fastspec.csd(*arguments, begin, [[5, 10], [0, 10]], 15), whole)
    engine = fastspec.Engine(target)
    for ids, named in (([5], r"expected \[0\] first"), ([], "is empty"), ([0, 9999], "9999")):
        with pytest.raises(ValueError, match=f"^decoder_input_ids: .*{named}"):
            engine.add_request([5, 6], decoder_input_ids=ids)
    assert not engine.has_unfinished


def test_only_an_encoder_decoder_takes_decoder_input_ids(model):
    with pytest.raises(ValueError, match=r"^decoder_input_ids: expected None"):
        fastspec.Engine(model).add_request([5, 6], decoder_input_ids=[5, 6])


@pytest.fixture
def bigram(model, tmp_path):
    """A file with what follows each token in a text of the model's own."""
    text = [*PROMPT[0].tolist(), *hugging_face_greedy(model, PROMPT[0].tolist(), 30)]
    successors = dict(pairwise(text))
    file = tmp_path / "bigram.json"
    file.write_text(json.dumps([successors.get(i, 0) for i in range(200)]), encoding="utf-8")
    return file


def test_a_bigram_table_and_the_counters(model, drafts, bigram):
    arguments = (model, PROMPT, PROMPT, K_MATRIX, 30)
    without, plain = fastspec.csd(drafts, *arguments, return_stats=True)
    ids, stats = fastspec.csd(drafts, *arguments, bigram_path=bigram, return_stats=True)
    own = [*drafts, MagDrafter(load_bigram(bigram))]
    same = fastspec.csd(own, *arguments, return_stats=True)[1]
    named = fastspec.csd([*drafts, "mag"], *arguments, bigram_path=bigram, return_stats=True)[1]
    assert torch.equal(ids, without)
    assert set(stats.num_draft_passes) == {"draft_model_1", "draft_model_2"}
    counts = [(each.num_steps, each.num_draft_passes) for each in (stats, same, named, plain)]
    assert counts[0] == counts[1] == counts[2] != counts[3]
    with pytest.raises(ValueError, match=r"^bigram_path: the MaG in draft_list"):
        fastspec.csd(own, *arguments, bigram_path=bigram)
    with pytest.raises(ValueError, match=r"^bigram_path: k_matrix has no level for a MaG"):
        fastspec.csd(drafts, *arguments[:3], [[3, 4], [0, 2]], 30, bigram_path="none.json")
    with pytest.raises(ValueError, match=r"^bigram_path: no such file"):
        fastspec.csd(drafts, *arguments, bigram_path="none.json")


def passes_by_level(stats):
    return [count for _, count in sorted(stats.num_draft_passes.items())]


def test_the_wrappers_of_published_scripts(model, drafts, bigram):
    wrapped = [
        compat.CountedCSDraftingDecoderModelKVCache(drafts[0], name="flan-t5-base"),
        compat.CountedCSDraftingDecoderModel(drafts[1], name="JackFram/llama-160m", vocab_size=9),
        compat.get_mag_model(bigram, True),
    ]
    target = compat.CountedCSDraftingDecoderModel(model, name="llama")
    arguments = (PROMPT.to(target.device), PROMPT, K_MATRIX, 30)
    expected, stats = fastspec.csd(
        [*drafts, "mag"], model, *arguments, bigram_path=bigram, return_stats=True
    )
    for _ in range(2):
        assert torch.equal(compat.csd(wrapped, target, *arguments), expected)
    models = [target, *wrapped[:2]]
    passes = [stats.num_steps, *passes_by_level(stats)]
    assert [each.forward_count for each in models] == [2 * count for count in passes]
    assert [len(each.wall_time) for each in models] == [2 * count for count in passes]
    assert all(seconds > 0 for each in models for seconds in each.wall_time)
    costs = [each.calculate_time_cost() for each in (*models, wrapped[2])]
    assert costs == [2 * n * c for n, c in zip(passes, (7000, 220, 160), strict=True)] + [0]
    assert {each.forward_count for each in models} == {0}
    plain = [compat.CSDraftingDecoderModel(drafts[0], name="a").cpu(), wrapped[2].to("cpu")]
    short = [[5, 10], [0, 10]]
    assert torch.equal(fastspec.csd(plain, target, PROMPT, PROMPT, short, 30), expected)
    assert compat.CSDraftingDecoderModelKVCache(model).vocab_size == model.config.vocab_size


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_wrappers_of_stored_targets(tmp_path, model, drafts, name):
    """The published experiment: the target is a file of its texts."""
    target, own, cached, begin = model, drafts, "CountedCSDraftingCachedDecoderModel", PROMPT
    draft_class = compat.CountedCSDraftingDecoderModel
    if name == "encoder-decoder":
        target, begin = random_t5(), torch.tensor([[0]])
        own = [perturbed(target, 0.02), perturbed(target, 0.05, seed=2)]
        cached = "CountedCSDraftingCachedEncoderDecoderModel"
        draft_class = compat.CountedCSDraftingEncoderDecoderModel
    live, stats = fastspec.csd(own, target, PROMPT, begin, K_MATRIX, 30, return_stats=True)
    file = tmp_path / "cache.json"
    key, value = ("_".join(map(str, ids[0].tolist())) for ids in (PROMPT, live))
    file.write_text(json.dumps({key: value}), encoding="utf-8")
    dummy = compat.DummyModel(vocab_size=target.config.vocab_size).cuda(0).cpu()
    stored = getattr(compat, cached)(dummy, name="flan-t5-xxl", cache_dir=file)
    wrapped = [draft_class(each, name="small") for each in own]
    ids = fastspec.csd([*wrapped, "mag"], stored, PROMPT, begin, K_MATRIX, 30)
    assert torch.equal(ids, live)
    assert stored.forward_count == stats.num_steps
    assert [each.forward_count for each in wrapped] == passes_by_level(stats)
    assert stored.calculate_time_cost() == stats.num_steps * 11300
    shorter = fastspec.csd(wrapped, stored, PROMPT, begin, K_MATRIX, 7)
    assert torch.equal(shorter, live[:, : begin.shape[1] + 7])
    with pytest.raises(ValueError, match=r"^initial_input: 'flan-t5-xxl' stores no output"):
        fastspec.csd(wrapped, stored, [[9]], begin, K_MATRIX)
    with pytest.raises(ValueError, match=r"^input_ids: expected .* for a stored target"):
        fastspec.csd(wrapped, stored, PROMPT, live[:, :9], K_MATRIX)


def test_every_name_of_the_module():
    assert {"csd", "get_mag_model", "CSDraftingEncoderDecoderModel"} <= set(dir(compat))
    for name in compat.__all__:
        assert callable(getattr(compat, name))
    assert compat.csd is fastspec.csd
    with pytest.raises(AttributeError, match=r"'fastspec\.compat' has no attribute 'nothing'"):
        _ = compat.nothing


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m: fastspec.csd([m, object()], m, PROMPT, PROMPT, K_MATRIX), "draft_list: item 1"),
        (lambda m: fastspec.csd([None], m, PROMPT, PROMPT, K_MATRIX), "draft_list: item 0"),
        (lambda m: fastspec.csd(m, m, PROMPT, PROMPT, K_MATRIX), "draft_list: expected a list"),
        (lambda m: fastspec.csd("mag", m, PROMPT, PROMPT, K_MATRIX), "draft_list: expected a list"),
        (lambda m: fastspec.csd(["mag", m], m, PROMPT, PROMPT, K_MATRIX), "draft_list: item 0"),
        (lambda m: fastspec.csd([m], 3, PROMPT, PROMPT, [[5, 10], [0, 10]]), "target_model: "),
        (lambda m: fastspec.csd([m], MagDrafter(), PROMPT, PROMPT, [[5]]), "target_model: "),
        (lambda m: compat.CSDraftingDecoderModel(m, sample=True), "sample: "),
        (lambda m: compat.CSDraftingDecoderModel("path"), "model: CSDraftingDecoderModel"),
        (lambda m: compat.CSDraftingMaGModel(m), "model: CSDraftingMaGModel expects a Tensor"),
        (lambda m: compat.CountedCSDraftingDecoderModel(m, counter_version="x"), "counter_version"),
        (
            lambda m: compat.CountedCSDraftingDecoderModel(m).calculate_time_cost(),
            "counter_version",
        ),
        (lambda m: compat.get_mag_model("no/such.json"), "bigram_path: no such file"),
        (
            lambda m: compat.CountedCSDraftingCachedDecoderModel(compat.DummyModel()),
            "outputs: expected a file, got the folder",
        ),
    ],
)
def test_unknown_objects_are_refused_by_name(model, call, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        call(model)

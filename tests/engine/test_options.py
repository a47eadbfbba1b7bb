"""What is given is obeyed or refused: no option is silently another one's, cut or ignored."""

import json
import re
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.config.methods import methods
from fastspec.config.options import options_of
from fastspec.drafters.ngram_table import NgramTable
from fastspec_kernels.backend import BACKENDS

from ..models import VOCAB_SIZE, random_model

SIZES = {"num_hidden_layers": 1, "max_position_embeddings": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return random_model("llama", **SIZES)


def test_the_number_of_draft_tokens_that_is_not_given():
    assert SpecConfig().num_speculative_tokens is None
    assert SpecConfig().num_draft_tokens() == 5
    assert SpecConfig().num_draft_tokens(3) == 3
    assert SpecConfig("cascade").num_draft_tokens() == 15
    assert SpecConfig("cascade", k_matrix=[[2, 3], [0, 2]]).num_draft_tokens() == 6
    assert replace(SpecConfig(), method="cascade").num_draft_tokens() == 15
    assert replace(SpecConfig("cascade"), k_matrix=[[2]]).num_draft_tokens() == 3
    assert replace(SpecConfig("cascade"), method="mag").num_draft_tokens() == 5


def test_sets_have_the_same_order_in_all_processes():
    """Ranks of a shared target compare the parameters of their requests."""
    words = {f"word {number}" for number in range(50)}
    params = SamplingParams(stop=words, bad_words=words)
    assert params.stop == params.bad_words == tuple(sorted(words))


def test_aliases_of_the_number_of_draft_tokens():
    for value in (5, 9):
        assert SpecConfig(num_assistant_tokens=value).num_speculative_tokens == value
        both = SpecConfig(num_speculative_tokens=value, num_assistant_tokens=value)
        assert both.num_draft_tokens() == value
        lookup = SpecConfig(prompt_lookup_num_tokens=value)
        assert (lookup.method, lookup.num_draft_tokens()) == ("prompt_lookup", value)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("num_speculative_tokens", {"method": "cascade", "num_speculative_tokens": 5}),
        ("num_speculative_tokens", {"method": "cascade", "num_assistant_tokens": 5}),
        ("num_speculative_tokens", {"num_speculative_tokens": 2**40}),
        ("num_speculative_tokens", {"num_speculative_tokens": True}),
        ("num_assistant_tokens", {"num_speculative_tokens": 5, "num_assistant_tokens": 9}),
        ("num_assistant_tokens", {"num_assistant_tokens": 2**40}),
        ("prompt_lookup_num_tokens", {"num_speculative_tokens": 5, "prompt_lookup_num_tokens": 9}),
        ("prompt_lookup_num_tokens", {"num_assistant_tokens": 5, "prompt_lookup_num_tokens": 9}),
        ("draft_sample_method", {"method": "mag", "draft_sample_method": "probabilistic"}),
        ("draft_sample_method", {"method": "ngram", "draft_sample_method": "greedy"}),
        ("k_matrix", {"method": "cascade", "k_matrix": [[10**9]]}),
        ("lenience", {"method": "cascade", "lenience": True}),
        ("ngram_size", {"method": "ngram", "ngram_size": 10**6}),
        ("filler_top_k", {"method": "ngram", "filler_top_k": 10**12}),
        ("prompt_lookup_max", {"method": "prompt_lookup", "prompt_lookup_max": 2**31}),
        ("bigram_path", {"method": "mag", "bigram_path": 3}),
        ("tree_nodes", {"method": "tree", "tree_nodes": True}),
        ("cape_bins", {"cape": True, "cape_bins": [(0.5, 2), (float("nan"), 1), (1.0, 0)]}),
        ("cape_bins", {"cape": True, "cape_bins": [(True, 2)]}),
        ("cape_bins", {"cape_bins": [(1.0, 0)]}),
        ("step_costs", {"schedule": "adaptive", "step_costs": [float("nan")] * 6}),
        ("step_costs", {"step_costs": [1.0] * 6}),
        ("relaxed_acceptance", {"relaxed_acceptance": True}),
        ("draft_sample_method", {"method": "none", "draft_sample_method": "greedy"}),
        ("schedule", {"method": "none", "schedule": "adaptive"}),
        ("schedule", {"method": "none", "schedule": "adaptive", "step_costs": [1.0] * 6}),
        ("step_costs", {"method": "none", "step_costs": [1.0] * 6}),
        ("relaxed_acceptance", {"method": "none", "relaxed_acceptance": 2.0}),
        ("synthetic_acceptance_rate", {"method": "none", "synthetic_acceptance_rate": 0.5}),
        ("rejection_sample_method", {"method": "none", "rejection_sample_method": "block"}),
    ],
)
def test_spec_config_refuses(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SpecConfig(**options)


GIVEN = {
    "draft_sample_method": "greedy",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 2,
    "bigram_path": "table.json",
    "ngram_size": 3,
    "filler_top_k": 2,
    "k_matrix": [[1, 2], [0, 0]],
    "lenience": 2.0,
    "mag_surplus": True,
    "tree_width": 2,
    "tree_nodes": 8,
    "tree_paths": [[0]],
    "tree_prompt_lookup": True,
    "tree_suffix": 4,
    "cape": True,
}


@pytest.mark.parametrize("method", methods())
def test_options_of_other_methods_are_refused_by_name(method):
    for field in GIVEN.keys() - methods()[method].fields:
        is_of_vllm = method == "ngram" and field in ("prompt_lookup_min", "prompt_lookup_max")
        hint = r" \(vLLM's is prompt_lookup here\)" if is_of_vllm else ""
        with pytest.raises(ValueError, match=f"^{field}: not for method '{method}'{hint}, got "):
            SpecConfig(method, **{field: GIVEN[field]})


@pytest.mark.parametrize("config", [SamplingParams, SpecConfig, EngineConfig])
def test_every_field_is_a_declared_option(config):
    declared = options_of(config)
    assert list(declared) == [field.name for field in fields(config)]
    for name, option in declared.items():
        assert option.help.endswith(".")
        assert f"    {name}: {option.help[:40]}" in config.__doc__
        assert option.checked(option.default) == getattr(config(), name)


def test_what_is_told_of_an_option_that_is_not_given_is_what_counts():
    told = {name: f"{o.help} {o.details}" for name, o in options_of(SpecConfig).items()}
    assert not any("{usual}" in text for text in told.values())
    assert "by default 5 (suffix: 24, mtp: 3, dflash: 15), " in told["num_speculative_tokens"]
    counts = [SpecConfig(method).num_draft_tokens() for method in ("mag", "suffix")]
    assert counts == [5, 24]
    factor, least, kept = SpecConfig("suffix").suffix_limits
    size, fillers = map(SpecConfig("ngram").value_of, ("ngram_size", "filler_top_k"))
    counts = {
        "prompt_lookup_min": SpecConfig("prompt_lookup").lookup_lengths[0],
        "ngram_size": size,
        "filler_top_k": fillers,
        "suffix_max_spec_factor": f"{factor:g}",
        "suffix_min_token_prob": least,
        "suffix_max_cached_tokens": kept,
        "k_matrix": json.dumps(SpecConfig("cascade").cascade_matrix, separators=(",", ":")),
        "tree_width": SpecConfig("tree").value_of("tree_width"),
        "tree_nodes": SpecConfig("tree").value_of("tree_nodes"),
    }
    for name, value in counts.items():
        assert re.search(rf"[Bb]y default {re.escape(str(value))}[ .,;]", told[name]), name


def test_every_backend_of_the_kernels_can_be_named():
    for name in ("auto", *BACKENDS):
        assert EngineConfig(backend=name).backend == name
    with pytest.raises(ValueError, match=r"^backend: expected one of "):
        EngineConfig(backend="nope")


def test_a_large_k_matrix_takes_no_time():
    rows = [[int(column >= row) for column in range(60)] for row in range(60)]
    assert SpecConfig("cascade", k_matrix=rows).num_draft_tokens() == 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-45),
        ("temperature", 1e39),
        ("temperature", True),
        ("temperature", 10**400),
        ("min_p", float("nan")),
        ("top_p", False),
        ("top_k", -2),
        ("top_k", 5.0),
        ("top_k", True),
        ("seed", 2**63),
        ("seed", 0.0),
        ("max_tokens", True),
        ("max_tokens", float("inf")),
        ("ignore_eos", "yes"),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop", b"end"),
        ("logprobs", 101),
        ("logprobs", -1),
        ("logprobs", 0.5),
        ("prompt_logprobs", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {-3: 1.0}),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [[-1]]),
        ("bad_words", 3),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("structured_outputs", "json"),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": "{}", "regex": "a"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"json": 3}),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("logits_processors", 3),
        ("logits_processors", [3]),
    ],
)
def test_sampling_params_refuse(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("bias", "expected", "key"),
    [
        ({"5": 1, "05": 2}, "token ids as keys", "'05'"),
        ({"\u0665": 1}, "token ids as keys", "'\u0665'"),  # an Arabic 5
        ({"9" * 5000: 1}, "token ids as keys", "'999"),
        ({5: 1, "5": 2}, "each token id once", "'5'"),
    ],
)
def test_a_biased_token_has_one_name(bias, expected, key):
    with pytest.raises(ValueError, match=rf"^logit_bias: expected {expected}.*, got {key}"):
        SamplingParams(logit_bias=bias)
    assert SamplingParams(logit_bias={"0": 1, "10": 2}).logit_bias == {0: 1.0, 10: 2.0}


def test_sampling_params_as_vllm_means_them():
    params = SamplingParams(
        stop=None, stop_token_ids=None, top_k=-1, max_tokens=None, logits_processors=None
    )
    assert (params.stop, params.stop_token_ids, params.top_k) == ((), (), 0)
    assert SamplingParams(stop_token_ids={3}).stop_token_ids == (3,)
    assert SamplingParams(logprobs=True).logprobs == SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(logit_bias={"7": -1}).logit_bias == {7: -1.0}
    assert SamplingParams(bad_words="a").bad_words == ("a",)


def test_numbers_of_other_types_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        top_k=np.int64(7),
        seed=np.uint64(2**63 - 1),
        max_tokens=np.int32(4),
        stop_token_ids=[np.int64(3)],
    )
    values = (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens)
    assert values == (0.5, 0.5, 7, 2**63 - 1, 4)
    assert [type(value) for value in (*values, *params.stop_token_ids)] == [float] * 2 + [int] * 4
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"
    assert type(EngineConfig(block_size=np.int64(8)).block_size) is int
    assert type(SpecConfig(num_speculative_tokens=np.int64(8)).num_speculative_tokens) is int


@pytest.mark.parametrize("top_k", [VOCAB_SIZE + 1, 2**31, 10**30])
def test_top_k_beyond_the_vocabulary_is_off(model, top_k):
    options = {"seed": 3, "max_tokens": 8, "ignore_eos": True}
    expected = Engine(model).generate([[1, 2]], SamplingParams(**options))
    outputs = Engine(model).generate([[1, 2]], SamplingParams(top_k=top_k, **options))
    assert outputs[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("max_tokens", [None, 10**12])
def test_texts_as_long_as_the_model_goes(model, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = Engine(model, model).generate([[1, 2]], params)
    assert len(output.token_ids) == 62
    assert output.finish_reason == "length"


def test_stop_ids_out_of_the_vocabulary(model):
    engine = Engine(model)
    with pytest.raises(ValueError, match=rf"^stop_token_ids: {VOCAB_SIZE} is not in 0"):
        engine.add_request([1], SamplingParams(stop_token_ids=[3, VOCAB_SIZE]))
    engine.add_request([1], SamplingParams(stop_token_ids=[VOCAB_SIZE - 1]))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("kv_cache_memory", {"num_blocks": 4, "kv_cache_memory": 2**20}),
        ("kv_cache_memory", {"kv_cache_memory": "4G"}),
        ("kv_cache_memory", {"kv_cache_memory": "0.4"}),
        ("kv_cache_memory", {"kv_cache_memory": "9" * 400 + "GiB"}),
        ("block_size", {"block_size": 2**31}),
        ("max_batch_size", {"max_batch_size": True}),
        ("device", {"device": 3}),
        ("backend", {"backend": None}),
    ],
)
def test_engine_config_refuses(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(10, 10), ("10", 10), ("4GiB", 2**32), ("500 MB", 5 * 10**8), ("1.5KiB", 1536)],
)
def test_sizes_with_units(size, num_bytes):
    config = EngineConfig(kv_cache_memory=size)
    assert config.kv_cache_memory == num_bytes
    assert config == EngineConfig(kv_cache_memory=num_bytes)


def test_spec_and_config_by_name_or_mapping(model):
    assert Engine(model, spec="prompt_lookup").is_speculative
    spec = {"method": "mag", "num_speculative_tokens": 3}
    engine = Engine(model, spec=spec, config={"max_batch_size": 2})
    assert engine.spec == SpecConfig(**spec)
    assert engine.config == EngineConfig(max_batch_size=2)
    assert SpecConfig.of({"num_assistant_tokens": 4}).num_draft_tokens() == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "medusa"}, "method: "),
        ({"spec": {"num_tokens": 3}}, "spec: unknown field 'num_tokens'"),
        ({"spec": {3: 3}}, "spec: unknown field 3"),
        ({"spec": 5}, "spec: expected SpecConfig or a mapping, got 5"),
        ({"spec": {"num_speculative_tokens": 0}}, "num_speculative_tokens: "),
        ({"config": "cpu"}, "config: expected EngineConfig or a mapping, got 'cpu'"),
        ({"config": {"blocksize": 3}}, "config: unknown field 'blocksize'"),
        (
            {"config": {"draft_bits": 8}},
            "config: unknown field 'draft_bits'; it is an option of SpecConfig",
        ),
    ],
)
def test_specs_and_configs_that_are_none(model, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Engine(model, **options)


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (SamplingParams, "max_new_tokens", "did you mean max_tokens?"),
        (SamplingParams, "temp", "did you mean temperature?"),
        (SamplingParams, "best_of", "known are temperature, "),
        (EngineConfig, "max_num_seqs", "did you mean max_batch_size?"),
        (SpecConfig, "num_spec_tokens", "did you mean num_speculative_tokens?"),
        (EngineConfig, "draft_bits", "it is an option of SpecConfig"),
        (SpecConfig, "dtype", "it is an option of EngineConfig"),
        (SpecConfig, "temperature", "it is an option of SamplingParams"),
        (Engine, "model", "it is target here"),
        (Engine, "max_model_len", "pass config={'max_model_len': ...}"),
        (Engine, "max_num_seqs", "pass config={'max_batch_size': ...}"),
        (Engine, "num_speculative_tokens", "pass spec={'num_speculative_tokens': ...}"),
        (Engine, "lora_request", "see the options of config and spec"),
    ],
)
def test_unknown_arguments_say_what_was_perhaps_meant(kind, name, hint):
    told = re.escape(f"{kind.__name__}: unknown argument {name!r}; {hint}")
    with pytest.raises(TypeError, match=f"^{told}"):
        kind(**{name: 5})


def test_speculation_turned_on_anew_drafts_as_much_as_before(model):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = Engine(model, model, spec=SpecConfig(num_speculative_tokens=7))
    engine.disable_spec_dec()
    engine.enable_spec_dec()
    (output,) = engine.generate([[1, 2]], params)
    assert len(output.stats.acceptance_histogram) == 8
    engine.enable_spec_dec(n_spec_tokens=2)
    (output,) = engine.generate([[1, 2]], params)
    assert len(output.stats.acceptance_histogram) == 3


def test_the_default_is_within_the_most_that_the_engine_allows(model):
    engine = Engine(model, model, config=EngineConfig(max_n_spec_tokens=2))
    (output,) = engine.generate([[1, 2]], GREEDY)
    assert len(output.stats.acceptance_histogram) == 3
    engine.enable_spec_dec()


def test_automatic_ids_leave_out_those_in_use(model):
    engine = Engine(model)
    given = [engine.add_request([1], GREEDY, f"request-{n}") for n in (2, 4, 5)]
    with pytest.raises(ValueError, match="already running"):
        engine.add_request([1], GREEDY, "request-2")
    automatic = [engine.add_request([1], GREEDY) for _ in range(3)]
    assert len({*given, *automatic}) == 6
    outputs = engine.generate([[1], [2]], GREEDY)
    assert all(output.finish_reason == "length" for output in outputs)


@pytest.mark.parametrize("request_id", [7, b"a", ("a",)])
def test_ids_that_are_no_texts(model, request_id):
    with pytest.raises(ValueError, match=r"^request_id: "):
        Engine(model).add_request([1], GREEDY, request_id)


def test_a_matrix_of_numpy_is_one():
    spec = SpecConfig("cascade", k_matrix=np.array([[1, 14], [0, 0]]))
    assert spec.k_matrix == ((1, 14), (0, 0))


def test_ids_of_numpy_become_plain_ones(model):
    (output,) = Engine(model).generate([list(np.array([1, 2]))], GREEDY)
    assert [type(token_id) for token_id in output.prompt_token_ids] == [int, int]


def test_more_fillers_than_tokens(model):
    spec = SpecConfig("ngram", filler_top_k=VOCAB_SIZE + 1)
    (output,) = Engine(model, spec=spec).generate([[1, 2, 1, 2]], GREEDY)
    assert output.token_ids == Engine(model).generate([[1, 2, 1, 2]], GREEDY)[0].token_ids


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_table_that_could_not_grow_grows_later(monkeypatch, failing, error):
    table = NgramTable(2)
    table.grow(1, torch.device("cpu"))
    calls = []

    def failing_at(function):
        def wrapper(*args, **kwargs):
            calls.append(function)
            if len(calls) == failing + 1:
                raise error
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patched:
        for name in ("zeros", "cat"):
            patched.setattr(torch, name, failing_at(getattr(torch, name)))
        with pytest.raises(error):
            table.grow(3, torch.device("cpu"))
    table.grow(3, torch.device("cpu"))
    rows = torch.tensor([2, 2])
    windows = torch.tensor([[4, 5], [4, 5]])
    table.learn(rows, windows, torch.tensor([6, 6]), torch.tensor([0, 1]))
    assert table.next_tokens(rows, windows).tolist() == [6, 6]


def test_enabling_a_drafter_object_refuses_options_that_it_does_not_read(model):
    spec = SpecConfig("draft_model", confidence_threshold=0.4)
    engine, other = Engine(model, model, spec=spec), Engine(model, model)
    with pytest.raises(ValueError, match=r"confidence_threshold: .* Drafter object"):
        engine.enable_spec_dec(other.drafter)
    assert len(engine.generate([[1, 2]], GREEDY)) == 1

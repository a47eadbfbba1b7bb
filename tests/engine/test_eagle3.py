"""EAGLE-3 drafts: the published forward, the same output, the exact distribution."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.eagle3.model import EagleConfig
from fastspec_kernels.testing import chi_square

from ..architectures import config_of, random_decoder
from ..models import random_model, random_t5
from .eagle3_models import THETA, published_logits, write_folder
from .eagle_checks import assert_logits, spied
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PLAIN,
    PROMPTS,
    drawn_counts,
    exact_distribution,
    finish,
    hugging_face_greedy,
    p_value,
    small_model,
)
from .probes import CountingCapture, count_preemptions, drafter_of, target_runner, use_graphs

IDS = "eagle_aux_hidden_state_layer_ids"
SAMPLED = SamplingParams(temperature=1.0, max_tokens=9, seed=5, ignore_eos=True)
CHAIN = SpecConfig("eagle3", 3)
TREE = SpecConfig("eagle3", 3, tree_nodes=7, tree_width=2)
GREEDY_TREE = SpecConfig("eagle3", 4, tree_nodes=9, draft_sample_method="greedy")
SMALL = EngineConfig(max_batch_size=3, block_size=4, prefill_chunk_size=7)


def assert_published(seen, weights, target, least=40, **options):
    """All rows of logits are those of the published forward."""
    assert_logits(seen, partial(published_logits, weights, target, **options), least)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("hidden_size", [64, 96])
@pytest.mark.parametrize("num_known", [None, 50])
def test_logits_are_those_of_the_published_forward(tmp_path, spec, hidden_size, num_known):
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target, hidden_size, num_known)
    engine = Engine(target, tmp_path, spec=spec, config=SMALL)
    seen = spied(engine)
    engine.generate(PROMPTS, SAMPLED)
    assert_published(seen, weights, target)


def test_a_configuration_of_defaults():
    """transformers before 5.20 makes one to compare with whenever it writes a configuration."""
    assert EagleConfig().num_hidden_layers == 1


def test_prompts_that_are_read_token_by_token(tmp_path):
    """The first token of a text has no row of the draft, and may be all that a pass is to read."""
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target)
    config = EngineConfig(prefill_chunk_size=1)
    engine = Engine(target, tmp_path, spec=CHAIN, config=config)
    seen = spied(engine)
    engine.generate(PROMPTS[1:2], SAMPLED)
    assert_published(seen, weights, target, least=10)


def test_hidden_states_survive_preemption_and_shared_prefixes(tmp_path):
    """Prompts of whole blocks that differ right after them: no draft reads another one's row."""
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target)
    config = EngineConfig(max_batch_size=3, block_size=4, num_blocks=13, prefix_caching=True)
    engine = Engine(target, tmp_path, spec=CHAIN, config=config)
    seen, preempted = spied(engine), count_preemptions(engine)
    prompts = [[*range(5, 17), *last] for last in ([1], [2], [3, 4])]
    together = engine.generate(prompts, SAMPLED)
    engine.generate([prompts[1]], SAMPLED)
    assert_published(seen, weights, target)
    assert preempted
    assert engine.stats.num_cached_prompt_tokens > 0
    alone = Engine(target, tmp_path, spec=CHAIN)
    assert [alone.generate([p], SAMPLED)[0].token_ids for p in prompts] == [
        output.token_ids for output in together
    ]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({IDS: [1, 2, 4]}, {"layers": [1, 2, 4]}),
        ({"eagle_config": {IDS: [0, 1, 3]}}, {"layers": [1, 2, 4]}),
        ({"norm_before_residual": True}, {"norm_before_residual": True}),
    ],
)
def test_other_published_folders(tmp_path, config, options):
    """Other hidden states, another residual, another file with other names."""
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target, **config)
    (tmp_path / "model.safetensors").unlink()
    renamed = {name.replace("midlayer", "model.layers.0"): w for name, w in weights.items()}
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    engine = Engine(target, tmp_path, spec=CHAIN)
    seen = spied(engine)
    engine.generate(PROMPTS[:1], SAMPLED)
    assert_published(seen, weights, target, least=10, **options)


def test_weights_in_several_files(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target, num_known=50)
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(weights)}
    for file in {*places.values()}:
        part = {name: weights[name] for name, place in places.items() if place == file}
        save_file(part, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    engine = Engine(target, tmp_path)
    seen = spied(engine)
    engine.generate(PROMPTS[:1], SAMPLED)
    assert_published(seen, weights, target, least=10)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"drafter: cannot load .*model-1.safetensors"):
        Engine(target, tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match="expected a weight_map"):
        Engine(target, tmp_path)


def as_speculators(folder, **changes):
    """The config.json of a draft as vLLM's `speculators` writes it."""
    stored = json.loads((folder / "config.json").read_text())
    own = {"draft_vocab_size", "norm_before_residual", IDS} & stored.keys()
    config = {name: stored.pop(name) for name in own}
    del stored["architectures"]
    config |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3"},
        "target_hidden_size": None,
        "transformer_layer_config": stored,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_folders_of_speculators(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    options = {"norm_before_residual": True, IDS: [1, 2, 4]}
    weights = write_folder(tmp_path, target, num_known=50, **options)
    renamed = {name.replace("midlayer", "layers.0"): w for name, w in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    as_speculators(tmp_path)
    engine = Engine(target, tmp_path)
    assert engine.drafter.name == "eagle3"
    seen = spied(engine)
    engine.generate(PROMPTS[:1], SAMPLED)
    options = {"norm_before_residual": True, "layers": [1, 2, 4]}
    assert_published(seen, weights, target, least=10, **options)


@pytest.mark.parametrize(
    ("field", "value"), [("speculators_model_type", "mlp"), ("transformer_layer_config", None)]
)
def test_other_folders_of_speculators_are_refused(tmp_path, field, value):
    target = random_model("llama")
    write_folder(tmp_path, target)
    as_speculators(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=f"drafter: .*{field}: expected .*, got {value!r}"):
        Engine(target, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [("llama", CHAIN), ("llama", TREE), ("qwen3", CHAIN), ("gemma3", GREEDY_TREE)],
)
def test_greedy_output_is_that_of_plain_decoding(tmp_path, architecture, spec):
    target = random_model(architecture)
    write_folder(tmp_path, target, num_known=90)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, tmp_path, spec=spec, config=SMALL)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


def test_a_draft_that_rotates_by_lengths(tmp_path):
    """What its rotation says of a position depends on the text: nothing is kept."""
    target = random_model("llama")
    factors = {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": THETA, **factors}
    rope["original_max_position_embeddings"] = 16
    write_folder(tmp_path, target, rope_parameters=rope)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, tmp_path, spec=SpecConfig("eagle3", 3), config=SMALL)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (FILTERED, {}),
        (PLAIN, {"rejection_sample_method": "coupled"}),
        (PLAIN, {"tree_nodes": 4, "tree_width": 2}),
    ],
    ids=["chain", "coupled", "tree"],
)
def test_exact_distribution(tmp_path, sampling, options):
    target = small_model()
    write_folder(tmp_path, target, num_known=4)
    assert p_value((target, tmp_path), sampling, SpecConfig("eagle3", 2, **options)) > ALPHA


@pytest.mark.parametrize("copies", [{}, {"suffix_tokens": 3}], ids=["alone", "with copies"])
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_exact_distribution_of_drafts_that_end_where_they_are_unsure(tmp_path, rule, copies):
    target = small_model()
    write_folder(tmp_path, target, num_known=4)
    options = {"confidence_threshold": 0.3, "rejection_sample_method": rule}
    spec, prompt = SpecConfig("eagle3", 3, **options, **copies), [1, 2, 3, 1, 2, 3, 1]
    engine = Engine(target, tmp_path, spec=spec)
    proposals = spied(engine)
    engine.generate([prompt], SAMPLED)
    written = {writer for *_, made in proposals for row in made.writers or [] for writer in row}
    assert ("suffix" in written) == bool(copies)
    stats = engine.stats
    assert 1 < stats.num_draft_tokens / stats.num_drafts < 3
    given = FILTERED, spec
    counts = drawn_counts((target, tmp_path), *given, prompt=prompt, num_more=3)
    assert chi_square(counts, exact_distribution(target, FILTERED, prompt)) > ALPHA


def test_unlike_requests_in_one_batch(tmp_path):
    """Each has the text that it has alone, whatever shares its batch, and one is aborted."""
    target = random_model("llama")
    write_folder(tmp_path, target)
    params = [
        SamplingParams(temperature=1.0, max_tokens=12, seed=1, top_k=20, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=12, logit_bias={7: 4.0}, min_tokens=12),
        SamplingParams(temperature=0.7, max_tokens=12, seed=2, num_speculative_tokens=1),
        SamplingParams(temperature=1.0, max_tokens=40, seed=3),
    ]
    alone = [
        Engine(target, tmp_path, spec=CHAIN).generate([prompt], each)[0].token_ids
        for prompt, each in zip(PROMPTS, params[:3], strict=False)
    ]
    engine = Engine(target, tmp_path, spec=CHAIN, config=EngineConfig(block_size=4))
    ids = [engine.add_request(*pair) for pair in zip(PROMPTS, params, strict=True)]
    engine.step()
    engine.abort(ids[3])
    outputs = finish(engine)
    assert [outputs[request_id].token_ids for request_id in ids[:3]] == alone


def test_switched_on_in_the_middle_of_a_text(tmp_path):
    """What the target read before it has no hidden states: drafts are bad, the text is not."""
    target = random_model("llama")
    write_folder(tmp_path, target)
    engine = Engine(target, config=EngineConfig(block_size=4, prefix_caching=True))
    engine.generate([PROMPTS[2]], GREEDY)
    request_id = engine.add_request(PROMPTS[1], GREEDY)
    engine.step()
    engine.enable_spec_dec(tmp_path, n_spec_tokens=3)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS[1:3]]
    assert finish(engine)[request_id].token_ids == expected[0]
    assert engine.generate([PROMPTS[2]], GREEDY)[0].token_ids == expected[1]


def test_what_was_read_before_it_was_switched_on_is_not_shared(tmp_path):
    """Else a seed would give another text behind the same prompt."""
    target = random_model("llama")
    write_folder(tmp_path, target)
    config = EngineConfig(block_size=4, prefix_caching=True)
    prompt = [*PROMPTS[1], *range(1, 24)]
    later = [[*prompt, 7], [*prompt, 8]]
    expected = [
        each.token_ids for each in Engine(target, tmp_path, spec=CHAIN).generate(later, SAMPLED)
    ]
    engine = Engine(target, config=config)
    engine.add_request(prompt, GREEDY)
    engine.step()
    engine.enable_spec_dec(tmp_path, n_spec_tokens=3)
    finish(engine)
    assert engine.generate(later[0], SAMPLED)[0].stats.num_cached_prompt_tokens == 0
    outputs = [engine.generate([each], SAMPLED)[0] for each in later]
    assert [output.token_ids for output in outputs] == expected
    assert outputs[1].stats.num_cached_prompt_tokens > 0
    other = prompt[::-1]
    engine.add_request(other, GREEDY)
    engine.step()
    engine.enable_spec_dec(tmp_path, n_spec_tokens=3)  # its hidden states are kept already
    finish(engine)
    assert engine.generate([*other, 7], SAMPLED)[0].stats.num_cached_prompt_tokens > 0


def test_switched_off_and_on_it_drafts_trees_again(tmp_path):
    target = random_model("llama")
    write_folder(tmp_path, target)
    engine = Engine(target, tmp_path, spec=SpecConfig("eagle3", 2, tree_suffix=3, tree_nodes=9))
    drafter = drafter_of(engine)
    engine.disable_spec_dec()
    engine.enable_spec_dec(tmp_path)
    assert type(drafter_of(engine)) is type(drafter)
    expected = hugging_face_greedy(target, PROMPTS[1])
    assert engine.generate([PROMPTS[1]], GREEDY)[0].token_ids == expected


def test_passes_that_are_replayed_keep_hidden_states_too(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target)
    engine = Engine(target, tmp_path, spec=CHAIN)
    runner = target_runner(engine)
    use_graphs(runner, CountingCapture())
    runner.graphs.keep_inputs(runner.inputs)
    seen = spied(engine)
    engine.generate(PROMPTS, SAMPLED)
    assert_published(seen, weights, target)


def test_adaptive_schedule(tmp_path):
    target = random_model("llama")
    write_folder(tmp_path, target)
    engine = Engine(target, tmp_path, spec=SpecConfig("eagle3", 2, schedule="adaptive"))
    expected = hugging_face_greedy(target, PROMPTS[1])
    assert engine.generate([PROMPTS[1]], GREEDY)[0].token_ids == expected


def test_a_folder_that_says_so_needs_no_method(tmp_path):
    target = random_model("llama")
    write_folder(tmp_path, target)
    assert Engine(target, tmp_path).drafter.name == "eagle3"
    tree = Engine(target, tmp_path, spec=SpecConfig("tree", 2)).drafter
    assert (tree.name, tree.draft.name) == ("tree", "eagle3")
    with pytest.raises(ValueError, match="an EAGLE draft needs method 'eagle3'"):
        Engine(target, tmp_path, spec="draft_model")


def without(name):
    return lambda weights: weights.pop(name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("fc.weight"), "fc.weight is missing"),
        (without("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is new"),
        (lambda weights: weights.update({"fc.weight": torch.zeros(48, 7)}), "fc.weight has shape"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(9, 48)}), "9, 48.*263, 48"),
        (lambda weights: weights.update(d2t=torch.full((263,), 9)), "d2t: names tokens outside"),
        (
            lambda weights: weights.update(d2t=torch.tensor([0, -1] + [0] * 261)),
            "d2t: names token 0 more than once",
        ),
        (
            lambda weights: weights.update(t2d=torch.arange(263) < 200),
            "t2d: marks 200 of 263 tokens, but there is no d2t",
        ),
        (
            lambda weights: weights.update(
                d2t=torch.zeros(50, dtype=torch.int64), t2d=torch.arange(263) > 212
            ),
            "t2d: marks 50 of 263 tokens, but d2t names other tokens",
        ),
    ],
)
def test_other_folders_are_refused(tmp_path, change, told):
    target = random_model("llama")
    write_folder(tmp_path, target)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    with pytest.raises(ValueError, match=f"drafter: .*{told}"):
        Engine(target, tmp_path, spec="eagle3")


def test_targets_with_several_states_per_token_are_refused(tmp_path):
    target = random_decoder(config_of("gemma3n_text"))
    write_folder(tmp_path, target)
    told = "target: Gemma3nForCausalLM passes its layers several states per token"
    with pytest.raises(ValueError, match=told):
        Engine(target, tmp_path)


def test_targets_without_such_layers_are_refused(tmp_path):
    target = random_model("llama")
    write_folder(tmp_path, target, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    with pytest.raises(ValueError, match="drafter: EAGLE drafts for decoders"):
        Engine(random_t5(), tmp_path, spec="eagle3")
    with pytest.raises(ValueError, match="target layers: expected 0 to 2, got"):
        Engine(target, tmp_path, spec="eagle3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="num_hidden_layers: expected 1"):
        Engine(target, tmp_path, spec="eagle3")

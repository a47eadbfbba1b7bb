"""Engines that verify token trees: equal output, exact law, paths that end, a cache in order."""

import pytest
import torch

import fastspec.tree_verification
from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal, TreeDrafter
from fastspec_kernels.testing import chi_square

from ..models import EOS_ID, byte_tokenizer, perturbed, random_model
from .test_greedy import GREEDY, PROMPTS, hugging_face_greedy
from .test_paged_cache import assert_same, cached, fresh
from .test_sampling import ALPHA, FILTERED, LENGTH, PROMPT, VOCAB_SIZE, exact_law

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]
TREES = {
    "tree": {"method": "tree"},
    "narrow": {"method": "tree", "tree_width": 2, "tree_nodes": 7, "num_speculative_tokens": 4},
    "chain": {"method": "tree", "tree_width": 1, "tree_nodes": 5},
    "greedy": {"method": "tree", "draft_sample_method": "greedy"},
    "paths": {"method": "tree", "tree_paths": PATHS},
    "paths of likeliest": {
        "method": "tree",
        "tree_paths": PATHS,
        "draft_sample_method": "greedy",
    },
    "with a copied branch": {
        "method": "tree",
        "tree_prompt_lookup": True,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "draft_sample_method": "greedy",
    },
    "cape": {"cape": True},
    "narrow cape": {"cape": True, "cape_bins": [(0.5, 2), (1.0, 0)], "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.mark.parametrize(("name", "noise"), [("tree", 0), ("cape", 0), *((t, 0.03) for t in TREES)])
def test_greedy_output_is_that_of_plain_decoding(model, name, noise):
    config = EngineConfig(block_size=5)
    spec = SpecConfig(**TREES[name])
    engine = Engine(model, perturbed(model, noise), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]
    if noise == 0:  # a tree holds the target's own choice as far as it goes
        assert not any("recovered" in out.sources for out in outputs)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    mixed = engine.generate(PROMPTS, [GREEDY, sampled, GREEDY, sampled])
    assert [mixed[i].token_ids for i in (0, 2)] == [outputs[i].token_ids for i in (0, 2)]


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("name", ["tree", "cape"])
def test_architectures(architecture, name):
    model = random_model(architecture)
    engine = Engine(model, perturbed(model, 0.03), spec=SpecConfig(**TREES[name]))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_trees_cross_the_borders_of_blocks(model, block_size):
    config = EngineConfig(block_size=block_size, prefill_chunk_size=7, max_batch_size=3)
    spec = SpecConfig(method="tree", tree_nodes=30, tree_width=6)
    engine = Engine(model, perturbed(model, 0.03), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]


@pytest.mark.parametrize("name", ["tree", "with a copied branch"])
def test_a_model_at_its_last_positions(name):
    model = random_model("gpt2", max_position_embeddings=48)
    drafter = perturbed(model, 0.03)
    drafter.config.max_position_embeddings = 24
    engine = Engine(model, drafter, spec=SpecConfig(**TREES[name]))
    plain = Engine(model)
    params = SamplingParams(temperature=0, ignore_eos=True)
    outputs, expected = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
    assert {out.finish_reason for out in outputs} == {"length"}


@pytest.mark.parametrize("name", ["tree", "cape", "paths", "with a copied branch"])
def test_the_last_token_does_not_depend_on_the_batch(model, name):
    """Nothing is proposed before it: a batch of it alone has no trees."""
    engine = Engine(model, perturbed(model, 0.1), spec=SpecConfig(**TREES[name]))
    params = [SamplingParams(seed=seed, max_tokens=1, ignore_eos=True) for seed in range(8)]
    mate = SamplingParams(seed=99, max_tokens=30, ignore_eos=True)
    together = engine.generate([PROMPTS[0]] * 8 + [PROMPTS[1]], [*params, mate])
    alone = [engine.generate([PROMPTS[0]], p)[0] for p in params]
    assert all(out.sources == ("target",) for out in alone)
    assert [out.token_ids for out in alone] == [out.token_ids for out in together[:8]]


def test_a_tight_cache_preempts_and_shares_prefixes(model):
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15, last] for last in (1, 2, 3, 1)]
    expected = [out.token_ids for out in Engine(model).generate(prompts, GREEDY)]
    spec = SpecConfig(**TREES["tree"])
    for prefix_caching in (False, True):
        config = EngineConfig(num_blocks=18, block_size=4, prefix_caching=prefix_caching)
        engine = Engine(model, perturbed(model, 0.03), spec=spec, config=config)
        for _ in range(2):
            outputs = engine.generate(prompts, GREEDY)
            assert [out.token_ids for out in outputs] == expected
        manager = engine._scheduler.block_manager
        assert manager.num_free == manager.num_blocks


@pytest.mark.parametrize(
    ("name", "noise", "temperature"),
    [
        ("tree", 0, 0),
        ("tree", 0.08, 0),
        ("tree", 0.08, 0.4),
        ("cape", 0.08, 0),
        ("cape", 0.03, 0.4),
    ],
)
@torch.no_grad()
def test_caches_equal_a_fresh_prefill(model, name, noise, temperature):
    drafter = perturbed(model, noise)
    config = EngineConfig(block_size=4)
    spec = SpecConfig(num_speculative_tokens=3, **TREES[name])
    engine = Engine(model, drafter, spec=spec, config=config)
    for index, prompt in enumerate(PROMPTS):
        params = {"temperature": temperature, "seed": index, "max_tokens": 24, "ignore_eos": True}
        engine.add_request(prompt, SamplingParams(**params))
    accepted_lens = set()
    while engine.has_unfinished:
        engine.step()
        draft = engine._speculation.drafter.draft
        for request in engine._scheduler.running:
            count = len(request.token_ids) - 1
            assert request.num_cached == count
            assert_same(
                cached(engine._runner, request, count), fresh(model, request.token_ids[:count])
            )
            draft_count = draft._num_cached[request.request_id]
            assert 0 < draft_count <= count
            assert_same(
                cached(draft.runner, request, draft_count),
                fresh(drafter, request.token_ids[:draft_count]),
            )
            accepted_lens |= {i for i, n in enumerate(request.stats.acceptance_histogram) if n}
    assert accepted_lens >= ({3} if noise == 0 else {0, 1, 2, 3})
    assert draft._num_cached == {}


def engine_of(model, drafter, name="tree", **config):
    return Engine(
        model,
        drafter,
        tokenizer=byte_tokenizer(),
        spec=SpecConfig(**TREES[name]),
        config=EngineConfig(**config),
    )


@pytest.mark.parametrize("name", ["tree", "cape"])
def test_stop_ids_and_lengths_cut_a_path(model, name):
    plain = Engine(model).generate(PROMPTS, GREEDY)
    engine = engine_of(model, model, name)
    for max_tokens in range(1, 9):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for output, full in zip(engine.generate(PROMPTS, params), plain, strict=True):
            assert output.token_ids == full.token_ids[:max_tokens]
            assert output.finish_reason == "length"
            assert output.stats.num_output_tokens == len(output.sources) == max_tokens
    for full in plain:
        for place in (5, 6, 7):
            stop = full.token_ids[place]
            params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop])
            (output,) = engine.generate([list(full.prompt_token_ids)], params)
            assert output.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
            assert output.finish_reason == "stop"


@pytest.mark.parametrize("name", ["chain", "cape"])
def test_passes_of_the_draft_model_are_counted(model, name):
    spec = SpecConfig(num_speculative_tokens=3, **TREES[name])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = Engine(model, model, spec=spec).generate(PROMPTS, params)
    assert all(out.stats.num_draft_passes == {"draft_model": 2 * 3} for out in outputs)


def test_eos_and_stop_strings_end_a_path():
    model = random_model("llama", seed=2, vocab_size=95)
    (full,) = engine_of(model, model).generate([PROMPTS[0]], GREEDY)
    stop = full.text[6:8]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    (output,) = engine_of(model, model).generate([PROMPTS[0]], params)
    assert output.text == full.text[: full.text.index(stop)]
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    model.generation_config.eos_token_id = full.token_ids[7]
    try:
        (output,) = engine_of(model, model).generate([PROMPTS[0]], SamplingParams(temperature=0))
    finally:
        model.generation_config.eos_token_id = EOS_ID
    assert output.token_ids == full.token_ids[: full.token_ids.index(full.token_ids[7]) + 1]


def test_logits_that_are_not_finite_fail_one_request_alone():
    model = random_model("llama")
    (healthy,) = Engine(model).generate([PROMPTS[0]], GREEDY)
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = float("nan")
    outputs = engine_of(model, perturbed(model, 0)).generate([PROMPTS[0], [5, 200, 6]], GREEDY)
    assert outputs[0].token_ids == healthy.token_ids
    assert outputs[1].finish_reason == "error"


class CountedTrees:
    """Says how many nodes its trees have."""

    name = "counted"

    def num_nodes(self, num_speculative_tokens):
        return 7

    def propose(self, batch):
        raise NotImplementedError

    def commit(self, batch, accepted):
        pass

    def release(self, request):
        pass


def test_a_schedule_of_trees_is_refused(model):
    spec = SpecConfig(schedule="adaptive")
    with pytest.raises(ValueError, match=r"^schedule: expected 'constant' for token trees"):
        Engine(model, CountedTrees(), spec=spec)


class GivenTrees:
    """Proposes the target's own next tokens as a tree or a chain, by turns, beside wrong ones."""

    name = "given"

    def __init__(self, expected, rule="target_only"):
        self._expected = expected
        self._rule = rule

    def propose(self, batch):
        token_ids, parents = [], []
        for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True):
            done = len(request.token_ids) - request.num_prompt_tokens
            right = self._expected[request.request_id][done : done + 5]
            right += [0] * (5 - len(right))
            if done % 2:  # a chain
                row = [(token, node) for node, token in enumerate(right[:4])]
            else:  # its second and third token behind a wrong sibling each
                wrong = [(token + 1) % 200 for token in right]
                row = [(wrong[0], 0), (right[0], 0), (wrong[1], 2), (right[1], 2)]
            row = [*row, (-1, 0)][:wanted]
            row += [(-1, -1)] * (batch.num_speculative_tokens - len(row))
            token_ids.append([token for token, _ in row])
            parents.append([parent for _, parent in row])
        ids, links = (torch.tensor(x, dtype=torch.int32) for x in (token_ids, parents))
        writers = [[f"node {node}" for node in range(1, ids.shape[1] + 1)]] * len(ids)
        return Proposal(ids, links, sibling_rule=self._rule, writers=writers)

    def commit(self, batch, accepted):
        pass

    def release(self, request):
        pass


def test_trees_and_chains_of_a_drafter_from_outside(model):
    plain = Engine(model).generate(PROMPTS, GREEDY)
    expected = {str(index): list(out.token_ids) for index, out in enumerate(plain)}
    spec = SpecConfig(num_speculative_tokens=6)
    engine = Engine(model, GivenTrees(expected), spec=spec, config=EngineConfig(block_size=4))
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, str(index))
    outputs, trees, paths = {}, [], {str(index): [] for index in range(4)}
    while engine.has_unfinished:
        for event in engine.step():
            trees += [event.tree] if event.tree else []
            paths[event.request_id] += event.tree.path if event.tree else ()
            if event.output:
                outputs[event.request_id] = event.output
    assert [outputs[str(i)].token_ids for i in range(4)] == [out.token_ids for out in plain]
    assert {tree.path for tree in trees} >= {(2, 4), (1, 2, 3, 4)}
    assert trees[0].token_ids[0] in {prompt[-1] for prompt in PROMPTS}
    assert all(tree.parents[0] == -1 for tree in trees)
    sources = [source for out in outputs.values() for source in out.sources]
    assert sources.count("draft") == engine.stats.num_accepted_tokens
    assert "recovered" not in sources[:-4]
    writers = [name for out in outputs.values() for name in out.drafters if name]
    assert writers == [f"node {node}" for out in outputs.values() for node in paths[out.request_id]]


def test_a_tree_needs_the_rule_of_its_siblings():
    ids = torch.zeros((1, 2), dtype=torch.int32)
    with pytest.raises(ValueError, match="sibling_rule"):
        Proposal(ids, ids)
    with pytest.raises(ValueError, match="sibling_rule"):
        Proposal(ids, sibling_rule="target_only")
    with pytest.raises(ValueError, match="parents"):
        Proposal(ids, ids[:, :1], sibling_rule="target_only")


def test_a_rule_that_does_not_exist_is_refused(model):
    drafter = GivenTrees({"0": [1] * 40}, rule="best_guess")
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=6))
    engine.add_request(PROMPTS[0], GREEDY, "0")
    with pytest.raises(ValueError, match="sibling_rule"):
        engine.step()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tree_width", {"method": "tree", "tree_width": 0}),
        ("tree_width", {"tree_width": 2}),
        ("tree_nodes", {"method": "tree", "tree_nodes": 128}),
        ("tree_nodes", {"method": "tree", "tree_nodes": 4, "tree_paths": [[0]]}),
        ("tree_paths", {"method": "tree", "tree_paths": []}),
        ("tree_paths", {"method": "tree", "tree_paths": [[0], [0]]}),
        ("tree_paths", {"method": "tree", "tree_paths": [[0], [2]]}),
        ("tree_paths", {"method": "tree", "tree_paths": [[0, 0]]}),
        ("tree_paths", {"method": "tree", "tree_paths": ["0"]}),
        ("tree_paths", {"method": "tree", "tree_paths": [[0] * n for n in range(1, 8)]}),
        ("tree_paths", {"tree_paths": [[0]]}),
        ("tree_prompt_lookup", {"method": "tree", "tree_prompt_lookup": True}),
        ("tree_prompt_lookup", {"tree_prompt_lookup": True, "draft_sample_method": "greedy"}),
        ("rejection_sample_method", {"method": "tree", "rejection_sample_method": "block"}),
        ("rejection_sample_method", {"cape": True, "rejection_sample_method": "block"}),
        ("schedule", {"method": "tree", "schedule": "adaptive"}),
        ("cape", {"method": "mag", "cape": True}),
        ("cape", {"cape": 1}),
        ("cape_bins", {"cape_bins": [(1.0, 2)]}),
        ("cape_bins", {"cape": True, "cape_bins": [(0.5, 2)]}),
        ("cape_bins", {"cape": True, "cape_bins": [(0.5, 2), (0.5, 1), (1.0, 1)]}),
        ("cape_bins", {"cape": True, "cape_bins": [(1.0, -1)]}),
        ("cape_bins", {"cape": True, "num_speculative_tokens": 16}),
    ],
)
def test_options_that_cannot_be_met(field, options):
    with pytest.raises(ValueError, match=f"^{field}:"):
        SpecConfig(**options)


def test_trees_need_a_draft_model(model):
    for options in ({"method": "tree"}, {"cape": True}):
        with pytest.raises(ValueError, match="drafter"):
            Engine(model, spec=SpecConfig(**options))
        with pytest.raises(ValueError, match="trees need a draft model"):
            Engine(model, GivenTrees({}), spec=SpecConfig(**options))
    engine = Engine(model, model, spec=SpecConfig(cape=True))
    with pytest.raises(ValueError, match="n_spec_tokens"):
        engine.enable_spec_dec(n_spec_tokens=50)
    assert engine.is_speculative
    engine.enable_spec_dec(n_spec_tokens=2)
    (output,) = engine.generate([PROMPTS[0]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[0])
    assert len(output.stats.acceptance_histogram) == 3


@pytest.fixture(scope="module")
def small_models():
    model = random_model("llama", seed=4, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0)
    return model, perturbed(model, 0.35)


DRAWS = 6_000
SAMPLED_PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]


def drawn_counts(models, law, **options):
    """Counts of the first tokens of texts so long that the trees are whole."""
    model, drafter = models
    spec = SpecConfig(num_speculative_tokens=3, **options)
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=512))
    params = [
        SamplingParams(**FILTERED, seed=seed, max_tokens=LENGTH + 1, ignore_eos=True)
        for seed in range(DRAWS)
    ]
    counts = law * 0
    for output in engine.generate([PROMPT] * DRAWS, params):
        counts[output.token_ids[:LENGTH]] += 1
    return counts


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"method": "tree", "tree_nodes": 9}, "without_replacement"),
        ({"method": "tree", "tree_paths": SAMPLED_PATHS}, "without_replacement"),
        ({"method": "tree", "tree_nodes": 9, "draft_sample_method": "greedy"}, "target_only"),
        ({"cape": True}, "target_only"),
    ],
    ids=["drawn", "paths", "likeliest", "cape"],
)
def test_exact_distribution(small_models, options, rule, monkeypatch):
    rules = set()
    propose = TreeDrafter.propose

    def spied(self, batch):
        proposal = propose(self, batch)
        rules.add(proposal.sibling_rule)
        return proposal

    monkeypatch.setattr(TreeDrafter, "propose", spied)
    law = exact_law(small_models[0], FILTERED)
    assert chi_square(drawn_counts(small_models, law, **options), law) > ALPHA
    assert rules == {rule}


def _shared_numbers(monkeypatch):
    monkeypatch.setattr(fastspec.tree_verification, "VERIFY_STREAM", 1)


def _draft_logits_not_drawn_from(monkeypatch):
    original = fastspec.tree_verification.verify_tree

    def verify_tree(*args, draft_logits, **kwargs):
        return original(*args, draft_logits=draft_logits / 3, **kwargs)

    monkeypatch.setattr(fastspec.tree_verification, "verify_tree", verify_tree)


@pytest.mark.parametrize("break_engine", [_shared_numbers, _draft_logits_not_drawn_from])
def test_biased_engines_are_caught(small_models, monkeypatch, break_engine):
    break_engine(monkeypatch)
    law = exact_law(small_models[0], FILTERED)
    counts = drawn_counts(small_models, law, method="tree", tree_paths=SAMPLED_PATHS)
    assert chi_square(counts, law) < ALPHA

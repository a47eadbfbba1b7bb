"""Trees of a draft model's tokens with a copied branch: same output, same distribution."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal, TreePlan
from fastspec.drafters.base import Branch, SamplingTensors, check_proposal
from fastspec.drafters.suffix import SuffixTreeDrafter
from fastspec.drafters.tree.copied import CopiedPaths
from fastspec.drafters.tree.grow import ShapedTree
from fastspec.drafters.tree.mixed import MixedTreeDrafter
from fastspec.models.reduced_vocabulary import DraftVocabulary

from ..models import perturbed, random_model
from .eagle3_models import write_folder
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PLAIN,
    PROMPTS,
    VOCAB_SIZE,
    drafter_for,
    finish,
    hugging_face_greedy,
    p_value,
    small_model,
)
from .probes import (
    assert_blocks_came_back,
    batch_of,
    draft_model_of,
    flatten_draft_logits,
    remembers_nobody,
    request_of,
)

REPEATED = [*[3, 5, 2, 1] * 4, 4, 3, 5]  # the first token may be a copy, and those after others
MIXED = {"tree_suffix": 5, "tree_nodes": 9, "tree_width": 2, "suffix_max_spec_factor": 3.0}
GREEDY_DRAFTS = {"draft_sample_method": "greedy"}
COUPLED = {"rejection_sample_method": "coupled"}


@pytest.mark.parametrize("blocks", [{}, {"block_size": 4, "num_blocks": 40}])
@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("tree", "draft_model", {}),
        ("tree", "draft_model", GREEDY_DRAFTS),
        ("tree", "draft_model", COUPLED),
        ("tree", "draft_model", {"tree_suffix": 1}),
        ("tree", "glide", {}),
        ("eagle3", "eagle3", {}),
    ],
    ids=str,
)
def test_greedy_output_is_that_of_plain_decoding(tmp_path, method, kind, options, blocks):
    """Alone, and beside requests that sample, for which other trees are drafted."""
    target = random_model("llama", num_hidden_layers=6)
    drafter = drafter_for(kind, target, tmp_path)
    spec = SpecConfig(method, 2, **{**MIXED, **options})
    config = EngineConfig(max_batch_size=3, prefill_chunk_size=7, **blocks)
    engine = Engine(target, drafter, spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    sampled = SamplingParams(temperature=0.5, seed=3, max_tokens=30, ignore_eos=True)
    mixed = engine.generate(PROMPTS, [GREEDY, sampled, GREEDY, sampled])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == hugging_face_greedy(target, prompt)
    assert [mixed[i].token_ids for i in (0, 2)] == [outputs[i].token_ids for i in (0, 2)]
    written = {name for output in outputs for name in output.drafters}
    assert "suffix" in written
    assert written <= {None, "suffix", "tree"}
    assert_blocks_came_back(engine)
    assert remembers_nobody(draft_model_of(engine))


@pytest.mark.parametrize(
    ("method", "options", "sampling", "num_known"),
    [
        ("tree", {}, PLAIN, None),
        ("tree", {}, FILTERED, None),
        pytest.param("tree", {"tree_suffix": 2}, FILTERED, None, marks=pytest.mark.check),
        pytest.param(
            "tree", {"tree_suffix": 8}, {"temperature": 0.7}, None, marks=pytest.mark.check
        ),
        pytest.param("tree", GREEDY_DRAFTS, FILTERED, None, marks=pytest.mark.check),
        ("tree", COUPLED, FILTERED, None),
        pytest.param("eagle3", {}, PLAIN, None, marks=pytest.mark.check),
        ("eagle3", {}, FILTERED, 3),
    ],
    ids=str,
)
def test_exact_distribution(tmp_path, method, options, sampling, num_known, monkeypatch):
    """With few known tokens, too, which are all that can be copied then."""
    target = small_model()
    drafter = drafter_for(method, target, tmp_path, num_known)
    spec, copied = SpecConfig(method, 2, **{**MIXED, **options}), []
    propose = MixedTreeDrafter.propose

    def spied(self, batch):
        proposal = propose(self, batch)
        assert proposal.branch is not None
        copied.extend(map(len, proposal.branch.token_ids))
        return proposal

    monkeypatch.setattr(MixedTreeDrafter, "propose", spied)
    assert p_value((target, drafter), sampling, spec, prompt=REPEATED, num_more=4) > ALPHA
    least = 1 if num_known else min(spec.tree_suffix, 6)  # a text has room for six
    assert max(copied) >= least


def test_a_copied_path_goes_on_from_its_own_nodes_alone():
    """The copied token below another node, or after one that was not drawn, does not count."""
    path = CopiedPaths([[5, 6, 7], [5, 6, 7]], 1, 3, torch.device("cpu"))
    path.follow(torch.tensor([[9, 5], [9, 8]]), torch.zeros(2, 2, dtype=torch.int64), 1, 0)
    path.follow(torch.tensor([[6, 6], [6, 6]]), torch.tensor([[1, 2], [0, 2]]), 3, 1)
    token_ids = torch.tensor([[9, 5, 6, 6], [9, 8, 6, 6]])
    parents = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 2]])
    added, above = path.beyond(token_ids, parents)
    assert (added.tolist(), above.tolist()) == ([[7], [-1]], [[4], [0]])


def test_rows_that_were_not_drawn_from_are_caught(monkeypatch):
    flatten_draft_logits(monkeypatch)
    target = small_model()
    models, spec = (target, perturbed(target, 0.2)), SpecConfig("tree", 2, **MIXED)
    assert p_value(models, FILTERED, spec, prompt=REPEATED, num_more=4) < ALPHA


def test_exact_distribution_beside_a_draft_model_that_lacks_tokens():
    target = small_model()
    draft = random_model("llama", seed=5, vocab_size=VOCAB_SIZE - 1, bos_token_id=0, eos_token_id=0)
    spec = SpecConfig("tree", 2, **MIXED)
    assert p_value((target, draft), PLAIN, spec, prompt=REPEATED, num_more=4) > ALPHA


@pytest.mark.parametrize("options", [{}, GREEDY_DRAFTS, COUPLED], ids=str)
@pytest.mark.parametrize("num_known", [None, 90])
def test_a_seeded_text_does_not_depend_on_the_batch(tmp_path, options, num_known):
    """Nor on a cache so small that requests lose their blocks, nor on prefix caching."""
    target = random_model("llama", num_hidden_layers=6)
    write_folder(tmp_path, target, num_known=num_known)
    params = [
        SamplingParams(
            temperature=0.2,
            seed=seed,
            max_tokens=40,
            ignore_eos=True,
            top_k=3 * (seed % 2),
            presence_penalty=seed % 2,
        )
        for seed in range(len(PROMPTS))
    ]
    spec = SpecConfig("eagle3", 2, **MIXED, **options)
    alone = [
        Engine(target, tmp_path, spec=spec).generate([prompt], each)[0].token_ids
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    tight = EngineConfig(block_size=4, num_blocks=32, prefix_caching=True)
    num_preemptions = 0
    for config in (EngineConfig(), tight):
        engine = Engine(target, tmp_path, spec=spec, config=config)
        for _ in range(2):
            outputs = engine.generate(PROMPTS, params)
            assert [output.token_ids for output in outputs] == alone
        num_preemptions += engine.stats.num_preemptions
    assert num_preemptions


def test_a_corpus_is_copied_from_further_than_the_model_drafts():
    target = random_model("llama")
    spec = SpecConfig("tree", 2, **{**MIXED, "tree_suffix": 8, "tree_nodes": 12})
    engine = Engine(target, perturbed(target, 0.2), spec=spec)
    expected = hugging_face_greedy(target, PROMPTS[1])
    engine.add_corpus([[*PROMPTS[1], *expected]])
    request_id = engine.add_request(PROMPTS[1], GREEDY)
    output = finish(engine)[request_id]
    assert output.token_ids == expected
    assert set(output.drafters) == {None, "suffix"}
    assert len(output.stats.acceptance_histogram) == 9
    sampled = SamplingParams(temperature=1e-3, seed=1, max_tokens=28, ignore_eos=True)
    (output,) = engine.generate([PROMPTS[1]], sampled)
    assert output.stats.acceptance_histogram[8]


def test_a_failing_suffix_harms_no_request(monkeypatch):
    target = random_model("llama")
    engine = Engine(target, perturbed(target, 0.2), spec=SpecConfig("tree", 2, **MIXED))

    def boom(*_):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr("fastspec.drafters.suffix.SuffixIndex.places", boom)
        with pytest.raises(RuntimeError, match="boom") as raised:
            engine.generate(PROMPTS, GREEDY)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    outputs = raised.value.__dict__["outputs"]
    assert [out.token_ids for out in outputs] == expected
    assert [out.token_ids for out in engine.generate(PROMPTS, GREEDY)] == expected
    assert_blocks_came_back(engine)


def test_a_model_at_its_last_positions():
    model = random_model("gpt2", max_position_embeddings=48)
    drafter = perturbed(model, 0.03)
    drafter.config.max_position_embeddings = 24
    engine = Engine(model, drafter, spec=SpecConfig("tree", 2, **MIXED))
    params = SamplingParams(temperature=0, ignore_eos=True)
    outputs, expected = engine.generate(PROMPTS, params), Engine(model).generate(PROMPTS, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
    sampled = engine.generate(PROMPTS, SamplingParams(seed=5, ignore_eos=True))
    assert {(out.finish_reason, out.error) for out in sampled} == {("length", None)}


def grown(copies, levels, params=None, beyond=2):
    """A tree of one path of two tokens and a sibling each, drawn from rows over four tokens."""
    params = params or [SamplingParams(temperature=1.0)] * len(copies)
    requests = [request_of([1], str(b), each, 50, seed=b) for b, each in enumerate(params)]
    batch = batch_of(*requests, wanted=9, num=2)
    plan = TreePlan(2, 4 + beyond, True, num_copied=2 + beyond)
    tree = plan.start(batch, copies)
    for level, logits in enumerate(levels):
        if level:
            logits = logits.repeat_interleave(tree.expanded()[0].shape[1], 0)
        tree.add(logits, slice(None), DraftVocabulary(len(logits[0])))
    return tree.proposal()


def test_a_copied_path_goes_on_where_the_drawn_tree_ends():
    """Rows that allow the copied token alone, then one of a request whose copy is never drawn."""
    sure = torch.full((2, 6), -torch.inf)
    sure[0, 3] = sure[1, 0] = 0.0
    proposal = grown([[3, 3, 2, 5], [1]], [sure, sure])
    assert proposal.sibling_rule == "without_replacement"
    logits, parents = proposal.draft_logits, proposal.parents
    assert parents is not None
    assert logits is not None
    assert proposal.token_ids[0].tolist()[:4] == [3, 3, 2, 5]
    assert parents[0].tolist()[:4] == [0, 1, 2, 3]
    assert proposal.num_tokens is not None
    assert proposal.num_tokens[0] == 4
    assert logits[0, 2:4].isneginf().sum() == 2 * 5
    assert (logits[0, 2, 2], logits[0, 3, 5]) == (0, 0)


def test_a_tilted_row_gives_the_copied_token_its_share():
    paths = CopiedPaths([[2], [0], []], 0, 1, torch.device("cpu"))
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]] * 3)
    rows = torch.arange(3), torch.zeros(3, dtype=torch.int64), 0
    temperature, top_p = torch.tensor([0.5, torch.inf, 1.0]), torch.tensor([0.5, 1.0, 1.0])
    sampling = SamplingTensors(temperature=temperature, top_k=None, top_p=top_p, min_p=None)
    tilted = paths.tilted(logits, rows, sampling, None, "auto")
    plain, probs = (logits[0] / 0.5).softmax(0), (tilted[0] / 0.5).softmax(0)
    is_copied = torch.tensor([0.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(probs, 0.485 * is_copied + 0.515 * plain)
    assert torch.equal(tilted[1:], logits[1:])  # no row is uniform and tilted at once


def test_shapes_of_a_plan():
    """What a copy needs beyond the drawn tokens is taken from their nodes."""
    request = request_of([1], "0", SamplingParams(temperature=1.0), 50, seed=0)
    batch = batch_of(request, wanted=5, num=5)
    for num_copied, size in ((0, 16), (5, 16), (8, 13), (15, 6)):
        tree = TreePlan(4, 16, True, num_copied=num_copied).start(batch, [[7] * num_copied])
        assert isinstance(tree, ShapedTree)
        assert tree._token_ids.shape[1] == size


def test_options():
    assert SpecConfig("tree", 2, tree_suffix=8).num_draft_tokens() == 8
    assert SpecConfig("tree", 9, tree_suffix=8).num_draft_tokens() == 9
    assert SpecConfig("eagle3", tree_suffix=8).drafts_trees
    assert SpecConfig("tree", tree_suffix=3).for_repeated_prompts().suffix_max_cached_tokens == 2
    tree = {"method": "tree", "tree_suffix": 4}
    refused = [
        {**tree, "tree_suffix": -1},
        {**tree, "tree_suffix": "3", "suffix_min_token_prob": 0.2},
        {**tree, "tree_suffix": 16},
        {**tree, "tree_suffix": 127, "tree_nodes": 127},
        {**tree, "tree_nodes": 4},
        {**tree, "tree_paths": [[0]]},
        {**tree, "tree_prompt_lookup": True, "draft_sample_method": "greedy"},
        {**tree, "suffix_tokens": 4},
        {"method": "suffix", "tree_suffix": 4},
        {"method": "draft_model", "tree_suffix": 4},
        {"method": "none", "tree_suffix": 4},
    ]
    for options in refused:
        with pytest.raises(ValueError, match=r"^tree_suffix: "):
            SpecConfig(**options)
    others = [{"suffix_min_token_prob": 0.5}, {"tree_suffix": 4, "schedule": "adaptive"}]
    for options, name in zip(others, ("suffix_min_token_prob", "schedule"), strict=True):
        with pytest.raises(ValueError, match=f"^{name}: "):
            SpecConfig("tree", **options)
    with pytest.raises(ValueError, match=r"^cape: "):
        SpecConfig("eagle3", tree_suffix=4, cape=True)


def test_what_it_needs_is_said():
    target = random_model("llama")
    spec, config = SpecConfig("tree", 2, tree_suffix=8), EngineConfig(max_n_spec_tokens=5)
    with pytest.raises(ValueError, match="tree_suffix: expected at most max_n_spec_tokens, 5"):
        Engine(target, perturbed(target, 0.2), spec=spec, config=config)
    with pytest.raises(ValueError, match="tree_suffix: needs a draft model, got 'suffix'"):
        Engine(target, SuffixTreeDrafter(8, 2.0, 0.1, 100), spec=spec)
    batch = batch_of(request_of([1]), wanted=2)
    ids = torch.zeros((1, 2), dtype=torch.int32)
    for proposal in (
        Proposal(ids, branch=Branch("me", [[1]])),
        Proposal(ids, ids, sibling_rule="target_only", branch=Branch("me", [])),
    ):
        with pytest.raises(ValueError, match=r"^branch: "):
            check_proposal(proposal, batch, 10)


@pytest.mark.parametrize(
    "rule",
    [
        {"rejection_sample_method": "block"},
        {"relaxed_acceptance": 2},
        {"synthetic_acceptance_rate": 0.5},
    ],
    ids=str,
)
def test_a_drafter_of_trees_is_refused_with_a_rule_for_chains(rule):
    """Otherwise each of its trees would be thrown away."""
    drafter, ((name, _),) = SuffixTreeDrafter(8, 2.0, 0.1, 100), rule.items()
    with pytest.raises(ValueError, match=f"^{name}: .* verifies chains, not token trees"):
        Engine(random_model("llama"), drafter, spec=rule)

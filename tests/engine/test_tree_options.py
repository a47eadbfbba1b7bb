"""Token trees of drafters from outside, and options of trees that cannot be met."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter, check_proposal

from .helpers import GREEDY, PROMPTS, hugging_face_greedy
from .probes import batch_of, request_of


class CountedTrees(NoDrafter):
    """Says how many nodes its trees have."""

    name = "counted"

    def max_nodes(self, num_speculative_tokens):
        return 7

    def propose(self, batch):
        raise NotImplementedError


def test_a_schedule_of_trees_is_refused(model):
    spec = SpecConfig(schedule="adaptive")
    with pytest.raises(ValueError, match=r"^schedule: expected 'constant' for token trees"):
        Engine(model, CountedTrees(), spec=spec)


def test_a_batch_counts_tokens_of_a_path_and_nodes_of_a_tree(model):
    seen = []

    class Listening(CountedTrees):
        def propose(self, batch):
            seen.append((batch.num_draft_tokens, batch.max_nodes))
            shape = len(batch.requests), batch.num_speculative_tokens
            return Proposal(torch.full(shape, -1, dtype=torch.int32))

    engine = Engine(model, Listening(), spec=SpecConfig(num_speculative_tokens=3))
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    assert seen == [([3], [7]), ([2], [7]), ([1], [7])]


class GivenTrees(NoDrafter):
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
    # Nothing that is proposed of a text is wrong but what would follow its end.
    assert all("recovered" not in out.sources[:-4] for out in outputs.values())
    writers = [name for out in outputs.values() for name in out.drafters if name]
    assert writers == [f"node {node}" for out in outputs.values() for node in paths[out.request_id]]


def test_a_tree_needs_the_rule_of_its_siblings():
    ids, batch = torch.zeros((1, 2), dtype=torch.int32), batch_of(request_of([1]), wanted=2)
    with pytest.raises(ValueError, match="sibling_rule"):
        check_proposal(Proposal(ids, ids), batch, 10)
    with pytest.raises(ValueError, match="sibling_rule"):
        check_proposal(Proposal(ids, sibling_rule="target_only"), batch, 10)
    with pytest.raises(ValueError, match="parents"):
        check_proposal(Proposal(ids, ids[:, :1], sibling_rule="target_only"), batch, 10)


def test_a_rule_that_does_not_exist_is_refused(model):
    drafter = GivenTrees({"0": [1] * 40}, rule="best_guess")
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=6))
    engine.add_request(PROMPTS[0], GREEDY, "0")
    assert [event.source for event in engine.step()] == ["target"]
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

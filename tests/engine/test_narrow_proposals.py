"""A proposal may have fewer columns than K: its text is that of the same one with empty columns."""

from dataclasses import replace

import pytest
import torch

from fastspec import Engine, SamplingParams
from fastspec.drafters import Proposal
from fastspec.drafters.base import DRAFT_STREAM, NoDrafter

from .helpers import VOCAB_SIZE, small_model

K = 4
PROMPTS = [[1, 4, 2], [3, 5], [2, 2, 2, 4], [5]]
# Of a batch: some requests want fewer than K.
WANTED = [None, 2, 0, 3]


class Drawn(NoDrafter):
    """Draws tokens by their own logits; if narrow, with no more columns than anyone wants."""

    name = "drawn"

    def __init__(self, is_narrow, has_logits):
        self.is_narrow, self.has_logits = is_narrow, has_logits
        self.widths = set()

    def propose(self, batch):
        # As wanted by the round: 1 to K tokens, and none where a text has an even length.
        texts = [request.token_ids for request in batch.requests]
        most = [1 + text[-1] % K if len(text) % 2 else 0 for text in texts]
        counts = [min(pair) for pair in zip(batch.num_draft_tokens, most, strict=True)]
        width = batch.num_speculative_tokens
        logits = torch.arange(VOCAB_SIZE).float().expand(len(texts), width, VOCAB_SIZE) / 3
        cdf = logits.softmax(-1).cumsum(-1)
        uniforms = batch.uniforms(width, DRAFT_STREAM)
        token_ids = (cdf < uniforms[:, :, None]).sum(-1).int().clamp(max=VOCAB_SIZE - 1)
        for row, count in zip(token_ids, counts, strict=True):
            row[count:] = -1
        self.widths.add(max(counts))
        proposal = Proposal(token_ids, num_tokens=counts)
        if self.has_logits and not batch.is_coupled:
            proposal = replace(proposal, draft_logits=logits.contiguous())
        return narrowed(proposal, max(counts)) if self.is_narrow else proposal


def narrowed(proposal, width):
    logits = proposal.draft_logits
    return replace(
        proposal,
        token_ids=proposal.token_ids[:, :width].contiguous(),
        draft_logits=None if logits is None else logits[:, :width].contiguous(),
    )


@pytest.mark.parametrize("has_logits", [False, True], ids=["point masses", "logits"])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"rejection_sample_method": "block"},
        {"rejection_sample_method": "coupled"},
        {"relaxed_acceptance": 1.5},
        {"synthetic_acceptance_rate": 0.6},
    ],
    ids=lambda rule: "_".join(map(str, rule.values())) or "standard",
)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_text_does_not_depend_on_empty_columns(temperature, rule, has_logits):
    target, texts, logprobs = small_model(), [], []
    for is_narrow in (False, True):
        drafter = Drawn(is_narrow, has_logits)
        engine = Engine(target, drafter, spec={"num_speculative_tokens": K, **rule})
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=24,
                ignore_eos=True,
                logprobs=1,
                num_speculative_tokens=wanted,
            )
            for seed, wanted in enumerate(WANTED)
        ]
        outputs = engine.generate(PROMPTS, params)
        texts.append([output.token_ids for output in outputs])
        logprobs.append([output.logprobs for output in outputs])
        alone = [engine.generate(*each)[0] for each in zip(PROMPTS, params, strict=True)]
        assert [output.token_ids for output in alone] == texts[-1]
        assert len(drafter.widths) > 2
    assert texts[0] == texts[1]
    assert logprobs[0] == logprobs[1]


def test_a_proposal_without_columns_is_plain_decoding():
    class Nothing(Drawn):
        def propose(self, batch):
            shape = len(batch.requests), 0
            return Proposal(torch.empty(shape, dtype=torch.int32))

    target = small_model()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = [output.token_ids for output in Engine(target).generate(PROMPTS, params)]
    engine = Engine(target, Nothing(True, False), spec={"num_speculative_tokens": K})
    assert [output.token_ids for output in engine.generate(PROMPTS, params)] == plain
    assert engine.stats.num_draft_tokens == 0

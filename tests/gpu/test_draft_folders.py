"""Draft models from files beside a target on a GPU: the ids of plain decoding."""

import pytest
import torch

from fastspec import Engine, SamplingParams
from fastspec.models.reduced_vocabulary import reduce_vocabulary, save_reduced
from tests.engine.test_graphed_drafts import draft_of, write_draft
from tests.gpu.backends import needs_gpu
from tests.models import VOCAB_SIZE, random_model

pytestmark = [pytest.mark.gpu, needs_gpu]
PARAMS = SamplingParams(temperature=0, max_tokens=20)
PROMPTS = [[5, 6, 7], [8] * 20, [40, 41]]


@pytest.mark.parametrize("kind", ["draft_model", "reduced", "eagle", "eagle3", "glide"])
def test_drafts_of_a_folder(tmp_path, kind):
    target = random_model("llama", num_hidden_layers=6)
    if kind == "reduced":
        draft, spec = draft_of("draft_model", target, tmp_path)
        reduce_vocabulary(draft, target, torch.arange(0, VOCAB_SIZE, 2))
        save_reduced(draft, tmp_path)
    else:
        spec = write_draft(kind, target, tmp_path)
    target.cuda()
    expected = [output.token_ids for output in Engine(target).generate(PROMPTS, PARAMS)]
    engine = Engine(target, tmp_path, spec=spec)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected

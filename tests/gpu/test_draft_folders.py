"""Draft models from files beside a target on a GPU: the ids of plain decoding."""

import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.models.reduced_vocabulary import reduce_vocabulary, save_reduced
from tests.engine.eagle1_models import write_folder as write_eagle1
from tests.engine.eagle3_models import write_folder as write_eagle3
from tests.engine.glide_models import random_glide
from tests.gpu.backends import needs_gpu
from tests.models import VOCAB_SIZE, perturbed, random_model

pytestmark = [pytest.mark.gpu, needs_gpu]
PARAMS = SamplingParams(temperature=0, max_tokens=20)
PROMPTS = [[5, 6, 7], [8] * 20, [40, 41]]


@pytest.mark.parametrize("kind", ["draft_model", "reduced", "eagle", "eagle3", "glide"])
def test_drafts_of_a_folder(tmp_path, kind):
    target = random_model("llama", num_hidden_layers=6)
    method = {"eagle": "eagle3", "reduced": "draft_model"}.get(kind, kind)
    if kind == "eagle":
        write_eagle1(tmp_path, target)
    elif kind == "eagle3":
        write_eagle3(tmp_path, target, num_known=50)
    elif kind == "reduced":
        draft = perturbed(target, 0.1)
        reduce_vocabulary(draft, target, torch.arange(0, VOCAB_SIZE, 2))
        save_reduced(draft, tmp_path)
    else:
        draft = random_glide(target) if kind == "glide" else perturbed(target, 0.1)
        draft.save_pretrained(tmp_path)
    target.cuda()
    expected = [output.token_ids for output in Engine(target).generate(PROMPTS, PARAMS)]
    engine = Engine(target, tmp_path, spec=SpecConfig(method))
    for _ in range(2):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected

"""One process of test_tensor_parallel.py: argv names the folder of the models."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fastspec import Engine, SamplingParams, SpecConfig

PROMPTS = [[1, 2, 3] * 5, [7, 8, 9], [40, 7] * 9]
SPECS = {
    "none": SpecConfig("none"),
    "draft_model": SpecConfig("draft_model", 3),
    "block": SpecConfig("draft_model", 3, rejection_sample_method="block"),
    "cascade": SpecConfig("cascade"),
    "tree": SpecConfig("tree", 3),
    "prompt_lookup": SpecConfig("prompt_lookup", prompt_lookup_min=1),
    "mag": SpecConfig("mag"),
    "ngram": SpecConfig("ngram"),
}
CONFIG = {"num_blocks": 8, "max_batch_size": 2}  # requests wait, and lose their blocks


def params(temperature):
    fields = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True}
    return [SamplingParams(**fields, seed=seed) for seed in range(len(PROMPTS))]


def texts(model, draft):
    """Token ids by method and temperature."""
    ids = {}
    for name, spec in SPECS.items():
        drafts = draft if spec.method in ("draft_model", "cascade", "tree") else None
        engine = Engine(model, drafts, spec=spec, config=CONFIG)
        for temperature in (0.0, 0.9):
            outputs = engine.generate(PROMPTS, params(temperature))
            ids[f"{name} {temperature}"] = [list(output.token_ids) for output in outputs]
    return ids


def main(folder):
    torch.set_num_threads(1)
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=plan)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    ids = texts(model, draft)
    # What chance and clocks decide: seeds that nobody gives, measured costs.
    spec = SpecConfig("draft_model", 3, schedule="adaptive")
    engine = Engine(model, draft, spec=spec, config=CONFIG)
    for temperature in (0.0, 0.9):
        given = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        outputs = engine.generate(PROMPTS, given)
        ids[f"agreed {temperature}"] = [list(output.token_ids) for output in outputs]
    rank = distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(ids), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

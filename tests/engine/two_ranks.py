"""One process of test_tensor_parallel.py: argv names the folder of the models."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.distributed import DistributedConfig

from fastspec import Engine, SamplingParams, SpecConfig

from ..models import perturbed
from .probes import running, target_runner

PROMPTS = [[1, 2, 3] * 5, [7, 8, 9], [40, 7] * 9]
SPECS = {
    "none": SpecConfig("none"),
    "draft_model": SpecConfig("draft_model", 3),
    "block": SpecConfig("draft_model", 3, rejection_sample_method="block"),
    "coupled": SpecConfig("draft_model", 3, rejection_sample_method="coupled"),
    "copies": SpecConfig("draft_model", 3, suffix_tokens=6),
    "cape": SpecConfig("draft_model", 3, cape=True),
    "cascade": SpecConfig("cascade"),
    "tree": SpecConfig("tree", 3),
    "eagle3": SpecConfig("eagle3", 3),
    "eagle3 trees": SpecConfig("eagle3", 3, tree_nodes=8),
    "prompt_lookup": SpecConfig("prompt_lookup", prompt_lookup_min=1),
    "mag": SpecConfig("mag"),
    "ngram": SpecConfig("ngram"),
    "suffix": SpecConfig("suffix"),
}
CONFIG = {"num_blocks": 8, "max_batch_size": 2}  # requests wait, and lose their blocks


def params(temperature):
    fields = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True}
    return [SamplingParams(**fields, seed=seed) for seed in range(len(PROMPTS))]


def texts(model, draft, folder):
    """Token ids by method and temperature."""
    drafts = {"draft_model": draft, "cascade": draft, "tree": draft, "eagle3": folder / "eagle3"}
    ids = {}
    for name, spec in SPECS.items():
        engine = Engine(model, drafts.get(spec.method), spec=spec, config=CONFIG)
        for temperature in (0.0, 0.9):
            outputs = engine.generate(PROMPTS, params(temperature))
            ids[f"{name} {temperature}"] = [list(output.token_ids) for output in outputs]
    return ids


def unlike_texts(model, draft, rank):
    """The same where rank 1 has other logits, drafts and costs than rank 0; and all page tables."""
    draft = perturbed(draft, 0.2) if rank else draft
    spec = SpecConfig("draft_model", 3, schedule="adaptive")
    engine = Engine(model, draft, spec=spec, config=CONFIG)
    runner, tables = target_runner(engine), []
    forward = runner.forward

    def other_forward(*args, **kwargs):
        tables.append([[*request.block_table] for request in running(engine)])
        logits = forward(*args, **kwargs)
        return logits + torch.randn_like(logits) if rank else logits

    runner.forward = other_forward
    ids = {}
    for temperature in (0.0, 0.9):
        # Seeds that nobody gives.
        given = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        outputs = engine.generate(PROMPTS, given)
        ids[f"unlike {temperature}"] = [list(output.token_ids) for output in outputs]
    return ids | {"tables": tables}


def refusals(model, folder, plan):
    """What is said of targets and drafts that cannot be run."""
    split_draft = AutoModelForCausalLM.from_pretrained(folder / "draft", distributed_config=plan)
    encoder_decoder = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5")
    weight = next(p for p in model.parameters() if isinstance(p, DTensor))
    norm = encoder_decoder.encoder.final_layer_norm
    split = distribute_tensor(norm.weight.data, weight.device_mesh, [Replicate()])
    norm.weight = torch.nn.Parameter(split)
    fsdp = AutoModelForCausalLM.from_pretrained(folder / "draft")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    split = distribute_tensor(fsdp.model.norm.weight.data, mesh, [Replicate()])
    fsdp.model.norm.weight = torch.nn.Parameter(split)
    tried = {
        "fsdp": partial(Engine, fsdp),
        "glide": partial(Engine, model, folder / "glide", spec="glide"),
        "early_exit": partial(Engine, model, spec=SpecConfig("early_exit", exit_layer=1)),
        "split draft": partial(Engine, model, split_draft),
        "encoder-decoder": partial(Engine, encoder_decoder),
    }
    return {name: error_of(call) for name, call in tried.items()}


def lonely_calls(model, rank):
    """What a rank is told whose calls the other does not make."""
    engine = Engine(model, config=CONFIG)
    engine.add_request(PROMPTS[0], params(0.0)[0])
    if rank:
        engine.abort("request-1")
        engine.add_request(PROMPTS[1], params(0.0)[0], "own")
    return error_of(engine.step)


def left_alone(model, rank, save):
    """What rank 0 is told when rank 1 ends in the midst of its passes."""
    engine = Engine(model, config=CONFIG)
    for prompt in PROMPTS:
        engine.add_request(prompt, params(0.0)[0])
    engine.step()
    if rank:
        save({})
        os._exit(0)
    error = error_of(lambda: [engine.step() for _ in range(5)])
    save({"left": error, "left for good": error_of(engine.step)})
    os._exit(0)


def error_of(call):
    """What it raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(folder):
    torch.set_num_threads(1)
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=plan)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    rank = distributed.get_rank()
    result = texts(model, draft, folder) | unlike_texts(model, draft, rank)
    result |= refusals(model, folder, plan) | {"lonely": lonely_calls(model, rank)}

    def save(more):
        (folder / f"rank{rank}.json").write_text(json.dumps(result | more), encoding="utf-8")

    left_alone(model, rank, save)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

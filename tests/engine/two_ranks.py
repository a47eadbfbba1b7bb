"""One process of test_tensor_parallel.py: argv names the folder of the models."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.distributed import DistributedConfig

from fastspec import Engine, SamplingParams, SpecConfig

from ..models import byte_tokenizer, perturbed
from .probes import before_passes, runners_of, running, target_runner

PROMPTS = [[1, 2, 3] * 5, [7, 8, 9], [40, 7] * 9]
SPECS = {
    "none": SpecConfig("none"),
    "draft_model": SpecConfig("draft_model", 3),
    "block": SpecConfig("draft_model", 3, rejection_sample_method="block"),
    "coupled": SpecConfig("draft_model", 3, rejection_sample_method="coupled"),
    "copies": SpecConfig("draft_model", 3, suffix_tokens=6),
    "copies and a schedule": SpecConfig(
        "draft_model", 3, suffix_tokens=6, schedule="adaptive", step_costs=(1.0, 1.1, 1.2, 1.3)
    ),
    "shared vocabulary": SpecConfig("draft_model", 3, heterogeneous_vocab="intersection"),
    "re-encoded": SpecConfig("draft_model", 3, heterogeneous_vocab="reencoding"),
    "cape": SpecConfig("draft_model", 3, cape=True),
    "cascade": SpecConfig("cascade"),
    "tree": SpecConfig("tree", 3),
    "eagle3": SpecConfig("eagle3", 3),
    "eagle3 trees": SpecConfig("eagle3", 3, tree_nodes=8),
    "eagle1": SpecConfig("eagle3", 3),
    "glide": SpecConfig("glide", 3),
    "glide cape": SpecConfig("glide", 3, cape=True),
    "glide copies": SpecConfig("glide", 3, suffix_tokens=6),
    "early_exit": SpecConfig("early_exit", 3, exit_layer=2),
    "early_exit cape": SpecConfig("early_exit", 3, exit_layer=2, cape=True),
    "early_exit copies": SpecConfig("early_exit", 3, exit_layer=2, suffix_tokens=6),
    "early_exit unsure": SpecConfig(
        "early_exit", 3, exit_layer=2, confidence_threshold=0.2, schedule="heuristic"
    ),
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
    """Token ids by method and temperature; how many were proposed, and how many held."""
    drafts = {"draft_model": draft, "cascade": draft, "tree": draft}
    drafts |= {name: folder / name for name in ("eagle3", "eagle1", "glide")}
    drafts |= dict.fromkeys(("shared vocabulary", "re-encoded"), folder / "spelled")
    ids = {}
    for name, spec in SPECS.items():
        tokenizer = byte_tokenizer() if spec.heterogeneous_vocab else None
        source = drafts.get(name, drafts.get(spec.method))
        engine = Engine(model, source, tokenizer, spec, CONFIG)
        for temperature in (0.0, 0.9):
            outputs = engine.generate(PROMPTS, params(temperature))
            ids[f"{name} {temperature}"] = [list(output.token_ids) for output in outputs]
        ids[f"{name} drafts"] = [engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens]
    return ids


def late_texts(model, folder):
    """The same of a GLIDE draft that comes when texts have been read, and trees judged."""
    engine = Engine(model, spec=SpecConfig("suffix", tree_nodes=8), config=CONFIG)
    for prompt, each in zip(PROMPTS, params(0.0), strict=True):
        engine.add_request(prompt, each)
    ids, num_steps = {}, 0
    while engine.has_unfinished:
        if num_steps == 5:
            engine.enable_spec_dec(folder / "glide", 3, use_glide_drafter=True)
        for event in engine.step():
            if event.output is not None:
                ids[event.request_id] = list(event.output.token_ids)
        num_steps += 1
    return {"late": [ids, engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens]}


def recurrent_texts(model, draft):
    """The same of a target with recurrent layers."""
    ids = {}
    for name, drafter in {"none": None, "draft_model": draft}.items():
        engine = Engine(model, drafter, config=CONFIG)
        for temperature in (0.0, 0.9):
            outputs = engine.generate(PROMPTS, params(temperature))
            ids[f"recurrent {name} {temperature}"] = [list(o.token_ids) for o in outputs]
    return ids


def unlike_texts(model, draft, rank):
    """The same where rank 1 has other logits, drafts and costs than rank 0; and the page tables."""
    draft = perturbed(draft, 0.2) if rank else draft
    exits = {"exit_layer": 2, "confidence_threshold": 0.2, "schedule": "heuristic"}
    specs = {
        "unlike": SpecConfig("draft_model", 3, schedule="adaptive"),
        "unlike copies": SpecConfig("draft_model", 3, suffix_tokens=6, schedule="adaptive"),
        "unlike exit": SpecConfig("early_exit", 3, **exits),
        "unlike cape exit": SpecConfig("early_exit", 3, exit_layer=2, cape=True, suffix_tokens=6),
    }
    given = {"unlike": draft, "unlike copies": draft}
    engines = {
        name: Engine(model, given.get(name), spec=spec, config=CONFIG)
        for name, spec in specs.items()
    }
    ids = {}
    for name, engine in engines.items():
        tables = ids[f"{name} tables"] = []
        for runner in runners_of(engine):
            _disturb(runner, engine, tables, rank)
        for temperature in (0.0, 0.9):
            # Seeds that nobody gives.
            given = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
            outputs = engine.generate(PROMPTS, given)
            ids[f"{name} {temperature}"] = [list(output.token_ids) for output in outputs]
    return ids


def _disturb(runner, engine, tables, rank):
    """Note the page tables of each pass; rank 1 gets other logits from it."""
    forward, is_target = runner.forward, runner is target_runner(engine)

    def other_forward(*args, **kwargs):
        if is_target:
            tables.append([[*request.block_table] for request in running(engine)])
        logits = forward(*args, **kwargs)
        return logits + torch.randn_like(logits) if rank else logits

    runner.forward = other_forward


def refusals(model, folder, plan):
    """What is said of targets and drafts that cannot be run."""
    split_draft = AutoModelForCausalLM.from_pretrained(folder / "draft", distributed_config=plan)
    encoder_decoder = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5")
    weight = next(p for p in model.parameters() if isinstance(p, DTensor))
    norm = encoder_decoder.encoder.final_layer_norm
    split = distribute_tensor(norm.weight.data, weight.device_mesh, [Replicate()])
    norm.weight = torch.nn.Parameter(split)
    fsdp = AutoModelForCausalLM.from_pretrained(folder / "draft")
    fully_shard(fsdp, mesh=init_device_mesh("cpu", (2,)))
    tried = {
        "fsdp": partial(Engine, fsdp),
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
    errors = {"lonely": error_of(engine.step)}
    exits = SpecConfig("early_exit", 3, exit_layer=2, suffix_tokens=6)
    engine = Engine(model, spec=exits, config=CONFIG)
    calls = partial(engine.generate, PROMPTS, params(0.0)), partial(engine.add_corpus, [[1, 2, 3]])
    errors["lonely corpus"] = error_of(calls[rank])
    return errors


def left_alone(model, rank, save):
    """What rank 0 is told when rank 1 ends in the midst of its passes, or of those that draft."""
    spec = SpecConfig("early_exit", 3, exit_layer=2)
    engine = Engine(model, spec=spec, config=CONFIG)
    for prompt in PROMPTS:
        engine.add_request(prompt, params(0.0)[0])
    engine.step()
    if rank:
        save({})
        before_passes(engine, lambda: os._exit(0))
        engine.step()
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
    result = texts(model, draft, folder) | late_texts(model, folder)
    recurrent = AutoModelForCausalLM.from_pretrained(folder / "recurrent", distributed_config=plan)
    result |= recurrent_texts(recurrent, draft) | unlike_texts(model, draft, rank)
    result |= refusals(model, folder, plan) | lonely_calls(model, rank)

    def save(more):
        (folder / f"rank{rank}.json").write_text(json.dumps(result | more), encoding="utf-8")

    left_alone(model, rank, save)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

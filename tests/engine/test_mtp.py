"""Multi-token prediction: drafts are those of transformers, output is the target's."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig, hf_generate

from ..architectures import PROMPTS, config_of, random_decoder
from .helpers import generated_greedily, ids_of
from .probes import noted_drafts

pytestmark = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="of an older transformers"
)

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
KINDS = ["deepseek_v3", "mellum"]


def target_with_layer(model_type, folder, monkeypatch, is_certain=False):
    """A target loaded from a folder with the weights of one MTP layer.

    With `is_certain` no layer adds anything, so the next token depends on one, and every draft is
    right.
    """
    model = random_decoder(config_of(model_type, num_mtp_layers=1))
    count = model.config.num_hidden_layers
    # The number of an MTP layer, which transformers knows only of the published models.
    ignored = [rf"model\.layers\.{count}\..*"]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", ignored)
    layer = MtpModel(model, 1).layers[0]
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.fill_(1.0) if weight.dim() < 2 else weight.normal_(std=weight.shape[-1] ** -0.5)
            if is_certain and name == "eh_proj.weight":
                weight.copy_(torch.eye(*weight.shape))  # the embedding
        if is_certain:
            layer.post_norm.weight.copy_(model.model.norm.weight)
            for part in (model, layer):
                for name, weight in part.named_parameters():
                    if re.search("o_proj|down_proj", name):
                        weight.zero_()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in layer.state_dict().items():
        own = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        weights[f"model.layers.{count}.{own}"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def target(tmp_path, monkeypatch):
    return target_with_layer("deepseek_v3", tmp_path, monkeypatch)


def texts_of(model):
    return [list(generated_greedily(model, prompt, NUM_TOKENS)) for prompt in PROMPTS]


@pytest.mark.parametrize("model_type", KINDS)
def test_drafts_are_those_of_transformers(model_type, tmp_path, monkeypatch):
    target = target_with_layer(model_type, tmp_path, monkeypatch)
    theirs = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        found = get_candidates(self, input_ids, *args, **kwargs)
        if drafted := found[0][0, input_ids.shape[1] :].tolist():
            theirs[input_ids.shape[1]] = drafted
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    target.generate(torch.tensor(PROMPTS[1:]), use_mtp=True, pad_token_id=0, **options)

    engine = Engine(target, spec=SpecConfig("mtp", 1))
    drafts = noted_drafts(engine)
    assert ids_of(engine.generate(PROMPTS[1:], GREEDY)) == texts_of(target)[1:]
    ours = {len(text): draft for text, draft in drafts.items()}
    shared = theirs.keys() & ours.keys()
    assert len(shared) > NUM_TOKENS // 2
    assert {place: ours[place] for place in shared} == {place: theirs[place] for place in shared}


@pytest.mark.parametrize(
    "options",
    [
        {"tree_nodes": 40, "tree_width": 40},
        {"suffix_tokens": 6},
        {"confidence_threshold": 0.3},
        {"cape": True},
        {"draft_bits": 8},
    ],
    ids=str,
)
def test_greedy_output_is_that_of_plain_decoding(target, options):
    config = EngineConfig(block_size=4, num_blocks=40)
    engine = Engine(target, spec=SpecConfig("mtp", **options), config=config)
    prompts = PROMPTS * 2
    assert ids_of(engine.generate(prompts, GREEDY)) == texts_of(target) * 2
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("config", [{"num_blocks": 30}, {"prefix_caching": True}])
def test_every_draft_holds_where_each_token_determines_the_next(config, tmp_path, monkeypatch):
    target = target_with_layer("deepseek_v3", tmp_path, monkeypatch, is_certain=True)
    engine = Engine(target, spec="mtp", config=EngineConfig(block_size=4, **config))
    for _ in range(2):
        assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    assert engine.stats.acceptance_rate == 1.0
    assert engine.spec.num_draft_tokens() == 3


def test_coupled_samples_are_those_of_plain_decoding(target):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts = [
        ids_of(Engine(target, spec=SpecConfig(method, **given)).generate(PROMPTS, params))
        for method in ("none", "mtp")
        for given in [{"rejection_sample_method": "coupled"}]
    ]
    assert texts[0] == texts[1]


def test_targets_converted_after_loading(target):
    target.to(torch.bfloat16)
    texts = [
        ids_of(Engine(target, spec=spec).generate(PROMPTS, GREEDY)) for spec in ("none", "mtp")
    ]
    assert texts[0] == texts[1]


def test_hf_generate(target):
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    for prompt, text in zip(PROMPTS, texts_of(target), strict=True):
        given = torch.tensor([prompt])
        ids = hf_generate(target, given, use_mtp=True, eos_token_id=None, **options)
        assert ids[0].tolist() == prompt + text
    for other in ({"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="use_mtp: cannot be combined with"):
            hf_generate(target, given, use_mtp=True, **other, **options)
    with pytest.raises(ValueError, match="use_mtp, speculation_type: cannot go with spec"):
        hf_generate(target, given, use_mtp=True, spec=SpecConfig("mtp", 2), **options)


def test_targets_without_such_layers(target, tmp_path):
    with pytest.raises(ValueError, match="'mtp' needs MTP layers, but LlamaForCausalLM has none"):
        Engine(random_decoder(config_of("llama")), spec="mtp")
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM was not loaded from a folder"):
        Engine(random_decoder(config_of("deepseek_v3", num_mtp_layers=1)), spec="mtp")
    with pytest.raises(ValueError, match="method 'mtp' does not take one"):
        Engine(target, "tiny-draft", spec="mtp")
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "enorm" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot load the layers of DeepseekV3ForCausalLM: .*enorm"
    ):
        Engine(target, spec="mtp")

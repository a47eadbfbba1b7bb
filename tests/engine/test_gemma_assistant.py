"""Gemma 4 assistants: drafts are those of transformers' model, output is the target's."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig, hf_generate

from ..architectures import PROMPTS, config_of, random_decoder
from .assistant_models import random_assistant
from .helpers import ALPHA, VOCAB_SIZE, generated_greedily, ids_of, p_value
from .probes import drafter_of, noted_drafts

pytest.importorskip("transformers.models.gemma4_assistant")

NUM_TOKENS = 20
CLUSTERS = {
    "use_ordered_embeddings": True,
    "num_centroids": 263,
    "centroid_intermediate_top_k": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return random_decoder(config_of("gemma4_text"))


@pytest.fixture(scope="module")
def assistant(target):
    return random_assistant(target)


def texts_of(model):
    return [list(generated_greedily(model, prompt, NUM_TOKENS)) for prompt in PROMPTS]


@torch.no_grad()
def drafted_by_transformers(target, assistant, text, count):
    """Greedy drafts after a text, of whose last token the target knows nothing."""
    known = torch.tensor([text[:-1]])
    seen = target(known, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    hidden, drafts = seen.hidden_states[-1][:, -1:], []
    token = torch.tensor([text[-1:]])
    for _ in range(count):
        embedded = target.get_input_embeddings()(token)
        out = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=seen.shared_kv_states,
        )
        hidden, token = out.last_hidden_state, out.logits.argmax(dim=-1)
        drafts.append(int(token))
    return drafts


@pytest.mark.parametrize(
    "options",
    [{}, CLUSTERS],
    ids=["whole head", "clusters"],
)
def test_drafts_are_those_of_transformers(target, options):
    assistant = random_assistant(target, **options)
    engine = Engine(target, assistant, spec=SpecConfig(num_speculative_tokens=3))
    drafts = noted_drafts(engine)
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    # transformers' window holds one token more; both are the same in shorter texts.
    window = target.config.sliding_window
    compared = [text for text in drafts if len(text) <= window]
    assert len(drafts) > len(compared) > 2
    for text in compared:
        theirs = drafted_by_transformers(target, assistant, list(text), len(drafts[text]))
        assert drafts[text] == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"tree_nodes": 40, "tree_width": 40},
        {"suffix_tokens": 6},
        {"tree_nodes": 12, "tree_suffix": 4},
        {"confidence_threshold": 0.3},
        {"cape": True},
    ],
    ids=str,
)
def test_greedy_output_is_that_of_plain_decoding(target, assistant, options):
    """With shared prefixes, and without blocks for all."""
    config = EngineConfig(block_size=4, num_blocks=30, prefix_caching=True)
    spec = SpecConfig("gemma_assistant", **options)
    engine = Engine(target, assistant, spec=spec, config=config)
    for _ in range(2):
        assert ids_of(engine.generate(PROMPTS * 2, GREEDY)) == texts_of(target) * 2
    assert engine.stats.num_draft_tokens > 0
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("auto", {}),
        ("auto", {"prefix_caching": True}),
        (SpecConfig("cascade", draft_bits=8), {"prefix_caching": True}),
    ],
    ids=["auto", "shared", "copy, shared"],
)
def test_a_seeds_text_does_not_depend_on_other_requests(target, assistant, spec, options):
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=NUM_TOKENS) for s in range(12)]
    prompts = [[*PROMPTS[0], 50 + s] for s in range(12)]  # one block and a token
    config = EngineConfig(block_size=4, **options)
    engine = Engine(target, assistant, spec=spec, config=config)
    engine.generate(prompts, params)  # with prefix caching, they share these blocks from now on
    together = ids_of(engine.generate(prompts, params))
    alone = Engine(target, assistant, spec=spec, config=EngineConfig(block_size=4))
    pairs = zip(prompts, params, strict=True)
    assert together == [ids_of(alone.generate([prompt], one))[0] for prompt, one in pairs]


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ({}, {"tree_nodes": 6, "tree_width": 2}),
        (CLUSTERS | {"num_centroids": 3}, {}),
    ],
    ids=["whole head, tree", "clusters, chain"],
)
def test_samples_follow_the_target(heads, options):
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    target = random_decoder(config_of("gemma4_text", vocab_size=VOCAB_SIZE, **ids))
    sampling = {"temperature": 0.7, "top_k": 4}
    spec = SpecConfig("gemma_assistant", 2, **options)
    assert p_value((target, random_assistant(target, **heads)), sampling, spec) > ALPHA


def test_coupled_samples_are_those_of_plain_decoding(target, assistant):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    coupled = {"rejection_sample_method": "coupled"}
    plain = Engine(target, spec=SpecConfig("none", **coupled))
    ours = Engine(target, assistant, spec=SpecConfig(**coupled))
    assert ids_of(ours.generate(PROMPTS, params)) == ids_of(plain.generate(PROMPTS, params))


def test_from_folders_and_in_hf_generate(target, assistant, tmp_path):
    assistant.save_pretrained(tmp_path)
    engine = Engine(target, tmp_path)
    assert drafter_of(engine).name == "gemma_assistant"
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    ids = hf_generate(target, torch.tensor(PROMPTS[:1]), drafter=assistant, **options)
    assert ids[0].tolist() == PROMPTS[0] + texts_of(target)[0]


def test_targets_whose_layers_share_their_keys(assistant):
    target = random_decoder(config_of("gemma4_text", num_kv_shared_layers=2))
    engine = Engine(target, assistant)
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    drafts = noted_drafts(engine)
    engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert drafts
    for text, draft in drafts.items():
        assert draft == drafted_by_transformers(target, assistant, list(text), len(draft))


def test_targets_that_also_take_images(assistant):
    target = random_decoder(config_of("gemma4"))
    engine = Engine(target, random_assistant(target))
    assert drafter_of(engine).name == "gemma_assistant"
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)


def test_targets_that_do_not_fit(target, assistant):
    with pytest.raises(ValueError, match="'gemma_assistant' needs a draft model"):
        Engine(target, spec="gemma_assistant")
    with pytest.raises(ValueError, match="Gemma 4 assistant needs method 'gemma_assistant'"):
        Engine(target, assistant, spec="draft_model")
    with pytest.raises(ValueError, match="needs a Gemma 4 assistant model, got Gemma4"):
        Engine(target, target, spec="gemma_assistant")
    with pytest.raises(ValueError, match="Gemma4AssistantForCausalLM: reads another model's cache"):
        Engine(assistant)
    with pytest.raises(ValueError, match="reads a layer of type 'sliding_attention'"):
        Engine(random_decoder(config_of("llama")), assistant)
    with pytest.raises(ValueError, match="made for 32 values in a state, its target has 64"):
        Engine(random_decoder(config_of("gemma4_text", hidden_size=64)), assistant)
    heads = random_decoder(config_of("gemma4_text", num_key_value_heads=1))
    with pytest.raises(ValueError, match=r"heads and head size \(2, 16\), but the target has \(1,"):
        Engine(heads, assistant)
    with pytest.raises(
        ValueError, match=r"has weights in torch.bfloat16, its target in torch.float32"
    ):
        Engine(target, random_assistant(target).to(torch.bfloat16))
    with pytest.raises(ValueError, match="draft_bits: not for a Gemma 4 assistant"):
        Engine(target, assistant, spec=SpecConfig(draft_bits=8))
    with pytest.raises(ValueError, match="made for 263 tokens, its target has 300"):
        Engine(random_decoder(config_of("gemma4_text", vocab_size=300)), assistant)

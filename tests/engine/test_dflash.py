"""DFlash drafts: the published forward in all layouts, the target's output, its distribution."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig, hf_generate
from fastspec.drafters.dflash import load_dflash

from ..architectures import PROMPTS, config_of, random_decoder
from ..models import random_model, random_t5
from .dflash_models import (
    MASK,
    expected_logits,
    of_transformers,
    random_dflash,
    stored,
    stored_as_speculators,
)
from .helpers import ALPHA, VOCAB_SIZE, generated_greedily, ids_of, p_value
from .probes import draft_model_of, drafter_of, noted_drafts

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL = EngineConfig(block_size=4, max_batch_size=3, prefill_chunk_size=7)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
# Of drafts that a target accepts whether they fit or not, so that several tokens are new to a pass.
ACCEPTED = {"synthetic_acceptance_rate": 0.7}


@pytest.fixture(scope="module")
def target():
    return random_decoder(config_of("llama"))


@pytest.fixture(scope="module")
def draft(target):
    return random_dflash(target)


@pytest.fixture(scope="module")
def folder(draft, tmp_path_factory):
    return stored(draft, tmp_path_factory.mktemp("dflash"))


def texts_of(model, params=GREEDY):
    return [list(generated_greedily(model, prompt, params.max_tokens)) for prompt in PROMPTS]


def check_drafts(engine, draft, target, most=None):
    """All drafts from now on are those of a plain pass over the text and the block."""
    drafts = noted_drafts(engine)
    engine.generate([*PROMPTS, [9]], GREEDY)
    most = most or draft.config.block_size - 1
    for text, given in drafts.items():
        expected = expected_logits(draft, target, list(text)).argmax(-1).tolist()
        assert len(given) <= most
        assert given == expected[: len(given)]
    assert len({len(given) for given in drafts.values()}) > 1  # some near the end of a text
    return drafts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        WINDOWS,
        WINDOWS | {"windows_are_causal": True},
        {"block_size": 9, "num_key_value_heads": 4, "attention_bias": True},
    ],
    ids=["full", "windows", "causal windows", "longer block"],
)
@pytest.mark.parametrize("write", [stored, stored_as_speculators])
@pytest.mark.parametrize("num", [3, 20])
def test_drafts_are_those_of_a_plain_pass(target, tmp_path, fields, num, write):
    draft = random_dflash(target, **fields)
    spec = SpecConfig("dflash", num, **ACCEPTED)
    engine = Engine(target, write(draft, tmp_path), spec=spec, config=SMALL)
    drafts = check_drafts(engine, draft, target, most=num)
    stats = engine.stats
    assert stats.num_output_tokens > 1.5 * stats.num_steps
    assert stats.num_draft_passes["dflash"] == sum(map(bool, drafts.values()))


def test_the_plain_pass_is_that_of_transformers(target, draft):
    pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    for layers in ({}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}):
        draft = random_dflash(target, **layers)
        theirs = of_transformers(draft)
        for text in ([*PROMPTS[0]], [*PROMPTS[1]]):
            known = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            read = torch.cat([known[layer] for layer in draft.config.target_layers], dim=-1)
            block = torch.tensor([[text[-1]] + [MASK] * (draft.config.block_size - 1)])
            cache = DFlashCache(config=theirs.config)
            cache.set_previous_accepted_tokens(len(text) - 1)
            total = len(text) - 1 + draft.config.block_size
            with torch.no_grad():
                out = theirs(
                    noise_embeds=target.get_input_embeddings()(block),
                    context_hidden_states=read,
                    position_ids=torch.arange(total)[None],
                    cache=cache,
                )
                logits = target.get_output_embeddings()(out.last_hidden_state)[0, 1:]
            torch.testing.assert_close(logits, expected_logits(draft, target, text))


def test_scaled_embeddings_and_logits(target, tmp_path):
    """As the authors' models for some targets have them; sampling needs the logits themselves."""
    fields = {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 4.0,
    }
    draft = random_dflash(target, **fields)
    engine = Engine(target, stored(draft, tmp_path), config=SMALL)
    seen = []
    model = draft_model_of(engine)
    read = model._read_blocks
    model._read_blocks = lambda *args: seen.append(read(*args)) or seen[-1]
    engine.generate(PROMPTS[:1], GREEDY)
    expected = expected_logits(draft, target, [*PROMPTS[0], texts_of(target)[0][0]])
    torch.testing.assert_close(seen[0][0], expected[: seen[0].shape[1]])


def test_layouts(target, draft, tmp_path):
    """Also models that are loaded already, and reduced vocabularies."""
    expected = check_drafts(
        Engine(target, stored(draft, tmp_path / "a"), config=SMALL), draft, target
    )
    for source in (
        stored_as_speculators(draft, tmp_path / "b"),
        load_dflash(tmp_path / "a", EngineConfig(), target),
    ):
        engine = Engine(target, source, config=SMALL)
        assert drafter_of(engine).name == "dflash"
        assert check_drafts(engine, draft, target) == expected


@pytest.mark.parametrize("has_head", [False, True], ids=["target's head", "own head"])
def test_reduced_vocabularies(target, draft, tmp_path, has_head):
    known = torch.arange(7, 263, 4)
    folder = stored_as_speculators(draft, tmp_path, draft_vocab_size=len(known))
    tensors = load_file(folder / "model.safetensors")
    is_known = torch.zeros(263, dtype=torch.bool)
    is_known[known] = True
    tensors |= {"d2t": known - torch.arange(len(known)), "t2d": is_known}
    if has_head:
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[known].clone()
    save_file(tensors, folder / "model.safetensors")
    drafts = noted_drafts(engine := Engine(target, folder, config=SMALL))
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    for text, given in drafts.items():
        logits = expected_logits(draft, target, list(text))[:, known]
        assert given == known[logits.argmax(-1)].tolist()[: len(given)]


def test_transformers_own_model(target, draft, tmp_path):
    pytest.importorskip("transformers.models.muse_glimmer_assistant")
    model = of_transformers(draft)
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        engine = Engine(target, source, config=SMALL)
        assert drafter_of(engine).name == "dflash"
        check_drafts(engine, draft, target)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    given = {"drafter": model}, {"assistant_model": model}
    for more in (*given, {"assistant_model": model, "speculation_type": "dflash"}):
        ids = hf_generate(target, torch.tensor(PROMPTS[:1]), **more, **options)
        assert ids[0].tolist() == PROMPTS[0] + texts_of(target)[0]
    for wrong, match in (
        ({"speculation_type": "other", "drafter": model}, "speculation_type: expected 'dflash'"),
        ({"speculation_type": "dflash", "use_mtp": True}, "cannot be combined with use_mtp"),
    ):
        with pytest.raises(ValueError, match=match):
            hf_generate(target, torch.tensor(PROMPTS[:1]), **wrong, **options)
    with pytest.raises(ValueError, match="MuseGlimmerAssistantModel"):
        Engine(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"suffix_tokens": 6},
        {"confidence_threshold": 0.3},
        {"confidence_threshold": 0.0},
        {"draft_bits": 8},
        {"schedule": "adaptive"},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [{"num_blocks": 40}, {"prefix_caching": True}], ids=str)
def test_greedy_output_is_that_of_plain_decoding(target, folder, options, config):
    config = EngineConfig(block_size=4, **config)
    spec = SpecConfig("dflash", **options)
    engine = Engine(target, folder, spec=spec, config=config)
    for _ in range(2):
        assert ids_of(engine.generate(PROMPTS * 2, GREEDY)) == texts_of(target) * 2
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("options", [{}, {"confidence_threshold": 0.2}], ids=str)
def test_a_seeds_text_does_not_depend_on_other_requests(target, folder, options):
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=NUM_TOKENS) for s in range(12)]
    prompts = [[*PROMPTS[0], 50 + s] for s in range(12)]
    spec, config = SpecConfig("dflash", 4, **options), EngineConfig(block_size=4)
    together = ids_of(Engine(target, folder, spec=spec, config=config).generate(prompts, params))
    alone = Engine(target, folder, spec=spec, config=config)
    pairs = zip(prompts, params, strict=True)
    assert together == [ids_of(alone.generate([prompt], one))[0] for prompt, one in pairs]


@pytest.mark.parametrize(
    "options", [{}, {"confidence_threshold": 0.4}, {"suffix_tokens": 3}], ids=str
)
def test_samples_follow_the_target(options):
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    target = random_decoder(config_of("llama", vocab_size=VOCAB_SIZE, **ids))
    draft = random_dflash(target, mask_token_id=1)
    pair = target, built(draft, target)
    assert (
        p_value(pair, {"temperature": 0.7, "top_k": 4}, SpecConfig("dflash", 2, **options)) > ALPHA
    )


def built(draft, target):
    """The draft with what it takes from a target, without a folder."""
    draft.embed_tokens, draft.lm_head = (
        target.get_input_embeddings(),
        target.get_output_embeddings(),
    )
    return draft


def test_coupled_samples_are_those_of_plain_decoding(target, folder):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    coupled = {"rejection_sample_method": "coupled"}
    plain = Engine(target, spec=SpecConfig("none", **coupled))
    ours = Engine(target, folder, spec=SpecConfig(**coupled))
    assert ids_of(ours.generate(PROMPTS, params)) == ids_of(plain.generate(PROMPTS, params))


def test_drafts_obey_the_rules_of_requests(target, folder):
    """A draft's tokens are chosen one by one then, as bans depend on those before."""
    free = ids_of(Engine(target, spec="none").generate(PROMPTS, GREEDY))
    words = [text[place : place + 2] for text in free for place in (1, 4, 6)]
    ruled = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        bad_words=words,
        frequency_penalty=2.0,
    )
    plain = ids_of(Engine(target, spec="none").generate(PROMPTS, ruled))
    spec = SpecConfig("dflash", 4, **ACCEPTED)
    engine = Engine(target, folder, spec=SpecConfig("dflash", 4), config=SMALL)
    both = engine.generate(PROMPTS * 2, [ruled, GREEDY, GREEDY, ruled])
    assert ids_of(both) == [plain[0], free[1], free[0], plain[1]]
    drafts = noted_drafts(engine := Engine(target, folder, spec=spec, config=SMALL))
    engine.generate(PROMPTS, ruled)
    for text, given in drafts.items():
        path = [*text[-1:], *given]
        assert not any(path[place : place + 2] in words for place in range(len(given)))


def target_of_size(size):
    return random_decoder(config_of("llama", hidden_size=size))


def test_without_room_for_a_draft(target, tmp_path):
    short = random_dflash(target, max_position_embeddings=32)
    engine = Engine(target, stored(short, tmp_path), config=SMALL)
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == texts_of(target)
    assert engine.stats.num_draft_tokens > 0


def test_texts_read_before_the_draft_was_enabled(target, draft, folder):
    """With prefix caching their blocks are not found any more, as they have no states."""
    config = EngineConfig(block_size=4, prefix_caching=True)
    engine = Engine(target, spec="none", config=config)
    engine.generate(PROMPTS, GREEDY)
    engine.enable_spec_dec(folder)
    for _ in range(2):
        check_drafts(engine, draft, target)


def test_rules_in_float16(folder):
    half = random_decoder(config_of("llama")).to(torch.float16)
    large = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={7: 70000.0})
    engine = Engine(half, folder, spec=SpecConfig("dflash", 4))
    assert ids_of(engine.generate(PROMPTS, large)) == [[7] * 8] * 2
    assert engine.stats.num_accepted_tokens > 0


def test_processors_see_only_tokens_that_are_wanted(target, folder):
    seen = []

    def noted(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    short = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    params = [SamplingParams(**short, logits_processors=[noted]), GREEDY]
    Engine(target, folder, spec=SpecConfig("dflash", 5)).generate([PROMPTS[0]] * 2, params)
    assert max(seen) < len(PROMPTS[0]) + 3


def test_what_does_not_fit(target, draft, folder, tmp_path):
    def refused(match, source=folder, model=target, spec="dflash", config=SMALL):
        with pytest.raises(ValueError, match=match):
            Engine(model, source, spec=spec, config=config)

    def written(name, **changes):
        return stored(draft, tmp_path / name, **changes)

    refused("'dflash' needs a draft model", None)
    refused("a DFlash draft needs method 'dflash', not 'draft_model'", spec="draft_model")
    refused("needs a DFlash model, got Llama", random_model("llama"))
    refused("hidden_size", model=target_of_size(64))
    refused("decoders, the target is an encoder-decoder", model=random_t5())
    nested = {"mask_token_id": 5, "target_layer_ids": [0]}
    for name, match, changes in (
        ("mask", "mask_token_id: expected an int from 0 to 262, got 263", {"mask_token_id": 263}),
        ("text", "mask_token_id: expected an int", {"mask_token_id": "a"}),
        ("no mask", "mask_token_id: expected an int", {"mask_token_id": None}),
        ("deep", "target layers: expected 0 to 3", {"target_layer_ids": [0, 3]}),
        ("letter", "target_layer_ids: expected a list", {"target_layer_ids": "a"}),
        ("half", "target_layer_ids: expected a list", {"target_layer_ids": [0.5]}),
        ("few", "fc.weight has shape", {}),
        ("size", "block_size: expected an int from 2 to 1024, got 1000000", {"block_size": 10**6}),
    ):
        refused(match, written(name, dflash_config=nested | changes))
    refused("target_layer_ids: expected", written("none", dflash_config={"mask_token_id": 5}))
    refused("dflash_config: expected a mapping", written("list", dflash_config=[1]))
    kinds = ["full_attention"] * 3
    more = written("layers", num_hidden_layers=3, layer_types=kinds)
    refused("is no DFlash draft: layers.2", more)
    refused("must be equal to the number of `layer_types`", written("kinds", layer_types=kinds))
    unknown = written("window", layer_types=["sliding_attention"] * 2, sliding_window=None)
    refused("sliding_window: expected", unknown)
    refused("is_causal: expected false", written("causal", is_causal=True))
    refused(
        "shift_label: expected False",
        written("shifted", dflash_config=nested | {"shift_label": True}),
    )
    for name, value in (("mask_token_id", None), ("shift_label", True), ("block_size", "a")):
        other = stored_as_speculators(draft, tmp_path / name, **{name: value})
        refused(f"{name}: expected", other)
    loaded = load_dflash(folder, EngineConfig(), target)
    refused("loaded for another target", loaded, target_of_size(64))
    refused("has no embeddings", random_dflash(target))
    other = stored_as_speculators(draft, tmp_path / "anchor", sample_from_anchor=True)
    refused("sample_from_anchor: expected False", other)
    other = stored_as_speculators(draft, tmp_path / "domino", projector_type="domino")
    refused("projector_type: expected 'dflash'", other)
    refused("cuda_graphs: 'on'", config=EngineConfig(cuda_graphs="on"))
    refused("guesses whole chains, so it cannot draft for trees", spec="tree")
    refused("a DFlash draft needs method 'dflash', not 'cascade'", spec="cascade")
    refused("cannot draft in a cascade", spec=SpecConfig("cascade", draft_bits=8))
    with pytest.raises(ValueError, match="cape"):
        SpecConfig("dflash", cape=True)

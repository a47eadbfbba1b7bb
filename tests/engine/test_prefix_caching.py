"""Requests that begin alike share blocks, and nobody can tell from what they say."""

from itertools import product

import pytest

from fastspec import Engine, EngineConfig

from ..models import perturbed, random_model
from .prefix_sharing import SIZE, TAILS, TEXT, Watcher, alone, engine_of, params_of
from .probes import (
    assert_blocks_came_back,
    assert_caches,
    idle_blocks,
    record_prefills,
    record_reads,
    runners_of,
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [False, True])
def test_shared_prefixes_of_every_length(model, drafter, speculative, temperature):
    drafter = drafter if speculative else None
    lengths = [n for n in range(len(TEXT) + 1) if n % SIZE != 2]  # like those of n % SIZE == 1
    for shared, at_once in product(lengths, [False, True]):
        prompts = [TEXT[:shared] + tail for tail in TAILS]
        params = [params_of(temperature, seed, max_tokens=7) for seed in (shared, shared + 1)]
        if not at_once:
            pairs = zip(prompts, params, strict=True)
            expected = [alone(model, drafter, *pair) for pair in pairs]
        engine = engine_of(model, drafter)
        if at_once:
            outputs = engine.generate(prompts, params)
        else:
            outputs = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
        for output, reference in zip(outputs, expected, strict=True):
            assert output.token_ids == reference.token_ids
            assert output.sources == reference.sources
        found = [output.stats.num_cached_prompt_tokens for output in outputs]
        assert found == [0, shared // SIZE * SIZE]
        assert engine.stats.num_cached_prompt_tokens == sum(found)
        assert engine.stats.num_prompt_tokens == sum(map(len, prompts))
        assert_blocks_came_back(engine)


def test_after_a_change_of_weights_nothing_old_is_found(model):
    own = random_model("llama", num_hidden_layers=2)
    engine, params = engine_of(own), params_of()
    engine.generate([TEXT], params)
    own.load_state_dict(random_model("llama", num_hidden_layers=2, seed=3).state_dict())
    engine.add_request(TEXT, params)
    with pytest.raises(ValueError, match=r"^reset_prefix_cache: expected no unfinished requests"):
        engine.reset_prefix_cache()
    while engine.has_unfinished:
        engine.step()
    engine.reset_prefix_cache()
    (output,) = engine.generate([TEXT], params)
    assert output.token_ids == alone(own, None, TEXT, params).token_ids
    assert output.stats.num_cached_prompt_tokens == 0
    assert_blocks_came_back(engine)


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_of_a_prompt_is_always_read(model, drafter, length):
    engine = engine_of(model, drafter)
    prompt = TEXT[:length]
    first, again = (engine.generate([prompt], params_of())[0] for _ in range(2))
    assert again.token_ids == first.token_ids
    assert again.stats.num_cached_prompt_tokens == (length - 1) // SIZE * SIZE


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "gpt_oss", "gpt2"])
def test_other_architectures(architecture):
    model = random_model(architecture)
    drafter = perturbed(model, 0.03)
    prompts = [TEXT + tail for tail in TAILS]
    engine = engine_of(model, drafter)
    for prompt in prompts:
        output = engine.generate([prompt], params_of(temperature=0))[0]
        assert output.token_ids == alone(model, drafter, prompt, params_of(0)).token_ids
    assert engine.stats.num_cached_prompt_tokens == len(TEXT) // SIZE * SIZE


def test_a_conversation_finds_its_own_answers(model, drafter):
    engine = engine_of(model, drafter)
    texts = [TEXT[:8], TEXT[:8]]  # of full blocks: the second request fills its last one again
    for turn in range(4):
        for index, text in enumerate(texts):
            output = engine.generate([text], params_of(seed=index))[0]
            assert output.token_ids == alone(model, drafter, text, params_of(seed=index)).token_ids
            if turn > 0:
                found = output.stats.num_cached_prompt_tokens
                assert found >= (len(text) - len(TAILS[index]) - 1) // SIZE * SIZE
            texts[index] = text + list(output.token_ids) + TAILS[index]


def test_seeds_see_the_same_prefix(model, drafter):
    engine = engine_of(model, drafter)
    texts = set()
    for seed in range(6):
        output = engine.generate([TEXT], params_of(seed=seed))[0]
        assert output.token_ids == alone(model, drafter, TEXT, params_of(seed=seed)).token_ids
        texts.add(output.token_ids)
    assert len(texts) == 6


@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_caches_equal_a_fresh_prefill_and_shared_blocks_never_change(model, noise):
    drafter = perturbed(model, noise)
    engine = engine_of(model, drafter)
    watcher = Watcher(engine)
    prompts = [TEXT, [*TEXT, 5], [*TEXT[:9], 2, 3], TEXT[:8], TEXT[:8], TEXT + TEXT]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params_of(seed=index, max_tokens=8 + index))
        for _ in range(index % 3):
            engine.step()
            watcher.look()
            assert_caches(engine, model, drafter)
    while engine.has_unfinished:
        engine.step()
        watcher.look()
        assert_caches(engine, model, drafter)
    assert engine.stats.num_cached_prompt_tokens >= 4 * 8
    assert watcher.num_compared > 100
    assert_blocks_came_back(engine)


@pytest.mark.parametrize("how", ["disabled", "one token", "another drafter"])
def test_a_drafter_reads_what_only_the_target_has_read(model, drafter, how):
    engine = engine_of(model, perturbed(model, 0.3) if how == "another drafter" else drafter)
    if how == "disabled":
        engine.disable_spec_dec()
    engine.generate([TEXT], params_of(max_tokens=1 if how == "one token" else 6))
    engine.enable_spec_dec(drafter if how == "another drafter" else None, n_spec_tokens=3)
    engine.add_request(TEXT + TAILS[0], params_of())
    engine.add_request(TEXT + TAILS[1], params_of(seed=1))
    while engine.has_unfinished:
        engine.step()
        assert_caches(engine, model, drafter)
    assert engine.stats.num_cached_prompt_tokens == 2 * 12


@pytest.mark.parametrize("at_once", [False, True])
def test_a_shared_prefix_is_read_once_by_target_and_drafter(model, drafter, at_once):
    engine = engine_of(model, drafter)
    prefix = TEXT * 3
    prompts = [[*prefix, last, *range(10, 20)] for last in range(4)]
    target, draft = runners_of(engine)
    of_both = record_reads(target), record_prefills(draft)
    if at_once:
        engine.generate(prompts, params_of(max_tokens=4))
    else:
        for prompt in prompts:
            engine.generate([prompt], params_of(max_tokens=4))
    shared = len(prefix) // SIZE * SIZE
    everything = sum(len(prompt) - 1 for prompt in prompts)
    assert [sum(counts) for counts in of_both] == [everything - 3 * shared] * 2


def test_off_by_default(model):
    engine = Engine(model, config=EngineConfig(block_size=SIZE))
    for _ in range(2):
        engine.generate([TEXT], params_of())
    assert engine.stats.num_cached_prompt_tokens == 0
    assert not idle_blocks(engine)

"""T5-type encoder-decoders: Hugging Face's tokens and logits for any drafts, batches and pages."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.texts import TextStore
from fastspec.models.layout import EncoderInput

from ..models import T5_CONFIGS, byte_tokenizer, perturbed, random_t5
from .helpers import GREEDY, hugging_face_greedy
from .probes import (
    assert_blocks_came_back,
    batch_of,
    encoders_of,
    fail_in_second_layer,
    num_encoder_blocks,
    record_passes,
    request_of,
    waiting,
)

PROMPTS = [[5, 6, 7, 1], [9] * 30 + [1], list(range(2, 60)), [7, 8] * 10]


def token_ids(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module", params=T5_CONFIGS)
def case(request):
    model = random_t5(request.param)
    return model, [hugging_face_greedy(model, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def model():
    return random_t5()


@pytest.fixture(scope="module")
def expected(model):
    return [hugging_face_greedy(model, prompt) for prompt in PROMPTS]


def test_texts_are_varied(case):
    _, expected = case
    assert max(len(set(tokens)) for tokens in expected) >= 8, "the test model repeats itself"
    assert len(set(expected)) == len(PROMPTS), "the test model does not read its input"


def test_plain_decoding(case):
    model, expected = case
    outputs = Engine(model).generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == expected
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert output.stats.num_prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("quality", "num_draft"), [("often right", 5), ("wrong", 3), ("itself", 4)]
)
def test_draft_models(case, num_draft, quality):
    model, expected = case
    drafter = {
        "often right": lambda: perturbed(model, 0.02),
        "wrong": lambda: random_t5("t5", seed=7),
        "itself": lambda: model,
    }[quality]()
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=num_draft))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    if quality == "itself":
        assert engine.stats.acceptance_rate == 1.0
    if quality == "wrong":
        assert engine.stats.acceptance_rate < 0.2


@pytest.mark.parametrize("method", ["mag", "prompt_lookup"])
def test_drafters_that_copy(case, method):
    model, expected = case
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method != "mag" else {}
    engine = Engine(model, spec=SpecConfig(method, 4, **lookup))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("options", [{"tree_width": 3, "tree_nodes": 80}, {"cape": True}], ids=str)
def test_token_trees(case, options):
    model, expected = case
    method = "auto" if "cape" in options else "tree"
    spec = SpecConfig(method, num_speculative_tokens=6, **options)
    engine = Engine(model, perturbed(model, 0.05), spec=spec, config=EngineConfig(block_size=4))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("k_matrix", [[[3, 4], [0, 2]], [[2, 3, 4], [0, 1, 3], [0, 0, 2]]])
def test_cascades(model, expected, k_matrix):
    drafts = [perturbed(model, 0.02), perturbed(model, 0.1)][: len(k_matrix) - 1]
    spec = SpecConfig("cascade", k_matrix=k_matrix, lenience=2.0)
    engine = Engine(model, drafts, spec=spec, config=EngineConfig(block_size=4, num_blocks=40))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("block_size", "max_batch_size"), [(1, 3), (5, 1), (64, 3)])
def test_block_and_batch_sizes(model, expected, block_size, max_batch_size):
    config = EngineConfig(block_size=block_size, max_batch_size=max_batch_size)
    engine = Engine(model, perturbed(model, 0.02), config=config)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected


def test_vocabularies_padded_differently(model, expected):
    for vocab_size in (64, 128):
        drafter = random_t5("t5", seed=7, vocab_size=vocab_size)
        assert token_ids(Engine(model, drafter).generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("chunk", [3, 512])
def test_preempted_requests_go_on_with_what_was_encoded(model, expected, chunk):
    config = EngineConfig(block_size=4, num_blocks=16, prefill_chunk_size=chunk)
    engine = Engine(model, perturbed(model, 0.02), config=config)
    num_encoded = [0, 0]
    for index, encoder in enumerate(encoders_of(engine)):

        def count(*_, index=index):
            num_encoded[index] += 1

        encoder.register_forward_hook(count)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    ids, was_preempted = {}, False
    while engine.has_unfinished:
        for event in engine.step():
            if event.output is not None:
                ids[event.request_id] = event.output.token_ids
        was_preempted |= any(len(request.token_ids) > 1 for request in waiting(engine))
    assert was_preempted
    assert [ids[f"request-{number}"] for number in range(1, 5)] == expected
    assert num_encoded == [4, 4]


def test_pages_of_encoded_inputs_come_back(model):
    engine = Engine(model, perturbed(model, 0.02))
    first = engine.add_request(PROMPTS[2], GREEDY)
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    assert num_encoder_blocks(engine) == [5, 5]
    engine.abort(first)
    assert num_encoder_blocks(engine) == [1, 1]
    for _ in range(3):
        engine.generate(PROMPTS, GREEDY)
    assert num_encoder_blocks(engine) == [0, 0]
    assert_blocks_came_back(engine)


@pytest.mark.parametrize("what", ["pages", "projection"])
def test_an_input_that_memory_does_not_suffice_for_is_encoded_again(expected, what):
    model = random_t5()  # its own, as the failing layer is part of it
    engine = Engine(model, perturbed(model, 0.02))
    fail_in_second_layer(engine, what)
    engine.add_request(PROMPTS[2], GREEDY)
    with pytest.raises(MemoryError):
        engine.step()
    assert num_encoder_blocks(engine) == [0, 4]
    events = []
    while engine.has_unfinished:
        events += engine.step()
    assert token_ids([events[-1].output]) == expected[2:3]


@pytest.mark.parametrize("kind", T5_CONFIGS)
@torch.inference_mode()
def test_logits_are_hugging_faces(kind):
    """Far past the largest distance that the bias tells apart, one token at a time and several."""
    model = random_t5(kind)
    engine = Engine(model, perturbed(model, 0.02), spec=SpecConfig(num_speculative_tokens=3))
    passes = record_passes(engine)
    outputs = engine.generate(PROMPTS[:3], GREEDY)
    texts = {out.prompt_token_ids: [0, *out.token_ids] for out in outputs}
    logits = {
        prompt: model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text])
        ).logits[0]
        for prompt, text in texts.items()
    }
    seen = [
        (span.encoder_input.token_ids, span.start, rows)
        for spans, packed in passes
        if packed.shape[0]
        for span, rows in zip(spans, packed.split([s.count for s in spans]), strict=True)
    ]
    assert len(seen) > 20
    for prompt, start, rows in seen:
        expected = logits[tuple(prompt)]
        # A row is judged where the tokens read before it were those that the text came to have.
        torch.testing.assert_close(rows[0], expected[start], atol=1e-4, rtol=1e-4)


def test_end_of_sequence_ends_a_text(model):
    full = hugging_face_greedy(model, PROMPTS[0])
    model.generation_config.eos_token_id = full[6]
    try:
        (output,) = Engine(model, model).generate(
            [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=40)
        )
    finally:
        model.generation_config.eos_token_id = 1
    assert output.finish_reason == "stop"
    assert output.token_ids == full[: full.index(full[6]) + 1]


def test_text_stop_strings_and_logprobs():
    model, tokenizer = random_t5(vocab_size=263), byte_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=True)
    engine = Engine(model, perturbed(model, 0.02), tokenizer=tokenizer)
    (full,) = engine.generate("translate: a house", params)
    assert full.prompt_token_ids == tuple(tokenizer("translate: a house")["input_ids"])
    ids = torch.tensor([[0, *full.token_ids]])
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([full.prompt_token_ids]), decoder_input_ids=ids
        ).logits
    expected = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(full.logprobs), expected, atol=1e-3, rtol=1e-3)
    stop = next(piece for piece in full.text if piece.isascii() and full.text.index(piece) > 3)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    (stopped,) = engine.generate("translate: a house", params)
    assert stopped.text == full.text[: full.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_seed_gives_the_same_text_in_any_batch(model):
    params = [SamplingParams(seed=s, max_tokens=20, ignore_eos=True) for s in range(4)]
    drafter = perturbed(model, 0.02)
    together = Engine(model, drafter).generate(PROMPTS, params)
    small = EngineConfig(block_size=4, num_blocks=12, max_batch_size=2)
    squeezed = Engine(model, drafter, config=small).generate(PROMPTS, params)
    assert token_ids(together) == token_ids(squeezed)
    for prompt, own, output in zip(PROMPTS, params, together, strict=True):
        assert Engine(model, drafter).generate([prompt], own)[0].token_ids == output.token_ids


def test_length_limits(model):
    engine = Engine(model, config=EngineConfig(max_model_len=12))
    (output,) = engine.generate([PROMPTS[0]], GREEDY)
    assert len(output.token_ids) == 11, "the start token is one of twelve"
    assert output.finish_reason == "length"
    with pytest.raises(ValueError, match="prompt: has 31 tokens; the limit is 11"):
        engine.generate([PROMPTS[1]], GREEDY)


def test_one_that_is_not_finite_fails_alone(model, expected):
    broken = perturbed(model, 0.0)
    with torch.no_grad():
        broken.encoder.embed_tokens.weight = torch.nn.Parameter(
            broken.encoder.embed_tokens.weight.clone()
        )
        broken.encoder.embed_tokens.weight[99] = torch.nan
    engine = Engine(broken, config=EngineConfig(max_batch_size=2))
    outputs = engine.generate([[99, 1], *PROMPTS, [5, 99], *PROMPTS], GREEDY)
    assert [out.finish_reason for out in outputs] == (["error"] + ["length"] * 4) * 2
    assert token_ids(outputs)[1:5] == token_ids(outputs)[6:] == expected


def test_copies_come_from_the_encoders_input_too():
    request = request_of([0], encoder_input=EncoderInput([5, 6, 7]))
    batch = batch_of(request)
    store = TextStore()
    assert store.update(batch).token_ids.tolist() == [[5, 6, 7, 0]]
    request.token_ids += [6, 8]
    texts = store.update(batch)
    assert texts.token_ids.tolist() == [[5, 6, 7, 0, 6, 8]]
    assert texts.lengths.tolist() == [6]

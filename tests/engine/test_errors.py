"""Bad input: one line that names what is wrong, and no other request is touched."""

import re
from dataclasses import replace

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.engine.detokenizer import Detokenizer

from ..models import VOCAB_SIZE, byte_tokenizer, perturbed, random_model
from .helpers import finish
from .probes import assert_blocks_came_back

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def assert_one_line(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([], ["prompt", "empty"]),
        ("", ["prompt", "empty"]),
        ([1, VOCAB_SIZE], ["prompt", str(VOCAB_SIZE)]),
        ([1, -1], ["prompt", "-1"]),
        ([1, 2.5], ["prompt", "2.5"]),
        ([1] * 512, ["prompt", "512", "511"]),
    ],
)
def test_prompts(model, prompt, parts):
    engine = Engine(model, tokenizer=byte_tokenizer())
    running = engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(ValueError, match="prompt") as error:
        engine.add_request(prompt, GREEDY)
    assert_one_line(error, *parts)
    outputs = finish(engine)
    assert [*outputs] == [running]
    assert len(outputs[running].token_ids) == 10


def test_one_bad_prompt_of_several_starts_nothing(model):
    engine = Engine(model)
    with pytest.raises(ValueError, match="prompt"):
        engine.generate([[1, 2], [VOCAB_SIZE]], GREEDY)
    assert not engine.has_unfinished


def test_no_room_in_the_cache(model):
    engine = Engine(model, config=EngineConfig(block_size=4, num_blocks=4))
    with pytest.raises(ValueError, match="no room in the cache") as error:
        engine.generate([[1] * 10], GREEDY)
    assert_one_line(error, "num_blocks", "5 blocks", "has 4")
    assert len(engine.generate([[1] * 6], GREEDY)[0].token_ids) == 10


def test_cache_memory_too_small(model):
    with pytest.raises(ValueError, match="kv_cache_memory"):
        Engine(model, config=EngineConfig(kv_cache_memory=10))


@pytest.mark.parametrize("memory", [{"num_blocks": 2**31 - 1}, {"kv_cache_memory": 2**60}])
def test_cache_that_no_memory_holds(model, memory):
    batch = 1 if "num_blocks" in memory else 2**31 - 1
    config = EngineConfig(max_batch_size=batch, **memory)
    with pytest.raises(ValueError, match=r"^num_blocks, kv_cache_memory: not enough") as error:
        Engine(model, config=config)
    assert_one_line(error, "bytes", "blocks of 16 tokens")


def test_text_needs_a_tokenizer(model):
    with pytest.raises(ValueError, match="tokenizer"):
        Engine(model).generate("text", GREEDY)
    with pytest.raises(ValueError, match="stop"):
        Engine(model).generate([[1]], SamplingParams(stop="x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", ["a"]),
        ("n", 0),
    ],
)
def test_sampling_params(field, value):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        SamplingParams(**{field: value})
    assert_one_line(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "wrong"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 2.0),
        ("draft_sample_method", "wrong"),
        ("rejection_sample_method", "wrong"),
        ("prompt_lookup_max", 3),
        ("k_matrix", [[1]]),
        ("lenience", 2.0),
        ("tree_width", 2),
        ("tree_nodes", 2),
        ("cape", 1),
        ("confidence_threshold", 1.3),
        ("schedule", "dynamic"),
        ("synthetic_acceptance_rate", 1.5),
        ("prompt_lookup_num_tokens", 0),
    ],
)
def test_spec_config(field, value):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        SpecConfig(**{field: value})
    assert_one_line(error)


def test_hugging_face_alias_and_unknown_fields():
    assert SpecConfig(num_assistant_tokens=7).num_speculative_tokens == 7
    with pytest.raises(ValueError, match=r"num_assistant_tokens: .* got 7"):
        SpecConfig(num_speculative_tokens=3, num_assistant_tokens=7)
    with pytest.raises(TypeError, match="num_asistant_tokens"):
        SpecConfig(num_asistant_tokens=7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("block_size", 0),
        ("num_blocks", 0),
        ("max_batch_size", 0),
        ("max_model_len", -1),
        ("max_model_len", 1),
        ("prefill_chunk_size", 0),
        ("prefix_caching", "yes"),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", None),
        ("compile_modules", "yes"),
        ("cuda_graphs", "wrong"),
    ],
)
def test_engine_config(field, value):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        EngineConfig(**{field: value})
    assert_one_line(error)


def test_max_model_len_beyond_the_model(model):
    with pytest.raises(ValueError, match="max_model_len: 513"):
        Engine(model, config=EngineConfig(max_model_len=513))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_device(device, tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device: cannot use") as error:
        Engine(tmp_path, config=EngineConfig(device=device))
    assert_one_line(error, device)


def test_backend(model):
    with pytest.raises(ValueError, match="backend"):
        Engine(model, config=EngineConfig(backend="cuda"))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing-here"])
def test_missing_folder(model, path):
    with pytest.raises(ValueError, match=re.escape(path)) as error:
        Engine(path)
    assert_one_line(error, "target", "no such folder")
    with pytest.raises(ValueError, match="drafter: no such folder"):
        Engine(model, path)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="target: cannot load") as error:
        Engine(tmp_path)
    assert_one_line(error)


def test_models_that_never_call_our_attention():
    with pytest.raises(ValueError, match="BloomForCausalLM: never calls"):
        Engine(random_model("bloom"))


def test_draft_model_method_without_a_draft(model):
    with pytest.raises(ValueError, match="drafter"):
        Engine(model, spec=SpecConfig(method="draft_model"))


def test_enable_spec_dec(model):
    engine = Engine(model)
    with pytest.raises(ValueError, match="n_spec_tokens"):
        engine.enable_spec_dec(model, n_spec_tokens=0)
    with pytest.raises(ValueError, match="drafter: GLIDE needs a GLIDE model"):
        engine.enable_spec_dec(model, use_glide_drafter=True)
    engine.enable_spec_dec(model)
    with pytest.raises(ValueError, match="drafter: no such folder"):
        engine.enable_spec_dec("./nothing-here")
    assert engine.is_speculative


def test_request_ids_are_unique_while_running(model):
    engine = Engine(model)
    engine.add_request([1], GREEDY, request_id="a")
    with pytest.raises(ValueError, match="request_id: 'a'"):
        engine.add_request([1], GREEDY, request_id="a")
    engine.abort("a")
    engine.add_request([1], SamplingParams(temperature=0, max_tokens=2), request_id="a")
    engine.generate([[5, 6]], GREEDY)  # "a" ends beside it
    with pytest.raises(ValueError, match=r"request_id: 'a' has events that step\(\) has not"):
        engine.add_request([1], GREEDY, request_id="a")
    assert len(finish(engine)["a"].token_ids) == 2
    engine.add_request([1], GREEDY, request_id="a")


def test_generated_ids_avoid_those_in_use(model):
    """Of a request whose events wait for step(), and of one whose first sample has ended."""
    engine, params = Engine(model), SamplingParams(seed=3, max_tokens=30, ignore_eos=True, n=2)
    first, second = engine.generate([[1, 2]], params)[0].outputs
    own = next(token_id for token_id in first.token_ids[:9] if token_id not in second.token_ids)
    engine.add_request([1, 2], replace(params, stop_token_ids=[own]), request_id="request-3")
    engine.add_request([1], SamplingParams(temperature=0, max_tokens=1), request_id="request-4")
    outputs = engine.generate([[5, 6]], GREEDY)  # ends one beside it, and half of the other
    outputs += engine.generate([[5, 6]] * 2, GREEDY)
    names = [output.request_id for output in outputs]
    assert names == ["request-2", "request-5", "request-6"]
    assert engine.abort("request-3").index == 1


def test_params_of_another_length(model):
    with pytest.raises(ValueError, match="params: 3 given for 2 prompts"):
        Engine(model).generate([[1], [2]], [GREEDY] * 3)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (7, GREEDY, "prompts: expected a text, .* got int"),
        ([[1], 7], GREEDY, "prompt: expected a text, .* got int"),
        ([1], 7, "params: expected SamplingParams or a list of them, got int"),
        ([1], [{"temperature": 0}], "params: expected SamplingParams, got dict"),
    ],
)
def test_arguments_of_another_type(model, prompts, params, message):
    with pytest.raises(ValueError, match=message) as error:
        Engine(model).generate(prompts, params)
    assert_one_line(error)


@pytest.mark.parametrize("params", [{}, [], 0, ""], ids=str)
def test_empty_parameters_are_not_taken_for_none(model, params):
    with pytest.raises(ValueError, match="params: expected SamplingParams, got"):
        Engine(model).add_request([1], params)


class RaggedDrafter:
    """Proposes 0, 1 or 2 tokens, some of which do not exist."""

    name = "ragged"

    def __init__(self):
        self.released = []

    def propose(self, batch):
        ids = torch.full((len(batch.requests), batch.num_speculative_tokens), -1, dtype=torch.int32)
        for row, limit in enumerate(batch.num_draft_tokens):
            count = min(limit, row % 3)
            ids[row, :count] = VOCAB_SIZE + 5 if row == 2 else 1
        return Proposal(ids)

    def commit(self, batch, accepted):
        assert len(accepted) == len(batch.requests)

    def release(self, request):
        self.released.append(request.request_id)


def test_anyone_can_write_a_drafter(model):
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8]]
    expected = Engine(model).generate(prompts, GREEDY)
    drafter = RaggedDrafter()
    outputs = Engine(model, drafter).generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert set(drafter.released) == {o.request_id for o in outputs}
    assert all(s in ("target", "recovered") for s in outputs[2].sources)


@pytest.mark.parametrize("fails_at", [1, 4, 9])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_tokenizer_that_raises_fails_its_request_alone(model, monkeypatch, fails_at, has_draft):
    """Also at the last token of a text; what was written before stays, in output and events."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    draft = perturbed(model, 0.02) if has_draft else None
    engine = Engine(model, draft, byte_tokenizer())
    first, second = engine.generate([[5, 6, 7], [9, 8]], params)
    push, failing = Detokenizer.push, []

    def fail_once(self, token_id):
        failing.extend([self] if not failing else [])
        if self is failing[0] and (left := getattr(self, "left", fails_at)) > 0:
            self.left = left - 1
            if self.left == 0:
                raise RuntimeError("no such token")
        push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", fail_once)
    broken, whole = (engine.add_request(prompt, params) for prompt in ([5, 6, 7], [9, 8]))
    outputs, tokens = {}, []
    while engine.has_unfinished:
        for event in engine.step():
            tokens += event.token_ids if event.request_id == broken else ()
            if event.output is not None:
                outputs[event.request_id] = event.output
    assert outputs[broken].error == "its text cannot be continued: RuntimeError('no such token')"
    assert outputs[broken].finish_reason == "error"
    assert outputs[broken].token_ids == first.token_ids[: fails_at - 1] == tuple(tokens)
    stats = outputs[broken].stats
    assert stats.num_output_tokens == fails_at - 1
    assert stats.num_accepted_tokens == outputs[broken].sources.count("draft")
    assert outputs[whole].token_ids == second.token_ids
    assert outputs[whole].text == second.text
    assert_blocks_came_back(engine)


def test_a_processor_that_leaves_no_token_is_named(model):
    params = SamplingParams(logits_processors=[lambda ids, scores: scores - torch.inf])
    (output,) = Engine(model).generate([[5, 6]], params)
    assert output.finish_reason == "error"
    assert "its logits processors made it so" in output.error

"""Models with recurrent layers: states follow the text through drafts, batches and preemption."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, Zamba2Config

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter
from fastspec.models import recurrent

from ..models import RECURRENT_CONFIGS, perturbed, random_model
from .glide_models import random_glide
from .helpers import GREEDY, NUM_TOKENS, PROMPTS, finish, generated_greedily, hugging_face_greedy
from .probes import model_of, num_sequences_with_states, target_runner, waiting

K = 4
CHAINS = ("draft_model", "prompt_lookup", "mag", "ngram", "suffix", "cascade")
TIGHT = EngineConfig(block_size=4, num_blocks=24, prefill_chunk_size=5)
# Limits of Mamba-2's time steps that most of them are outside of.
LIMITS = {
    "mamba2": {"time_step_limit": (0.5, 1.0)},
    "falcon_h1": {"time_step_limit": (0.2, 0.5)},
    "granitemoehybrid": {"time_step_limit": (0.5, 1.0)},
    "nemotron_h": {"time_step_min": 1.0},
}


@cache
def case_of(kind, is_limited=False):
    model = random_model(kind, **(LIMITS[kind] if is_limited else {}))
    return model, [hugging_face_greedy(model, prompt) for prompt in PROMPTS]


def texts(outputs):
    return [output.token_ids for output in outputs]


class Knowing(NoDrafter):
    """Proposes the text that will be written, wrong after ever another number of tokens."""

    name = "knowing"

    def __init__(self, expected):
        self.texts = {p[0]: [*p, *new] for p, new in zip(PROMPTS, expected, strict=True)}
        self.calls = 0

    def propose(self, batch):
        rows = []
        for request in batch.requests:
            self.calls += 1
            text, done = self.texts[request.token_ids[0]], len(request.token_ids)
            row = (text[done : done + K] + [-1] * K)[:K]
            if (wrong := self.calls % (K + 1)) < K:
                row[wrong] = (row[wrong] + 1) % 256
            rows.append(row)
        return Proposal(torch.tensor(rows, dtype=torch.int32))


def engine_of(kind, method, **config):
    """An engine whose draft models have recurrent layers too, where the method takes any."""
    model, _ = case_of(kind)
    drafter, options = None, {"num_speculative_tokens": K}
    if method == "draft_model":
        drafter = perturbed(model, 0.03)
    if method == "cascade":
        drafter = [perturbed(model, 0.02), random_model("mamba", seed=4)]
        options = {"k_matrix": [[2, 2, 3], [0, 1, 2], [0, 0, 2]]}
    return Engine(model, drafter, spec=SpecConfig(method, **options), config=EngineConfig(**config))


@pytest.mark.parametrize("kind", RECURRENT_CONFIGS)
def test_drafts_accepted_up_to_any_token(kind):
    model, expected = case_of(kind)
    assert min(len(set(text)) for text in expected) > 8, "the test model repeats itself"
    drafter, spec = Knowing(expected), SpecConfig("draft_model", num_speculative_tokens=K)
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=3, block_size=4))
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected
    assert all(engine.stats.acceptance_histogram[: K + 1])
    assert num_sequences_with_states(engine) == 0


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "falcon_h1"])
def test_plain_decoding(kind):
    model, expected = case_of(kind)
    assert texts(Engine(model).generate(PROMPTS, GREEDY)) == expected
    single = Engine(model, config=EngineConfig(prefill_chunk_size=3)).generate(PROMPTS[1], GREEDY)
    assert texts(single) == [expected[1]]


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "mamba2"])
@pytest.mark.parametrize("method", CHAINS)
def test_every_chain_method(kind, method):
    _, expected = case_of(kind)
    engine = engine_of(kind, method, max_batch_size=3)
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected
    assert texts(engine.generate(PROMPTS[2], GREEDY)) == expected[2:3]
    assert engine.stats.num_draft_tokens > 0


def test_weights_of_zero_that_are_written_later():
    """With them the trial cannot show that Mamba's pass over several tokens drops its state."""
    model, expected = random_model("mamba"), case_of("mamba")[1]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    engine = Engine(model, config=EngineConfig(prefill_chunk_size=3))
    model.load_state_dict(state)
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected


def with_short_memory(bias, dtype):
    """A Mamba whose first layer, the one that is tried, forgets most of its state at each token."""
    model = random_model("mamba", num_hidden_layers=3)
    model.backbone.layers[0].mixer.dt_proj.bias.data.fill_(bias)
    return model.to(dtype)


def test_a_layer_whose_state_hardly_matters():
    """Several tokens at once then give the same numbers in it with a dropped state, but not in the
    other layers."""
    model = with_short_memory(15.0, torch.float32)
    expected = [hugging_face_greedy(model, prompt) for prompt in PROMPTS]
    for engine in (Engine(model, config=EngineConfig(prefill_chunk_size=3)), Engine(model, model)):
        assert texts(engine.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("kind", ["mamba", "short memory", "mamba2", "nemotron_h"])
def test_bfloat16(kind):
    """Mamba adds in float32, so its norms get numbers that are wider than their weights; Mamba-2
    gives other numbers for several tokens at once, so drafts are read one by one."""
    if kind == "short memory":
        model = with_short_memory(1.0, torch.bfloat16)
    else:
        model = random_model(kind).to(torch.bfloat16)
    plain = texts(Engine(model).generate(PROMPTS, GREEDY))
    assert texts(Engine(model, Knowing(plain)).generate(PROMPTS, GREEDY)) == plain


def test_a_recurrent_draft_of_a_model_that_attends():
    model = random_model("llama")
    expected = [hugging_face_greedy(model, prompt) for prompt in PROMPTS]
    engine = Engine(model, random_model("lfm2"), spec=SpecConfig(num_speculative_tokens=K))
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("method", ["none", "draft_model"])
@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_preempted_requests_are_read_again(kind, method):
    model, expected = case_of(kind)
    drafter = perturbed(model, 0.03) if method == "draft_model" else None
    engine = Engine(model, drafter, spec=method, config=TIGHT)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    ids, was_preempted = {}, False
    while engine.has_unfinished:
        ids |= {e.request_id: e.output.token_ids for e in engine.step() if e.output}
        was_preempted |= any(len(r.token_ids) > r.num_prompt_tokens for r in waiting(engine))
    assert was_preempted
    assert [ids[f"request-{number}"] for number in range(1, 5)] == expected


def test_an_aborted_request_leaves_no_state():
    _, expected = case_of("lfm2")
    engine = engine_of("lfm2", "draft_model")
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    assert num_sequences_with_states(engine) == 4
    engine.abort(ids[1])
    assert num_sequences_with_states(engine) == 3
    outputs = finish(engine)
    assert texts(outputs[name] for name in (ids[0], *ids[2:])) == [expected[0], *expected[2:]]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pass_that_fails_in_the_middle(layer, monkeypatch):
    _, expected = case_of("mamba2")
    engine = engine_of("mamba2", "draft_model")
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise RuntimeError("out of memory")

        patch.setitem(model_of(engine).backbone.layers[layer].norm.__dict__, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    outputs = finish(engine)
    assert texts(outputs[name] for name in ids) == expected


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "mamba2"])
def test_sampled_tokens_have_the_models_own_probabilities(kind):
    """What is judged and drawn from are the logits of the text so far, whatever was rejected."""
    model, _ = case_of(kind)
    params = SamplingParams(seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
    outputs = engine_of(kind, "draft_model").generate(PROMPTS, params)
    assert 0 < sum(output.stats.acceptance_rate for output in outputs) < 4
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, rtol=0, atol=2e-4)


def test_seeds_alone_and_in_batches():
    engine = engine_of("mamba2", "draft_model")
    params = [SamplingParams(seed=n, max_tokens=NUM_TOKENS, ignore_eos=True) for n in range(4)]
    together = texts(engine.generate(PROMPTS, params))
    alone = [engine.generate(*pair)[0] for pair in zip(PROMPTS, params, strict=True)]
    assert texts(alone) == together


@pytest.mark.parametrize(
    ("kind", "is_limited"), [("mamba", False), ("mamba2", False), ("mamba2", True)]
)
def test_several_tokens_are_read_at_once_where_that_is_the_same(kind, is_limited, monkeypatch):
    """Mamba's layers in transformers begin from nothing when they are given several tokens."""
    lengths = []
    read = recurrent._read

    def spy(module, kind, cache, layer, hidden, is_prompt):
        lengths.append(hidden.shape[1])
        return read(module, kind, cache, layer, hidden, is_prompt)

    monkeypatch.setattr(recurrent, "_read", spy)
    model, expected = case_of(kind, is_limited)
    engine = Engine(model, config=EngineConfig(prefill_chunk_size=6))
    lengths.clear()
    assert texts(engine.generate(PROMPTS[1], GREEDY)) == expected[1:2]
    assert lengths.count(6) == (2 if kind == "mamba" else 4)  # 16 tokens before the last, 2 layers


@pytest.mark.check
@pytest.mark.parametrize("kind", LIMITS)
def test_only_the_time_steps_of_prompts_are_limited(kind):
    """As in `generate`, whose pass over a prompt limits them, and whose passes after it do not."""
    model, expected = case_of(kind, is_limited=True)
    unlimited = deepcopy(model)
    for module in unlimited.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    text = list(PROMPTS[1])
    for _ in range(NUM_TOKENS):  # limits all of them
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert expected[1] != tuple(text[len(PROMPTS[1]) :])
    assert expected[1] != generated_greedily(unlimited, PROMPTS[1])

    for size in (1, 3, 16, 512):
        engine = Engine(model, config=EngineConfig(max_batch_size=3, prefill_chunk_size=size))
        assert texts(engine.generate(PROMPTS, GREEDY)) == expected
    spec = SpecConfig("draft_model", num_speculative_tokens=K)
    engine = Engine(model, Knowing(expected), spec=spec, config=EngineConfig(max_batch_size=3))
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected
    assert all(engine.stats.acceptance_histogram[: K + 1])
    engine = Engine(model, perturbed(model, 0.03), config=TIGHT)
    assert texts(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.num_preemptions > 0


def test_prompt_logprobs_with_limited_time_steps():
    model, expected = case_of("mamba2", is_limited=True)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    for size in (1, 5, 512):
        engine = Engine(model, config=EngineConfig(prefill_chunk_size=size))
        (output,) = engine.generate(PROMPTS[1], params)
        assert output.token_ids == expected[1][:4]
        ids = torch.tensor([PROMPTS[1]])
        logprobs = model(ids).logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None])[:, 0]
        ours = [row[i] for row, i in zip(output.prompt_logprobs[1:], PROMPTS[1][1:], strict=True)]
        torch.testing.assert_close(torch.tensor(ours), logprobs, rtol=0, atol=2e-4)


def test_time_steps_limited_by_code_that_is_not_known(monkeypatch):
    model, _ = case_of("mamba2", is_limited=True)
    monkeypatch.setattr(recurrent, "_UPDATE", "another_function")
    with pytest.raises(ValueError, match="Mamba2Mixer: limits its time steps in a way"):
        Engine(model)
    Engine(case_of("mamba2")[0])


@pytest.mark.parametrize("options", [{"method": "tree"}, {"method": "draft_model", "cape": True}])
def test_trees_are_refused(options):
    attending, (model, _) = random_model("llama"), case_of("mamba")
    message = "MambaForCausalLM: a model with recurrent layers verifies chains, not token trees"
    with pytest.raises(ValueError, match=message):
        Engine(model, attending, spec=options)
    with pytest.raises(ValueError, match="drafter: MambaForCausalLM has recurrent layers and can"):
        Engine(attending, model, spec=options)


def test_a_drafter_of_ones_own_that_proposes_trees():
    model, expected = case_of("lfm2")
    drafter = Knowing(expected)
    chain = drafter.propose

    def tree(batch):
        ids = chain(batch).token_ids
        parents = torch.arange(K, dtype=torch.int32).expand(ids.shape).contiguous()
        return Proposal(ids, parents, sibling_rule="target_only")

    drafter.propose = tree
    engine = Engine(model, drafter, spec=SpecConfig("draft_model", num_speculative_tokens=K))
    with pytest.raises(ValueError, match="with recurrent layers verifies chains") as error:
        engine.generate(PROMPTS, GREEDY)
    assert texts(error.value.outputs) == expected


def test_glide_reads_the_layers_that_attend():
    model, expected = case_of("lfm2")
    glide = random_glide(model)
    assert texts(Engine(model, glide, spec="glide").generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(ValueError, match="drafter: has 1 layers, the target 0"):
        Engine(case_of("mamba")[0], glide, spec="glide")


def test_shared_prefixes_are_refused():
    model, _ = case_of("lfm2")
    message = "prefix_caching: Lfm2ForCausalLM has recurrent layers, whose state at the end of a"
    with pytest.raises(ValueError, match=message):
        Engine(model, config=EngineConfig(prefix_caching=True))


def test_states_count_as_memory_of_the_cache():
    model, expected = case_of("mamba2")
    # Of each of 2 layers and 2 states: 128 channels by 4 tokens, and 96 by 8 numbers.
    size = 2 * 2 * 4 * (128 * 4 + 96 * 8)
    config = {"max_batch_size": 8, "kv_cache_memory": 8 * size}
    assert texts(Engine(model, config=config).generate(PROMPTS[0], GREEDY)) == expected[:1]
    assert target_runner(Engine(model)).paged_model.bytes_per_sequence == size
    with pytest.raises(ValueError, match=rf"of 8 requests \(max_batch_size\) {8 * size}"):
        Engine(model, config=config | {"kv_cache_memory": 8 * size - 1})


def test_layers_that_share_an_attention_are_refused():
    config = Zamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        layers_block_type=["mamba", "hybrid"],
        num_attention_heads=2,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_d_state=8,
        intermediate_size=48,
    )
    with pytest.raises(ValueError, match="Zamba2ForCausalLM: layers that share their attention"):
        Engine(AutoModelForCausalLM.from_config(config))

"""`hf_generate` does what `model.generate` does, or refuses by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from fastspec import HFGenerator, hf, hf_generate
from fastspec.engine import hf_processors
from fastspec.models.paged_model import cache_name
from fastspec_kernels.testing import chi_square

from ..models import EOS_ID, byte_tokenizer, perturbed, random_model, random_t5
from .helpers import ALPHA, LENGTH, PROMPT, VOCAB_SIZE, exact_distribution, small_model

IDS = torch.tensor([[0, 0, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10], [0, 40, 7, 40, 7, 40]])
MASK = (IDS != 0).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK}
ONE = {"input_ids": IDS[1:2]}
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def assert_same(model, inputs, drafter=None, **options):
    """The ids that transformers' own loop and the engine write."""
    expected = model.generate(**inputs, **options)
    with_engine = {"drafter": drafter, "custom_generate": hf_generate}
    assert model.generate(**inputs, **options, **with_engine).tolist() == expected.tolist()
    return expected


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "gpt_neox", "opt", "gemma3", "qwen3", "mamba", "lfm2"]
)
def test_greedy_batches_with_padding(architecture):
    model = random_model(architecture)
    assert_same(model, BATCH, perturbed(model, 0.03), **GREEDY)


@pytest.mark.parametrize(
    "spec",
    ["none", "draft_model", "tree", "prompt_lookup", "mag", "ngram", "cascade", {"cape": True}],
    ids=str,
)
def test_every_drafter(model, drafter, spec):
    expected = model.generate(**BATCH, **GREEDY)
    needs_draft = spec in ("draft_model", "tree", "cascade") or isinstance(spec, dict)
    draft = [drafter] if spec == "cascade" else drafter if needs_draft else None
    generator = HFGenerator(model, draft, spec)
    ids = model.generate(**BATCH, **GREEDY, custom_generate=generator)
    assert ids.tolist() == expected.tolist()
    assert generator.generate(BATCH, **GREEDY).tolist() == expected.tolist()
    assert generator.engine.stats.num_output_tokens == 2 * 3 * 20
    assert (generator.engine.stats.num_drafts > 0) is (spec != "none")


def test_encoder_decoders():
    model = random_t5()
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [9, 8, 7, 6]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    }
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3}
    more = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    more["logits_processor"] = LogitsProcessorList([Shift()])
    assert_same(model, inputs, perturbed(model, 0.05), **options)
    assert_same(model, inputs, perturbed(model, 0.05), **options | more)
    output = hf_generate(model, **inputs, **options, return_dict_in_generate=True)
    assert type(output).__name__ == "GenerateEncoderDecoderOutput"
    with pytest.raises(ValueError, match=r"decoder_input_ids: expected \[0\]"):
        hf_generate(model, **inputs, **options, decoder_input_ids=torch.tensor([[0, 3]] * 2))


def test_encoder_outputs_are_those_of_the_inputs():
    model = random_t5()
    ids, others = torch.tensor([[5, 6, 7, 0], [9, 8, 7, 6]]), torch.tensor([[20, 31, 8, 0]] * 2)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 1, "num_return_sequences": 2}

    def encoded(token_ids):  # anew for each call, as generate changes it
        mask = inputs["attention_mask"]
        return {"encoder_outputs": model.get_encoder()(token_ids, attention_mask=mask)}

    ours = options | {"custom_generate": hf_generate}
    expected = model.generate(**inputs, **encoded(ids), **options)
    assert model.generate(**inputs, **encoded(ids), **ours).tolist() == expected.tolist()
    assert model.generate(**inputs, **encoded(others), **options).tolist() != expected.tolist()
    with pytest.raises(ValueError, match="encoder_outputs: expected those of input_ids"):
        model.generate(**inputs, **encoded(others), **ours)
    model.train()  # those of generate itself come from an encoder with dropout
    assert model.generate(**inputs, **ours).tolist() == expected.tolist()


FAVOURED = [[[40], 5.0], [[9], 5.0]]  # each of them in a prompt of another row
PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [74, 15]},
    "min_length": {"min_length": 14, "eos_token_id": [74, 15]},
    "bad_words": {"bad_words_ids": [[74], [15, 203], [33]]},
    "single bad words": {"bad_words_ids": [[74], [33]], "repetition_penalty": 1.2},
    "suppress": {"suppress_tokens": [74, 15], "begin_suppress_tokens": [172]},
    "bias": {"sequence_bias": [[[74], -3.0], [[33], 2.0]], "repetition_penalty": 1.2},
    "long bias": {"sequence_bias": [[[74, 32], -8.0], [[33], 2.0]]},
    "no_repeat": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.1, "min_new_tokens": 5},
    "encoder_repetition": {"encoder_repetition_penalty": 2.0, "repetition_penalty": 1.1},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": FAVOURED},
    "forced_eos": {"forced_eos_token_id": 3},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 74},
    "renormalized": {"renormalize_logits": True, "remove_invalid_values": True},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, 74 + row, 15, 33]},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processors_of_a_configuration(model, drafter, name):
    plain = model.generate(**BATCH, **GREEDY).tolist()
    ids = assert_same(model, BATCH, drafter, **GREEDY, **PROCESSED[name])
    assert name == "renormalized" or ids.tolist() != plain


class Shift(LogitsProcessor):
    """Favours a token that follows from the text, its padding and its place in the batch."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(input_ids))
        favoured = (input_ids.sum(dim=1) + rows + input_ids.shape[1]) % scores.shape[1]
        scores[rows, favoured] += 4.0
        return scores


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_processors_of_the_user(model, drafter, inputs):
    options = GREEDY | {"logits_processor": LogitsProcessorList([Shift()])}
    ids = assert_same(model, inputs, drafter, **options)
    assert ids.tolist() != model.generate(**inputs, **GREEDY).tolist()
    assert_same(model, inputs, drafter, **options, repetition_penalty=1.3, bad_words_ids=[[74]])


def test_transformers_own_processors_get_one_row(model, monkeypatch):
    """Those that look at nothing else; the others get it as often as the batch has rows."""
    sizes = {kind: set() for kind in (NoRepeatNGramLogitsProcessor, TypicalLogitsWarper, Shift)}

    def noting(kind, call):
        def noted(self, input_ids, scores):
            sizes[kind].add((len(input_ids), len(scores)))
            return call(self, input_ids, scores)

        return noted

    for kind in sizes:
        monkeypatch.setattr(kind, "__call__", noting(kind, kind.__call__))
    options = {"no_repeat_ngram_size": 2, "typical_p": 0.9, "logits_processor": [Shift()]}
    hf_generate(model, **BATCH, **GREEDY | {"do_sample": True}, **options)
    assert [*sizes.values()] == [{(1, 1)}, {(1, 1)}, {(3, 3)}]


@pytest.mark.parametrize("kind", hf_processors.ROW_BY_ROW, ids=lambda kind: kind.__name__)
def test_rows_of_these_processors_depend_on_no_other(kind):
    given = {
        "ExponentialDecayLengthPenalty": ((2, 1.5), EOS_ID, 3),
        "ForcedBOSTokenLogitsProcessor": (7,),
        "ForcedEOSTokenLogitsProcessor": (8, EOS_ID),
        "InfNanRemoveLogitsProcessor": (),
        "LogitNormalization": (),
        "MinLengthLogitsProcessor": (20, EOS_ID),
        "MinNewTokensLengthLogitsProcessor": (3, 9, EOS_ID),
        "NoBadWordsLogitsProcessor": ([[7, 40]],),
        "SequenceBiasLogitsProcessor": ([[[7, 40], 2.0]],),
        "SuppressTokensAtBeginLogitsProcessor": ([5, 9], 6),
        "SuppressTokensLogitsProcessor": ([5, 9],),
        "TopKLogitsWarper": (4,),
        "NoRepeatNGramLogitsProcessor": (2,),
        "EpsilonLogitsWarper": (0.01,),
        "EtaLogitsWarper": (0.01,),
    }
    processor = kind(*given.get(kind.__name__, (0.7,)))
    scores = torch.randn(len(IDS), 300)
    for ids in (IDS, IDS[:, :1]):
        whole = processor(ids, scores.clone())
        for row in range(len(ids)):
            rows = slice(row, row + 1)
            own = hf_processors.processed([processor], ids[rows], scores[rows], row, len(ids))
            assert own.equal(whole[rows])


def test_a_processor_that_raises(model):
    def broken(input_ids, scores):
        raise RuntimeError("no such state")

    with pytest.raises(ValueError, match="no such state"):
        hf_generate(model, **ONE, **GREEDY, logits_processor=LogitsProcessorList([broken]))


class After(StoppingCriteria):
    """Stops rows whose last token is a multiple, from a padded length on."""

    def __init__(self, factor, least=0):
        self.factor, self.least = factor, least

    def __call__(self, input_ids, scores, **_):
        return (input_ids[:, -1] % self.factor == 0) & (input_ids.shape[1] >= self.least)


@pytest.mark.parametrize("criterion", [After(4), After(3, 12), After(1)], ids=["4", "3", "1"])
def test_criteria_cut_an_accepted_run(model, criterion):
    """The drafter is always right, so that most criteria hold inside a run."""
    options = GREEDY | {"eos_token_id": EOS_ID}
    options["stopping_criteria"] = StoppingCriteriaList([criterion])
    ids = assert_same(model, BATCH, model, **options)
    assert ids.tolist() != model.generate(**BATCH, **GREEDY).tolist()
    generator = HFGenerator(model, model, {"num_speculative_tokens": 8})
    assert generator.generate(BATCH, **options).tolist() == ids.tolist()
    assert generator.engine.metrics()["num_requests_running"] == 0
    assert_same(model, ONE, model, **options | {"eos_token_id": None})


def test_lengths_and_ends(model, drafter):
    plain = model.generate(**BATCH, **GREEDY)
    ends = [int(plain[0, 12]), int(plain[1, 15])]
    assert assert_same(model, BATCH, drafter, **GREEDY, eos_token_id=ends).shape[1] <= 26
    assert_same(model, BATCH, drafter, do_sample=False, max_length=13)
    assert_same(model, BATCH, drafter, do_sample=False)
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    ids = hf_generate(model, BATCH, generation_config=config, drafter=drafter)
    assert ids.tolist() == plain[:, :11].tolist()
    ids = hf_generate(model, **BATCH, **GREEDY, assistant_model=drafter)
    assert ids.tolist() == plain.tolist()
    assert hf_generate(model, IDS[1:], **GREEDY).shape == (2, 26)
    with pytest.raises(ValueError, match=r"max_length|max_model_len"):
        hf_generate(model, **ONE, max_new_tokens=600)
    with pytest.raises(ValueError, match="max_length: 26 prompt and output tokens"):
        HFGenerator(model, config={"max_model_len": 20}).generate(**ONE, **GREEDY)


def test_stop_strings(model, drafter):
    tokenizer = byte_tokenizer()
    model = random_model("llama", seed=2, vocab_size=95)
    text = tokenizer.decode(model.generate(**ONE, **GREEDY)[0, 6:])
    stop = {"stop_strings": [text[7:10], "never"], "tokenizer": tokenizer}
    expected = model.generate(**ONE, **GREEDY, **stop)
    assert expected.shape[1] < 26
    assert hf_generate(model, **ONE, **GREEDY, **stop, drafter=model).tolist() == expected.tolist()
    config = GenerationConfig(stop_strings=stop["stop_strings"], **GREEDY)
    options = {"generation_config": config, "tokenizer": tokenizer}
    assert hf_generate(model, **ONE, **options).tolist() == expected.tolist()
    assert config.stop_strings == stop["stop_strings"]
    with pytest.raises(ValueError, match="stop_strings: these need a tokenizer"):
        hf_generate(model, **ONE, **GREEDY, stop_strings="a")
    model.generation_config.stop_strings = ["a"]
    with pytest.raises(ValueError, match=r"stop_strings: set in model\.generation_config"):
        hf_generate(model, **ONE, **GREEDY, **stop)


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_streamers_get_what_transformers_gives_them(model, drafter, inputs):
    plain = model.generate(**inputs, **GREEDY)
    options = GREEDY | {"eos_token_id": [int(plain[0, 12]), int(plain[-1, 9])]}
    theirs, ours, handed_on = Recorder(), Recorder(), Recorder()
    model.generate(**inputs, **options, streamer=theirs)
    hf_generate(model, **inputs, **options, streamer=ours, drafter=drafter)
    assert ours.seen == theirs.seen
    draft = {"drafter": drafter, "custom_generate": hf_generate}
    model.generate(**inputs, **options, token_streamer=handed_on, **draft)
    assert handed_on.seen == theirs.seen


SAMPLED = {"do_sample": True, "temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.03}
SMALL = {"max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}


def counts_of(model, num, **options):
    """How often each text of LENGTH tokens is written, after seed 11 of torch."""
    set_seed(11)
    drafter = perturbed(model, 0.35)
    options = SAMPLED | SMALL | {"num_return_sequences": num, "drafter": drafter} | options
    ids = hf_generate(model, torch.tensor([PROMPT]), **options)
    counts = np.zeros((VOCAB_SIZE,) * LENGTH)
    np.add.at(counts, tuple(ids[:, len(PROMPT) :].T.numpy()), 1)
    return counts


def test_samples_follow_the_distribution():
    model = small_model()
    distribution = exact_distribution(
        model, {name: SAMPLED[name] for name in SAMPLED if name != "do_sample"}
    )
    assert chi_square(counts_of(model, 2000), distribution) > ALPHA


class Favour(LogitsProcessor):
    """Not one of transformers', which have parameters of ours."""

    def __call__(self, input_ids, scores):
        scores[:, 0] += 2.0
        return scores


def test_samples_of_a_warper_before_another_processor_follow_the_distribution():
    """It stays a processor: what comes after it must see its scores."""
    model = small_model()

    def biased(ids):
        output = model(ids)
        output.logits[..., 0] += 2.0 * 1.7
        return output

    biased.config = model.config
    order = [TemperatureLogitsWarper(1.7), Favour()]
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    options["logits_processor"] = LogitsProcessorList(order)
    assert (
        chi_square(
            counts_of(model, 500, **options), exact_distribution(biased, {"temperature": 1.7})
        )
        > ALPHA
    )


def test_the_seed_of_torch_repeats_a_sample(model, drafter):
    options = GREEDY | {"do_sample": True, "drafter": drafter}
    texts = []
    for seed in (3, 3, 4):
        set_seed(seed)
        texts.append(hf_generate(model, **BATCH, **options).tolist())
    assert texts[0] == texts[1] != texts[2]
    before = torch.random.get_rng_state()
    hf_generate(model, **BATCH, **GREEDY)
    assert torch.equal(torch.random.get_rng_state(), before)
    two = hf_generate(model, **ONE, **options, num_return_sequences=2).tolist()
    assert two[0] != two[1]


def test_outputs_as_mappings(model, drafter):
    expected = model.generate(**BATCH, **GREEDY, return_dict_in_generate=True)
    output = hf_generate(model, BATCH, **GREEDY, return_dict_in_generate=True, drafter=drafter)
    assert type(output) is type(expected)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.scores is None


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.5},
        {"output_scores": True, "return_dict_in_generate": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache()},
        {"position_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])},
        {"position_ids": torch.tensor([[0, 1, 2]])},
        {"token_type_ids": torch.zeros(1, 6, dtype=torch.long)},
        {"use_mtp": True, "drafter": "tiny-draft"},
        {"assistant_early_exit": 1, "prompt_lookup_num_tokens": 3},
        {"assistant_confidence_threshold": 0.2},
        {"num_assistant_tokens_schedule": "other"},
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]])},
        {"synced_gpus": True},
        {"token_healing": True},
        {"assistant_tokenizer": byte_tokenizer()},
        {"prompt_lookup_num_tokens": 3, "assistant_model": "tiny-draft"},
        {"assistant_early_exit": 1, "drafter": "tiny-draft"},
        {"input_ids": "text"},
        {"input_ids": [[5, 6, 7]]},
        {"input_ids": torch.tensor([5, 6, 7])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_it_cannot_honour_is_refused_by_name(model, options):
    target = random_model("gpt2") if "token_type_ids" in options else model
    name = next(iter(options))
    names = {"past_key_values": f"^{cache_name(target)}"}  # transformers renames it
    with pytest.raises(ValueError, match=names.get(name, f"^{name}")) as error:
        hf_generate(target, **ONE | GREEDY | options)
    assert "\n" not in str(error.value)


def test_schedule_and_early_exit(model, drafter):
    expected = model.generate(**ONE, **GREEDY)
    for options in (
        {"assistant_model": drafter, "num_assistant_tokens_schedule": "heuristic"},
        {"assistant_early_exit": 1, "num_assistant_tokens": 3},
    ):
        assert torch.equal(hf_generate(model, **ONE, **GREEDY, **options), expected)


def test_more_refusals(model, drafter):
    with pytest.raises(ValueError, match=r"inputs: expected a tensor of token ids .* got 'text'"):
        hf_generate(model, "text", **GREEDY)
    positions = model.config.max_position_embeddings
    long = torch.ones(1, positions - 1, dtype=torch.long)
    message = f"max_length: expected at most the model's {positions} positions"
    with pytest.raises(ValueError, match=message):
        hf_generate(model, long, **GREEDY)
    with pytest.raises(ValueError, match="assistant_model: an alias of drafter"):
        hf_generate(model, **ONE, **GREEDY, drafter=drafter, assistant_model=drafter)
    with pytest.raises(ValueError, match="cannot go with spec"):
        hf_generate(model, **ONE, **GREEDY, prompt_lookup_num_tokens=3, spec="mag")
    criteria = StoppingCriteriaList([After(4)])
    options = {"stopping_criteria": criteria, "eos_token_id": None, "pad_token_id": None}
    bare = random_model("llama", eos_token_id=None)
    with pytest.raises(ValueError, match="pad_token_id: needed for rows"):
        hf_generate(bare, **BATCH, max_new_tokens=3, **options)
    right = {"input_ids": BATCH["input_ids"], "attention_mask": BATCH["attention_mask"].flip(1)}
    repeats = {"no_repeat_ngram_size": 2}
    with pytest.raises(
        ValueError, match=r"attention_mask: row . is padded on the right, which NoR"
    ):
        hf_generate(model, **right, **GREEDY, **repeats)
    generator = HFGenerator(model, drafter)
    with pytest.raises(ValueError, match="for another LlamaForCausalLM"):
        drafter.generate(**ONE, **GREEDY, custom_generate=generator)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        generator.generate(**ONE, **GREEDY, num_assistant_tokens=3)
    watermark = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor keeps state"):
        hf_generate(model, **ONE, **GREEDY | {"do_sample": True}, watermarking_config=watermark)


def test_fields_of_assisted_generation(model, drafter, monkeypatch):
    made = []
    monkeypatch.setattr(
        hf, "HFGenerator", lambda *args: made.append(HFGenerator(*args)) or made[-1]
    )
    expected = model.generate(**BATCH, **GREEDY).tolist()
    fields = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    assert hf_generate(model, BATCH, **GREEDY, **fields).tolist() == expected
    spec = made[-1].engine.spec
    assert (spec.method, spec.num_speculative_tokens, spec.lookup_lengths) == (
        "prompt_lookup",
        4,
        (1, 3),
    )
    assert made[-1].engine.stats.num_drafts > 0
    fields = {"num_assistant_tokens": 3, "assistant_model": drafter}
    assert hf_generate(model, BATCH, **GREEDY, **fields).tolist() == expected
    assert len(made[-1].engine.stats.num_accepted_tokens_per_pos) == 3
    assert made[-1].engine.max_model_len == 26


def test_a_wrapper_of_lora_layers(model, drafter):
    """PEFT's model calls `generate` of the one that it wraps."""
    config = SimpleNamespace(peft_type="LORA")
    wrapper = SimpleNamespace(active_peft_config=config, get_base_model=lambda: model)
    generator = HFGenerator(wrapper, drafter)
    expected = model.generate(**ONE, **GREEDY).tolist()
    assert model.generate(**ONE, **GREEDY, custom_generate=generator).tolist() == expected
    assert generator.generate(**ONE, **GREEDY).tolist() == expected

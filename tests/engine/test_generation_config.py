"""What a model's own generation_config changes in `generate`, and how requests get the same."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ForcedEOSTokenLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from fastspec import Engine, HFGenerator, SamplingParams
from fastspec.engine import generation_config as told

from ..models import EOS_ID, byte_tokenizer, random_model

PROMPT = [5, 7, 40, 9, 11]
NUM_NEW = 16


@pytest.fixture
def model():
    return random_model("llama")


@pytest.fixture
def warnings(monkeypatch):
    """What is logged."""
    messages = []
    told._warn_once.cache_clear()
    monkeypatch.setattr(told.logger, "warning", messages.append)
    yield messages
    told._warn_once.cache_clear()


def generated(model):
    """New tokens of `generate`, as the model's own generation_config has it."""
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW)
    return ids[0, len(PROMPT) :].tolist()


def written(engine, **options):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **options)
    (output,) = engine.generate([PROMPT], params)
    return list(output.token_ids)


def test_only_the_generation_config_ends_texts(model, tmp_path, warnings):
    """As in `generate`: also where config.json and the tokenizer name a token that would."""
    plain = generated(model)
    model.config.eos_token_id, model.generation_config.eos_token_id = plain[3], None
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.eos_token_id == plain[3]
    assert written(Engine(tmp_path, spec="none")) == plain == generated(loaded)
    (message,) = warnings
    assert "no eos_token_id" in message
    assert f"stop_token_ids=[{plain[3]}]" in message
    end = plain.index(plain[3])
    assert written(Engine(loaded), stop_token_ids=[plain[3]]) == plain[: end + 1]
    assert len(warnings) == 1  # once a process
    bare = random_model("llama", eos_token_id=None)
    assert written(Engine(bare)) == generated(bare)
    assert len(warnings) == 1
    Engine(bare, tokenizer=byte_tokenizer())
    assert f"stop_token_ids=[{EOS_ID}]" in warnings[1]


BAN = -float("inf")
# By name: what the model's generation_config has, where its plain text is `ids`; the parameter that
# the warning names, and its value that does the same.
FIELDS = {
    "repetition_penalty": lambda ids: (1.3, "repetition_penalty", 1.3),
    "suppress_tokens": lambda ids: (ids[:2], "logit_bias", dict.fromkeys(ids[:2], BAN)),
    "bad_words_ids": lambda ids: ([ids[:1], ids[3:5]], "bad_words", [ids[:1], ids[3:5]]),
    "min_new_tokens": lambda ids: (12, "min_tokens", 12),
    "min_length": lambda ids: (12 + len(PROMPT), "min_tokens", 12),
    "no_repeat_ngram_size": lambda ids: processor(1, NoRepeatNGramLogitsProcessor(1)),
    "begin_suppress_tokens": lambda ids: processor(
        ids[:1], SuppressTokensAtBeginLogitsProcessor(ids[:1], len(PROMPT))
    ),
    "forced_eos_token_id": lambda ids: processor(
        9, ForcedEOSTokenLogitsProcessor(len(PROMPT) + NUM_NEW, 9)
    ),
    "sequence_bias": lambda ids: processor(
        [[ids[:1], -9.0], [ids[3:5], -9.0]],
        SequenceBiasLogitsProcessor([[ids[:1], -9.0], [ids[3:5], -9.0]]),
    ),
}


def processor(value, same):
    return value, "logits_processors", [same]


@pytest.mark.parametrize("name", FIELDS)
def test_what_requests_do_not_apply_is_named_with_how_to(model, warnings, name):
    plain = generated(model)
    value, option, same = FIELDS[name](plain)
    if name.startswith("min_"):
        model.generation_config.eos_token_id = plain[6]
    setattr(model.generation_config, name, value)
    expected = generated(model)
    engine = Engine(model)
    (message,) = warnings
    assert f"{name}={value!r} (SamplingParams.{option}" in message
    assert written(engine) != expected == written(engine, **{option: same})


def test_what_is_not_supported_and_what_changes_nothing(model, warnings):
    config = model.generation_config
    config.temperature, config.top_p, config.do_sample = 0.6, 0.9, True  # of samples alone
    config.repetition_penalty, config.no_repeat_ngram_size, config.suppress_tokens = 1.0, 0, []
    config.max_new_tokens = 5
    Engine(model)
    assert not warnings
    config.num_beams, config.length_penalty = 4, 2.0
    Engine(model)
    (message,) = warnings
    assert message.endswith("unless they ask for it: num_beams=4 (not supported)")
    config.num_beams, config.repetition_penalty = 1, 1.2
    HFGenerator(model)  # `generate` applies it
    assert len(warnings) == 1

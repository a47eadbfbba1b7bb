"""What ends a request, what it reports, and that requests do not disturb each other."""

import copy
import pickle
import re
from dataclasses import replace

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter

from ..models import EOS_ID, byte_tokenizer, random_model
from .helpers import finish
from .probes import assert_blocks_came_back, record_releases

TEMPLATE = {"chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"}}
PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10, [99], [60, 61, 62, 63]]


def engine_of(model, drafter=None, num_draft=4, **config):
    return Engine(
        model,
        drafter,
        tokenizer=byte_tokenizer(),
        spec=SpecConfig(num_speculative_tokens=num_draft),
        config=EngineConfig(**config),
    )


def sampled(seed, **kwargs):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 24, **kwargs})


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact(model, drafter, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for output in engine_of(model, drafter).generate(PROMPTS, params):
        assert len(output.token_ids) == max_tokens
        assert output.finish_reason == "length"
        assert len(output.sources) == len(output.drafters) == max_tokens
        assert output.stats.num_output_tokens == max_tokens


def test_model_length_ends_a_request(model, drafter):
    engine = engine_of(model, drafter, max_model_len=30)
    (output,) = engine.generate([PROMPTS[2]], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.token_ids) == 30
    assert output.finish_reason == "length"


def test_stop_ids_cut_an_accepted_run_at_the_first_match(model):
    plain = engine_of(model).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30))
    engine = engine_of(model, model, num_draft=8)
    for prompt, full in zip(PROMPTS, plain, strict=True):
        for stop in (full.token_ids[5], full.token_ids[11]):
            params = SamplingParams(
                temperature=0, max_tokens=30, stop_token_ids=[stop, full.token_ids[20]]
            )
            (output,) = engine.generate([prompt], params)
            first = min(full.token_ids.index(stop), full.token_ids.index(full.token_ids[20]))
            assert output.token_ids == full.token_ids[: first + 1]
            assert output.finish_reason == "stop"
            assert output.stop_reason == output.token_ids[-1]
            assert output.stats.num_output_tokens == len(output.token_ids) == len(output.sources)


def test_eos_ends_unless_ignored(model):
    (free,) = engine_of(model).generate(
        [PROMPTS[0]], SamplingParams(temperature=0, ignore_eos=True)
    )
    model.generation_config.eos_token_id = free.token_ids[7]
    try:
        engine = engine_of(model, model, num_draft=5)
        (output,) = engine.generate([PROMPTS[0]], SamplingParams(temperature=0))
    finally:
        model.generation_config.eos_token_id = EOS_ID
    end = free.token_ids.index(free.token_ids[7])
    assert output.token_ids == free.token_ids[: end + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_without_max_tokens_the_model_length_ends_a_request(model, drafter):
    engine = engine_of(model, drafter, max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = engine.generate(PROMPTS[0], params)
    assert len(output.prompt_token_ids) + len(output.token_ids) == 200
    assert output.finish_reason == "length"


@pytest.mark.parametrize("num_draft", [1, 3, 8])
def test_stop_strings_cut_text_and_ids_at_one_token(model, num_draft):
    tokenizer = byte_tokenizer()
    ascii_model = random_model("llama", seed=2, vocab_size=95)
    full = engine_of(ascii_model).generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )[0]
    stop = full.text[9:12]
    params = SamplingParams(temperature=0, max_tokens=40, stop=["\x00never", stop], ignore_eos=True)
    engine = engine_of(ascii_model, ascii_model, num_draft=num_draft)
    (output,) = engine.generate(PROMPTS[0], params)
    where = full.text.find(stop)
    assert output.text == full.text[:where]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert full.stop_reason is None
    assert tokenizer.decode(output.token_ids) == full.text[: where + 3]
    streamed = list(engine.stream(PROMPTS[0], params))
    assert "".join(event.text for event in streamed) == output.text
    (kept,) = engine.generate(PROMPTS[0], replace(params, include_stop_str_in_output=True))
    assert kept.token_ids == output.token_ids
    assert kept.text == full.text[: where + 3]
    assert kept.stop_reason == stop


@pytest.mark.parametrize(("speculative", "seed"), [(False, 26), (True, 5)])
def test_special_tokens_in_the_text(model, speculative, seed):
    """The text that is streamed is the decoded ids, special tokens and all."""
    tokenizer = byte_tokenizer()
    engine = engine_of(model, model if speculative else None, num_draft=5)
    (plain,) = engine.generate(PROMPTS[0], sampled(seed, max_tokens=40, ignore_eos=True))
    assert EOS_ID in plain.token_ids, "of another seed"
    assert "<|end|>" not in plain.text
    params = sampled(seed, max_tokens=40, ignore_eos=True, skip_special_tokens=False)
    *events, last = engine.stream(PROMPTS[0], params)
    whole = tokenizer.decode(plain.token_ids)
    assert "".join(event.text for event in [*events, last]) == last.output.text == whole
    stopping = {"stop": "<|end|>", "include_stop_str_in_output": True}
    (stopped,) = engine.generate(PROMPTS[0], replace(params, **stopping))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index("<|end|>") + 7]
    ending = {"ignore_eos": False, "include_stop_str_in_output": True}
    (ended,) = engine.generate(PROMPTS[0], replace(params, **ending))
    assert (ended.text, ended.token_ids) == (stopped.text, stopped.token_ids)
    assert engine.generate(PROMPTS[0], replace(params, ignore_eos=False))[0].text == ended.text[:-7]


def test_same_seed_same_tokens_whatever_the_batch(model, drafter):
    params = [sampled(seed) for seed in range(len(PROMPTS))]
    together = engine_of(model, drafter).generate(PROMPTS, params)
    alone = [
        engine_of(model, drafter).generate([prompt], one)[0]
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    reverse = engine_of(model, drafter, max_batch_size=2).generate(PROMPTS[::-1], params[::-1])
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.token_ids for o in together] == [o.token_ids for o in reverse[::-1]]
    zero, one = engine_of(model).generate([PROMPTS[0]] * 2, [sampled(0), sampled(1)])
    assert zero.token_ids != one.token_ids


def test_preemption_changes_nothing(model, drafter):
    params = [sampled(seed, ignore_eos=True) for seed in range(len(PROMPTS))]
    roomy = engine_of(model, drafter).generate(PROMPTS, params)
    tight = engine_of(model, drafter, block_size=4, num_blocks=13)
    releases = record_releases(tight)
    outputs = tight.generate(PROMPTS, params)
    assert len(releases) > len(PROMPTS), "nothing was preempted"
    assert [o.token_ids for o in outputs] == [o.token_ids for o in roomy]
    assert [o.stats.num_steps for o in outputs] == [o.stats.num_steps for o in roomy]


@pytest.mark.parametrize("speculative", [False, True])
def test_nan_logits_fail_that_request_alone(model, speculative):
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = engine_of(model).generate(PROMPTS, greedy)
    broken = random_model("llama")
    with torch.no_grad():
        broken.model.embed_tokens.weight[99] = float("nan")
    outputs = engine_of(broken, model if speculative else None).generate(PROMPTS, greedy)
    assert outputs[3].finish_reason == "error"
    assert "NaN" in outputs[3].error
    assert outputs[3].token_ids == ()
    untouched = [i for i, o in enumerate(expected) if 99 not in o.prompt_token_ids + o.token_ids]
    assert len(untouched) >= 3
    for index in untouched:
        assert outputs[index].token_ids == expected[index].token_ids


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_rejected_draft_that_makes_nan_logits_fails_nothing(temperature, rule):
    broken = random_model("llama")
    with torch.no_grad():
        broken.model.embed_tokens.weight[99] = float("nan")

    class Proposes99(NoDrafter):
        name = "99"

        def propose(self, batch):
            shape = (len(batch.requests), batch.num_speculative_tokens)
            return Proposal(torch.full(shape, 99, dtype=torch.int32))

    params = sampled(3, temperature=temperature, ignore_eos=True)
    spec = SpecConfig(rejection_sample_method=rule)
    outputs = Engine(broken, Proposes99(), spec=spec).generate(PROMPTS[:3], params)
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    if temperature == 0 or rule == "coupled":
        plain = Engine(broken, spec=spec).generate(PROMPTS[:3], params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_logprobs_are_the_targets(model, drafter):
    params = sampled(5, temperature=0.7, logprobs=True, ignore_eos=True)
    (output,) = engine_of(model, drafter).generate([PROMPTS[1]], params)
    with torch.no_grad():
        logits = model(torch.tensor([output.prompt_token_ids + output.token_ids])).logits[0]
    rows = logits[len(PROMPTS[1]) - 1 : -1].div(0.7).log_softmax(-1)
    expected = rows.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_sources_and_statistics_agree(model, drafter):
    engine = engine_of(model, drafter, num_draft=3)
    outputs = engine.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    )
    for output in outputs:
        stats = output.stats
        assert output.sources.count("draft") == stats.num_accepted_tokens
        assert output.drafters.count("draft_model") == stats.num_accepted_tokens
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
        assert sum(stats.acceptance_histogram) == stats.num_steps
        assert set(output.sources) <= {"draft", "recovered", "bonus", "target"}
    total = sum(output.stats.num_accepted_tokens for output in outputs)
    assert engine.stats.num_accepted_tokens == total
    assert all(seconds > 0 for seconds in engine.stats.seconds.values())


def test_stream_is_the_output(model, drafter):
    engine = engine_of(model, drafter)
    (expected,) = engine.generate(PROMPTS[1], sampled(3))
    events = list(engine.stream(PROMPTS[1], sampled(3)))
    assert events[-1].output.token_ids == expected.token_ids
    assert tuple(t for event in events for t in event.token_ids) == expected.token_ids
    assert tuple(event.source for event in events[:-1]) == expected.sources
    assert "".join(event.text for event in events) == expected.text == events[-1].output.text


def test_leaving_a_stream_frees_everything(model, drafter):
    engine = engine_of(model, drafter)
    for _ in engine.stream(PROMPTS[0], sampled(1)):
        break
    assert not engine.has_unfinished
    assert_blocks_came_back(engine)


def test_abort_returns_what_there_is(model, drafter):
    engine = engine_of(model, drafter)
    kept = engine.add_request(PROMPTS[0], sampled(1, ignore_eos=True))
    gone = engine.add_request(PROMPTS[1], sampled(2, ignore_eos=True))
    engine.step()
    output = engine.abort(gone)
    assert output.finish_reason == "abort"
    assert output.token_ids
    assert engine.abort(gone) is None
    outputs = finish(engine)
    assert [*outputs] == [kept]
    (alone,) = engine_of(model, drafter).generate([PROMPTS[0]], sampled(1, ignore_eos=True))
    assert outputs[kept].token_ids == alone.token_ids


def test_switching_speculation_between_steps(model, drafter):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = engine_of(model).generate(PROMPTS, params)
    engine = engine_of(model)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs, steps = {}, 0
    while engine.has_unfinished:
        steps += 1
        if steps == 3:
            engine.enable_spec_dec(drafter, n_spec_tokens=3)
        if steps == 5:
            engine.disable_spec_dec()
            assert not engine.is_speculative
        if steps == 7:
            engine.enable_spec_dec(n_spec_tokens=2)
        outputs |= {e.request_id: e.output for e in engine.step() if e.output}
    assert [outputs[i].token_ids for i in ids] == [o.token_ids for o in expected]
    engine.clear_spec_dec()
    with pytest.raises(ValueError, match="drafter: none to enable"):
        engine.enable_spec_dec()


def test_several_prompts_in_one_stream(model, drafter):
    engine = engine_of(model, drafter, max_batch_size=3)
    params = [sampled(seed, max_tokens=6 + seed) for seed in range(len(PROMPTS))]
    expected = engine.generate(PROMPTS, params)
    events = list(engine.stream(PROMPTS, params))
    for index, output in enumerate(expected):
        own = [event for event in events if event.prompt_index == index]
        assert own[-1].output.token_ids == output.token_ids
        assert tuple(t for event in own for t in event.token_ids) == output.token_ids
        assert "".join(event.text for event in own) == output.text
    first = [event.prompt_index for event in events if event.token_ids][: len(PROMPTS) * 2]
    assert len(set(first)) > 1, "one after the other"
    assert_blocks_came_back(engine)


def test_leaving_a_stream_of_several_prompts_frees_everything(model, drafter):
    engine = engine_of(model, drafter)
    for event in engine.stream(PROMPTS, sampled(1)):
        if event.prompt_index == 1:
            break
    del event
    assert not engine.has_unfinished
    assert_blocks_came_back(engine)


def test_a_bar_of_finished_prompts(model, drafter, capsys):
    engine = engine_of(model, drafter)
    plain = engine.generate(PROMPTS, sampled(1))
    assert capsys.readouterr() == ("", "")
    shown = engine.generate(PROMPTS, sampled(1), use_tqdm=True)
    assert [output.token_ids for output in shown] == [output.token_ids for output in plain]
    bar = capsys.readouterr().err
    assert "Processed prompts: 100%" in bar
    assert "5/5" in bar
    assert re.search(r"tok/s=[\d.]+, acceptance=0\.\d\d", bar)
    engine.disable_spec_dec()
    engine.chat([{"role": "user", "content": "a"}], sampled(1), use_tqdm=True, **TEMPLATE)
    bar = capsys.readouterr().err
    assert "1/1" in bar
    assert "acceptance" not in bar


def test_metrics_by_vllms_names(model, drafter):
    engine = engine_of(model, drafter, num_draft=3, block_size=4, num_blocks=13)
    at_rest = engine.metrics()
    assert at_rest["request_success"] == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert {value for value in at_rest.values() if isinstance(value, (int, float))} == {0}
    ids = [engine.add_request(prompt, sampled(1, ignore_eos=True)) for prompt in PROMPTS]
    outputs, seen = [], []
    while engine.has_unfinished:
        outputs += [event.output for event in engine.step() if event.output is not None]
        seen.append(engine.metrics())
        if len(seen) == 2:
            outputs.append(engine.abort(ids[-1]))
    assert max(now["num_requests_running"] for now in seen) > 1
    assert max(now["num_requests_waiting"] for now in seen) > 0
    assert 0.5 < max(now["kv_cache_usage_perc"] for now in seen) <= 1
    assert seen[-1]["kv_cache_usage_perc"] == 0
    total, parts = engine.metrics(), [output.stats.to_metrics() for output in outputs]
    assert total["request_success"] == {"stop": 0, "length": 4, "abort": 1, "error": 0}
    assert total["num_preemptions"] > 0
    assert total["generation_tokens"] == sum(len(output.token_ids) for output in outputs)
    assert total["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs if o.token_ids)
    assert 0 < total["spec_decode_num_drafts"] <= engine.stats.num_steps
    assert len(total["spec_decode_num_accepted_tokens_per_pos"]) == 3
    assert set(total) - set(parts[0]) == {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    }
    for name in set(parts[0]) - {"request_success", "spec_decode_num_accepted_tokens_per_pos"}:
        assert total[name] == sum(part[name] for part in parts), name


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(model, drafter, copied):
    """A copy would share the cache with it, without knowing which blocks are free."""
    with pytest.raises(TypeError, match="an Engine cannot be copied or pickled"):
        copied(engine_of(model, drafter))


def test_reprs_are_one_short_line(model, drafter):
    engine = engine_of(model, drafter, max_model_len=500)
    params = sampled(1, max_tokens=None, ignore_eos=True, logprobs=True)
    *events, last = engine.stream([3] * 300, params)
    shown = [repr(each) for each in (engine, engine.stats, events[0], last, last.output)]
    assert all(len(line) < 400 and "\n" not in line for line in shown), shown
    name = "LlamaForCausalLM, drafter='draft_model', dtype=float32, device=cpu, num_blocks="
    assert shown[0].startswith(f"Engine({name}")
    assert "300 prompt tokens, 200 new ones" in shown[4]
    assert f"finish_reason='length', stats={last.output.stats!r}" in shown[4]
    assert f"token_ids={events[0].token_ids}, source=" in shown[2]
    (several,) = engine.generate([[3] * 3], sampled(1, n=3))
    assert repr(several).endswith(", 2 more samples)")
    (one,) = engine.generate([[3]], sampled(1, n=2, max_tokens=1))
    assert "1 prompt token, 1 new one, " in repr(one)
    assert repr(one).endswith("SpecStats(1 token in 1 step), 1 more sample)")
    engine.disable_spec_dec()
    assert "drafter='none'" in repr(engine)


def test_ids_that_end_a_text_may_be_a_tensor_in_the_models_configuration():
    model = random_model("llama")
    first = Engine(model).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))[0]
    for ids in (torch.tensor(first.token_ids[0]), torch.tensor([4, first.token_ids[0]])):
        model.generation_config.eos_token_id = ids
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = Engine(model).generate([[1, 2, 3]], params)
        assert (output.finish_reason, len(output.token_ids)) == ("stop", 1)

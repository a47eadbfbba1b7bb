"""A simulated drafter accepts exactly what the live engine accepted; files that hold no outputs."""

import json
import re
from dataclasses import replace

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import write_whole
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter, common_prefix_len
from fastspec.drafters.ngram import NgramDrafter
from fastspec.engine.schedule import Step
from fastspec.tools.simulate import Simulator
from fastspec.tools.stored_outputs import (
    StoredOutput,
    accepted_by_step,
    read_outputs,
    stored_record,
)

from ..models import VOCAB_SIZE, byte_tokenizer, perturbed, random_t5

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 17, [9], [40, 7, 40]]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
READING = {"seconds": None, "num_prompt_steps": 0}  # stored prompts are not read
SAMPLED = SamplingParams(temperature=0.9, top_k=2, top_p=0.95, seed=11, max_tokens=40)


def stored_run(engine, params, path):
    """A live run, written to a file and read again."""
    lives = engine.generate(PROMPTS, params)
    of_run = params, engine.max_model_len, None, engine.decoder_start_id
    records = [stored_record(live, *of_run) for live in lives]
    write_whole("".join(json.dumps(record) + "\n" for record in records), path)
    return lives, read_outputs(path)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "draft_model"},
        {"method": "draft_model", "draft_sample_method": "greedy"},
        {"method": "draft_model", "draft_sample_method": "greedy", "cape": True},
        {"method": "tree"},
        {"method": "tree", "tree_suffix": 8},
        {"method": "tree", "tree_paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]},
        {"method": "prompt_lookup", "prompt_lookup_min": 1},
        {"method": "suffix"},
        {"method": "suffix", "tree_nodes": 9},
        {"method": "mag"},
        {"method": "ngram", "filler_top_k": 1},
    ],
    ids=str,
)
def test_a_stored_run_is_reproduced(model, drafter, tmp_path, params, options):
    spec = SpecConfig(**options, num_speculative_tokens=4)
    given = drafter if spec.method in ("draft_model", "tree") else None
    engine = Engine(model, given, spec=spec, config=EngineConfig(max_batch_size=3))
    lives, outputs = stored_run(engine, params, tmp_path / "run.jsonl")
    assert engine.stats.num_accepted_tokens > 0
    size = 3 if spec.method == "suffix" else 2  # it copies from requests that ended before
    config = EngineConfig(max_batch_size=size, block_size=8)
    simulations = Simulator(model, given, VOCAB_SIZE, spec=spec, config=config).run(outputs)
    for live, output, simulation in zip(lives, outputs, simulations, strict=True):
        assert simulation.accepted == output.accepted == accepted_by_step(live.sources)
        counts, expected = simulation.stats.to_dict(), live.stats.to_dict()
        assert counts | READING == expected | READING
        assert simulation.matched[-1] == len(live.token_ids)


@pytest.mark.parametrize(
    ("record", "end"),
    [
        ({"token_ids": [4, 5]}, "length"),
        ({"token_ids": [4, 5], "max_tokens": 2}, "length"),
        ({"token_ids": [4, 5], "max_tokens": 3}, "stop"),
        ({"token_ids": [4, 5], "max_tokens": 2, "finish_reason": "stop"}, "stop"),
        ({"token_ids": [4, 5], "finish_reason": "abort"}, "abort"),
    ],
)
def test_outputs_end_as_they_did(model, tmp_path, record, end):
    """Where the file does not say how, its limit does."""
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [1], **record}), encoding="utf-8")
    simulator = Simulator(model, None, VOCAB_SIZE, spec=SpecConfig("prompt_lookup"))
    (simulation,) = simulator.run(read_outputs(file))
    reasons = {reason: count for reason, count in simulation.stats.finish_reasons.items() if count}
    assert reasons == {end: 1}


def test_a_text_that_is_cut_ended_at_its_limit(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text('{"prompt": "a", "token_ids": [4, 5], "finish_reason": "stop"}')
    ends = [read_outputs(file, max_tokens=most)[0].end for most in (1, 2, 3)]
    assert ends == ["length", "stop", "stop"]
    file.write_text('{"prompt": "a", "token_ids": [4, 5], "finish_reason": ["stop"]}')
    with pytest.raises(ValueError, match="line 1, finish_reason: expected one of"):
        read_outputs(file)


def test_outputs_that_stopped_are_reproduced(model, drafter, tmp_path):
    (free,) = Engine(model).generate([PROMPTS[0]], GREEDY)
    stops = [free.token_ids[place] for place in (6, 17)]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=stops)
    for draft in (model, drafter):
        engine = Engine(model, draft)
        lives, outputs = stored_run(engine, params, tmp_path / "run.jsonl")
        assert "stop" in {live.finish_reason for live in lives}
        simulations = Simulator(model, draft, VOCAB_SIZE).run(outputs)
        for live, output, simulation in zip(lives, outputs, simulations, strict=True):
            assert simulation.accepted == output.accepted
            assert simulation.stats.num_draft_tokens == live.stats.num_draft_tokens


@pytest.mark.parametrize("layout", ["joined", "tensors", "lists"])
@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_early_stops_of_files_that_do_not_say_their_limit(model, drafter, tmp_path, layout, method):
    """Drafts beyond the end of a text count, as in the live run, and a cascade's end there."""
    options = {"k_matrix": [[3, 5], [0, 5]]} if method == "cascade" else {}
    spec = SpecConfig(method, **options)
    (free,) = Engine(model).generate([PROMPTS[2]], GREEDY)
    stop = next(i for i in free.token_ids[12:] if i not in free.token_ids[:12])
    params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[stop])
    lives = Engine(model, drafter, spec=spec).generate(PROMPTS, params)
    assert {live.finish_reason for live in lives} == {"stop", "length"}
    pairs = [([*live.prompt_token_ids], [*live.token_ids]) for live in lives]
    if layout == "joined":
        name, content = "run.json", {_joined(p): _joined([*p, *new]) for p, new in pairs}
        text = json.dumps(content)
    elif layout == "tensors":
        name, text = "run.txt", "\n".join(str(torch.tensor([new])) for _, new in pairs)
    else:
        name, text = "run.jsonl", "\n".join(json.dumps(new) for _, new in pairs)
    (tmp_path / name).write_text(text, encoding="utf-8")
    prompts = None if layout == "joined" else ["?"] * len(pairs)
    outputs = read_outputs(tmp_path / name, prompts, max_tokens=60)
    outputs = [replace(o, prompt=prompt) for o, (prompt, _) in zip(outputs, pairs, strict=True)]
    simulations = Simulator(model, drafter, VOCAB_SIZE, spec=spec).run(outputs)
    for live, simulation in zip(lives, simulations, strict=True):
        counts, expected = simulation.stats.to_dict(), live.stats.to_dict()
        assert counts | READING == expected | READING


def _joined(token_ids):
    return "_".join(map(str, token_ids))


def test_the_limit_of_a_stored_run(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text('{"prompt": "a", "token_ids": [5, 6, 7], "accepted": [1, 0]}', "utf-8")
    for most, ids, accepted in ((3, [5, 6, 7], [1, 0]), (2, [5, 6], None), (9, [5, 6, 7], [1, 0])):
        (output,) = read_outputs(file, max_tokens=most)
        assert (output.token_ids, output.accepted) == (ids, accepted)
        assert output.params.max_tokens == most
        assert output.is_ended == (most == 9)
    with pytest.raises(ValueError, match=r"^max_tokens: expected an int >= 1, got 0"):
        read_outputs(file, max_tokens=0)
    file.write_text('{"prompt": "a", "token_ids": [5], "max_tokens": 4}', "utf-8")
    with pytest.raises(ValueError, match=r"^max_tokens: expected None, as the file has its own"):
        read_outputs(file, max_tokens=4)


def test_a_cache_too_small_for_all_changes_nothing(model, drafter):
    lives = Engine(model, drafter).generate(PROMPTS, GREEDY)
    outputs = [StoredOutput(list(o.prompt_token_ids), list(o.token_ids), GREEDY) for o in lives]
    tight = EngineConfig(block_size=4, num_blocks=24)
    simulations = Simulator(model, drafter, VOCAB_SIZE, config=tight).run(outputs)
    roomy = Simulator(model, drafter, VOCAB_SIZE).run(outputs)
    assert [s.steps for s in simulations] == [s.steps for s in roomy]


class Fixed(NoDrafter):
    """Proposes the stored text with every third token wrong."""

    name = "fixed"

    def __init__(self, text):
        self._text = text

    def propose(self, batch):
        ids = torch.full((len(batch.requests), batch.num_speculative_tokens), -1)
        for row, request in enumerate(batch.requests):
            start = len(request.token_ids) - 1
            for column, token in enumerate(self._text[start : start + ids.shape[1]]):
                ids[row, column] = token if (start + column) % 3 != 2 else token + 1
        return Proposal(ids.to(torch.int32))

    def commit(self, batch, accepted):
        assert all(len(request.token_ids) > 1 for request in batch.requests)


def test_steps_by_hand(model):
    text = list(range(10, 20))
    outputs = [StoredOutput([1], text, SamplingParams(temperature=0, max_tokens=10))]
    heard = []
    spec = SpecConfig(num_speculative_tokens=4)
    (simulation,) = Simulator(model, Fixed(text), VOCAB_SIZE, spec=spec).run(outputs, heard.append)
    assert simulation.steps == [Step(4, 4, 2), Step(4, 4, 2), Step(3, 3, 2), Step(0, 0, 0)]
    assert simulation.matched == [3, 6, 9, 10]
    assert heard == [3, 3, 3, 1]


def test_common_prefix_len():
    drafts = [[1, 2, 3], [1, 9, 3], [], [1, 2], [1, 2, 3]]
    stored = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 2]]
    lengths = [common_prefix_len(*pair) for pair in zip(drafts, stored, strict=True)]
    assert lengths == [3, 1, 0, 2, 2]


def test_printed_tensors(tmp_path):
    file = tmp_path / "llama.txt"
    text = "tensor([[ 518,  799,\n          7]])\ntensor([5, 6], device='cuda:0')\n"
    file.write_text(text + "tensor([[1, 2], [3, 4]])\n", encoding="utf-8")
    outputs = read_outputs(file, prompts=list("abcd"))
    assert [output.token_ids for output in outputs] == [[518, 799, 7], [5, 6], [1, 2], [3, 4]]
    assert [output.prompt for output in outputs] == list("abcd")
    assert outputs[0].params.temperature == 0


def test_joined_ids(tmp_path):
    file = tmp_path / "cache.json"
    file.write_text('{"1_2_3": "1_2_3_4_5", "9": "9_7"}', encoding="utf-8")
    expected = [([1, 2, 3], [4, 5]), ([9], [7])]
    assert [(o.prompt, o.token_ids) for o in read_outputs(file)] == expected
    with pytest.raises(ValueError, match="entry 1: expected the whole text, the start id 0"):
        read_outputs(file, decoder_start_id=0)
    file.write_text('{"1_2_3": "0_4_5", "9": "0_7"}', encoding="utf-8")
    outputs = read_outputs(file, decoder_start_id=0)
    assert [(o.prompt, o.token_ids) for o in outputs] == expected


@pytest.mark.parametrize("most", [60, None])
def test_a_prompt_takes_no_room_of_an_encoder_decoders_text(tmp_path, most):
    """Its own limit is stored: all positions but that of the start token."""
    engine = Engine(random_t5(), spec="prompt_lookup", config=EngineConfig(max_model_len=64))
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    lives, outputs = stored_run(engine, params, tmp_path / "run.jsonl")
    assert max(map(len, PROMPTS)) > 64 // 2
    for live, output in zip(lives, outputs, strict=True):
        assert len(live.token_ids) == output.params.max_tokens == (most or 63)
        assert (output.token_ids, output.end) == (list(live.token_ids), "length")


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("lenience", [1, 3.0])
def test_a_cascade_over_the_published_layout(tmp_path, model, name, lenience):
    """The stored texts of CS-Drafting's targets give the passes of the live run."""
    target = model if name == "decoder" else random_t5()
    drafts = [perturbed(target, 0.02), perturbed(target, 0.05, seed=2)]
    matrix = [[3, 4, 5], [0, 1, 5], [0, 0, 5]]
    spec = SpecConfig("cascade", k_matrix=matrix, lenience=lenience)
    engine = Engine(target, drafts, spec=spec)
    lives = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40))
    start = engine.decoder_start_id
    table = {}
    for live in lives:
        prompt = [*live.prompt_token_ids]
        text = [*(prompt if start is None else [start]), *live.token_ids]
        table["_".join(map(str, prompt))] = "_".join(map(str, text))
    file = tmp_path / "cache.json"
    file.write_text(json.dumps(table), encoding="utf-8")
    vocab_size = target.config.vocab_size
    simulator = Simulator(target, drafts, vocab_size, spec=spec, decoder_start_id=start)
    simulations = simulator.run(read_outputs(file, decoder_start_id=start))
    for live, simulation in zip(lives, simulations, strict=True):
        assert simulation.accepted == accepted_by_step(live.sources)
        assert simulation.stats.num_draft_passes == live.stats.num_draft_passes
    assert engine.stats.num_accepted_tokens > 0
    other = 0 if start is None else None
    with pytest.raises(ValueError, match=r"^drafter: .* must both be decoders"):
        Simulator(target, drafts, vocab_size, spec=spec, decoder_start_id=other)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"token_ids": [4, 5], "prompt": "a"}\n', [4, 5]),
        ("tensor([[4, 5]])", [4, 5]),
        ("[tensor([[4, 5]])]", [4, 5]),
        ("[4, 5]\n", [4, 5]),
        ('{"9": "9_4_5"}', [4, 5]),
        ('{\n  "9": "9_4_5"\n}\n', [4, 5]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_the_content_says_what_a_file_is(tmp_path, text, ids, name):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    prompts = None if '"' in text else ["a"]
    (output,) = read_outputs(file, prompts)
    assert output.token_ids == ids


def test_lines_of_ids(tmp_path, model):
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt": "ab", "token_ids": [4, 5]}\n\n', encoding="utf-8")
    (output,) = read_outputs(file)
    assert output.prompt == "ab"
    simulator = Simulator(model, model, VOCAB_SIZE, byte_tokenizer())
    assert simulator.run([output])[0].stats.num_output_tokens == 2
    file.write_text("[4, 5]\n[6]\n", encoding="utf-8")
    assert [o.token_ids for o in read_outputs(file, ["a", "b"])] == [[4, 5], [6]]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.jsonl", '{"token_ids": [1], "prompt": "a"}\n{"token_ids": [2', "line 2: cut off"),
        ("a.jsonl", "\n5\n", "line 2: expected an object"),
        ("a.jsonl", '{"token_ids": []}', "line 1, token_ids"),
        ("a.jsonl", '{"token_ids": [1.5]}', "line 1, token_ids"),
        ("a.jsonl", '{"token_ids": [true]}', "line 1, token_ids"),
        ("a.jsonl", '{"token_ids": [1], "prompt": 5}', "line 1, prompt"),
        ("a.jsonl", '{"token_ids": [1], "prompt_token_ids": "1"}', "prompt_token_ids"),
        ("a.jsonl", '{"token_ids": [1], "accepted": [-1]}', "line 1, accepted"),
        ("a.jsonl", '{"token_ids": [1], "temperature": -1}', "line 1, temperature"),
        ("a.jsonl", '{"token_ids": [1, 2], "max_tokens": 1}', "line 1, max_tokens"),
        ("a.jsonl", '{"token_ids": [1], "error": "no room"}', "no room"),
        ("a.jsonl", "", "contains no output"),
        ("a.json", '{"1_2": "3_4"', "cut off"),
        ("a.json", "5", "line 1: expected an object"),
        ("a.json", '{"1_2": "3_"}', "entry 1"),
        ("a.json", '{"1": "1_2", "a": "3"}', "entry 2"),
        ("a.json", '{"1_2": "3_4"}', "entry 1: expected the whole text, its prompt"),
        ("a.json", '{"1_2": "1_2"}', "entry 1: expected the whole text"),
        ("a.json", '{"1": 2}', "entry 1"),
        ("a.txt", "tensor([[1, 2]])\ntensor([[3,\n", "line 2: the tensor that begins here"),
        ("a.txt", "tensor([[1, 2]])\n\ntensor([[3, 4]\n", "line 3"),
        ("a.txt", "tensor([[1, 2]]) and more", "line 1"),
        ("a.txt", "tensor([[1, ..., 2]])", "abbreviated"),
        ("a.txt", "tensor([[1, 2.5]])", "line 1"),
        ("a.txt", "tensor([])", "line 1"),
        ("a.txt", "1 2 3", "or printed tensors"),
        ("a.txt", "", "contains no output"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, named):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="outputs: ") as caught:
        read_outputs(file, prompts=["a"])
    assert named in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_outputs(tmp_path / "missing.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_outputs(tmp_path / "a.txt")


def test_prompts_that_lack_or_are_too_many(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("tensor([[1]])", encoding="utf-8")
    with pytest.raises(ValueError, match="without a prompt"):
        read_outputs(file)
    with pytest.raises(ValueError, match="2 given for 1 outputs"):
        read_outputs(file, ["a", "b"])
    joined = tmp_path / "a.json"
    joined.write_text('{"1": "1_2"}', encoding="utf-8")
    with pytest.raises(ValueError, match="has its own prompts"):
        read_outputs(joined, ["a"])


def test_simulations_that_cannot_run(model):
    params = SamplingParams(temperature=0, max_tokens=3)
    good = StoredOutput([1], [2, 3, 4], params)
    with pytest.raises(ValueError, match="max_tokens: expected at least the 3 token_ids"):
        replace(good, params=replace(params, max_tokens=2))
    with pytest.raises(ValueError, match="drafter: none to simulate"):
        Simulator(model, None, VOCAB_SIZE)
    with pytest.raises(ValueError, match="rejection_sample_method"):
        Simulator(model, model, VOCAB_SIZE, spec=SpecConfig(rejection_sample_method="block"))
    adaptive = SpecConfig(num_speculative_tokens=1, schedule="adaptive", step_costs=[1.0, 1.1])
    with pytest.raises(ValueError, match=r"^schedule: expected 'constant', the only one"):
        Simulator(model, model, VOCAB_SIZE, spec=adaptive)
    simulator = Simulator(model, model, VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"^outputs: expected one or more, got none"):
        simulator.run([])
    with pytest.raises(ValueError, match=r"^output 1: it has no new token"):
        simulator.run([StoredOutput([1, 2], [], params)])
    for wrong in ([-5], [1.5]):
        with pytest.raises(ValueError, match=r"^output 1: token id"):
            simulator.run([StoredOutput([1], wrong, params)])
        with pytest.raises(ValueError, match=r"^output 1: token id"):
            simulator.run([StoredOutput(wrong, [1], params)])
    with pytest.raises(ValueError, match="output 2: token id 999"):
        simulator.run([good, StoredOutput([1], [999], params)])
    with pytest.raises(ValueError, match="output 1: its prompt is a string"):
        simulator.run([StoredOutput("a", [1], params)])
    with pytest.raises(ValueError, match="output 1: its prompt is empty"):
        simulator.run([StoredOutput([], [1], params)])
    small = Simulator(model, model, VOCAB_SIZE, config=EngineConfig(num_blocks=1, block_size=2))
    with pytest.raises(ValueError, match="num_blocks"):
        small.run([good])


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("eagle3", "the target's hidden states"),
        ("glide", "the target's cache"),
        ("ngram", "the target's top tokens (filler_top_k above 1)"),
    ],
)
def test_methods_that_read_more_than_texts(model, method, named):
    message = f"method: '{method}' reads {named}, which stored outputs lack"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Simulator(model, None, VOCAB_SIZE, spec=SpecConfig(method))
    simulator = Simulator(model, NgramDrafter(3, filler_top_k=2), VOCAB_SIZE)
    stored = StoredOutput([1], [2, 3, 4], SamplingParams(temperature=0, max_tokens=3))
    with pytest.raises(ValueError, match=r"^on_target_logits: expected None"):
        simulator.run([stored])

"""Training of EAGLE-3 drafts: what it unrolls is what drafting does, and it helps."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fastspec import Engine, SpecConfig
from fastspec.cli import app
from fastspec.config import EngineConfig
from fastspec.drafters.eagle3 import load_eagle, save_eagle3
from fastspec.drafters.eagle3.model import usual_layers
from fastspec.train.distillation import FrozenHeadLoss
from fastspec.train.eagle3 import Eagle3Trainer, make_eagle3, unrolled
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.states import (
    Text,
    cut_texts,
    measure_acceptance,
    stored_lessons,
    train_on_states,
)

from ..engine import eagle1_models
from ..engine.eagle3_models import published_logits, write_folder
from ..engine.helpers import GREEDY, PROMPTS, hugging_face_greedy
from ..models import byte_tokenizer, random_model

KNOWN = 60


def texts_of(target, count=12):
    """Texts of a target's own, after prompts of five tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(250, (count, 5), generator=generator)
    texts = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=20,
        eos_token_id=None,
        do_sample=False,
        pad_token_id=0,
    )
    return [Text(text, 5) for text in texts]


def test_a_row_of_each_step_is_what_the_published_forward_drafts(tmp_path):
    """Whatever the lengths of the texts beside it, and where their answers start."""
    target = random_model("llama", num_hidden_layers=6)
    weights = write_folder(tmp_path, target, num_known=KNOWN)
    draft = load_eagle(tmp_path, EngineConfig(), target).train()
    ids = torch.arange(3, 27)
    texts = [Text(ids[:9], 4), Text(ids[2:], 12), Text(ids[5:8], 1)]
    known = draft.lm_head.token_ids
    teacher = stored_lessons(target, usual_layers(6), texts, known, tmp_path / "s")
    lesson = teacher(torch.arange(3))
    owners = [
        (index, place) for index, text in enumerate(texts) for place in range(len(text.token_ids))
    ]
    seen = set()
    for step, (rows, places) in enumerate(unrolled(draft, lesson, 4)):
        for row, place in zip(rows, places.tolist(), strict=True):
            index, column = owners[place]
            text = texts[index].token_ids.tolist()
            begin = column - step + 1  # tokens before the first that this row's chain drafted
            expected = published_logits(weights, target, text[:begin], text[begin : column + 1])[-1]
            logits = draft.lm_head.linear(row)
            torch.testing.assert_close(
                logits, expected[draft.lm_head.token_ids], atol=1e-4, rtol=1e-4
            )
            seen.add((index, begin, step))
    # An answer's first token is drafted after the prompt alone, its last one is never drafted from.
    assert seen == {
        (index, begin, step)
        for index, text in enumerate(texts)
        for step in range(4)
        for begin in range(max(2, text.start), len(text.token_ids))
        if begin + step < len(text.token_ids)
    }


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_loss_and_gradient_are_those_of_cross_entropy_and_acceptance(weight):
    torch.manual_seed(0)
    rows, head = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    probs = torch.randn(5, 11).softmax(-1)
    loss = FrozenHeadLoss.apply(rows, head, probs, weight)
    logits = rows @ head.T
    accepted = torch.minimum(logits.softmax(-1), probs).sum(-1)
    expected = (1 - weight) * torch.nn.functional.cross_entropy(logits, probs)
    expected = expected - weight * accepted.log().mean()
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(3 * loss, rows)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * expected, rows)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_acceptance_are_finite_in_16_bits(dtype):
    """Also where draft and target agree on nothing."""
    torch.manual_seed(0)
    rows, head = (
        torch.randn(9, 8, dtype=dtype, requires_grad=True),
        9 * torch.randn(31, 8).to(dtype),
    )
    probs = (30 * torch.randn(9, 31)).softmax(-1).to(dtype)
    loss = FrozenHeadLoss.apply(rows, head, probs, 0.75)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_no_rate_is_reported_for_steps_that_no_text_reaches(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    texts = [Text(torch.arange(5, 9)), Text(torch.arange(9, 12))]
    draft = make_eagle3(target, texts, DraftShape())
    known = draft.lm_head.token_ids
    teacher = stored_lessons(target, usual_layers(6), texts, known, tmp_path / "s")
    for places, num_reached in ([0, 1], 2), ([1], 1):
        found = measure_acceptance(
            partial(unrolled, draft),
            draft.lm_head,
            target,
            teacher,
            torch.tensor(places),
            num_steps=5,
        )
        assert [len(rates) for rates in found.values()] == [num_reached] * 2
        assert all(rate > 0 for rate in found["sampled_acceptance"])


def test_training_helps_and_goes_on_where_it_stopped(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    every = texts_of(target)
    held_out, texts = every[: len(every) // 5], every[len(every) // 5 :]
    shape = DraftShape(reduced_vocab_size=KNOWN)
    done = []

    def run(folder, steps, resume=False, acceptance=0.0, teacher=target):
        torch.manual_seed(0)
        options = TrainOptions(
            steps=steps, batch_size=4, rate=5e-3, warmup=0.0, acceptance=acceptance
        )
        draft = make_eagle3(teacher, texts, shape)
        arguments = teacher, draft, texts, held_out, options, tmp_path / folder, resume
        return train_on_states(Eagle3Trainer, *arguments, lambda *step: done.append(step))

    record = run("whole", 24)
    losses = record["losses"]
    before = run("start", 1)["sampled_acceptance"]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    assert all(old < new for old, new in zip(before, record["sampled_acceptance"], strict=True))
    assert len(before) == 5
    direct = run("direct", 24, acceptance=0.5)["sampled_acceptance"]
    assert all(old < new for old, new in zip(before, direct, strict=True))
    assert not [*(tmp_path / "whole").glob("target-states*")]
    with pytest.raises(ValueError, match="has a checkpoint"):
        run("whole", 24)
    with pytest.raises(ValueError, match=r"acceptance: expected 0\.0, as the run to resume"):
        run("whole", 26, resume=True, acceptance=0.5)
    checkpoint = tmp_path / "whole" / "checkpoint.pt"
    state = torch.load(checkpoint)
    torch.save(state | {"run": state["run"] | {"kind": "plain", "rate": 1.0}}, checkpoint)
    with pytest.raises(ValueError, match=r"^resume: .* is of a draft of kind plain, not eagle3$"):
        run("whole", 26, resume=True)
    torch.save(state, checkpoint)
    stored = tmp_path / "whole" / "target-states-of-it.bin"
    stored.touch()
    with pytest.raises(ValueError, match=r"^target: expected .* as the run to resume"):
        run("whole", 26, resume=True, teacher=random_model("llama", 9, num_hidden_layers=6))
    assert stored.exists()
    longer = run("whole", 26, resume=True)
    assert (longer["losses"][:24], longer["steps"]) == (losses, 26)
    engine = Engine(target, tmp_path / "whole", spec=SpecConfig("eagle3", 3))
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


def test_a_saved_draft_is_the_same(tmp_path):
    """It keeps neither embeddings nor a head: these are the target's."""
    target = random_model("llama", num_hidden_layers=6)
    draft = make_eagle3(target, texts_of(target, 2), DraftShape(reduced_vocab_size=KNOWN))
    save_eagle3(draft, tmp_path)
    loaded = load_eagle(tmp_path, EngineConfig(), target)
    assert torch.equal(loaded.lm_head.token_ids, draft.lm_head.token_ids)
    assert torch.equal(loaded.lm_head.linear.weight, target.lm_head.weight[draft.lm_head.token_ids])
    assert loaded.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    for name, weight in loaded.midlayer.named_parameters():
        given = draft.midlayer.get_parameter(name)
        torch.testing.assert_close(weight, given.bfloat16().float(), atol=0, rtol=0)


def test_texts_and_vocabulary_come_from_answers():
    documents = [([1, 2, 3, 4, 4, 4, 5], 3), ([9, 9], 1), ([7, 7, 7, 8, 8], 4)]
    texts = cut_texts(documents, 4)
    assert [(text.token_ids.tolist(), text.start) for text in texts] == [([4, 4, 5], 1)]
    texts = cut_texts(documents, 7)
    assert [(text.token_ids.tolist(), text.start) for text in texts] == [([1, 2, 3, 4, 4, 4, 5], 3)]
    target = random_model("llama", num_hidden_layers=6)
    draft = make_eagle3(target, texts, DraftShape(reduced_vocab_size=3))
    assert draft.lm_head.token_ids.tolist() == [0, 4, 5]
    with pytest.raises(ValueError, match="data: no text is long enough"):
        cut_texts(documents[1:], 8)


def test_the_command(monkeypatch, tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    lines = [
        {"prompt_ids": text.token_ids[:5].tolist(), "token_ids": text.token_ids[5:].tolist()}
        for text in texts_of(target, 5)
    ]
    lines.append({"text": "a text of which all is learnt"})
    data, out = tmp_path / "texts.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", "eagle3", "--target", str(tmp_path / "target"), "--data", str(data)]
    command += ["--batch-size", "2", "--steps", "2", "--vocab-size", "50", "--out", str(out)]
    monkeypatch.setattr("fastspec.cli.train._SECONDS_BETWEEN_LINES", 0.0)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    assert "2 steps, loss" in result.stdout
    assert "target: text 6 of 6\n" in result.stderr
    assert "\nstep 2 of 2, loss " in result.stderr
    assert json.loads((out / "record.json").read_text())["steps"] == 2
    assert Engine(target, out).drafter.name == "eagle3"
    # Further, at a rate so low that the draft stays what it was.
    again = [*command[:-6], "--out", str(tmp_path / "again"), "--start", str(out), "--steps", "1"]
    result = CliRunner().invoke(app, [*again, "--rate", "1e-9"])
    assert result.exit_code == 0, result.stderr
    files = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    for one, other in zip(*(file.items() for file in files), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    result = CliRunner().invoke(app, [*again, "--vocab-size", "40"])
    assert result.exit_code == 2
    assert "--start" in result.stderr
    # A run that began with a draft goes on with that draft alone.
    result = CliRunner().invoke(app, [*again, "--steps", "2", "--rate", "1e-9", "--resume"])
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "again" / "record.json").read_text())["steps"] == 2
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    result = CliRunner().invoke(app, [*again, "--steps", "3", "--rate", "1e-9", "--resume"])
    assert result.exit_code == 1
    assert "of a draft of other tokens or layers" in result.stderr
    (out / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, [*command, "--resume", "--context", "9"])
    assert result.exit_code == 1
    assert "--context: expected 512, as the run to resume" in result.stderr
    eagle1_models.write_folder(tmp_path / "first", target)
    at = again.index("--start") + 1
    result = CliRunner().invoke(app, [*again[:at], str(tmp_path / "first"), *again[at + 1 :]])
    assert result.exit_code == 2
    assert "--start: expected an EAGLE-3 draft, got EAGLE-1 or EAGLE-2" in result.stderr
    data.write_text('{"prompt_ids": [1, 2], "token_ids": [1, 9999]}\n')
    result = CliRunner().invoke(app, [*command, "--resume"])
    assert result.exit_code == 1
    assert "line 1: token_ids: expected ids in 0.." in result.stderr
    assert "got 9999" in result.stderr

"""The GLIDE trainer: its mask, padding, resumption, command line and report."""

import json
import re
import sys

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from typer.testing import CliRunner

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli import app
from fastspec.cli.train import _documents
from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.drafters.glide.dense import block_mask, read_target
from fastspec.train.data import Lesson, Rows, cut_rows, frozen_target, split_documents
from fastspec.train.new_drafts import make_glide, make_matched
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.run import train_draft
from fastspec.train.trainer import DraftTrainer, draft_loss

from ..models import VOCAB_SIZE, byte_tokenizer, random_model

PROCESS = OneProcess(torch.device("cpu"))
TEXT = "the cat sat on the mat and the dog sat on the cat. " * 40


def rows_of(count=24, width=17, seed=0):
    """Texts that count up, which is easily learnt."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(200, (count, 1), generator=generator)
    return Rows(starts + torch.arange(width), torch.full((count,), width))


@pytest.mark.parametrize("block_size", [1, 3, 5])
def test_block_mask_follows_the_rule(block_size):
    valid = torch.ones(3, 13, dtype=torch.bool)
    valid[1, 8:] = False
    valid[2, :4] = False  # padding at either end
    mask = block_mask(valid, block_size)
    assert mask.shape == (3, 1, 13, 13)
    for b, first in enumerate((0, 0, 4)):
        for i in range(13):
            for j in range(13):
                if not valid[b, i]:
                    continue  # nobody reads this row, but it must see something
                query, key = i - first, j - first
                in_earlier_block = query // block_size > key // block_size
                in_first_block = query < block_size and query >= key
                expected = bool(valid[b, j]) and (in_earlier_block or in_first_block)
                assert bool(mask[b, 0, i, j]) == expected
    assert mask.any(dim=-1).all()


def test_target_layers_are_its_last_ones_as_its_own_cache_has_them():
    target = random_model("mistral")  # its own cache drops what leaves the window
    token_ids = torch.randint(250, (2, 20))
    layers, logits = read_target(target, token_ids, torch.ones_like(token_ids).bool(), 2)
    expected = target(token_ids, use_cache=True)
    torch.testing.assert_close(logits, expected.logits)
    for layer, pair in zip(expected.past_key_values.layers[1:], layers, strict=True):
        window = layer.keys.shape[2]
        for own, kept in zip((layer.keys, layer.values), pair, strict=True):
            assert kept.shape[2] == 20
            torch.testing.assert_close(kept[:, :, -window:], own)


@pytest.mark.parametrize("is_glide", [True, False])
def test_padding_changes_no_loss_and_no_gradient(is_glide):
    target = random_model("llama")
    glide = make_glide(target)
    draft = glide if is_glide else make_matched(glide, target)
    rows = rows_of(1, 12)
    gradients = []
    for width in (12, 19):
        token_ids = torch.full((1, width), 7)
        token_ids[:, :12] = rows.token_ids
        teacher = frozen_target(target, Rows(token_ids, rows.lengths), 1)
        lesson = teacher(torch.tensor([0]))
        loss = draft_loss(draft, lesson, 5 if is_glide else 0, 0.5)
        used = [p for n, p in draft.named_parameters() if "lm_head" not in n]
        gradients.append([loss, *torch.autograd.grad(loss, used)])
    for alone, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


def test_loss_mixes_the_next_token_and_the_distribution():
    target = random_model("llama")
    draft = make_glide(target)
    lesson = frozen_target(target, rows_of(2), 1)(torch.arange(2))
    hard, soft, mixed = (draft_loss(draft, lesson, 5, weight) for weight in (0.0, 1.0, 0.25))
    torch.testing.assert_close(mixed, 0.75 * hard + 0.25 * soft)
    perfect = Lesson(lesson.token_ids, lesson.valid, lesson.layers, lesson.target_logits * 0)
    even = draft_loss(draft, perfect, 5, 1.0)
    assert even >= torch.tensor(float(VOCAB_SIZE)).log()


def train(folder, steps, draft, stop_at=None, resume=False, **options):
    target = random_model("llama")
    rows = rows_of()
    settings = TrainOptions(steps, batch_size=5, rate=2e-3, checkpoint_steps=4, **options)
    teacher = frozen_target(target, rows, draft.config.num_hidden_layers)
    trainer = DraftTrainer(draft, teacher, len(rows), settings, folder, PROCESS)
    if resume:
        trainer.resume()
    losses = []

    def advance(step, loss):
        losses.append(loss)
        if step == stop_at:
            raise KeyboardInterrupt

    if stop_at is None:
        trainer.run(advance)
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(advance)
    return losses


@pytest.mark.parametrize("num_layers", [1, 2])
def test_training_lowers_the_loss_and_leaves_the_target_alone(num_layers, tmp_path):
    target = random_model("llama")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    torch.manual_seed(0)
    draft = make_glide(target, num_layers)
    cross_attn = draft.model.layers[0].cross_attn
    start = cross_attn.q_proj.weight.detach().clone()
    losses = train(tmp_path, 20, draft)
    assert losses[-1] < losses[0]
    assert not torch.equal(cross_attn.q_proj.weight, start)
    assert cross_attn.o_proj.weight.any()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_loss_that_is_none_ends_the_run_and_spoils_no_checkpoint(tmp_path):
    draft, loss = make_glide(random_model("llama")), DraftTrainer._loss

    def spoiled(trainer, lesson):
        own, count = loss(trainer, lesson)
        return (own * torch.nan if trainer.record["steps"] == 5 else own), count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftTrainer, "_loss", spoiled)
        with pytest.raises(ValueError, match=r"^rate: the loss of step 6 is nan; try"):
            train(tmp_path, 12, draft)
    assert json.loads((tmp_path / "record.json").read_text())["steps"] == 4
    train(tmp_path, 12, make_glide(random_model("llama")), resume=True)


def test_a_continued_run_is_the_unbroken_one(tmp_path):
    drafts = []
    for _ in range(3):
        torch.manual_seed(1)
        drafts.append(make_glide(random_model("llama")))
    train(tmp_path / "whole", 6, drafts[0])
    train(tmp_path / "broken", 6, drafts[1], stop_at=5)
    train(tmp_path / "broken", 6, drafts[2], resume=True)
    for whole, continued in zip(drafts[0].parameters(), drafts[2].parameters(), strict=True):
        assert torch.equal(whole, continued)
    records = [json.loads((tmp_path / n / "record.json").read_text()) for n in ("whole", "broken")]
    assert records[0] == records[1]
    assert records[0]["steps"] == 6
    assert records[0]["tokens"] == 6 * 5 * 16


def test_only_the_same_run_is_resumed(tmp_path):
    """And nothing that it has stored is deleted before another one is refused."""
    target, usual = random_model("llama"), {"batch_size": 5, "store_target": True}

    def run(steps, rows=None, resume=True, num_layers=1, **options):
        settings, draft = TrainOptions(steps, **usual | options), make_glide(target, num_layers)
        given = draft, rows or rows_of(), settings, tmp_path, PROCESS, resume
        return train_draft(target, *given, lambda *_: None)

    with pytest.raises(ValueError, match="resume: no checkpoint"):
        run(2)
    run(2, resume=False)
    stored = tmp_path / "target-states-of-it.bin"
    stored.touch()
    others = {"seed": 1, "optimizer": "muon", "batch_size": 4, "rate": 1e-3, "warmup": 0.5}
    for name, value in (others | {"distillation": 0.5}).items():
        with pytest.raises(ValueError, match=rf"{name}: expected .* as the run to resume"):
            run(3, **{name: value})
    with pytest.raises(ValueError, match=r"data: expected .* as the run to resume"):
        run(3, rows_of(seed=1))
    with pytest.raises(ValueError, match=r"resume: .* contains a draft of another shape"):
        run(3, num_layers=2)
    assert stored.exists()
    assert run(3, checkpoint_steps=7, store_target=False)["steps"] == 3


def checkpoint_after(
    folder, target=None, resume=False, plain=False, shape=None, rows=None, steps=None
):
    """The path of the checkpoint of a run, by default of one or, resumed, two steps."""
    target = target or random_model("llama")
    glide = make_glide(target)
    draft = make_matched(glide, target) if plain else glide
    settings = TrainOptions(steps or 1 + resume, batch_size=2)
    given = draft, rows or rows_of(4), settings, folder, PROCESS, resume, lambda *_: None
    train_draft(target, *given, shape=shape)
    return folder / "checkpoint.pt"


def test_a_run_goes_on_only_with_its_target(tmp_path):
    checkpoint_after(tmp_path)
    for other in (random_model("llama", rms_norm_eps=1e-3), random_model("llama", seed=9)):
        with pytest.raises(ValueError, match=r"^target: expected .* as the run to resume"):
            checkpoint_after(tmp_path, other, resume=True)
    for place in (0, -1):
        changed = random_model("llama")
        projections = [part for part in changed.model.layers.modules() if type(part) is nn.Linear]
        projections[place].weight.data[0, 0] += 1
        with pytest.raises(ValueError, match=r"^target: expected .* as the run to resume"):
            checkpoint_after(tmp_path, changed, resume=True)
    renamed = random_model("llama")
    renamed.name_or_path = "another"
    with pytest.raises(ValueError, match=r"^target: expected .* another'$"):
        checkpoint_after(tmp_path, renamed, resume=True)
    with pytest.raises(ValueError, match=r"^dtype: expected 'float32', as .* got 'bfloat16'$"):
        checkpoint_after(tmp_path, random_model("llama").bfloat16(), resume=True)
    checkpoint_after(tmp_path, resume=True)


def test_a_run_does_not_go_back(tmp_path):
    checkpoint_after(tmp_path, steps=3)
    with pytest.raises(ValueError, match=r"^steps: expected at least 3, which are done, got 2$"):
        checkpoint_after(tmp_path, resume=True, steps=2)


def test_a_run_goes_on_only_with_its_kind_of_draft_and_cut_of_the_texts(tmp_path):
    shape = DraftShape(context=16)
    checkpoint_after(tmp_path, shape=shape)
    with pytest.raises(ValueError, match=r"^resume: .* is of a draft of kind glide, not plain$"):
        checkpoint_after(tmp_path, resume=True, plain=True, shape=shape)
    other = rows_of(4, 9)
    with pytest.raises(ValueError, match=r"^context: expected 16, as the run to resume .* got 8$"):
        checkpoint_after(tmp_path, resume=True, shape=DraftShape(context=8), rows=other)
    shape = DraftShape(context=16, held_out=0.5)
    with pytest.raises(ValueError, match=r"^held_out: expected 0\.05, as the run to resume"):
        checkpoint_after(tmp_path, resume=True, shape=shape, rows=rows_of(2))


@pytest.mark.parametrize(
    "damage", ["truncated", "halved", "empty", "text", "byte", "weight", "list", "no draft"]
)
def test_a_damaged_checkpoint_is_refused(damage, tmp_path):
    path = checkpoint_after(tmp_path)
    if damage in ("truncated", "halved"):
        content = path.read_bytes()
        path.write_bytes(content[:-100] if damage == "truncated" else content[: len(content) // 2])
    elif damage == "weight":
        content = bytearray(path.read_bytes())
        weight = torch.load(path)["draft"]["lm_head.weight"]
        content[content.index(weight.numpy().tobytes()) + 3] ^= 1
        path.write_bytes(content)
    elif damage == "byte":
        path.write_bytes(path.read_bytes().replace(b"optimizers", b"optimizer\xff", 1))
    elif damage in ("empty", "text"):
        path.write_bytes(b"" if damage == "empty" else b"no checkpoint")
    else:
        torch.save([1, 2] if damage == "list" else {"model": {}}, path)
    with pytest.raises(ValueError, match=r"^resume: .*\.pt is damaged or not a checkpoint of"):
        checkpoint_after(tmp_path, resume=True)


@pytest.mark.parametrize("lost", ["run", "target"])
def test_a_checkpoint_that_does_not_know_its_run_is_refused(lost, tmp_path):
    path = checkpoint_after(tmp_path)
    state = torch.load(path)
    del (state if lost == "run" else state["run"])[lost]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"^resume: .*\.pt was written by an earlier version"):
        checkpoint_after(tmp_path, resume=True)


def test_every_row_is_seen_once_in_an_epoch():
    draft = make_glide(random_model("llama"))
    for num_processes in (1, 2):
        shares = []
        for index in range(num_processes):
            process = OneProcess(torch.device("cpu"))
            process.num_processes, process.process_index = num_processes, index
            options = TrainOptions(12, batch_size=4)
            trainer = DraftTrainer(draft, None, 24, options, None, process)
            steps = range(12 // num_processes)
            shares += [trainer._indices(step).tolist() for step in steps]
        seen = sorted(index for share in shares for index in share)
        assert seen == sorted([*range(24)] * 2)


def test_plain_draft_is_as_large_as_glide():
    target = random_model("llama", hidden_size=48, head_dim=12)
    glide = make_glide(target)
    matched = make_matched(glide, target)
    assert matched.num_parameters() == pytest.approx(glide.num_parameters(), rel=0.01)
    assert not any("cross_attn" in name for name, _ in matched.named_parameters())


def test_drafts_start_from_the_target():
    target = random_model("llama")
    draft = make_glide(target)
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    own, large = draft.model.layers[0], target.model.layers[0]
    assert torch.equal(own.self_attn.q_proj.weight, large.self_attn.q_proj.weight)
    draft = make_glide(target, 2)
    for layer, large in zip(draft.model.layers, target.model.layers[1:], strict=True):
        assert torch.equal(layer.cross_attn.q_proj.weight, large.self_attn.q_proj.weight)
        assert not layer.cross_attn.o_proj.weight.any()


def test_drafts_start_as_a_trained_one():
    target, start = random_model("llama"), random_model("llama", num_hidden_layers=1)
    ids = torch.randint(0, target.config.vocab_size, (1, 9))
    glide = make_glide(target, 1, start)
    with torch.no_grad():
        expected = start(ids).logits
        for draft in (glide, make_matched(glide, target, start)):
            torch.testing.assert_close(draft.eval()(ids).logits, expected)
    large = target.model.layers[-1].self_attn.q_proj.weight
    assert torch.equal(glide.model.layers[0].cross_attn.q_proj.weight, large)


def test_rows_are_windows_of_the_documents():
    rows = cut_rows([[1, 2, 3, 4, 5, 6], [7], [8, 9], []], context=3)
    assert rows.token_ids.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 0]]
    assert rows.lengths.tolist() == [4, 4, 3]
    assert rows.valid.sum(dim=1).tolist() == [4, 4, 3]
    assert cut_rows([[1, 2], [3, 4]], context=3).token_ids.tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="data: expected at least two tokens of text"):
        cut_rows([[1], []], context=3)


def test_held_out_tokens_are_in_no_text_to_train_on():
    """Those of one document are together, at its end; an answer begins where it did."""
    documents = [(list(range(100 * n, 100 * n + 10)), 4) for n in range(10)]
    training, held_out = split_documents(documents, 0.25, 3, seed=0)
    parts = {ids[0] // 100: [(ids, start)] for ids, start in training}
    for ids, start in held_out:
        parts.setdefault(ids[0] // 100, []).append((ids, start))
    joined = [[token_id for ids, _ in parts[n] for token_id in ids] for n in range(10)]
    assert joined == [ids for ids, _ in documents]
    assert sum(len(ids) for ids, _ in held_out) == 25
    (cut,) = (each for each in parts.values() if len(each) == 2)
    assert [start for _, start in cut] == [4, 1]  # cut in the middle, after the answer began
    for seed in range(3):
        (first,), (last,) = split_documents([([*range(40)], 30)], 0.1, 19, seed)
        assert (first, last) == (([*range(20)], 30), ([*range(20, 40)], 10))
    for share in (0.9, 0.999):
        training, _ = split_documents(documents, share, 3, seed=0)
        assert sum(len(ids) for ids, _ in training) == max(2, round(100 * (1 - share)))
    with pytest.raises(ValueError, match="data: too little text"):
        split_documents([([1, 2, 3], 1), ([], 1)], 0.5, 8, 0)


def test_documents_begin_as_prompts_do(tmp_path):
    tokenizer, text, lines = byte_tokenizer(), tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("ab")
    answer = {"prompt_ids": [5, 6], "token_ids": [7], "messages": []}
    answer["text"] = tokenizer.decode([5, 6, 7])
    lines.write_text(json.dumps({"text": "ab"}) + "\n" + json.dumps(answer))
    plain = tokenizer("ab")["input_ids"]
    files = [text, lines]
    found = [*_documents(files, tokenizer, VOCAB_SIZE)]
    assert found == [(plain, 1), (plain, 1), ([5, 6, 7], 2)]
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    in_front = TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.backend_tokenizer.post_processor = in_front
    found = [*_documents(files, tokenizer, VOCAB_SIZE)]
    assert found == [([begin, *plain], 1), ([begin, *plain], 1), ([5, 6, 7], 2)]


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt_ids": [5, 6], "token_ids": [7], "text": "of others"}))
    with pytest.raises(ValueError, match=r"line 1: .* ids, which are of another tokenizer"):
        [*_documents([file], byte_tokenizer(), VOCAB_SIZE)]


@pytest.mark.parametrize("beside", [{"prompt": "a"}, {"messages": []}])
def test_an_answer_without_its_question_is_no_text(tmp_path, beside):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "b", "token_ids": [1], **beside}))
    with pytest.raises(ValueError, match=r"line 1: \"text\" is an answer to its (prompt|messages)"):
        [*_documents([file], byte_tokenizer(), VOCAB_SIZE)]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["train", "glide", *map(str, arguments)])


def test_command_line_makes_a_draft_that_runs(target_folder, tmp_path, monkeypatch):
    text, out = tmp_path / "text.txt", tmp_path / "draft"
    text.write_text(TEXT)
    records = tmp_path / "more.jsonl"
    lines = {"text": TEXT[:300]}, {"prompt_ids": [3, 4], "token_ids": [5, 6, 7]}
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ("--target", target_folder, "--data", text, "--data", records, "--out", out)
    sizes = ("--context", 32, "--batch-size", 4, "--held-out", 0.1, "--checkpoint-steps", 3)
    result = run(*common, *sizes, "--steps", 4, "--lookup-rows", 6)
    assert result.exit_code == 0, result.output
    assert "4 steps" in result.output
    assert "acceptance rate" in result.output
    record = json.loads((out / "record.json").read_text())
    assert 0 <= record["acceptance_rate"] <= 1
    assert record["mean_acceptance_length"] >= 1
    engine = Engine(str(target_folder), str(out), spec=SpecConfig("glide"))
    plain = Engine(str(target_folder))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = [e.generate("the cat", params)[0].token_ids for e in (engine, plain)]
    assert outputs[0] == outputs[1]
    again = run(*common, *sizes, "--steps", 4)
    assert again.exit_code != 0
    assert "has a checkpoint" in again.output
    longer = run(*common, *sizes, "--steps", 5, "--resume")
    assert longer.exit_code == 0, longer.output
    assert "5 steps" in longer.output
    for flag, value in (("--context", 16), ("--held-out", 0.4), ("--dtype", "bfloat16")):
        other = run(*common, *sizes, flag, value, "--resume")
        assert other.exit_code == 1
        assert f"{flag}: expected" in other.output
    monkeypatch.chdir(target_folder.parent)
    same = ("--target", target_folder.name, *common[2:])
    result = run(*same, *sizes, "--steps", 5, "--resume")
    assert result.exit_code == 0, result.output
    GlideLlamaForCausalLM.from_pretrained(out)


def test_plain_baseline_from_the_command_line(target_folder, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "draft"
    text.write_text(TEXT)
    options = ("--target", target_folder, "--data", text, "--out", out, "--plain")
    small = ("--context", 64, "--hidden-size", 32, "--steps", 2)
    result = run(*options, *small, "--distillation", 1)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--steps", 0), "steps"),
        (("--batch-size", 0), "--batch-size: "),
        (("--rate", 0), "rate"),
        (("--distillation", 1.5), "distillation"),
        (("--lookup-rows", -1), "--lookup-rows: "),
        (("--lookup-rows", 5, "--plain"), "--lookup-rows: a --plain draft"),
        (("--held-out", 1), "--held-out: "),
        (("--layers", 9), "layers"),
        (("--hidden-size", 33), "--hidden-size: "),
        (("--context", 1), "--context"),
        (("--context", 100_000), "--context: expected at most 512, the target's positions"),
        (("--context", 64, "--data", "little.txt"), "data: too little text"),
        (("--resume",), "resume: no checkpoint"),
        (("--accelerate",), "--accelerate: not installed"),
        (("--accelerate", "--device", "cpu"), "--device: accelerate launch chooses it"),
    ],
)
def test_bad_input_is_named(arguments, named, target_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    (tmp_path / "little.txt").write_text(TEXT[:3])
    monkeypatch.chdir(tmp_path)
    given = () if "--data" in arguments else ("--data", text)
    result = run("--target", target_folder, *given, "--out", tmp_path / "o", *arguments)
    assert result.exit_code != 0
    assert named in result.output


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"\xff\xfe\xfa", "is not UTF-8"),
        ("a.jsonl", b'{"words": 1}\n', 'line 1 has neither "text" nor'),
        ("a.jsonl", b'{"text": "x"}\n[1\n', "line 2"),
        ("a.jsonl", b'{"text": 3}\n', "is not a string: 3"),
        ("a.txt", b"", "data: too little text to hold any out"),
    ],
)
def test_bad_data_is_named(name, content, named, target_folder, tmp_path):
    file = tmp_path / name
    file.write_bytes(content)
    result = run("--target", target_folder, "--data", file, "--out", tmp_path / "o")
    assert result.exit_code == 1
    assert re.search(named, result.output)

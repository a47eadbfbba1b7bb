"""The training script on a toy corpus."""

import ast
import json

import pytest
import torch
from typer.testing import CliRunner

from scripts.tiny import attention as tiny_attention
from scripts.tiny import corpus as tiny_corpus
from scripts.tiny import draft as tiny_draft
from scripts.tiny import evaluate as tiny_evaluate
from scripts.tiny import generate as tiny_generate
from scripts.tiny import target as tiny_target
from scripts.tiny import textbook
from scripts.tiny.__main__ import app
from scripts.tiny.loop import LoopOptions
from scripts.tiny.optim import WallClockAnneal, windows
from scripts.tiny.tokenizer import END_OF_TEXT_ID, train_tokenizer

LINES = [f"def function_{index}(value):\n    return value + {index}\n\n\n" for index in range(5)]


@pytest.fixture
def single_thread():
    """The loop sets one operator thread; give the others back their own."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def write_library(folder):
    """Ten training files and one held-out file."""
    folder.mkdir()
    names = [f"file{index}.py" for index in range(500)]
    held_out = [name for name in names if tiny_corpus.is_held_out(f"lib/{name}")]
    training = [name for name in names if name not in held_out]
    for name in held_out[:1] + training[:10]:
        (folder / name).write_text("".join(LINES) * 4)


@pytest.mark.usefixtures("single_thread")
def test_every_stage_runs_and_the_card_reports_it(tmp_path):
    write_library(tmp_path / "lib")
    out, assets = tmp_path / "out", tmp_path / "assets"
    size = ("--vocab-size", 300, "--prompts-per-kind", 1, "--modules", 60, "--pages", 60)
    run("corpus", "--out", out, "--library", tmp_path / "lib", *size)
    shape = ("--no-compiled", "--rows", 4, "--context", 32)
    shape += ("--layers", 3, "--hidden", 64, "--intermediate", 32)
    run("target", "--out", out, "--minutes", 0.01, *shape)
    first = json.loads((out / "target" / "record.json").read_text())
    run("target", "--out", out, "--minutes", 0.005, *shape, "--resume")
    record = json.loads((out / "target" / "record.json").read_text())
    assert record["steps"] > first["steps"] > 0
    assert record["tokens"] == 4 * 32 * record["steps"]
    kinds = ("corpus", "repeated", "greedy", "sampled")
    batches = [word for kind in kinds for word in (f"--{kind}-batches", 1)]
    run("generate", "--out", out, *batches, "--context", 16)
    run("draft", "--out", out, "--minutes", 0.01, "--rows", 4, "--layers", 1)
    run("export", "--out", out, "--assets", assets)
    card = (assets / "MODEL_CARD.md").read_text()
    assert f"| steps | {record['steps']:,} |" in card
    assert "| all | 1 |" in card
    assert "GLIDE" not in card
    run("glide", "--out", out, "--assets", assets, "--steps", 2)
    run("glide", "--out", out, "--assets", assets, "--steps", 3, "--resume")
    record = json.loads((assets / "record.json").read_text())["glide"]
    assert record["glide"]["steps"] == record["plain"]["steps"] == 3
    assert record["glide"]["tokens"] == record["plain"]["tokens"] == 3 * 4 * 16
    assert [row["draft"] for row in record["evaluation"]] == ["glide", "plain"] * 2
    card = (assets / "MODEL_CARD.md").read_text()
    assert "| steps, of 3 planned | 3 | 3 |" in card
    assert "| plain | 1 |" in card
    assert (assets / "tiny-glide" / "model.safetensors").is_file()
    configs = [json.loads(file.read_text()) for file in assets.glob("tiny-*/config.json")]
    assert [config["dtype"] for config in configs] == ["float32"] * 3


def test_resume_without_checkpoint_is_refused(tmp_path):
    model = tiny_target.make_model(tiny_target.Shape(1, 64, 32), 300)
    options = LoopOptions(tmp_path, 1.0, 8, resume=True)
    with pytest.raises(ValueError, match="resume"):
        tiny_draft.TrainingLoop(model, options, tuple, torch.stack, dict)
    with pytest.raises(ValueError, match="minutes"):
        LoopOptions(tmp_path, 0.0, 8)


@pytest.mark.parametrize(
    "text",
    ["  two spaces", "\n\n\tdef f():\n        pass\n", "naïve ☃ 日本 \x00", " don't , do !", ""],
)
def test_tokenizer_round_trips(text):
    tokenizer = train_tokenizer(LINES, 300, 1024)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert END_OF_TEXT_ID not in ids
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == END_OF_TEXT_ID


def test_tokenizer_refuses_a_vocabulary_below_the_bytes():
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer(LINES, 256, 1024)


def test_split_is_small_and_fixed():
    sources = [f"lib/file{index}.py" for index in range(5000)]
    held_out = sum(map(tiny_corpus.is_held_out, sources))
    assert 50 < held_out < 150
    assert tiny_corpus.is_held_out("lib/argparse.py")
    assert not tiny_corpus.is_held_out("lib/abc.py")


def test_corpus_leaves_out_tests_and_refuses_an_empty_folder(tmp_path):
    (tmp_path / "lib" / "test").mkdir(parents=True)
    (tmp_path / "lib" / "good.py").write_text("pass\n")
    (tmp_path / "lib" / "test" / "bad.py").write_text("pass\n")
    documents = tiny_corpus.read_corpus(library=tmp_path / "lib")
    assert [document.source for document in documents] == ["lib/good.py"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="library"):
        tiny_corpus.read_corpus(tmp_path / "empty")


def is_attribute_of_a_name(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def test_the_textbook_is_python_and_the_same_each_time():
    """No two modules alike, imports there for what is used, and no part twice."""
    modules = [textbook.module(number) for number in range(300)]
    assert len({*modules}) == 300
    assert modules[:3] == [textbook.module(number) for number in range(3)]
    for text in modules:
        tree = ast.parse(text)
        parts = (ast.ClassDef, ast.FunctionDef)
        names = [node.name for node in tree.body if isinstance(node, parts)]
        assert len(names) == len({*names})
        used = {node.value.id for node in ast.walk(tree) if is_attribute_of_a_name(node)}
        for module in used & {"os", "sys", "json", "csv", "math", "random", "time", "argparse"}:
            assert f"import {module}\n" in text
    assert all(textbook.page(number).startswith(":mod:`") for number in range(50))


def test_windows_cover_the_text_once_an_epoch():
    token_ids = torch.arange(101, dtype=torch.int32)
    stream = windows(token_ids, 3, 8, torch.Generator().manual_seed(1))
    starts = torch.cat([next(stream)[:, 0] for _ in range(3)]).tolist()
    assert len(set(starts)) == 9
    assert len({start % 8 for start in starts}) == 1


def test_anneal_is_a_line_to_zero_and_survives_a_pause(monkeypatch):
    now = 0.0
    monkeypatch.setattr("scripts.tiny.optim.time.monotonic", lambda: now)
    anneal = WallClockAnneal(100.0, warmup_steps=1)
    factors = []
    for step in range(80):
        now += 21.0 if step == 40 else 1.0  # a pause of twenty steps, of which three may count
        factors.append(anneal.advance())
    assert factors[39] == pytest.approx(0.60)
    assert 0.55 < factors[40] < 0.60
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)
    assert anneal.finished


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([True] * 10, (8, 8, 2)),
        ([False] * 3, (0, 6, 3)),
        ([True, False, True, True], (3, 6, 2)),
        ([], (0, 0, 0)),
    ],
)
def test_chain_counts(flags, expected):
    assert tiny_evaluate.chain_counts(flags, 4) == expected


def test_a_model_always_accepts_itself():
    torch.manual_seed(0)
    model = tiny_target.make_model(tiny_target.Shape(1, 64, 32), 300).eval()
    for temperature in (0.0, 1.0):
        texts = tiny_evaluate.write_texts(model, [[5, 6, 7], [8, 9]], temperature)
        measured = tiny_evaluate.measure_acceptance(model, model, texts, temperature)
        assert measured["acceptance_rate"] > 0.99


def test_shared_head_attention_writes_the_same_text():
    torch.manual_seed(0)
    model = tiny_target.make_model(tiny_target.Shape(2, 128, 32), 300).eval()
    prompts = torch.randint(300, (4, 7))
    plain = tiny_generate.write_text(model, prompts, 9, 0.0, torch.Generator())
    tiny_attention.use_shared_head_attention(model)
    shared = tiny_generate.write_text(model, prompts, 9, 0.0, torch.Generator())
    assert torch.equal(plain.token_ids, shared.token_ids)
    torch.testing.assert_close(plain.hidden, shared.hidden, atol=1e-4, rtol=0.0)


def test_repeated_segments_have_their_period():
    rows = torch.arange(64).expand(20, 64)
    repeated = tiny_generate.repeat_segments(rows, torch.Generator().manual_seed(0))
    for row in repeated.tolist():
        drop = next(index for index in range(1, 64) if row[index] < row[index - 1])
        start = row[drop]
        assert row[:drop] == list(range(drop))
        assert 3 <= drop - start < 16
        assert row[drop:] == [start + index % (drop - start) for index in range(64 - drop)]


def test_distillation_loss_is_the_cross_entropy_and_its_gradient():
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(2, 5, 11)
    draft_logits.requires_grad_()
    plain = torch.nn.functional.cross_entropy(draft_logits, target_logits.softmax(dim=-1))
    loss = tiny_draft.DistillationLoss.apply(draft_logits, target_logits)
    torch.testing.assert_close(loss, plain)
    gradients = [torch.autograd.grad(2 * value, draft_logits)[0] for value in (loss, plain)]
    torch.testing.assert_close(*gradients)

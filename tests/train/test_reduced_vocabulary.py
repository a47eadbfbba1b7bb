"""Drafts that know a part of the vocabulary, and the stored target and texts that teach them."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli import app
from fastspec.config import EngineConfig
from fastspec.models.reduced_vocabulary import (
    read_reduced,
    reduce_vocabulary,
    save_reduced,
)
from fastspec.train.data import (
    Rows,
    cut_rows,
    frozen_target,
    most_frequent,
    states_file,
    stored_states,
    stored_target,
)
from fastspec.train.new_drafts import make_glide, make_plain
from fastspec.train.options import TrainOptions
from fastspec.train.own_text import write_texts
from fastspec.train.run import train_draft

from ..engine.helpers import (
    ALPHA,
    GREEDY,
    PLAIN,
    PROMPTS,
    hugging_face_greedy,
    p_value,
    small_model,
)
from ..engine.probes import flat_model_of
from ..models import VOCAB_SIZE, byte_tokenizer, random_model

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def reduced(target, token_ids, kind="draft_model", num_layers=2):
    make = make_glide if kind == "glide" else make_plain
    draft = make(target, num_layers)
    reduce_vocabulary(draft, target, torch.tensor(token_ids))
    return draft.eval()


def rows_of(width, count=5):
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randint(250, (count, width), generator=generator),
        torch.tensor([width] * (count - 1) + [width - 3]),
    )


def test_other_tokens_have_no_probability():
    target = random_model("llama")
    draft = reduced(target, [3, 7, 200])
    hidden = torch.randn(2, 5, target.config.hidden_size)
    logits = draft.lm_head(hidden)
    assert logits.shape == (2, 5, VOCAB_SIZE)
    torch.testing.assert_close(logits[..., [3, 7, 200]], target.lm_head(hidden)[..., [3, 7, 200]])
    others = torch.ones(VOCAB_SIZE, dtype=bool)
    others[[3, 7, 200]] = False
    assert (logits[..., others] == -torch.inf).all()


@pytest.mark.parametrize("kind", ["draft_model", "glide"])
def test_folder_drafts_exactly_and_holds_no_embedding(kind, tmp_path):
    target = random_model("llama")
    known = sorted({token for prompt in PROMPTS for token in hugging_face_greedy(target, prompt)})
    draft = reduced(target, known[::2], kind)
    save_reduced(draft, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        kinds = {file.get_tensor(name).dtype for name in names if name.endswith("proj.weight")}
    assert not any("embed_tokens" in name or name == "lm_head.weight" for name in names)
    assert kinds == {torch.int8}
    read = read_reduced(tmp_path, target)
    for name, weight in draft.named_parameters():
        worst = weight.detach().abs().amax() / 127
        torch.testing.assert_close(read.get_parameter(name), weight, atol=float(worst), rtol=0)
    engine = Engine(target, tmp_path, spec=SpecConfig(kind, 4))
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == hugging_face_greedy(target, prompt)
    assert engine.stats.num_accepted_tokens > 0


def test_the_law_is_the_targets():
    model = small_model()
    draft = reduced(model, [0, 2, 5])
    spec = SpecConfig("draft_model", 2)
    assert p_value((model, draft), PLAIN, spec, num_more=2) > ALPHA


def test_proposals_have_the_columns_of_known_tokens():
    target = random_model("llama")
    engine = Engine(target, reduced(target, range(0, 200, 3)), spec=SpecConfig("draft_model", 2))
    drafter, seen = engine.drafter, []
    assert drafter is not None
    propose = drafter.propose

    def spy(batch):
        seen.append(propose(batch))
        return seen[-1]

    drafter.propose = spy
    engine.generate(PROMPTS, SamplingParams(temperature=1, seed=1, max_tokens=8))
    for proposal in seen:
        assert proposal.draft_logits.shape[2] == 67
        assert proposal.draft_token_map[[0, 1, 3, 198]].tolist() == [0, -1, 1, 66]
        drafted = proposal.token_ids[proposal.token_ids >= 0]
        assert (drafted % 3 == 0).all()


def test_a_head_that_tells_most_tokens_has_the_columns_of_all():
    target = random_model("llama")
    engine = Engine(target, reduced(target, range(200)), spec=SpecConfig("draft_model", 2))
    assert engine.drafter.vocabulary.token_map is None
    assert engine.generate(PROMPTS[0], GREEDY)[0].token_ids == hugging_face_greedy(
        target, PROMPTS[0]
    )


def test_flat_passes_take_the_head():
    draft = reduced(random_model("llama"), range(0, 200, 3))
    engine = Engine(draft)
    assert flat_model_of(engine) is not None
    for prompt in PROMPTS:
        (output,) = engine.generate(prompt, GREEDY)
        assert output.token_ids == hugging_face_greedy(draft, prompt)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"hidden_size": 64}, r"drafter: cannot load .*needs embeddings \(263, 48\)"),
        ({"vocab_size": 300}, r"drafter: cannot load .*which has \(300, 48\)"),
    ],
)
def test_another_target_is_refused(other, named, tmp_path):
    save_reduced(reduced(random_model("llama"), [1, 2]), tmp_path)
    with pytest.raises(ValueError, match=named):
        Engine(random_model("llama", **other), tmp_path, spec=SpecConfig("draft_model"))


def test_a_plain_draft_is_no_glide(tmp_path):
    target = random_model("llama")
    save_reduced(reduced(target, [1, 2]), tmp_path)
    with pytest.raises(ValueError, match="drafter: GLIDE needs a GLIDE model"):
        Engine(target, tmp_path, spec=SpecConfig("glide"))


def test_a_head_with_a_bias_is_refused():
    target = random_model("llama")
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE))
    with pytest.raises(ValueError, match="a head with a bias"):
        reduced(target, [1, 2])


def test_shallow_drafts_start_from_both_ends():
    target = random_model("llama", num_hidden_layers=5)
    draft = make_plain(target, 3)
    chosen = [target.model.layers[index] for index in (0, 3, 4)]
    for own, large in zip(draft.model.layers, chosen, strict=True):
        assert torch.equal(own.mlp.up_proj.weight, large.mlp.up_proj.weight)
    assert torch.equal(make_plain(target).model.norm.weight, target.model.norm.weight)


def test_most_frequent_tokens_of_the_rows():
    rows = cut_rows([[5, 5, 5, 9, 9, 2, 7, 7, 7]], context=4)
    token_ids = rows.token_ids[rows.valid]
    assert most_frequent(token_ids, 2).tolist() == [5, 7]
    assert most_frequent(token_ids, 4).tolist() == [2, 5, 7, 9]
    assert most_frequent(token_ids, 12).tolist() == [*range(12)]


@pytest.mark.parametrize("token_ids", [None, torch.tensor([3, 7, 200])])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_stored_target_says_what_it_said(kind, token_ids, tmp_path):
    target, rows, file = random_model(kind), rows_of(18), tmp_path / "states.bin"
    live = frozen_target(target, rows, 2, token_ids)
    read = []
    for _ in range(2):  # read by the target, then from the file
        stored = stored_target(target, rows, 2, token_ids, file, read.append)
        for indices in (torch.tensor([4, 1]), torch.arange(5)):
            for name in ("token_ids", "valid", "target_logits", "layers"):
                theirs, ours = (getattr(t(indices), name) for t in (live, stored))
                torch.testing.assert_close(ours, theirs)
    assert read == [5]


def test_a_text_counts_as_read_once_all_of_it_is_there(tmp_path, monkeypatch):
    """Whoever is killed between two copies leaves a text that is read again."""
    truth, copy, copied = torch.arange(1.0, 13).view(2, 3, 2), torch.Tensor.copy_, []

    def dying(self, *args):
        if len(copied) == 3:
            raise KeyboardInterrupt
        copied.append(self)
        return copy(self, *args)

    def read(places):
        return truth[places]

    arguments = tmp_path / "s", torch.float32, [3, 2], 2, read, lambda _: None
    monkeypatch.setattr(torch.Tensor, "copy_", dying)
    with pytest.raises(KeyboardInterrupt):
        stored_states(*arguments)
    monkeypatch.undo()
    states = stored_states(*arguments)
    assert torch.equal(states[0], truth[0])
    assert torch.equal(states[1], truth[1, :2])


def test_states_of_other_texts_or_another_target_are_not_taken(tmp_path):
    target, texts = random_model("llama"), [torch.arange(4), torch.arange(9)]
    file = states_file(tmp_path, True, target, texts, (1, 2))
    file.write_bytes(b"states")
    assert states_file(tmp_path, True, target, texts, (1, 2)) == file
    assert file.exists()
    others = (
        (target, [torch.arange(4)], (1, 2)),
        (target, [torch.arange(5), torch.arange(8)], (1, 2)),
        (target, texts, (1, 3)),
        (random_model("llama", rms_norm_eps=1e-3), texts, (1, 2)),
    )
    for other in others:
        file.write_bytes(b"states")
        assert states_file(tmp_path, True, *other[:2], other[2]) != file
        assert not file.exists()


def test_a_head_that_is_not_the_end_cannot_be_stored(tmp_path):
    target = random_model("gemma2", final_logit_softcapping=2.0)
    with pytest.raises(ValueError, match="store_target: Gemma2ForCausalLM modifies"):
        stored_target(target, rows_of(9), 0, None, tmp_path / "states.bin", lambda _: None)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_command_line_from_texts_to_a_draft(chat_folder, tmp_path):
    prompts, texts, out = (tmp_path / name for name in ("prompts.txt", "texts.jsonl", "draft"))
    prompts.write_text("".join(f"what is {n}?\n" for n in range(9)))
    common = ("--target", chat_folder, "--dtype", "float32")
    result = run("texts", *common, "--prompts-file", prompts, "--out", texts, "--max-tokens", 30)
    assert result.exit_code == 0, result.output
    first = json.loads(texts.read_text().splitlines()[0])["text"]
    assert first.startswith("[user]what is 0?")
    sizes = ("--layers", 2, "--vocab-size", 60, "--context", 32, "--batch-size", 2, "--steps", 3)
    common = (*common, "--data", texts, "--out", out, *sizes)
    picture = tmp_path / "loss.png"
    out.mkdir()
    (out / "target-states.bin").write_bytes(b"of another run")
    result = run("draft", *common, "--store-target", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "3 steps" in result.output
    assert len(json.loads((out / "record.json").read_text())["losses"]) == 3
    assert picture.stat().st_size > 0
    assert not (out / "tokenizer.json").exists()
    engine = Engine(str(chat_folder), str(out), config=EngineConfig(dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = engine.generate("what is 4?", params)
    assert output.token_ids == Engine(chat_folder).generate("what is 4?", params)[0].token_ids
    assert not [*out.glob("target-states*")]
    result = run("draft", *common, "--store-target", "--accelerate")
    assert result.exit_code == 2
    assert "--store-target: not with --accelerate" in result.output
    result = run("draft", *common, "--distillation", 0.5, "--resume")
    assert result.exit_code == 1
    assert "distillation: expected 1, as the vocabulary is reduced" in result.output
    result = run("draft", *common, "--vocab-size", 999)
    assert result.exit_code != 0
    assert "--vocab-size: expected at most 263" in result.output


def test_written_texts_go_on_where_they_stopped(chat_folder, tmp_path):
    engine = Engine(str(chat_folder), config=EngineConfig(max_batch_size=1))
    prompts = [f"question {n}" for n in range(6)]
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_texts(engine, "target", prompts, 5, whole, lambda _: None)
    content = whole.read_bytes()
    part = interrupted(engine, prompts, broken)
    head, first = part.read_bytes().splitlines()[:2]
    part.write_bytes(b"\n".join((head, first, first[:9])))  # one line, and a part of the next
    seen = []
    write_texts(engine, "target", prompts, 5, broken, seen.append)
    assert broken.read_bytes() == content
    assert seen == [1, 5, 6]
    assert sorted(tmp_path.iterdir()) == [broken, whole]
    for line in map(json.loads, content.splitlines()):
        given, written = line["prompt_ids"], line["token_ids"]
        assert line["text"] == engine.tokenizer.decode([*given, *written])
        assert len(written) == 5
    engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        write_texts(engine, "target", prompts, 5, tmp_path / "none.jsonl", lambda _: None)
    assert sorted(tmp_path.iterdir()) == [broken, whole]


def interrupted(engine, prompts, file):
    """What a run keeps that is interrupted after its first write."""

    def stop(done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_texts(engine, "target", prompts, 5, file, stop)
    assert not file.exists()
    return file.with_name(f"{file.name}.part")


def test_texts_of_another_run_are_neither_taken_nor_changed(chat_folder, tmp_path):
    engine = Engine(str(chat_folder), config=EngineConfig(max_batch_size=1))
    prompts, file = [f"question {n}" for n in range(6)], tmp_path / "texts.jsonl"
    part = interrupted(engine, prompts, file)
    content = part.read_bytes()
    for other in (("other", prompts, 5), ("target", prompts[1:], 5), ("target", prompts, 6)):
        with pytest.raises(ValueError, match=r"^out: .*texts\.jsonl\.part is from a run"):
            write_texts(engine, *other, file, lambda _: None)
    assert part.read_bytes() == content
    asked, out = tmp_path / "prompts.txt", tmp_path / "other.jsonl"
    asked.write_text("question 1\n")
    out.write_text('{"text": "mine"}')
    common = ("texts", "--target", chat_folder, "--prompts-file", asked)
    result = run(*common, "--out", out)
    assert (result.exit_code, "--out: expected a file that does not" in result.output) == (2, True)
    assert out.read_text() == '{"text": "mine"}'


def test_an_answer_that_failed_is_no_text(chat_folder, tmp_path, monkeypatch):
    """What was written before it is kept."""
    engine = Engine(str(chat_folder), config=EngineConfig(max_batch_size=1))
    generate = engine.generate

    def failing(ids, params):
        first, second, *others = generate(ids, params)
        return [first, replace(second, error="not finite"), *others]

    monkeypatch.setattr(engine, "generate", failing)
    file = tmp_path / "texts.jsonl"
    with pytest.raises(ValueError, match="prompt 2: not finite"):
        write_texts(engine, "target", ["a", "b", "c"], 5, file, lambda _: None)
    assert not file.exists()
    assert len((tmp_path / "texts.jsonl.part").read_text().splitlines()) == 2


def test_only_eagle3_drafts_learn_by_acceptance():
    nothing: Any = None
    options = TrainOptions(acceptance=0.5)
    with pytest.raises(ValueError, match="acceptance: expected 0"):
        train_draft(nothing, nothing, nothing, options, nothing, nothing, False, nothing)

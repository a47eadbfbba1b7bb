"""`fastspec train shapes`: what is tried, and what untrained drafts are; what they cost decides no
test."""

import pytest
import torch
from typer.testing import CliRunner

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli import app
from fastspec.train.options import ShapesTried
from fastspec.train.shapes import shapes_of, untrained

from ..models import random_model

SHORT = ["--num-prompts", "1", "--max-tokens", "24", "-k", "2"]


def sizes(target, **tried):
    shapes = shapes_of(target, ShapesTried(**tried))
    return [(each.layers, each.hidden_size, each.reduced_vocab_size) for each in shapes]


def test_what_is_tried_fits_the_target():
    target = random_model("llama", num_hidden_layers=2)
    width = target.config.hidden_size
    assert sizes(target) == [(1, None, None), (2, None, None)]
    named = sizes(target, layers=[1], hidden_sizes=[width, 2 * width], vocab_sizes=[9, 64])
    assert named == [(1, None, 9), (1, None, 64), (1, None, None), (1, 2 * width, None)]


@pytest.mark.parametrize(("kind", "method"), [("plain", "draft_model"), ("glide", "glide")])
def test_an_untrained_draft_drafts(kind, method):
    target = random_model("llama").to(torch.bfloat16)
    texts = [[1, 2, 3, 2], [4, 2]]
    (shape,) = shapes_of(target, ShapesTried(layers=[1], vocab_sizes=[200]))[:1]
    draft = untrained(target, shape, kind, texts)
    assert (draft.dtype, draft.training) == (torch.bfloat16, False)
    assert {1, 2, 3, 4} <= {*draft.lm_head.token_ids.tolist()}
    engine = Engine(target, draft, spec=SpecConfig(method, 2))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = engine.generate([texts[0]], params)
    (plain,) = Engine(target, spec="none").generate([texts[0]], params)
    assert output.token_ids == plain.token_ids
    assert output.stats.num_draft_tokens > 0


@pytest.mark.parametrize("options", [[], ["--glide"]])
def test_the_table(options):
    run = ["train", "shapes", *SHORT, "--layers", "1,2", "--vocab-sizes", "512", *options]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.stderr
    names = [line.split("│")[0].strip() for line in result.stdout.splitlines() if "│" in line]
    assert names == ["1 layer, 512 tokens", "2 layers, 512 tokens", "1 layer", "2 layers"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--layers", "0"], "--layers"),
        (["--layers", "99"], "layers"),
        (["--hidden-sizes", "7"], "hidden"),
        (["--vocab-sizes", "100000"], "vocab"),
    ],
)
def test_shapes_that_do_not_fit(options, named):
    result = CliRunner().invoke(app, ["train", "shapes", *SHORT, *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line

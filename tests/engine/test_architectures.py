"""The tables of docs/models.md are what the installed transformers' decoders show."""

import re

import pytest
import transformers

from fastspec_kernels import available_backends

from ..architectures import (
    MULTIMODAL,
    NOT_TRIED,
    OVERRIDES,
    PAGE,
    TABLE,
    model_types,
    try_out,
)

_TEXT = "".join(match["rows"] for match in TABLE.finditer(PAGE.read_text(encoding="utf-8")))
ROWS = {row[1]: row[0] for row in re.finditer(r"^\| `(.*?)` \|.*$", _TEXT, flags=re.MULTILINE)}
SOME = [*ROWS][::9]

pytestmark = [
    pytest.mark.skipif(
        f"transformers {transformers.__version__}:" not in _TEXT, reason="of another transformers"
    ),
    pytest.mark.skipif("cpu" not in available_backends(), reason="says what the CPU kernels run"),
]


def test_every_decoder_is_in_the_table():
    assert [*ROWS] == [*model_types(), *MULTIMODAL]
    assert not NOT_TRIED & set(OVERRIDES)


@pytest.mark.parametrize("model_type", SOME)
def test_some_do_what_the_table_says(model_type):
    assert try_out(model_type).row == ROWS[model_type]


@pytest.mark.check
@pytest.mark.parametrize("model_type", sorted(set(ROWS) - set(SOME)))
def test_the_others_do_too(model_type):
    assert try_out(model_type).row == ROWS[model_type]

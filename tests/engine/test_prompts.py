"""Prompts in every form that users have them: the same ids, or an error by name."""

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from fastspec import Engine, SamplingParams

from ..models import EOS_ID, byte_tokenizer, random_model
from .helpers import finish

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
IDS = [[5, 6, 7], [9, 8, 7]]
LEFT = {"input_ids": [[0, 5, 6], [1, 2, 3]], "attention_mask": [[0, 1, 1], [1, 1, 1]]}
RIGHT = {"input_ids": [[5, 6, 0], [1, 2, 3]], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
PADDED = [[5, 6], [1, 2, 3]]
TENSORS = {"input_ids": torch.tensor(LEFT["input_ids"]), "attention_mask": torch.ones(2, 3) > 0}


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (torch.tensor(IDS[0]), IDS[:1]),
        (torch.tensor(IDS, dtype=torch.int32), IDS),
        (np.array(IDS[0]), IDS[:1]),
        (np.array(IDS, dtype=np.uint8), IDS),
        (tuple(np.array(IDS[0])), IDS[:1]),
        ([torch.tensor(IDS[0]), np.array(IDS[1])], IDS),
        ([torch.tensor(IDS[:1]), IDS[1], "ab"], [*IDS, [64, 65]]),
        ({"prompt": "ab"}, [[64, 65]]),
        ({"prompt_token_ids": IDS[0]}, IDS[:1]),
        ([{"prompt_token_ids": IDS[0]}, {"prompt": "ab"}], [IDS[0], [64, 65]]),
        ({"input_ids": IDS}, IDS),
        (LEFT, PADDED),
        (BatchEncoding(RIGHT), PADDED),
        (BatchEncoding(LEFT, tensor_type="pt"), PADDED),
        (TENSORS, LEFT["input_ids"]),
        ({"input_ids": [[5], [1, 2]], "attention_mask": [[1], [1, 1]]}, [[5], [1, 2]]),
        ([BatchEncoding({"input_ids": IDS[0], "attention_mask": [True, True, False]})], [[5, 6]]),
        ({"input_ids": torch.tensor(IDS), "mm_token_type_ids": torch.zeros(2, 3)}, IDS),
    ],
    ids=str,
)
def test_forms_of_prompts(engine, prompts, expected):
    outputs = engine.generate(prompts, GREEDY)
    assert [list(output.prompt_token_ids) for output in outputs] == expected
    assert all(type(token_id) is int for output in outputs for token_id in output.prompt_token_ids)


@pytest.mark.parametrize(("row", "name"), [(-1, "prompts"), (0, "prompts"), (0, "input_ids")])
def test_padding_without_a_mask(row, name):
    """Unless texts begin or end with the token too."""
    model = random_model("llama", pad_token_id=0)
    rows = torch.tensor([[5, 6, 7], [5, 6, 7]])
    rows[1, row] = 0
    prompts = rows if name == "prompts" else {name: rows}
    with pytest.raises(ValueError, match=f"^{name}: row 1 begins or ends with padding, token"):
        Engine(model).generate(prompts, GREEDY)
    assert len(Engine(model).generate(rows.tolist(), GREEDY)) == 2
    assert Engine(model).generate(rows[1:], GREEDY)[0].prompt_token_ids == tuple(rows[1].tolist())
    model.generation_config.eos_token_id = [EOS_ID, 0]
    assert len(Engine(model).generate(prompts, GREEDY)) == 2


@pytest.mark.parametrize("prompt", [torch.tensor([1, 2]), {"prompt_token_ids": np.array([[1, 2]])}])
def test_one_prompt_of_any_form(engine, prompt):
    assert [*engine.stream(prompt, GREEDY)][-1].output.prompt_token_ids == (1, 2)
    request_id = engine.add_request(prompt, GREEDY)
    assert finish(engine)[request_id].prompt_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.ones(2), "prompts: expected integers in one or two dimensions, got float32"),
        (torch.tensor([True]), "prompts: expected integers .* got bool"),
        (torch.tensor(1), "prompts: expected integers .* got int64 in 0"),
        (np.ones((1, 1, 1), dtype=int), "prompts: expected integers .* in 3"),
        (np.array(["a"]), "prompts: expected integers"),
        (np.zeros((0, 3), dtype=int), "prompts: the list is empty"),
        (torch.zeros(2, 3, dtype=int, device="meta"), "prompts: expected a dense .* no values"),
        (torch.tensor(IDS).to_sparse(), "prompts: expected a dense tensor, got .*sparse"),
        ({"input_ids": IDS, "mm_token_type_ids": [[0, 1, 1]] * 2}, "mm_token_type_ids: not supp"),
        ([np.array([0.5])], "prompt: expected integers"),
        ([torch.tensor(IDS)], "prompt: expected one, got a batch of 2"),
        (None, "prompts: expected a text, .* or a list of such prompts, got NoneType"),
        (b"ab", "prompts: expected a text, .* got bytes"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data: not supported"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt: expected one of the keys"),
        ({"text": "a"}, r"prompt: expected one of the keys .* got \['text'\]"),
        ({"prompt": [1]}, "prompt: expected a text, got list"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids: expected a list, got str"),
        ({"input_ids": [1], "token_type_ids": [0]}, "token_type_ids: not supported"),
        ({"prompt_token_ids": [1], "attention_mask": [1]}, "attention_mask: not supported"),
        ({"input_ids": IDS, "attention_mask": [[1, 0, 1], [1, 1, 1]]}, "attention_mask: .* a gap"),
        ({"input_ids": IDS, "attention_mask": [[1, 2, 1], [1, 1, 1]]}, "attention_mask: .* 1s"),
        ({"input_ids": IDS, "attention_mask": [[1, 1], [1, 1]]}, "attention_mask: .* the shape"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "prompt: is empty"),
        ([[1, 2], 5], r"prompt: expected a text, .* or an array, got int \(prompts\[1\]\)"),
        ([[1, 2], []], r"prompt: is empty \(prompts\[1\]\)"),
        (np.array([[1, 2], [3, -4]]), r"prompt: token id -4 is not in .* \(prompts\[1\]\)"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_by_name(engine, prompt, message):
    with pytest.raises(ValueError, match=message) as error:
        engine.generate(prompt, GREEDY)
    assert "\n" not in str(error.value)
    assert not engine.has_unfinished


def test_errors_with_a_generation_config_say_which_prompt(engine):
    config = GenerationConfig(max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompt: is empty \(prompts\[1\]\)"):
        engine.generate([[1, 2], []], generation_config=config)
    with pytest.raises(ValueError, match=r"num_beams is not supported, got 2$"):
        engine.generate([[1, 2], [3]], generation_config=GenerationConfig(num_beams=2))

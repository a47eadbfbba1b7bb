"""Projections of the same rows, next to each other in memory."""

from typing import Any

import pytest
import torch
from torch import nn

from fastspec.models.side_by_side import move_side_by_side

from ..models import random_model

CPU = torch.device("cpu")


def follow_each_other(*weights):
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    return len(storages) == 1 and ends[:-1] == [weight.data_ptr() for weight in weights[1:]]


@pytest.mark.parametrize("has_bias", [False, True])
def test_projections_follow_each_other(tmp_path, has_bias):
    """Nothing else changes, and the model can be saved."""
    model: Any = random_model("llama", attention_bias=has_bias)
    parameters = dict(model.named_parameters())
    values = {name: weight.clone() for name, weight in parameters.items()}
    move_side_by_side(model, CPU)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        assert follow_each_other(*(part.weight for part in parts))
        assert follow_each_other(mlp.gate_proj.weight, mlp.up_proj.weight)
        if has_bias:
            assert follow_each_other(*(part.bias for part in parts))
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, weight in parameters.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in values.items())


def test_other_projections_stay():
    model: Any = random_model("llama")
    first, second, third, *_ = (layer.self_attn for layer in model.model.layers)
    first.k_proj = nn.Sequential(first.k_proj)
    second.q_proj.half()
    third.v_proj.bias = nn.Parameter(torch.zeros(len(third.v_proj.weight)))
    places = [weight.data_ptr() for each in (first, second) for weight in each.parameters()]
    move_side_by_side(model, CPU)
    assert places == [weight.data_ptr() for each in (first, second) for weight in each.parameters()]
    assert follow_each_other(third.q_proj.weight, third.k_proj.weight, third.v_proj.weight)


def test_weights_on_another_device_stay():
    model: Any = random_model("llama")
    attention = model.model.layers[0].self_attn
    attention.v_proj.to("meta")
    place = attention.q_proj.weight.data_ptr()
    move_side_by_side(model, CPU)
    assert attention.q_proj.weight.data_ptr() == place
    assert attention.v_proj.weight.device.type == "meta"

"""What a server's loaders have filled, as far as they are recorded; and a server's method, of plain parameters."""

import pytest
import torch
from helpers.served_weights import INPUT_SCALE, decoded, error_by_column, rounded, tensors_of, weights_of
from torch import nn

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import (
    COMPRESSED,
    EXPERTS,
    MODELOPT,
    Loader,
    Served,
    has_all_experts,
    is_whole,
    loads_of,
)
from nvfp4_tensor.integrations.serving import Activations

ROWS = (64, 32, 32)


def loaded(*calls, experts=False):
    layer, parameter = nn.Module(), nn.Parameter(torch.zeros(4, 2))
    parameter.weight_loader = Loader(layer, lambda *args, **kwargs: None, experts)
    for call in calls:
        parameter.weight_loader(parameter, torch.zeros(4, 2), **call)
    return parameter


def test_a_fused_weight_is_whole_with_all_of_its_parts():
    parts = [{"loaded_shard_id": each} for each in "qkv"]
    assert [is_whole(loaded(*parts[:n]), 3) for n in range(4)] == [False, False, False, True]
    assert is_whole(loaded({}), 3)  # one tensor of all parts


def test_experts_are_whole_with_each_shard_of_each():
    calls = [{"shard_id": shard, "expert_id": expert} for shard in ("w1", "w3") for expert in range(2)]
    assert has_all_experts(loaded(*calls, experts=True), ("w1", "w3"), 2)
    for missing in range(4):
        some = [call for i, call in enumerate(calls) if i != missing]
        assert not has_all_experts(loaded(*some, experts=True), ("w1", "w3"), 2)
    stacked = loaded(experts=True)
    for shard in ("w1", "w3"):  # each shard of all experts is one tensor in the file
        assert not has_all_experts(stacked, ("w1", "w3"), 2)
        stacked.weight_loader(stacked, torch.zeros(2, 4, 2), shard_id=shard)
    assert has_all_experts(stacked, ("w1", "w3"), 2)


def test_experts_of_other_ranks_are_not_recorded():
    layer, parameter = nn.Module(), nn.Parameter(torch.zeros(4, 2))
    load = Loader(layer, lambda *args, **kwargs: None, True, elsewhere=lambda layer, parameter, expert: expert == 1)
    for expert in range(2):
        load(parameter, torch.zeros(4, 2), shard_id="w1", expert_id=expert)
    assert loads_of(parameter) == {("w1", 0)}


def empty_layer(method, experts=False):
    """Return the parameters that a server registers for q, k and v, or for two experts, with arbitrary values."""
    layer = nn.Module()
    layer.params_dtype, layer.logical_widths = torch.bfloat16, ROWS

    def write(parameter, value, shard_id=None, expert_id=None):
        data = parameter.data
        if shard_id is None:  # q, k and v are one tensor
            start, size = 0, 1 if data.dim() == 1 else len(value)
        elif experts:  # gates and ups are halves of the rows; each of an expert's has a scale
            data, index = data[expert_id], ("w1", "w3").index(shard_id) if shard_id != "w2" else 0
            start, size = (index, 1) if data.dim() == 1 else (index * len(value), len(value))
        else:
            index = "qkv".index(shard_id)
            start, size = (index, 1) if data.dim() == 1 else (sum(ROWS[:index]), ROWS[index])
        data[start : start + size] = value

    loader = Loader(layer, write, experts)
    sizes = {"w13_": (2, 96, 64, 2), "w2_": (2, 64, 48, 1)} if experts else {"": (sum(ROWS), 64, 3)}
    for prefix, (*rows, columns, parts) in sizes.items():
        found = {
            method.names.qdata: torch.zeros(*rows, columns // 2, dtype=torch.uint8),
            method.names.scale: torch.zeros(*rows, columns // 16).to(torch.float8_e4m3fn),
            method.names.factor: torch.ones(*rows[:-1], parts), method.names.input_scale: torch.ones(*rows[:-1], parts),
        }  # fmt: skip
        for name, data in found.items():
            layer.register_parameter(f"{prefix}{name}", nn.Parameter(data, requires_grad=False))
            getattr(layer, f"{prefix}{name}").weight_loader = loader
    method.expect(layer, EXPERTS if experts else ("",))
    return layer


def method_of(names, quantizes):
    method = Served()
    method.names, method.quantizes_activations = names, quantizes
    return method


def fill(layer, names, input_scale=INPUT_SCALE, without=()):
    for shard, weight in zip("qkv", weights_of(ROWS, 64), strict=True):
        for name, tensor in tensors_of(weight, names.divides, input_scale).items():
            if (shard, name) not in without:
                getattr(layer, name).weight_loader(getattr(layer, name), tensor, shard)


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["dense", "static", "dynamic"])
def test_a_method_multiplies_with_what_was_loaded(names, kind):
    """Made ready again the layer stays as it is; its scales were NaN before, and are not loaded again."""
    method, scale = method_of(names, kind != "dense"), INPUT_SCALE if kind == "static" else None
    layer = empty_layer(method)
    with pytest.raises(ValueError, match="not loaded"):  # nothing was: not even dummies
        method.adopt(layer, "qkv_proj")
    fill(layer, names, scale)
    method.adopt(layer, "qkv_proj")
    x = torch.randn(6, 64).bfloat16()
    y = serving.linear(x, method.weight(layer))
    assert error_by_column(y, rounded(x, kind) @ decoded(weights_of(ROWS, 64)).t()) < 2**-8
    addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
    method.adopt(layer, "qkv_proj")
    assert addresses == {name: p.data_ptr() for name, p in layer.named_parameters()}
    assert set(addresses) == {"weight", "nvfp4_scale", "nvfp4_factor"} | ({"nvfp4_amax"} if scale else set())
    if names is MODELOPT:
        with pytest.raises(RuntimeError, match="reload_weights"):
            layer.weight.weight_loader(layer.weight, torch.zeros(64, 32), "q")


@pytest.mark.parametrize("name", [MODELOPT.qdata, MODELOPT.scale, MODELOPT.factor, MODELOPT.input_scale])
def test_a_part_that_was_not_loaded_is_named(name):
    method = method_of(MODELOPT, True)
    layer = empty_layer(method)
    fill(layer, MODELOPT, without=[("k", name)])
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=f"qkv_proj: {name} was not loaded, or only in part"):
        method.adopt(layer, "qkv_proj")
    assert dict(layer.named_parameters()) == before and method.activations is None


def test_weights_that_are_one_in_the_file_have_its_scales():
    """Those of the other parts are arbitrary in a parameter that a server has not initialized."""
    method, (weight,) = method_of(MODELOPT, True), weights_of((128,), 64, (1.0,))
    layer = empty_layer(method)
    for name, tensor in tensors_of(weight, False, INPUT_SCALE).items():
        parameter = getattr(layer, name)
        if parameter.dim() == 1:
            parameter.data.fill_(5.0)
        parameter.weight_loader(parameter, tensor)
    method.adopt(layer, "qkv_proj")
    assert (layer.nvfp4_factor == weight.per_tensor_scale).all()
    assert layer.nvfp4_amax == torch.tensor(INPUT_SCALE) * 2688


def test_a_reload_may_not_change_how_activations_are_quantized():
    method = method_of(MODELOPT, True)
    for scale in (INPUT_SCALE, None):
        layer = empty_layer(method)
        fill(layer, MODELOPT, scale)
        if scale:
            method.adopt(layer, "qkv_proj")
    with pytest.raises(ValueError, match="were quantized with the checkpoint's scale, and are quantized with"):
        method.adopt(layer, "qkv_proj")


@pytest.mark.parametrize("missing", [None, "weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_experts_of_a_method(missing):
    method = method_of(MODELOPT, True)
    layer = empty_layer(method, experts=True)
    first, second = weights_of((96, 96), 64, (1.0, 30.0)), weights_of((64, 64), 48, (1.0, 2.0))
    for expert in range(2):
        gate, up = halves(tensors_of(first[expert], False, 0.1))
        for shard, tensors in {"w1": gate, "w3": up, "w2": tensors_of(second[expert], False, 0.1)}.items():
            for name, tensor in tensors.items():
                if (expert, shard, name) != (1, "w3", missing):
                    parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name}")
                    parameter.weight_loader(parameter, tensor, shard_id=shard, expert_id=expert)
    if missing:
        with pytest.raises(ValueError, match=f"experts: w13_{missing} was not loaded for all of 2 experts"):
            method.adopt_experts(layer, "experts", gated=True)
        return
    method.adopt_experts(layer, "experts", gated=True)
    assert method.activations == dict.fromkeys(EXPERTS, Activations.STATIC)
    for prefix, parts in zip(EXPERTS, (first, second), strict=True):
        w = method.weight(layer, prefix)  # products with them: test_serving.py
        assert torch.equal(w.qdata, torch.stack([each.qdata for each in parts]))
        assert torch.equal(w.per_tensor_scale.view(2, -1)[:, 0], torch.stack([each.per_tensor_scale for each in parts]))
        assert w.amax == torch.tensor(0.1) * 2688


def halves(tensors):
    """Return a checkpoint's tensors of the gate, which is the first half of the rows, and of the up."""
    return [{name: t[i : i + 48] if t.dim() else t for name, t in tensors.items()} for i in (0, 48)]

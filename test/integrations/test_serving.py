"""A server's method: what its loaders have filled becomes weights, and products equal those of dense mirrors."""

import pytest
import torch
from helpers.served_weights import decoded, error_by_column, tensors_of, weights_of
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, fake_quantize, quantize
from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, EXPERTS, MODELOPT, Loader, Served, has_all_experts, loads_of
from nvfp4_tensor.integrations.serving import Activations, Combine, Weight

NAN, ROWS = float("nan"), (48, 20, 33)
SHARDS = {"q": 0, "k": 1, "v": 2, "w1": 0, "w3": 1, "w2": 0}
"""Where each shard of a parameter stands among those that are fused."""


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def method_of(names=MODELOPT, inputs=None):
    method = Served()
    method.names, method.quantizes_activations = names, inputs is not None
    return method


def empty_layer(method, sizes, experts=None, dtype=torch.bfloat16):
    """Return a layer with what a server registers, filled with arbitrary values.

    sizes: by prefix the rows of the weights that are fused, and their columns; with ``experts``, of each expert.
    """
    layer, lead = nn.Module(), () if experts is None else (experts,)
    layer.params_dtype, names = dtype, method.names
    for prefix, (rows, columns) in sizes.items():
        layer.logical_widths = rows

        def write(parameter, value, shard_id=None, expert_id=None, rows=rows):
            data = parameter.data if expert_id is None else parameter.data[expert_id]
            i = SHARDS.get(shard_id, 0)  # None: all in one tensor
            if data.dim() == 1:
                data[i] = value
            else:
                data[sum(rows[:i]) : sum(rows[:i]) + len(value)] = value

        found = {
            names.qdata: torch.zeros(*lead, sum(rows), columns // 2, dtype=torch.uint8),
            names.scale: torch.zeros(*lead, sum(rows), columns // 16).to(torch.float8_e4m3fn),
            names.factor: torch.ones(*lead, len(rows)),
            names.input_scale: torch.ones(*lead, len(rows)),
        }
        for name, data in found.items():
            parameter = nn.Parameter(data, requires_grad=False)
            layer.register_parameter(f"{prefix}{name}", parameter)
            parameter.weight_loader = Loader(layer, write, experts is not None)
    method.expect(layer, sizes)
    return layer


def load(layer, prefix, tensors, shard=None, expert=None, without=()):
    positional = [shard] if shard and expert is None else []
    named = {} if expert is None else {"shard_id": shard, "expert_id": expert}
    for name, tensor in tensors.items():
        if (expert, shard, name) not in without:
            parameter = getattr(layer, f"{prefix}{name}")
            parameter.weight_loader(parameter, tensor, *positional, **named)


def input_scales(inputs, count):
    """Return the input scale of each part: ``inputs``, one or several, or None where it is NaN."""
    values = [None if inputs is None else inputs] * count if not isinstance(inputs, list) else inputs
    return [None if each is None or each != each else each for each in values]


def filled(weights, method, inputs=None, dtype=torch.bfloat16, rows=None, without=(), **changes):
    """Return a layer that has loaded weights which a server fuses; ``changes`` replace parameters."""
    layer = empty_layer(method, {"": (rows or list(map(len, weights)), weights[0].shape[1])}, dtype=dtype)
    scales = input_scales(inputs, len(weights))
    for shard, weight, scale in zip("qkv", weights, scales, strict=False):
        tensors = tensors_of(weight, method.names.divides, scale)
        load(layer, "", tensors, None if rows else shard, without=without)
    for field, data in changes.items():
        getattr(layer, getattr(method.names, field)).data = data
    return layer


def served(weights, names=MODELOPT, inputs=None, **options):
    """Return what products read of weights that a server fuses."""
    method = method_of(names, inputs)
    layer = filled(weights, method, inputs, **options)
    method.adopt(layer, "layers.0.qkv_proj")
    return method.weight(layer)


def dequantized(w):
    columns = w.qdata.shape[-1] * 2
    return NVFP4Tensor(w.qdata, w.scale, w.per_tensor_scale, columns, torch.float32, QuantizeSpec()).dequantize()


def fused():
    return weights_of(ROWS, 64)


# --- what was loaded -------------------------------------------------------------------------------------------------


def test_experts_are_whole_with_each_shard_of_each_and_others_are_not_recorded():
    def loaded(calls, **options):
        layer, parameter = nn.Module(), nn.Parameter(torch.zeros(4, 2))
        loader = Loader(layer, lambda *args, **kwargs: None, True, **options)
        for call in calls:
            loader(parameter, torch.zeros(*[2] * ("expert_id" not in call), 4, 2), **call)
        return parameter

    calls = [{"shard_id": shard, "expert_id": expert} for shard in ("w1", "w3") for expert in range(2)]
    assert has_all_experts(loaded(calls), ("w1", "w3"), 2)
    for missing in range(4):
        assert not has_all_experts(loaded(calls[:missing] + calls[missing + 1 :]), ("w1", "w3"), 2)
    stacked = [{"shard_id": shard} for shard in ("w1", "w3")]  # each shard of all experts is one tensor in the file
    assert [has_all_experts(loaded(stacked[:n]), ("w1", "w3"), 2) for n in range(3)] == [False, False, True]
    other = loaded(calls[:2], elsewhere=lambda layer, parameter, expert: expert == 1)
    assert loads_of(other) == {("w1", 0)}


@pytest.mark.parametrize("name", [MODELOPT.qdata, MODELOPT.scale, MODELOPT.factor, MODELOPT.input_scale])
def test_a_part_that_was_not_loaded_is_named(name):
    method = method_of(inputs=0.002)
    layer = filled(fused(), method, 0.002, without=[(None, "k", name)])
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=f"qkv_proj: {name} was not loaded, or only in part"):
        method.adopt(layer, "qkv_proj")
    assert dict(layer.named_parameters()) == before and method.activations is None


def test_it_is_adopted_once_and_not_loaded_again():
    """Before, its scales were NaN."""
    method = method_of(inputs=0.002)
    with pytest.raises(ValueError, match="not loaded"):  # nothing was: not even dummies
        method.adopt(empty_layer(method, {"": (ROWS, 64)}), "qkv_proj")
    layer = filled(fused(), method, 0.002)
    method.adopt(layer, "qkv_proj")
    addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
    method.adopt(layer, "qkv_proj")
    assert addresses == {name: p.data_ptr() for name, p in layer.named_parameters()}
    assert set(addresses) == {"weight", "nvfp4_scale", "nvfp4_factor", "nvfp4_amax"}
    with pytest.raises(RuntimeError, match="reload_weights"):
        layer.weight.weight_loader(layer.weight, torch.zeros(48, 32), "q")
    # a reload may not change how activations are quantized
    with pytest.raises(ValueError, match="were quantized with the checkpoint's scale, and are quantized with"):
        method.adopt(filled(fused(), method, NAN), "qkv_proj")


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names, dtype", [
    (MODELOPT, torch.bfloat16), (COMPRESSED, torch.float16), (COMPRESSED, torch.float32),
], ids=str)  # fmt: skip
def test_fused_weights_with_other_scales_are_exact(names, dtype):
    w, dense = served(fused(), names, dtype=dtype), decoded(fused())
    torch.testing.assert_close(dequantized(w).double(), dense, rtol=2e-7, atol=0)
    x, bias = normal(2, 3, 64, dtype=dtype), normal(101, dtype=dtype)
    y = serving.linear(x, w, bias)
    assert y.shape == (2, 3, 101) and y.dtype == dtype
    expected = x.view(6, 64).double() @ dense.t() + bias.double()
    assert error_by_column(y.view(6, 101), expected) < max(torch.finfo(dtype).eps, 1e-6)


def test_one_weight_keeps_its_scalar_and_its_codes():
    method, (weight,) = method_of(inputs=0.002), weights_of((32,), 64, (1.0,))
    layer = filled([weight], method, 0.002)
    address = layer.weight.data_ptr()
    method.adopt(layer, "down_proj")
    w = method.weight(layer)
    assert w.per_tensor_scale.dim() == 0 and torch.equal(w.per_tensor_scale, weight.per_tensor_scale)
    assert w.qdata.data_ptr() == address and torch.equal(w.qdata, weight.qdata)
    assert torch.equal(w.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    # Equal scales take the form of different ones: a reload writes others into their memory.
    assert served([weight, weight]).per_tensor_scale.shape == (64,)
    # Weights that are one in the file have its scales: those of the other parts are arbitrary.
    scales = {"factor": torch.tensor([weight.per_tensor_scale, 5.0]), "input_scale": torch.tensor([0.002, 5.0])}
    w = served([weight], inputs=0.002, rows=[16, 16], **scales)
    assert torch.equal(dequantized(w), weight.dequantize(torch.float32)) and w.amax == torch.tensor(0.002) * 2688


@pytest.mark.parametrize("inputs, names", [
    (0.002, MODELOPT), (0.002, COMPRESSED), (NAN, MODELOPT), (NAN, COMPRESSED),
], ids=str)  # fmt: skip
def test_activations_are_rounded(inputs, names):
    """By the static scale, or each token by its own; tokens do not depend on others, and a NaN stays in its token."""
    weights, is_static = fused(), inputs == inputs
    w = served(weights, names=names, inputs=inputs)
    assert w.activations is (Activations.STATIC if is_static else Activations.BY_TOKEN)
    x = normal(5, 64) * 3
    x[3] *= 1 if is_static else 1e4  # another request's token
    if is_static:
        assert abs(w.amax.item() / (0.002 * 2688) - 1) < 1e-6
    mirror = fake_quantize(x, QuantizeSpec(row_scaled=not is_static), amax=w.amax, dtype=torch.float32)
    assert (mirror - x.float()).norm() > 0.05 * x.float().norm()  # else the next line says little
    expected = mirror.double() @ decoded(weights).t()
    y = serving.linear(x, w)
    # Of fused weights each column has its size; by token, each row too.
    size = expected.abs().amax(0) if is_static else expected.abs().amax(1, keepdim=True)
    assert ((y.double() - expected).abs() / size).max() < 2**-8
    for row in range(5):
        assert torch.equal(y[row : row + 1], serving.linear(x[row : row + 1], w))
    x[1] = torch.nan
    again = serving.linear(x, w)
    assert again[1].isnan().all() and torch.equal(again[[0, 2, 3, 4]], y[[0, 2, 3, 4]])


@pytest.mark.parametrize("inputs", [None, 0.002, NAN])
def test_a_part_of_a_larger_tensor_and_compilation(inputs):
    """Servers pass the rows of a fused product's part."""
    w, larger = served(fused(), inputs=inputs), normal(6, 192)
    for part in (larger[:, 64:128], larger[::2, :64]):
        assert torch.equal(serving.linear(part, w), serving.linear(part.contiguous(), w))
    compiled = torch.compile(serving.linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (1, 5):
        x = normal(tokens, 64)
        assert torch.equal(compiled(x, w), serving.linear(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [None, 0.003, NAN], ids=["W4A16", "static", "by token"])
def test_cuda_graphs(inputs):
    """A graph holds no work of the host: other tokens and other experts in the same memory."""

    def on_gpu(w):
        return Weight(*(each.cuda() if isinstance(each, torch.Tensor) else each for each in w))

    on_cpu = served(fused(), inputs=inputs)
    w, (gate_up, down) = on_gpu(on_cpu), map(on_gpu, mixture((1.0, 300.0), inputs)[0])
    x, (weights, ids) = normal(7, 64).cuda(), [each.cuda() for each in routing(7, 5, 2)]

    def forward():
        return serving.linear(x, w), serving.experts(x, weights, ids, gate_up, down, Combine.SILU)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward()
    x.copy_(normal(7, 64, seed=9))
    for new, old in zip(routing(7, 5, 2, seed=9), (weights, ids), strict=True):
        old.copy_(new)
    graph.replay()
    for got, expected in zip(y, forward(), strict=True):
        assert torch.equal(got, expected)
    expected = serving.linear(x.cpu(), on_cpu)
    assert ((y[0].cpu() - expected).abs().amax(0) / expected.abs().amax(0)).max() < 2**-7


def test_the_largest_static_scale_serves_fused_weights(caplog):
    assert served(fused(), inputs=0.001).amax == torch.tensor(0.001) * 2688 and not caplog.records
    assert served(fused(), inputs=[0.001, 0.004, 0.002]).amax == torch.tensor(0.004) * 2688
    assert "different input scales: the largest is used" in caplog.text
    divided = served(fused(), names=COMPRESSED, inputs=[0.001, 0.004, 0.002])
    assert abs(divided.amax.item() / (0.004 * 2688) - 1) < 1e-6


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"factor": torch.tensor([1.0, NAN, 1.0])}, "per-tensor scales were not loaded"),
        ({"factor": torch.tensor([1.0, -1.0, 1.0])}, "finite and not negative"),
        ({"factor": torch.tensor([1.0, 0.0, 1.0])}, "found 0 for codes"),
        ({"factor": torch.tensor([1.0, 0.0, 1.0]), "names": COMPRESSED}, "finite and not negative"),
        ({"scale": torch.full((101, 4), NAN).to(torch.float8_e4m3fn)}, "404 of 404 block scales were not loaded"),
        ({"scale": torch.full((101, 4), -1.0).to(torch.float8_e4m3fn)}, "not negative"),
        ({"scale": torch.ones(101, 3).to(torch.float8_e4m3fn)}, "multiple of 16"),
        ({"qdata": torch.zeros(101, 64, dtype=torch.bfloat16)}, "not packed NVFP4 codes"),
        ({"inputs": 1.0, "input_scale": torch.tensor([1.0, NAN, 1.0])}, "1 of 3 input scales"),
        ({"inputs": [1.0, 0.0, 1.0]}, "zero, negative or infinite"),
    ],
)
def test_what_was_not_loaded_is_refused(changes, message):
    with pytest.raises(ValueError, match=rf"layers\.0\.qkv_proj.*{message}"):
        served(fused(), **changes)


# --- experts ---------------------------------------------------------------------------------------------------------


def experts_in(method, ratios, inputs=None, own=range(5), without=()):
    """Return a layer with loaded experts, whose gate and up have scales apart, and these weights by prefix."""
    gates = ("w1", "w3")[: len(ratios)]
    sizes = {"w13_": ([48] * len(ratios), 64), "w2_": ([64], 48)}
    layer, weights = empty_layer(method, sizes, len(own)), dict.fromkeys(EXPERTS, ())
    for index, expert in enumerate(own):
        first = [quantize(normal(48, 64, seed=8 * expert + i) * ratio / 8) for i, ratio in enumerate(ratios)]
        second = quantize(normal(64, 48, seed=8 * expert + 7) / 8)
        for prefix, parts, shards in (("w13_", first, gates), ("w2_", [second], ("w2",))):
            weights[prefix] += (parts,)
            for part, shard, scale in zip(parts, shards, input_scales(inputs, len(parts)), strict=True):
                load(layer, prefix, tensors_of(part, False, scale), shard, index, without=without)
    return layer, weights


def mixture(ratios, inputs=None, own=range(5)):
    """Return what products read of experts, and their dense mirrors (E, N, K)."""
    method = method_of(inputs=inputs)
    layer, weights = experts_in(method, ratios, inputs, own)
    method.adopt_experts(layer, "experts", len(ratios) > 1)
    read = [method.weight(layer, prefix) for prefix in EXPERTS]
    mirrors = [torch.stack([decoded(parts).float() for parts in weights[prefix]]) for prefix in EXPERTS]
    for prefix, w, mirror in zip(EXPERTS, read, mirrors, strict=True):
        assert torch.equal(w.qdata, torch.stack([torch.cat([p.qdata for p in parts]) for parts in weights[prefix]]))
        torch.testing.assert_close(dequantized(w), mirror, rtol=2e-7, atol=0)
        assert w.amax == (None if inputs is None or inputs != inputs else torch.tensor(inputs) * 2688)
    return read, mirrors


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_an_expert_that_was_not_loaded_is_named(missing):
    method = method_of(inputs=0.003)
    layer, _ = experts_in(method, (1.0, 30.0), 0.003, without=[(1, "w3", missing)])
    with pytest.raises(ValueError, match=f"experts: w13_{missing} was not loaded for all of 5 experts"):
        method.adopt_experts(layer, "experts", gated=True)


def mirrored(x, weights, ids, gate_up, down, combine, round_x):
    """Return the experts' sum from dense weights, token by token."""
    y = torch.zeros(len(x), down.shape[1])
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            hidden = (round_x(x[token : token + 1], 0) @ gate_up[expert].t()).to(x.dtype)
            hidden = serving.combined(hidden, combine)
            y[token] += weight * (round_x(hidden, 1) @ down[expert].t()).to(x.dtype).float()[0]
    return y.to(x.dtype)


def routing(tokens, experts, top, seed=0):
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    weights, ids = scores.topk(top)
    return weights, ids.int()


@pytest.mark.parametrize("inputs, combine", [
    (None, Combine.SILU), (0.003, Combine.GELU_TANH), (NAN, Combine.RELU2_NO_MUL), (0.003, Combine.SILU),
], ids=str)  # fmt: skip
def test_experts(inputs, combine):
    experts, dense = mixture((1.0, 300.0) if combine is not Combine.RELU2_NO_MUL else (1.0,), inputs)
    x, (weights, ids) = normal(7, 64), routing(7, 5, 2)

    def round_x(values, index):
        amax = experts[index].amax
        if inputs is None:
            return values.float()
        return fake_quantize(values, QuantizeSpec(row_scaled=amax is None), amax=amax, dtype=torch.float32)

    got = serving.experts(x, weights, ids, *experts, combine)
    expected = mirrored(x, weights, ids, *dense, combine, round_x)
    assert (got - expected).float().norm() < 0.01 * expected.float().norm()
    # one token alone has the same bits
    assert torch.equal(serving.experts(x[3:4], weights[3:4], ids[3:4], *experts, combine), got[3:4])


def test_experts_of_two_ranks_sum_to_all():
    experts, dense = mixture((1.0, 2.0), own=range(6))
    x, (weights, ids) = normal(9, 64, dtype=torch.float32), routing(9, 6, 3)
    whole = serving.experts(x, weights, ids, *experts, Combine.SILU)
    total = torch.zeros_like(whole)
    for own in (range(3), range(3, 6)):
        expert_map = torch.full((6,), -1)
        expert_map[list(own)] = torch.arange(3)
        parts, _ = mixture((1.0, 2.0), own=own)
        total += serving.experts(x, weights, ids, *parts, Combine.SILU, expert_map)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    expected = mirrored(x, weights, ids, *dense, Combine.SILU, lambda x, _: x.float())
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    # A token without experts here, or with none, is 0 even if it is not finite.
    x[0], ids[0], expert_map = NAN, torch.tensor([-1, 3, 4]), torch.tensor([0, 1, 2, -1, -1, -1])
    by_token, _ = mixture((1.0, 2.0), NAN, own=range(3))
    assert not serving.experts(x, weights, ids, *by_token, Combine.SILU, expert_map)[0].any()


def test_experts_take_no_tokens_weights_on_input_and_compile():
    experts, _ = mixture((1.0, 2.0), own=range(4))
    empty = serving.experts(normal(0, 64), torch.zeros(0, 2), torch.zeros(0, 2).int(), *experts, Combine.SILU)
    assert empty.shape == (0, 64)
    x, (weights, ids) = normal(5, 64), routing(5, 4, 1)
    on_input = serving.experts(x, weights, ids, *experts, Combine.SILU, weights_on_input=True)
    scaled = serving.experts(x * weights.bfloat16(), torch.ones_like(weights), ids, *experts, Combine.SILU)
    assert torch.equal(on_input, scaled)
    compiled = torch.compile(
        lambda x, w, i: serving.experts(x, w, i, *experts, Combine.SILU),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for tokens in (2, 6):
        arguments = normal(tokens, 64), *routing(tokens, 4, 2)
        assert torch.equal(compiled(*arguments), serving.experts(*arguments, *experts, Combine.SILU))


# --- the setting -----------------------------------------------------------------------------------------------------


def test_setting(monkeypatch):
    monkeypatch.delenv(serving.SETTING, raising=False)
    assert serving.setting() is serving.Setting.AS_CHECKPOINT
    for value, expected in {"0": "OFF", "W4A16": "W4A16", "1": "AS_CHECKPOINT", "": "AS_CHECKPOINT"}.items():
        monkeypatch.setenv(serving.SETTING, value)
        assert serving.setting() is serving.Setting[expected]
    monkeypatch.setenv(serving.SETTING, "yes")
    with pytest.raises(ValueError, match="set one of these"):
        serving.setting()


def test_what_a_server_would_take_for_dense_is_refused(monkeypatch):
    """Layers of an algorithm that the server does not know; not those that are dense, or that it reads."""

    algorithms = {"a": "FP8_PER_CHANNEL_PER_TOKEN", "b": "NVFP4", "dense": None, "excluded": "FP8", "none": "FP8"}

    class Config:
        is_layer_excluded = staticmethod("excluded".__eq__)
        _resolve_quant_algo = staticmethod(algorithms.get)

        def get_quant_method(self, layer, prefix):
            return {"b": "NVFP4's", "none": None}.get(prefix, 1.5)

    monkeypatch.delenv(serving.SETTING, raising=False)
    refusing = serving.refuse_unread(Config.get_quant_method, (int,), float)
    assert [refusing(Config(), 1, prefix) for prefix in ("b", "dense", "excluded")] == ["NVFP4's", 1.5, 1.5]
    assert refusing(Config(), "another layer", "a") == 1.5
    for prefix in ("a", "none"):
        with pytest.raises(NotImplementedError, match=rf"{prefix}: the server reads no FP8.*compressed-tensors"):
            refusing(Config(), 1, prefix)
    monkeypatch.setenv(serving.SETTING, "0")
    assert refusing(Config(), 1, "a") == 1.5


def test_where_weights_are_served(monkeypatch):
    assert serving.cannot_serve("cpu", None) == ""
    monkeypatch.setenv(serving.SETTING, "0")
    assert "is 0" in serving.cannot_serve("cpu", None)
    monkeypatch.undo()
    for capability in ((7, 5), (8, 0), (9, 0), (9, 1), (12, 0)):
        refused = "not between" in serving.cannot_serve("cuda", capability)
        assert refused == (capability not in ((8, 0), (9, 0)))
    assert "no kernels for xpu" in serving.cannot_serve("xpu", None)
    if not serving.native.library("cuda").loaded:
        assert "kernels are not in use" in serving.cannot_serve("cuda", (9, 0))

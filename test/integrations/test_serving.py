"""The parameters that a server loads become weights, and products equal those of the dense mirror."""

import pytest
import torch
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, fake_quantize, quantize, quantize_experts
from nvfp4_tensor.checkpoints import parts_of
from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, EXPERTS, MODELOPT, Served
from nvfp4_tensor.integrations.serving import Activations, Combine, Weight

NAN = float("nan")


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adopted(parts, names=MODELOPT, inputs=None, dtype=torch.bfloat16, rows=None, **changes):
    """Return what products read of a layer whose parameters have these parts; of experts, by their prefixes."""
    method, layer = Served(), nn.Module()
    method.names, method.quantizes_activations = names, inputs is not None
    layer.params_dtype, layer.logical_widths = dtype, rows
    for prefix, each in parts.items():
        dim = each[0].qdata.dim() - 2
        factors = torch.stack([part.per_tensor_scale.squeeze(-1) for part in each], dim)
        found = {
            "qdata": torch.cat([part.qdata for part in each], dim),
            "scale": torch.cat([part.scale.view(torch.uint8) for part in each], dim).view(torch.float8_e4m3fn),
            "factor": factors.reciprocal() if names.divides else factors,
            "input_scale": torch.as_tensor(NAN if inputs is None else inputs).expand(factors.shape),
        }
        found["input_scale"] = found["input_scale"].reciprocal() if names.divides else found["input_scale"]
        for field, data in (found | changes).items():
            layer.register_parameter(prefix + getattr(names, field), nn.Parameter(data, requires_grad=False))
    if "" in parts:
        method.adopt(layer, "layers.0.qkv_proj")
        return method.weight(layer)
    method.adopt_experts(layer, "experts", len(parts["w13_"]) > 1)
    return [method.weight(layer, prefix) for prefix in EXPERTS]


def served(weights, rows=None, **options):
    """Return what a server loads of weights that it fuses."""
    return adopted({"": [parts_of(w) for w in weights]}, rows=rows or [len(w) for w in weights], **options)


def dequantized(w):
    columns = w.qdata.shape[-1] * 2
    return NVFP4Tensor(w.qdata, w.scale, w.per_tensor_scale, columns, torch.float32, QuantizeSpec()).dequantize()


def fused(ratios=(1.0, 700.0, 0.01), rows=(48, 16, 32), columns=64):
    return [quantize(normal(n, columns, seed=i) * r) for i, (n, r) in enumerate(zip(rows, ratios, strict=True))]


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_weights_with_other_scales_are_exact(names, dtype):
    weights = fused(rows=(48, 20, 33))
    w = served(weights, names=names, dtype=dtype)
    dense = torch.cat([each.dequantize(torch.float32) for each in weights])
    torch.testing.assert_close(dequantized(w), dense, rtol=2e-7, atol=0)
    x, bias = normal(2, 3, 64, dtype=dtype), normal(101, dtype=dtype)
    y = serving.linear(x, w, bias)
    expected = x.double() @ dense.double().t() + bias.double()
    assert y.shape == (2, 3, 101) and y.dtype == dtype
    # Per column, for the columns' sizes differ by their scales.
    error = (y.double() - expected).abs().amax((0, 1)) / expected.abs().amax((0, 1))
    assert error.max() < max(torch.finfo(dtype).eps, 1e-6)


def test_one_weight_keeps_its_scalar_and_its_codes():
    (weight,) = fused((1.0,), (32,))
    w = served([weight], qdata=weight.qdata)
    assert w.per_tensor_scale.dim() == 0 and torch.equal(w.per_tensor_scale, weight.per_tensor_scale)
    assert w.qdata.data_ptr() == weight.qdata.data_ptr()
    assert torch.equal(w.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    # Equal scales take the form of different ones: a reload writes others into their memory.
    assert served([weight, weight]).per_tensor_scale.shape == (64,)
    # Weights that are fused in the file have the first scale.
    w = served([weight], [16, 16], factor=torch.tensor([weight.per_tensor_scale, torch.nan]))
    assert torch.equal(dequantized(w), weight.dequantize(torch.float32))


@pytest.mark.parametrize("inputs, names", [(0.002, MODELOPT), (0.002, COMPRESSED), (NAN, MODELOPT)], ids=str)
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
    expected = mirror.double() @ torch.cat([each.dequantize(torch.float32) for each in weights]).double().t()
    y = serving.linear(x, w)
    error = (y.double() - expected).abs() / expected.abs().amax(0 if is_static else 1, keepdim=True)
    assert error.max() < 2**-8
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
    w, (gate_up, down) = on_gpu(on_cpu), map(on_gpu, mixture(5, (1.0, 300.0), inputs)[0])
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
        ({"factor": torch.tensor([NAN, 1.0, 1.0])}, "per-tensor scales were not loaded"),
        ({"factor": torch.tensor([1.0, NAN, 1.0])}, "per-tensor scales were not loaded"),
        ({"factor": torch.tensor([1.0, -1.0, 1.0])}, "finite and not negative"),
        ({"factor": torch.tensor([1.0, float("inf"), 1.0])}, "finite and not negative"),
        ({"factor": torch.tensor([1.0, 0.0, 1.0])}, "found 0 for codes"),
        ({"factor": torch.tensor([1.0, 0.0, 1.0]), "names": COMPRESSED}, "finite and not negative"),
        ({"scale": torch.full((96, 4), NAN).to(torch.float8_e4m3fn)}, "384 of 384 block scales were not loaded"),
        ({"scale": torch.full((96, 4), -1.0).to(torch.float8_e4m3fn)}, "not negative"),
        ({"scale": torch.ones(96, 3).to(torch.float8_e4m3fn)}, "multiple of 16"),
        ({"qdata": torch.zeros(96, 64, dtype=torch.bfloat16)}, "not packed NVFP4 codes"),
        ({"inputs": [1.0, NAN, 1.0]}, "1 of 3 input scales"),
        ({"inputs": [1.0, 0.0, 1.0]}, "zero, negative or infinite"),
    ],
)
def test_what_was_not_loaded_is_refused(changes, message):
    with pytest.raises(ValueError, match=rf"layers\.0\.qkv_proj.*{message}"):
        served(fused(), **changes)


# --- experts ---------------------------------------------------------------------------------------------------------


def mixture(count, ratios, inputs=None, own=slice(None)):
    """Return the gate and up, whose scales differ, and the down of experts, and their dense mirrors (E, N, K)."""
    dense = [normal(count, 48 * len(ratios), 64)[own] / 8], [normal(count, 64, 48, seed=1)[own] / 8]
    halves = dense[0][0].chunk(len(ratios), 1), dense[1]
    tensors = [
        [quantize_experts(half.contiguous() * ratio) for half, ratio in zip(each, ratios, strict=False)]
        for each in halves
    ]
    parts = {prefix: [parts_of(t) for t in each] for prefix, each in zip(EXPERTS, tensors, strict=True)}
    weights = adopted(parts, inputs=inputs)
    mirrors = [torch.cat([t.dequantize(torch.float32) for t in each], 1) for each in tensors]
    for weight, mirror in zip(weights, mirrors, strict=True):
        torch.testing.assert_close(dequantized(weight), mirror, rtol=2e-7, atol=0)
    return weights, mirrors


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
    experts, dense = mixture(5, (1.0, 300.0) if combine is not Combine.RELU2_NO_MUL else (1.0,), inputs)
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
    experts, dense = mixture(6, (1.0, 2.0))
    x, (weights, ids) = normal(9, 64, dtype=torch.float32), routing(9, 6, 3)
    whole = serving.experts(x, weights, ids, *experts, Combine.SILU)
    total = torch.zeros_like(whole)
    for own in (slice(0, 3), slice(3, 6)):
        expert_map = torch.full((6,), -1)
        expert_map[own] = torch.arange(3)
        parts, _ = mixture(6, (1.0, 2.0), own=own)
        total += serving.experts(x, weights, ids, *parts, Combine.SILU, expert_map)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    expected = mirrored(x, weights, ids, *dense, Combine.SILU, lambda x, _: x.float())
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)


def test_experts_take_no_tokens_weights_on_input_and_compile():
    experts, _ = mixture(4, (1.0, 2.0))
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

"""The parameters that a server loads become weights, and products equal those of the dense mirror."""

import pytest
import torch

from nvfp4_tensor import QuantizeSpec, fake_quantize, quantize, quantize_experts
from nvfp4_tensor.checkpoints import parts_of
from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import Loaded, differs_within, weight_of
from nvfp4_tensor.integrations.serving import Activations, Combine, Weight


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loaded(weights, *, divides=False, inputs=None, **changes):
    """Return what a server loads of weights that it fuses."""
    parts = [parts_of(w) for w in weights]
    factors = torch.stack([each.per_tensor_scale for each in parts])
    scale = torch.cat([each.scale.view(torch.uint8) for each in parts]).view(torch.float8_e4m3fn)
    if inputs is not None:
        inputs = torch.tensor(inputs)
    fields = {
        "name": "layers.0.qkv_proj",
        "qdata": torch.cat([each.qdata for each in parts]),
        "scale": scale,
        "factors": factors.reciprocal() if divides else factors,
        "rows": [len(w) for w in weights],
        "divides": divides,
        "input_scales": inputs.reciprocal() if divides and inputs is not None else inputs,
        "quantizes_activations": inputs is not None,
    }
    return Loaded(**{**fields, **changes})


def fused(ratios=(1.0, 700.0, 0.01), rows=(48, 16, 32), columns=64):
    return [quantize(normal(n, columns, seed=i) * r) for i, (n, r) in enumerate(zip(rows, ratios, strict=True))]


def served(w):
    """Return a weight as the forward passes take it."""
    kind = Activations.BY_TOKEN if w.activation_amax is None else Activations.STATIC
    kind = Activations.DENSE if w.activation_spec is None else kind
    return Weight(w.qdata, w.scale, w.per_tensor_scale, kind, w.activation_amax)


def product(x, w, bias=None):
    return serving.linear(x, served(w), bias)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_weights_with_other_scales_are_exact(divides, dtype):
    weights = fused(rows=(48, 20, 33))
    w = weight_of(loaded(weights, divides=divides), dtype)
    dense = torch.cat([each.dequantize(torch.float32) for each in weights])
    torch.testing.assert_close(w.dequantize(torch.float32), dense, rtol=2e-7, atol=0)
    x, bias = normal(2, 3, 64, dtype=dtype), normal(101, dtype=dtype)
    y = product(x, w, bias)
    expected = x.double() @ dense.double().t() + bias.double()
    assert y.shape == (2, 3, 101) and y.dtype == dtype
    eps = torch.finfo(dtype).eps
    # Per column, for the columns' sizes differ by their scales.
    error = (y.double() - expected).abs().amax((0, 1)) / expected.abs().amax((0, 1))
    assert error.max() < max(eps, 1e-6)


def test_one_weight_keeps_its_scalar_and_its_codes():
    (weight,) = fused((1.0,), (32,))
    given = loaded([weight])
    w = weight_of(given, torch.bfloat16)
    assert w.per_tensor_scale.dim() == 0 and torch.equal(w.per_tensor_scale, weight.per_tensor_scale)
    assert w.qdata.data_ptr() == given.qdata.data_ptr()
    assert torch.equal(w.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    # Equal scales take the form of different ones: a reload writes others into their memory.
    assert weight_of(loaded([weight, weight]), torch.bfloat16).per_tensor_scale.shape == (64,)
    # Weights that are fused in the file have the first scale.
    factors = torch.tensor([weight.per_tensor_scale, torch.nan])
    w = weight_of(loaded([weight], rows=[16, 16], factors=factors), torch.float32)
    assert torch.equal(w.dequantize(), weight.dequantize(torch.float32))


@pytest.mark.parametrize("inputs, divides", [(0.002, False), (0.002, True), (torch.nan, False)], ids=str)
def test_activations_are_rounded(inputs, divides):
    """By the static scale, or each token by its own; tokens do not depend on others, and a NaN stays in its token."""
    weights, is_static = fused(), inputs == inputs
    w = weight_of(loaded(weights, divides=divides, inputs=[inputs] * 3), torch.bfloat16)
    assert served(w).activations is (Activations.STATIC if is_static else Activations.BY_TOKEN)
    x = normal(5, 64) * 3
    x[3] *= 1 if is_static else 1e4  # another request's token
    if is_static:
        assert abs(w.activation_amax.item() / (0.002 * 2688) - 1) < 1e-6
    mirror = fake_quantize(x, QuantizeSpec(row_scaled=not is_static), amax=w.activation_amax, dtype=torch.float32)
    assert (mirror - x.float()).norm() > 0.05 * x.float().norm()  # else the next line says little
    expected = mirror.double() @ torch.cat([each.dequantize(torch.float32) for each in weights]).double().t()
    y = product(x, w)
    error = (y.double() - expected).abs() / expected.abs().amax(0 if is_static else 1, keepdim=True)
    assert error.max() < 2**-8
    for row in range(5):
        assert torch.equal(y[row : row + 1], product(x[row : row + 1], w))
    x[1] = torch.nan
    assert product(x, w)[1].isnan().all() and torch.equal(product(x, w)[[0, 2, 3, 4]], y[[0, 2, 3, 4]])


@pytest.mark.parametrize("inputs", [None, [0.002] * 3, [torch.nan] * 3])
def test_a_part_of_a_larger_tensor_and_compilation(inputs):
    """Servers pass the rows of a fused product's part."""
    w = weight_of(loaded(fused(), inputs=inputs), torch.bfloat16)
    larger = normal(6, 192)
    assert torch.equal(product(larger[:, 64:128], w), product(larger[:, 64:128].contiguous(), w))
    assert torch.equal(product(larger[::2, :64], w), product(larger[::2, :64].contiguous(), w))
    compiled = torch.compile(serving.linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (1, 5):
        x = normal(tokens, 64)
        assert torch.equal(compiled(x, served(w)), product(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [None, 0.003, torch.nan], ids=["W4A16", "static", "by token"])
def test_cuda_graphs(inputs):
    """A graph holds no work of the host: other tokens and other experts in the same memory."""
    on_cpu = weight_of(loaded(fused(), inputs=None if inputs is None else [inputs] * 3), torch.bfloat16)
    w = on_cpu.cuda()
    gate_up, down = (
        Weight(*(each.cuda() if isinstance(each, torch.Tensor) else each for each in projection(*arguments, inputs)[0]))
        for arguments in ((normal(5, 96, 64) / 8, (1.0, 300.0)), (normal(5, 64, 48, seed=1) / 8, (1.0,)))
    )
    x, (weights, ids) = normal(7, 64).cuda(), [each.cuda() for each in routing(7, 5, 2)]

    def forward():
        return product(x, w), serving.experts(x, weights, ids, gate_up, down, Combine.SILU)

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
    error = (y[0].cpu() - product(x.cpu(), on_cpu)).abs().amax(0) / product(x.cpu(), on_cpu).abs().amax(0)
    assert error.max() < 2**-7


def test_the_largest_static_scale_serves_fused_weights():
    given = loaded(fused(), inputs=[0.001, 0.004, 0.002])
    assert differs_within(given.input_scales)
    assert weight_of(given, torch.bfloat16).activation_amax == torch.tensor(0.004) * 2688
    divided = loaded(fused(), inputs=[0.001, 0.004, 0.002], divides=True)
    assert abs(weight_of(divided, torch.bfloat16).activation_amax.item() / (0.004 * 2688) - 1) < 1e-6
    assert not differs_within(loaded(fused(), inputs=[0.001] * 3).input_scales)


NAN = float("nan")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"factors": torch.tensor([NAN, 1.0, 1.0])}, "per-tensor scales were not loaded"),
        ({"factors": torch.tensor([1.0, NAN, 1.0])}, "per-tensor scales were not loaded"),
        ({"factors": torch.tensor([1.0, -1.0, 1.0])}, "finite and not negative"),
        ({"factors": torch.tensor([1.0, float("inf"), 1.0])}, "finite and not negative"),
        ({"factors": torch.tensor([1.0, 0.0, 1.0])}, "found 0 for codes"),
        ({"factors": torch.tensor([1.0, 0.0, 1.0]), "divides": True}, "finite and not negative"),
        ({"scale": torch.full((96, 4), NAN).to(torch.float8_e4m3fn)}, "384 of 384 block scales were not loaded"),
        ({"scale": torch.full((96, 4), -1.0).to(torch.float8_e4m3fn)}, "not negative"),
        ({"scale": torch.ones(96, 3).to(torch.float8_e4m3fn)}, "multiple of 16"),
        ({"qdata": torch.zeros(96, 64, dtype=torch.bfloat16)}, "not packed NVFP4 codes"),
        ({"input_scales": torch.tensor([1.0, NAN, 1.0]), "quantizes_activations": True}, "1 of 3 input scales"),
        ({"input_scales": torch.tensor([1.0, 0.0, 1.0]), "quantizes_activations": True}, "zero, negative or infinite"),
    ],
)
def test_what_was_not_loaded_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        weight_of(loaded(fused(), **changes), torch.bfloat16)
    assert "layers.0.qkv_proj" in str(raised.value)


# --- experts ---------------------------------------------------------------------------------------------------------


def projection(dense, ratios, inputs=None, seed=0):
    """Return a projection whose gate and up have other scales, and its dense mirror float32 (E, N, K)."""
    halves = [dense[:, : dense.shape[1] // 2], dense[:, dense.shape[1] // 2 :]] if len(ratios) > 1 else [dense]
    tensors = [quantize_experts(half.contiguous() * ratio) for half, ratio in zip(halves, ratios, strict=True)]
    parts = [parts_of(each) for each in tensors]
    given = Loaded(
        name="experts",
        qdata=torch.cat([each.qdata for each in parts], 1),
        scale=torch.cat([each.scale.view(torch.uint8) for each in parts], 1).view(torch.float8_e4m3fn),
        factors=torch.cat([each.per_tensor_scale for each in parts], 1),
        rows=[each.shape[1] for each in tensors],
        divides=False,
        input_scales=None if inputs is None else torch.full((len(dense), len(ratios)), inputs),
        quantizes_activations=inputs is not None,
    )
    w = weight_of(given, torch.bfloat16)
    mirror = torch.cat([each.dequantize(torch.float32) for each in tensors], 1)
    torch.testing.assert_close(w.dequantize(torch.float32), mirror, rtol=2e-7, atol=0)
    return served(w), mirror


def mirrored(x, weights, ids, gate_up, down, combine, round_x, expert_map=None):
    """Return the experts' sum from dense weights, token by token."""
    y = torch.zeros(len(x), down.shape[1])
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            expert = expert if expert_map is None else expert_map[expert].item()
            if expert >= 0:
                hidden = (round_x(x[token : token + 1], 0) @ gate_up[expert].t()).to(x.dtype)
                hidden = serving.combined(hidden, combine)
                y[token] += weight * (round_x(hidden, 1) @ down[expert].t()).to(x.dtype).float()[0]
    return y.to(x.dtype)


def routing(tokens, experts, top, seed=0):
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    weights, ids = scores.topk(top)
    return weights, ids.int()


@pytest.mark.parametrize("inputs, combine", [
    (None, Combine.SILU), (0.003, Combine.GELU_TANH), (torch.nan, Combine.RELU2_NO_MUL), (0.003, Combine.SILU),
], ids=str)  # fmt: skip
def test_experts(inputs, combine):
    ratios = (1.0, 300.0) if combine is not Combine.RELU2_NO_MUL else (1.0,)
    gate_up, dense_gate_up = projection(normal(5, 48 * len(ratios), 64) / 8, ratios, inputs)
    down, dense_down = projection(normal(5, 64, 48, seed=1) / 8, (1.0,), inputs)
    x, (weights, ids) = normal(7, 64), routing(7, 5, 2)

    def round_x(values, index):
        amax = (gate_up, down)[index].amax
        if inputs is None:
            return values.float()
        spec = QuantizeSpec(row_scaled=amax is None)
        return fake_quantize(values, spec, amax=amax, dtype=torch.float32)

    got = serving.experts(x, weights, ids, gate_up, down, combine)
    expected = mirrored(x, weights, ids, dense_gate_up, dense_down, combine, round_x)
    assert (got - expected).float().norm() < 0.01 * expected.float().norm()
    # one token alone has the same bits
    assert torch.equal(serving.experts(x[3:4], weights[3:4], ids[3:4], gate_up, down, combine), got[3:4])


def test_experts_of_two_ranks_sum_to_all():
    gate_up, dense_gate_up = projection(normal(6, 96, 64) / 8, (1.0, 2.0))
    down, dense_down = projection(normal(6, 64, 48, seed=1) / 8, (1.0,))
    x, (weights, ids) = normal(9, 64, dtype=torch.float32), routing(9, 6, 3)
    whole = serving.experts(x, weights, ids, gate_up, down, Combine.SILU)
    total = torch.zeros_like(whole)
    for rank in range(2):
        expert_map = torch.full((6,), -1)
        expert_map[rank * 3 : rank * 3 + 3] = torch.arange(3)
        own = slice(rank * 3, rank * 3 + 3)
        parts, _ = projection(normal(6, 96, 64)[own] / 8, (1.0, 2.0))
        parts_down, _ = projection(normal(6, 64, 48, seed=1)[own] / 8, (1.0,))
        total += serving.experts(x, weights, ids, parts, parts_down, Combine.SILU, expert_map)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    expected = mirrored(x, weights, ids, dense_gate_up, dense_down, Combine.SILU, lambda x, _: x.float())
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)


def test_experts_take_no_tokens_weights_on_input_and_compile():
    gate_up, _ = projection(normal(4, 96, 64) / 8, (1.0, 2.0))
    down, _ = projection(normal(4, 64, 48, seed=1) / 8, (1.0,))
    empty = serving.experts(normal(0, 64), torch.zeros(0, 2), torch.zeros(0, 2).int(), gate_up, down, Combine.SILU)
    assert empty.shape == (0, 64)
    x, (weights, ids) = normal(5, 64), routing(5, 4, 1)
    on_input = serving.experts(x, weights, ids, gate_up, down, Combine.SILU, weights_on_input=True)
    scaled = serving.experts((x * weights.bfloat16()), torch.ones_like(weights), ids, gate_up, down, Combine.SILU)
    assert torch.equal(on_input, scaled)
    compiled = torch.compile(
        lambda x, w, i: serving.experts(x, w, i, gate_up, down, Combine.SILU),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for tokens in (2, 6):
        arguments = normal(tokens, 64), *routing(tokens, 4, 2)
        assert torch.equal(compiled(*arguments), serving.experts(*arguments, gate_up, down, Combine.SILU))


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

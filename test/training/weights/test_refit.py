"""refit_: the bits of a fresh quantize at the old addresses, or an error and nothing changed."""

import pytest
import torch
from helpers.bits import stored_bits
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    FP8Tensor,
    NVFP4Config,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    quantize,
    quantize_experts,
    quantize_model,
)
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.quantization.linear import set_pre_scale
from nvfp4_tensor.training import refit_

HADAMARD = QuantizeSpec(hadamard_sign=True)
FP8 = FP8Tensor(torch.ones(24, 48).to(torch.float8_e4m3fn), torch.ones(1, 1))
Q = "attention.q_proj.weight"


def trainer(dtype=torch.float32):
    return nn.Sequential(nn.Linear(72, 48), nn.BatchNorm1d(48), nn.Linear(48, 24)).to(dtype)


def server(config=None, dtype=torch.float32, device="cpu"):
    model = trainer(dtype).to(device).eval()
    quantize_(model, NVFP4WeightOnlyConfig() if config is None else config)
    return model


def tensors(model):
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize(
    "config, dtype, given",
    [
        (NVFP4WeightOnlyConfig(), torch.float32, torch.bfloat16),
        (NVFP4WeightOnlyConfig(block_rows=16, four_over_six=True), torch.bfloat16, torch.float32),
        (NVFP4Config(), torch.bfloat16, torch.bfloat16),
    ],
)
def test_equals_a_fresh_quantize_at_the_old_addresses(config, dtype, given, device):
    model, weights = server(config, dtype, device), trainer(given).state_dict()
    addresses = [t.data_ptr() for t in tensors(model)]
    report = refit_(model, weights)
    assert [t.data_ptr() for t in tensors(model)] == addresses
    for i in (0, 2):
        fresh = quantize(weights[f"{i}.weight"].to(device), config.weight)
        held = model[i].weight
        assert torch.equal(stored_bits(held), stored_bits(fresh))
        assert held.dtype == dtype and held.activation_spec == getattr(config, "activation", None)
    assert torch.equal(model[1].weight.cpu(), weights["1.weight"].to(dtype))
    assert (report.quantized, report.dense) == (2, 4 + 3)
    assert report.source_bytes == sum(w.nbytes for w in weights.values())
    assert report.seconds > 0 and "2 NVFP4 and 7 dense" in str(report)
    model.again = model[0]  # tied parameters need one name
    assert str(refit_(model, weights)).partition(" in ")[0] == str(report).partition(" in ")[0]


def test_stochastic_noise_is_a_function_of_seed_and_step():
    weights, model = trainer().state_dict(), server()
    codes = {}
    for step in (0, 1, 0):
        refit_(model, weights, round_mode="stochastic", seed=4, step=step)
        codes.setdefault(step, []).append(model[0].weight.qdata.clone())
    assert torch.equal(*codes[0]) and not torch.equal(codes[0][0], codes[1][0])
    rng_state = rng_state_of("refit", 4, "0.weight", 0, torch.device("cpu"))
    fresh = quantize(weights["0.weight"], QuantizeSpec().with_round_mode("stochastic"), rng_state=rng_state)
    assert torch.equal(codes[0][0], fresh.qdata)
    assert model[0].weight.spec == QuantizeSpec()


def test_fused_weights_by_a_function():
    torch.manual_seed(0)
    model = nn.ModuleDict({"qkv": nn.Linear(32, 80, bias=False), "out": nn.Linear(32, 16)})
    quantize_(model, NVFP4WeightOnlyConfig())
    qkv = {"q": torch.randn(48, 32), "v": torch.randn(16, 32), "k": torch.randn(16, 32)}
    rest = {"out.weight": torch.randn(16, 32), "out.bias": torch.randn(16), "rotary": torch.randn(3)}

    def name_map(name):
        if name in qkv:
            return "qkv.weight", "qkv".index(name)
        return None if name == "rotary" else name

    refit_(model, iter([*qkv.items(), *rest.items()]), name_map=name_map)
    fresh = quantize(torch.cat([qkv["q"], qkv["k"], qkv["v"]]))
    assert torch.equal(model["qkv"].weight.qdata, fresh.qdata)
    assert torch.equal(model["out"].bias, rest["out.bias"])
    before = stored_bits(*tensors(model))
    del qkv["k"]
    with pytest.raises(KeyError, match="slices"):
        refit_(model, {**qkv, **rest}, name_map=lambda n: ("qkv.weight", 2) if n == "v" else name_map(n))
    assert torch.equal(stored_bits(*tensors(model)), before)


def test_experts_and_transposed_parameters():
    model = nn.Module()
    model.experts = nn.Parameter(quantize_experts(torch.randn(3, 20, 40)), requires_grad=False)
    model.turned = nn.Parameter(quantize(torch.randn(24, 40)).mT, requires_grad=False)
    new = {"experts": torch.randn(3, 20, 40) * 7, "turned": torch.randn(40, 24)}
    refit_(model, new)
    assert torch.equal(model.experts.qdata, quantize_experts(new["experts"]).qdata)
    assert torch.equal(model.experts.dequantize(), quantize_experts(new["experts"]).dequantize())
    assert torch.equal(model.turned.dequantize(), quantize(new["turned"].mT).dequantize().mT)


def test_weights_of_a_former_conv1d_are_given_as_in_its_state_dict():
    """GPT-2's square ones would otherwise be written transposed, without an error."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    trainer, model, fresh = (nn.Sequential(conv1d(48, 32), conv1d(48, 48)) for _ in range(3))
    fresh.load_state_dict(trainer.state_dict())
    for each in (model, fresh):
        quantize_model(each, filter_fn=lambda module, name: isinstance(module, conv1d))
    refit_(model, trainer.state_dict())
    assert torch.equal(stored_bits(*tensors(model)), stored_bits(*tensors(fresh)))


def test_not_strict_writes_the_given_weights():
    model = server(NVFP4Config())
    model[0].weight.activation_amax = torch.tensor(3.5)
    old = stored_bits(model[2].weight)
    report = refit_(model, {"0.weight": torch.randn(48, 72), "other": torch.randn(2)}, strict=False)
    assert (report.quantized, report.dense) == (1, 0) and torch.equal(stored_bits(model[2].weight), old)
    assert model[0].weight.activation_amax.item() == 3.5 and model[2].weight.activation_amax is None


def given(changes=()):
    """The trainer's weights, some of them replaced or, by None, left out."""
    weights = trainer().state_dict() | dict(changes)
    return {name: value for name, value in weights.items() if value is not None}


def in_fp8(model):
    model[2].weight = nn.Parameter(FP8, False)


def of_awq(model):
    set_pre_scale(model[2], torch.full((48,), 2.0))


@pytest.mark.parametrize(
    "weights, options, error, message",
    [
        (lambda: given({"2.bias": None}), {}, KeyError, "missing: 2.bias"),
        (lambda: given({"other": torch.zeros(3)}), {}, KeyError, "unexpected: other"),
        (lambda: given({"2.weight": torch.zeros(48, 24)}), {}, ValueError, r"\(24, 48\) .* \(48, 24\)"),
        (lambda: given({"2.bias": torch.zeros(1)}), {}, ValueError, r"2.bias is \(24,\)"),
        (lambda: given({"2.weight": torch.zeros(24, 48).char()}), {}, TypeError, "not torch.int8"),
        (lambda: given({"2.weight": 3.0}), {}, TypeError, "dense tensor, not a float"),
        (lambda: given({"2.weight": torch.zeros(24, 48, device="meta")}), {}, TypeError, "is on the meta device"),
        (lambda: [*given().items(), ("2.bias", torch.zeros(24))], {}, KeyError, "given twice"),
        (lambda: torch.nn.Linear(2, 2), {}, TypeError, "pass the state_dict"),
        (lambda: given({"2.weight": FP8}), {}, TypeError, "not a FP8Tensor"),
        (given, {"round_mode": "eden"}, ValueError, "EDEN"),
        (given, {"change": in_fp8}, ValueError, "2.weight is FP8, whose codes are read-only"),
        (given, {"change": of_awq}, ValueError, "of 2.weight are multiplied by pre_quant_scale .*divided"),
    ],
)
def test_errors_leave_the_model_unchanged(weights, options, error, message):
    model = server()
    {"change": lambda model: None, **options}["change"](model)
    options = {name: value for name, value in options.items() if name != "change"}
    held = [t for t in tensors(model) if not isinstance(t, FP8Tensor)]
    before = stored_bits(*held)
    with pytest.raises(error, match=message):
        refit_(model, weights(), **options)
    assert torch.equal(stored_bits(*held), before)


@pytest.mark.gpu
def test_a_cuda_graph_sees_the_new_weights():
    model = server(dtype=torch.bfloat16, device="cuda")
    x = torch.randn(8, 72, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        old = y.clone()
        refit_(model, trainer(torch.bfloat16).state_dict())
        graph.replay()
        assert not torch.equal(y, old)
        assert torch.equal(y, model(x))


def block():
    """Linears that servers join: q, k and v; gate and up."""
    heads = {name: nn.Linear(64, rows) for name, rows in [("q_proj", 48), ("k_proj", 16), ("v_proj", 32)]}
    mlp = {name: nn.Linear(64, 64) for name in ("gate_proj", "up_proj", "down_proj")}
    model = nn.ModuleDict({"attention": nn.ModuleDict(heads), "mlp": nn.ModuleDict(mlp)})
    for i, parameter in enumerate(model.parameters()):
        parameter.data.mul_(i + 1)
    return model


@pytest.mark.parametrize(
    "config", [NVFP4WeightOnlyConfig(four_over_six=True), NVFP4Config(weight_spec=HADAMARD, activation_spec=HADAMARD)]
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_shares_a_scale_goes_on_sharing_one(config, alone):
    def quantized(model):
        for part in [*model.attention.values(), *model.mlp.values()] if alone else [model]:
            quantize_(part, config)
        return model

    model, new = quantized(block()), block()
    weights = {name: value.clone() for name, value in reversed(new.state_dict().items())}
    weights["0"], weights["1"] = weights.pop(Q).split(24)  # a trainer that has q in two parts
    refit_(model, weights, name_map=lambda name: (Q, int(name)) if name.isdigit() else name)
    assert torch.equal(stored_bits(*tensors(model)), stored_bits(*tensors(quantized(new))))
    q, k, v = (each.weight.per_tensor_scale for each in model.attention.values())
    assert (q == k == v) != alone


def test_a_part_of_what_servers_join_warns():
    model, weights = block(), block().state_dict()
    quantize_(model, NVFP4WeightOnlyConfig())
    given = {name: weights[name] for name in (Q, "mlp.up_proj.weight", "mlp.down_proj.weight")}
    with pytest.warns(UserWarning, match=f"^{Q}, mlp.up_proj.weight without the linears") as caught:
        refit_(model, given, strict=False)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.equal(model.get_parameter(Q).qdata, quantize(weights[Q]).qdata)

"""quantize_model: what it chooses and says, shared scales, and Conv1D."""

import copy
import io

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    checkpoints,
    quantize,
    quantize_model,
)
from nvfp4_tensor.quantization.model_plan import Kind, Matrix, plan_matrices
from nvfp4_tensor.training import NVFP4TrainingConfig, NVFP4TrainingLinear, keep_dense, summary, to_dense

# --- the plan --------------------------------------------------------------------------------------------------------

MIXTURE = {
    "layers.0.mlp.experts.0.up_proj": (64, 64), "layers.0.mlp.experts.3.up_proj": (64, 64),
    "layers.0.mlp.gate.wg": (4, 64), "layers.0.mlp.shared_expert.gate_proj": (4, 64),
    "layers.0.mlp.shared_expert.up_proj": (64, 64), "layers.0.mixer.x_proj": (16, 512), "layers.0.mixer.dt": (17, 512),
    "layers.0.attn.q_proj": (64, 64), "layers.0.attn.k_proj": (8, 64), "layers.0.attn.v_proj": (8, 64),
    "layers.0.attn.o_proj": (64, 40), "mtp.fc": (64, 128), "layers.1.eh_proj": (64, 128),
    "layers.1.shared_head.head": (64, 64), "model.embed": (64, 64), "lm_head": (64, 64),
}  # fmt: skip
REASONS = {
    "layers.0.mlp.gate.wg": "router of experts", "layers.0.mixer.x_proj": "few rows (16 of 512 columns)",
    "layers.0.attn.o_proj": "in files, columns that are not a multiple of 16 cannot be NVFP4",
    "mtp.fc": "layer of a drafter", "layers.1.eh_proj": "layer of a drafter",
    "layers.1.shared_head.head": "output layer", "model.embed": "no linear: named like an embedding or norm",
    "lm_head": "output layer",
}  # fmt: skip


def plan(shapes=MIXTURE, **options):
    return plan_matrices([Matrix(f"{n}.weight", s, torch.bfloat16) for n, s in shapes.items()], **options)


def test_reasons_of_a_mixture():
    found = plan()
    assert {name.removesuffix(".weight"): found[name].reason for name in found.dense} == REASONS
    attention = tuple(f"layers.0.attn.{each}_proj.weight" for each in "qkv")
    assert found[attention[1]].group == attention  # few rows of its own, but servers multiply it with q
    told = found.left_dense().splitlines()
    assert told[-1] == "left dense (output layer): layers.1.shared_head.head, lm_head" and len(told) == 5
    assert repr(found).splitlines()[-1] == "8 of 16 matrices quantized, 39.9% of elements"


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({"include": ["lm_head"]}, {"lm_head": True}),
        ({"exclude": ["*.q_proj.weight"]}, {"layers.0.attn.q_proj": False, "layers.0.attn.k_proj": True}),
        ({"selected": lambda name: "gate" in name}, {"layers.0.mlp.gate.wg": True, "layers.0.attn.q_proj": False}),
        ({"selected": lambda name: True}, {"layers.0.attn.o_proj": True}),
    ],
)
def test_choices_of_the_caller(options, quantized):
    found = plan(**options)
    assert {name: found[f"{name}.weight"].is_quantized for name in quantized} == quantized


def test_groups_stay_dense_together():
    shapes = dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.b_proj", "attn.f_a_proj"), (64, 64))
    found = plan(shapes)
    assert not found.quantized
    assert found["attn.b_proj.weight"].reason == "gate of a linear attention"
    assert found["attn.q_proj.weight"].reason == "servers join it with b_proj, which stays dense"
    assert plan(dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.b_proj"), (64, 64))).quantized
    with pytest.raises(ValueError, match=r"'\*\.w7' matches no linear of the model, which has attn\.q_proj"):
        plan(shapes, exclude=["*.w7"])


def test_other_kinds():
    experts = Matrix("mlp.experts.up_proj", (4, 32, 32), torch.float32, Kind.EXPERTS)
    other = Matrix("conv.weight", (32, 32, 3), torch.float32, Kind.OTHER, "Conv1d")
    ints = Matrix("x.weight", (32, 32), torch.int8)
    found = plan_matrices([experts, other, ints])
    assert [each.reason for each in found.values()] == ["experts", "no linear: Conv1d", "int8 cannot be NVFP4"]
    assert "1 x  mlp.experts.up_proj  4 x 32 x 32  NVFP4  experts" in repr(found)


# --- models in memory ------------------------------------------------------------------------------------------------


def linears(*names):
    """A module whose linears have weights of other magnitudes."""
    module = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})
    for i, linear in enumerate(module.values()):
        nn.init.normal_(linear.weight, std=4.0**i)
    return module


def attention():
    return linears("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(scale_search="mse"), NVFP4Config()])
def test_fused_linears_share_the_largest_scale(config):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": attention(), "mlp": linears("gate_proj", "up_proj"), "out": nn.Linear(32, 64)})
    model.get_output_embeddings = lambda: model["out"]
    dense = copy.deepcopy(model)
    report = quantize_model(model, config)
    for group in ([f"attn.{each}_proj" for each in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]):
        weights = {name: dense.get_parameter(f"{name}.weight").detach() for name in group}
        amax = max(each.abs().max() for each in weights.values())
        for name, each in weights.items():
            own, expected = model.get_parameter(f"{name}.weight"), quantize(each, config.weight, amax=amax)
            assert torch.equal(own.qdata, expected.qdata) and own.per_tensor_scale == expected.per_tensor_scale
    alone = quantize(dense.attn.o_proj.weight.detach(), config.weight)
    assert model.attn.o_proj.weight.per_tensor_scale == alone.per_tensor_scale
    assert report["out.weight"].reason == "output layer" and type(model.out.weight.data) is torch.Tensor


@pytest.mark.parametrize("call", [quantize_model, quantize_])
def test_one_call_shares_scales_and_calls_for_each_linear_do_not(call):
    adapted = attention()
    alone = copy.deepcopy(adapted)
    adapted["q_proj"] = nn.ModuleDict({"base_layer": adapted["q_proj"]})  # as peft wraps it
    call(adapted, NVFP4WeightOnlyConfig())
    for linear in alone.values():
        call(nn.Sequential(linear), NVFP4WeightOnlyConfig())
    scales = [
        [float(each.per_tensor_scale) for each in model.parameters() if each.dim() > 1] for model in (adapted, alone)
    ]
    q, k, v, o = scales[0]
    assert q == k == v != o and v in scales[1] and len(set(scales[1])) == 4


def test_rows_have_their_own_scales():
    model, twin = (copy.deepcopy(m) for m in [nn.ModuleDict({"attn": attention()})] * 2)
    config = NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(row_scaled=True))
    quantize_model(model, config)
    quantize_(twin, config)
    assert torch.equal(model.attn.q_proj.weight.dequantize(), twin.attn.q_proj.weight.dequantize())


def test_tied_weights():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Embedding(64, 32)})
    model["b"].weight = model["a"].weight
    model["d"] = nn.Linear(32, 64)
    model["d"].weight = model["c"].weight
    report = quantize_model(model)
    assert report.quantized == ("a.weight",) and report["a.weight"].tied == ("b.weight",)
    assert model["b"].weight is model["a"].weight and isinstance(model["a"].weight, NVFP4Tensor)
    assert report["c.weight"].tied == ("d.weight",) and type(model["d"].weight.data) is torch.Tensor
    plan = plan_matrices([Matrix("a", (32, 32), torch.bfloat16, tied=("b",))], selected=lambda name: name == "a")
    assert plan["a"].reason == "not selected by filter_fn"  # one of its names is not


# --- Conv1D ----------------------------------------------------------------------------------------------------------


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **no_dropout)
    return transformers.GPT2LMHeadModel(config)


IDS = torch.arange(24).view(2, 12)
SQUARE = "transformer.h.0.attn.c_proj.weight"


def test_conv1d_is_quantized_along_its_inputs(tmp_path):
    model, twin = gpt2().eval(), gpt2()
    dense = {name: each.detach().clone() for name, each in model.state_dict().items()}
    report = quantize_model(model)
    assert len(report.quantized) == 4 and report["transformer.h.0.mlp.c_fc.weight"].shape == (256, 64)
    for name in report.quantized:
        weight, expected = model.get_parameter(name), quantize(dense[name].t().contiguous())
        assert torch.equal(weight.dequantize(), expected.dequantize())
        assert torch.equal(model.state_dict()[name].dequantize(), expected.dequantize().t())  # Conv1D's layout
    fresh = gpt2().eval()
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    assert torch.allclose(fresh(IDS).logits, model(IDS).logits, atol=1e-5)
    for name, each in {"linears": model, "conv1d": fresh}.items():  # of codes both
        checkpoints.save(each, tmp_path / name, progress=False)
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("linears", "conv1d")]
    assert written[0] == written[1]
    quantize_(twin, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: type(module).__name__ == "Conv1D")
    assert torch.equal(model.get_parameter(SQUARE).qdata, twin.get_parameter(SQUARE).qdata)


def test_conv1d_trains_with_the_state_dict_of_the_dense_model():
    model, dense = gpt2(), gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # made before: the parameters stay the same objects
    before = copy.deepcopy(model.state_dict())
    assert {row.recipe for row in summary(model).rows} == {"Embedding", "dense"}
    quantize_(model, NVFP4TrainingConfig("weight_only"), filter_fn=keep_dense("lm_head"))
    assert sum(isinstance(module, NVFP4TrainingLinear) for module in model.modules()) == 4
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = model.state_dict()
    assert not torch.equal(after[SQUARE], before[SQUARE]) and after[SQUARE].shape == before[SQUARE].shape
    dense.load_state_dict(after)
    to_dense(model)
    assert torch.allclose(dense(IDS).logits, model(IDS).logits, atol=1e-5)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again.load_state_dict(before)
    assert torch.allclose(again(IDS).logits, gpt2()(IDS).logits, atol=1e-5)

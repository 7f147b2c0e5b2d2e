"""Parameters that are joined from several tensors of a file, and split again."""

import copy

import pytest
import torch
from helpers.checkpoint_folders import dense_tensors
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.checkpoints.models.loading import ORIGINS

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


class Joined(nn.Module):
    """As vLLM and others have it: q, k and v in one linear, gate and up in one."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(64, 128, bias=True).bfloat16()
        self.gate_up_proj = nn.Linear(64, 192, bias=False).bfloat16()


def joined_folder(tmp_path, scales):
    """A checkpoint with the parts apart; q, k and v have the per-tensor scales of these amaxes."""
    tensors = dense_tensors(1)
    state = {}
    for name, amax in zip("qkv", scales, strict=True):
        weight = quantize(tensors[f"model.layers.0.self_attn.{name}_proj.weight"], amax=amax)
        state[f"{name}_proj.weight"] = weight._replace(
            activation_spec=QuantizeSpec(), activation_amax=torch.tensor(amax)
        )
        state[f"{name}_proj.bias"] = torch.randn(len(weight)).bfloat16()
    for name in ("gate", "up"):
        state[f"{name}_proj.weight"] = quantize(tensors[f"model.layers.0.mlp.{name}_proj.weight"], amax=9.0)
    checkpoints.save(state, tmp_path / "src", mismatched_scales="keep", progress=False)
    return state


@pytest.mark.parametrize("scales", [(3.0, 17.0, 70.0), (70.0, 70.0, 70.0)])
def test_joined_linears(tmp_path, scales):
    state = joined_folder(tmp_path, scales)
    model = checkpoints.load(Joined(), tmp_path / "src", progress=False)
    parts = [state[f"{name}_proj.weight"] for name in "qkv"]
    weight = model.qkv_proj.weight
    assert torch.equal(weight.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert weight.per_tensor_scale.shape == ((128,) if len(set(scales)) > 1 else ())
    assert torch.equal(model.qkv_proj.bias, torch.cat([state[f"{name}_proj.bias"] for name in "qkv"]))
    assert model.gate_up_proj.weight.per_tensor_scale.shape == ()
    assert weight.activation_amax == torch.tensor(70.0) / 2688 * 2688
    checkpoints.save(model, tmp_path / "again", mismatched_scales="keep", progress=False)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("src", "again"))
    assert one == other


def test_what_was_joined_and_replaced_is_saved_as_it_is(tmp_path):
    joined_folder(tmp_path, (70.0, 70.0, 70.0))
    model = checkpoints.load(Joined(), tmp_path / "src", progress=False)
    other = quantize(torch.randn(48, 64))
    model.qkv_proj.weight = nn.Parameter(other, requires_grad=False)
    checkpoints.save(model, tmp_path / "again", progress=False)
    with checkpoints.read(tmp_path / "again") as read:
        assert torch.equal(tensor_of(read.linear("qkv_proj.weight")).dequantize(torch.float32), other.dequantize())


@pytest.fixture(scope="module")
def experts():
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_experts_are_stacked_and_taken_apart_again(tmp_path, experts):
    experts.save_pretrained(tmp_path / "dense")
    dense = copy.deepcopy(experts)
    dense.model.layers[0].mlp.experts.gate_up_proj.data.zero_()
    checkpoints.load(dense, tmp_path / "dense", progress=False)
    assert torch.equal(*(m.model.layers[0].mlp.experts.gate_up_proj for m in (dense, experts)))
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    model = checkpoints.load(copy.deepcopy(experts), tmp_path / "q", progress=False)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(weight, NVFP4Tensor) and weight.shape == (4, 64, 64) and weight.per_tensor_scale.shape == (4, 1)
    with checkpoints.read(tmp_path / "q") as read:
        one = tensor_of(read.linear("model.layers.0.mlp.experts.2.up_proj.weight")).dequantize()
    assert torch.equal(weight.dequantize()[2, 32:], one)
    ids = torch.arange(24)[None]
    exact = experts(ids).logits
    assert (model(ids).logits - exact).norm() < 0.3 * exact.norm()
    checkpoints.save(model, tmp_path / "again", progress=False)
    for module in model.modules():
        vars(module).pop(ORIGINS, None)
    checkpoints.save(model, tmp_path / "without origins", progress=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("q", "again", "without origins")]
    assert files[0] == files[1] == files[2]

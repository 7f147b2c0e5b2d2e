"""gpt-oss and Llama 4: experts are parameters (E, K, N), in files too.

gpt-oss has gate and up interleaved, and MXFP4 in files; ModelOpt's files of Llama 4 have codes and block scales
transposed.
"""

import json

import pytest
import torch
import transformers
from helpers.checkpoint_folders import edit
from helpers.hub_models import SIZES, assert_kept, from_pretrained, random_model, same_codes, same_file
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of
from nvfp4_tensor.checkpoints.formats import modelopt

pytestmark = pytest.mark.slow

EXPERTS = {"GptOss": "model.layers.1.mlp.experts.", "Llama4": "model.layers.1.feed_forward.experts."}
NAMES = ("gate_up_proj", "down_proj")


def small(family):
    """gpt-oss has a square down_proj, whose shape does not show whether it is transposed."""
    sizes = {**SIZES, "num_local_experts": 4, "architectures": [f"{family}ForCausalLM"]}
    if family == "GptOss":
        sizes |= {"intermediate_size": 64, "num_experts_per_tok": 2, "sliding_window": 16}
        return random_model(transformers.GptOssConfig(**sizes))
    sizes |= {"intermediate_size": 96, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2}
    return random_model(transformers.Llama4TextConfig(**sizes, num_experts_per_tok=1))


def in_mxfp4(name, t):
    experts, columns, rows = t.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def in_nvfp4(name, t):
    """With one per-tensor scale per parameter. The parameter gets the decoded values."""
    weight = quantize(t.transpose(-2, -1).contiguous())
    parts = parts_of(weight)
    t.copy_(weight.dequantize().transpose(-2, -1))
    scale = parts.scale.view(torch.uint8).transpose(-2, -1).contiguous().view(torch.float8_e4m3fn)
    keys = name, f"{name}_weight_scale", f"{name}_weight_scale_2"
    return dict(zip(keys, (parts.qdata.transpose(-2, -1).contiguous(), scale, parts.per_tensor_scale), strict=True))


@pytest.fixture(params=EXPERTS)
def published(request, tmp_path):
    """Return (family, folder, the decoded model)."""
    family, folder, tensors = request.param, tmp_path / "published", {}
    model = small(family)
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    if family == "GptOss":
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    for name, t in model.state_dict().items():
        write = in_mxfp4 if family == "GptOss" else in_nvfp4
        tensors |= write(name, t) if t.dim() == 3 else {name: t.clone()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": settings}))
    if family == "GptOss":
        decode = transformers.Mxfp4Config(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=decode, dtype=torch.bfloat16)
    return family, folder, model


@torch.no_grad()
def test_published_files_are_read_and_written_again(published, tmp_path, ids):
    family, folder, decoded = published
    checkpoints.convert(folder, tmp_path / "nvfp4", to="modelopt", progress=False)
    by_them = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4" if family == "GptOss" else folder)
    for model in (by_them, checkpoints.load(small(family), folder, progress=False)):
        for name, expected in decoded.named_parameters():
            weight = model.get_parameter(name)
            if any(name == EXPERTS[family] + each for each in NAMES):
                assert isinstance(weight, NVFP4Tensor) and weight.transposed
                weight = weight.dequantize()
            if "experts" in name:
                assert torch.equal(weight, expected), name
        for implementation in ("grouped_mm", "eager") if family == "GptOss" else ("eager",):
            logits = []
            for each in (model, decoded):
                each.set_experts_implementation(implementation)
                logits.append(each(ids).logits)
            torch.testing.assert_close(*logits, rtol=0.02, atol=0.02 if family == "GptOss" else 0.05)
    by_them.save_pretrained(tmp_path / "saved")
    checkpoints.save(by_them, tmp_path / "by us", progress=False)
    for again in ("saved", "by us", *(["published"] if family == "Llama4" else [])):
        assert same_file(tmp_path / "nvfp4", tmp_path / again), again


@torch.no_grad()
@pytest.mark.parametrize("family", EXPERTS)
def test_quantized_while_loading_and_saved_as_modelopt_does(family, tmp_path, ids):
    """The codes are those of every other way: test_one_choice.py."""
    dense = small(family)
    dense.save_pretrained(tmp_path / "dense")
    model = from_pretrained(tmp_path / "dense", None)
    logits, exact = assert_kept(model, ids, tmp_path / "nvfp4", decoded=True)(ids).logits, dense(ids).logits
    assert (logits - exact).norm() < 0.3 * exact.norm()
    tensors = load_file(tmp_path / "nvfp4/model.safetensors")
    for name in NAMES:
        keys, (experts, columns, rows) = (
            modelopt.keys_of(EXPERTS[family] + name),
            dense.get_parameter(EXPERTS[family] + name).shape,
        )
        assert model.get_parameter(EXPERTS[family] + name).shape == (experts, columns, rows)
        if family == "Llama4":
            assert tensors[keys["qdata"]].shape == (experts, columns // 2, rows)
            assert tensors[keys["scale"]].shape == (experts, columns // 16, rows)
    checkpoints.quantize(tmp_path / "dense", tmp_path / "linears", exclude=["*.experts.*"], progress=False)
    with checkpoints.read(tmp_path / "linears") as read:
        assert {len(entry.shape) for entry in read.entries.values() if entry.quantized} == {2}


@torch.no_grad()
def test_files_with_one_tensor_an_expert(tmp_path, ids):
    """As compressed-tensors' files of Llama 4 have them: joined, they have the orientation of the parameter."""
    dense, folder = small("Llama4"), tmp_path / "nvfp4"
    dense.save_pretrained(tmp_path / "dense")
    model = from_pretrained(tmp_path / "dense", None)
    model.save_pretrained(folder)

    def split(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for last, linears in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            parts = parts_of(model.get_parameter(EXPERTS["Llama4"] + last).transpose(-2, -1))
            for expert in range(4):
                codes, scales = (t[expert].chunk(len(linears)) for t in (parts.qdata, parts.scale.view(torch.uint8)))
                for linear, code, scale in zip(linears, codes, scales, strict=True):
                    name = f"{EXPERTS['Llama4']}{expert}.{linear}.weight"
                    tensors[name], tensors[f"{name}_scale"] = code.clone(), scale.clone().view(torch.float8_e4m3fn)
                    tensors[f"{name}_scale_2"] = parts.per_tensor_scale[expert].reshape(()).clone()

    edit(folder, split)
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name in NAMES:
        weight = again.get_parameter(EXPERTS["Llama4"] + name)
        assert weight.transposed and same_codes(weight, model.get_parameter(EXPERTS["Llama4"] + name))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_experts_that_dense_files_name_otherwise(tmp_path, ids):
    """Aria's are fc1 and fc2 in dense files: transformers would rename the codes, but not the scales beside them."""
    sizes = {**SIZES, "intermediate_size": 64, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    random_model(transformers.AriaTextConfig(**sizes)).save_pretrained(tmp_path / "dense")
    assert_kept(from_pretrained(tmp_path / "dense", None), ids, tmp_path / "nvfp4")

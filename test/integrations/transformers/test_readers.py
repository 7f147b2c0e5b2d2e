"""Other readers of saved models: compressed-tensors' reader in plain transformers, and vLLM's requirements."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, checkpoints
from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.quantization.model_families import JOINED

pytestmark = pytest.mark.slow

READS = """
    import sys, torch, transformers
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer" and "nvfp4_tensor" not in sys.modules
    ids = torch.load(sys.argv[2])
    with torch.no_grad():
        model(ids)  # the first call decompresses the weights, to bfloat16
        model = torch.nn.Module.float(model)
        weights = {name: p for name, p in model.named_parameters() if name.endswith("proj.weight")}
        torch.save((weights, model(ids).logits), sys.argv[3])
"""


def test_compressed_tensors_reads_what_we_write(llama, tmp_path, ids):
    """Its reader, in a process without this package, gives our weights and logits up to bfloat16 rounding."""
    pytest.importorskip("compressed_tensors")
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
    model = AutoModelForCausalLM.from_pretrained(llama()[1], quantization_config=config)
    checkpoints.save(model, tmp_path / "ct", format="compressed-tensors", progress=False)
    torch.save(ids, tmp_path / "ids")
    arguments = [tmp_path / "ct", tmp_path / "ids", tmp_path / "read"]
    subprocess.run([sys.executable, "-c", textwrap.dedent(READS), *arguments], check=True, timeout=120)
    weights, logits = torch.load(tmp_path / "read")
    assert len(weights) == 14
    for name, weight in weights.items():
        expected = model.get_parameter(name).dequantize(torch.float32)
        torch.testing.assert_close(weight, expected, rtol=2**-7, atol=0)  # it rounds the scales too
    model = nn.Module.float(model)
    assert (logits - model(ids).logits).norm() < 0.01 * logits.norm()


def vllm_takes(folder):
    """Check the requirements of vLLM 0.33's reader (quantization/modelopt.py) for every linear of a folder.

    A linear that it fuses of several has a weight_scale_2 and an input_scale for each, of which it takes the largest.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt" and config["quant_algo"] in ("NVFP4", "W4A16_NVFP4")
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= legacy.keys()
    assert legacy["quant_algo"] == config["quant_algo"] and legacy["group_size"] == config["group_size"] == 16
    assert isinstance(config["ignore"], list) and config["ignore"] == legacy["exclude_modules"]
    quantized = {group["input_activations"] is not None for group in config["config_groups"].values()} if (
        config["quant_algo"] == "NVFP4"
    ) else {False}  # fmt: skip
    assert quantized == {config["quant_algo"] == "NVFP4"}  # else it is taken for W4A16
    tensors = load_file(folder / "model.safetensors")
    linears = [name.removesuffix("_scale_2") for name in tensors if name.endswith(".weight_scale_2")]
    for name in linears:
        rows, half = tensors[name].shape
        assert tensors[name].dtype == torch.uint8 and half % 8 == 0
        assert tensors[f"{name}_scale"].dtype == torch.float8_e4m3fn
        assert tensors[f"{name}_scale"].shape == (rows, half // 8)
        assert not tensors[f"{name}_scale"].float().isnan().any()
        assert tensors[f"{name}_scale_2"].dtype == torch.float32 and tensors[f"{name}_scale_2"].numel() == 1
        module = name.removesuffix(".weight")
        assert (f"{module}.input_scale" in tensors) == (config["quant_algo"] == "NVFP4")
        assert not any(ignored in module for ignored in config["ignore"])  # it looks for parts of names
    return tensors, linears


def one_scale_in_each_group(tensors, linears):
    for group in JOINED:
        for name in linears:
            path, _, last = name.removesuffix(".weight").rpartition(".")
            if last in group:
                present = [each for each in group if f"{path}.{each}.weight" in linears]
                scales = [tensors[f"{path}.{each}.weight_scale_2"] for each in present]
                assert all(torch.equal(scales[0], scale) for scale in scales)


@pytest.mark.filterwarnings("ignore:requantizing")
@pytest.mark.parametrize("made", ["while loading", "calibrated"])
def test_vllms_rules(llama, tmp_path, ids, made):
    dense, folder = llama()
    if made == "calibrated":
        linears = lambda module, name: isinstance(module, torch.nn.Linear) and "lm_head" not in name  # noqa: E731
        model = nvfp4.attach_quantizer(calibrate(dense, [ids], NVFP4Config(), filter_fn=linears, progress=False))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nvfp4.NVFP4TensorConfig())
    nvfp4.save(model, tmp_path / "nvfp4")
    tensors, linears = vllm_takes(tmp_path / "nvfp4")
    assert len(linears) == 14
    one_scale_in_each_group(tensors, linears)


def test_fused_linears_of_which_a_part_is_dense_are_warned_of(llama, tmp_path):
    config = nvfp4.NVFP4TensorConfig(modules_to_not_convert=["model.layers.0.self_attn.q_proj", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(llama()[1], quantization_config=config)
    with pytest.warns(UserWarning, match=r"0.self_attn.q_proj.weight are dense, .* vLLM raises an error"):
        model.save_pretrained(tmp_path / "nvfp4")

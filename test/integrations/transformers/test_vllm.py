"""vLLM's own layers load what save writes: its code reads the configuration and the tensors, and decodes our weights.

It wants torch of its own release, so no environment of ours has it. Its wheel's Python files on PYTHONPATH are enough:
these tests run on a CPU, where vLLM has no kernel for W4A16, and emulates W4A4.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate
from nvfp4_tensor.integrations import transformers as nvfp4

pytest.importorskip("vllm")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Set up vLLM in one process on a CPU, with W4A4 by emulation."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms.interface import PlatformEnum

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        if model_parallel_is_initialized():  # by other tests of this process
            yield
            return
        address = f"file://{tmp_path_factory.mktemp('vllm')}/rendezvous"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1)
        yield


@pytest.fixture(autouse=True)
def without_our_plugin(monkeypatch):
    """These tests are of vLLM's own code; other tests of this process may have installed the plug-in."""
    monkeypatch.setenv("NVFP4_TENSOR_SERVING", "0")


def layer_of(folder, name, sizes):
    """Return vLLM's fused linear of the first layer, with weights loaded by vLLM from the folder."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert ModelOptNvFp4Config.override_quantization_method(found, None) == "modelopt_fp4"
    legacy = ModelOptNvFp4Config.from_config(json.loads((folder / "hf_quant_config.json").read_text()))
    config = ModelOptNvFp4Config.from_config(found)
    assert (config.quant_method, config.exclude_modules) == (legacy.quant_method, legacy.exclude_modules)
    assert config.is_layer_excluded("lm_head") and not config.is_layer_excluded(f"model.layers.0.{name}")
    path, options = f"model.layers.0.{name}", {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
    if "qkv" in name:
        layer, shards = QKVParallelLinear(64, 16, 4, 2, prefix=path, **options), "qkv"
    else:
        layer, shards = MergedColumnParallelLinear(64, sizes, prefix=path, **options), range(len(sizes))
    parameters, tensors = dict(layer.named_parameters()), load_file(folder / "model.safetensors")
    for shard, part in zip(shards, FUSED[name], strict=True):
        prefix = f"{path.rpartition('.')[0]}.{part}."
        for key in [each.removeprefix(prefix) for each in tensors if each.startswith(prefix)]:
            parameters[key].weight_loader(parameters[key], tensors[prefix + key], shard)
    return layer


@pytest.mark.parametrize("name", FUSED)
def test_weight_only(vllm, llama, tmp_path, monkeypatch, name):
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    # A kernel is chosen when the layer is made, and on a CPU there is none for W4A16; it is not run here.
    monkeypatch.setattr(modelopt, "select_linear_kernel", lambda *_, **__: EmulationNvFp4LinearKernel(None))
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
    model = AutoModelForCausalLM.from_pretrained(llama()[1], quantization_config=config)
    nvfp4.save(model, tmp_path / "nvfp4")
    parts = [model.get_parameter(f"model.layers.0.{name.split('.')[0]}.{part}.weight") for part in FUSED[name]]
    layer = layer_of(tmp_path / "nvfp4", name, [len(part) for part in parts])
    assert layer.weight_scale_2.unique().numel() == 1
    layer.quant_method.process_weights_after_loading(layer)
    got = dequantize_to_dtype(layer.weight, layer.weight_scale, layer.weight_global_scale, torch.float32, swizzle=False)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", FUSED)
def test_w4a4(vllm, llama, tmp_path, ids, name):
    """Compare vLLM's emulated product with ours."""
    is_linear = lambda module, name: isinstance(module, torch.nn.Linear) and "lm_head" not in name  # noqa: E731
    model = calibrate(llama()[0], [ids], NVFP4Config(), filter_fn=is_linear, progress=False)
    nvfp4.save(nvfp4.attach_quantizer(model), tmp_path / "nvfp4")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    module = again.model.layers[0].get_submodule(name.split(".")[0])
    linears = [module.get_submodule(part) for part in FUSED[name]]
    layer = layer_of(tmp_path / "nvfp4", name, [linear.out_features for linear in linears])
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    got, expected = layer(x)[0].float(), torch.cat([linear(x) for linear in linears], dim=-1).float()
    assert (got - expected).norm() < 0.01 * expected.norm()

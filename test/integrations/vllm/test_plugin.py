"""What is checked before anything is replaced, and what is left to vLLM."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations import vllm as ours

vllm = pytest.importorskip("vllm", reason="pip install '.[serve-test]' in an environment of its own")

ROOT = Path(__file__).parents[3]
MODELOPT = "vllm.model_executor.layers.quantization.modelopt"


@pytest.fixture
def fresh(plugin, monkeypatch):
    """The plug-in as before its installation, in which nothing of this test stays."""
    from vllm.model_executor.layers.quantization import modelopt

    monkeypatch.setattr(plugin, "_installed", False)
    monkeypatch.setattr(modelopt, "LINEAR_METHOD_BUILDERS", {})
    return plugin


@pytest.mark.parametrize("target, value, message", [
    ("vllm.__version__", "0.34.0", "this is vLLM 0.34.0"),
    (f"{MODELOPT}.LINEAR_METHOD_BUILDERS", {"NVFP4": print}, "another plug-in serves NVFP4"),
    (f"{MODELOPT}.LINEAR_METHOD_BUILDERS", None, "has no LINEAR_METHOD_BUILDERS"),
])  # fmt: skip
def test_a_change_of_vllm_leaves_it_as_it_was(fresh, monkeypatch, target, value, message):
    from vllm.model_executor.layers.quantization import modelopt

    monkeypatch.setattr(target, value)
    before = dict(vars(modelopt)), modelopt.LINEAR_METHOD_BUILDERS
    with pytest.warns(UserWarning, match=f"leaves vLLM as it is: .*{message}"):
        ours.register()
    assert not fresh._installed and dict(vars(modelopt)) == before[0]
    if isinstance(before[1], dict):
        assert "W4A16_NVFP4" not in before[1]


def test_an_error_is_a_warning(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "differences", lambda: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        ours.register()
    monkeypatch.setenv(serving.SETTING, "on")
    with pytest.warns(UserWarning, match="is not one of 0, 1, w4a16"):
        ours.register()


def test_the_setting(fresh, monkeypatch, recwarn):
    """0 installs nothing, and leaves new layers to vLLM once installed; each changes the hash of compiled graphs."""
    from vllm.model_executor.layers.quantization import modelopt

    from nvfp4_tensor.integrations.vllm import linears

    monkeypatch.setenv(serving.SETTING, "0")
    ours.register()
    assert not fresh._installed and modelopt.LINEAR_METHOD_BUILDERS == {} and not recwarn
    assert "is 0" in linears.not_served()
    seen = set()
    for value in ("0", "1", "w4a16"):
        monkeypatch.setenv(serving.SETTING, value)
        seen.add(str(vllm.envs.compile_factors()[serving.SETTING]))
    assert len(seen) == 3 and linears.not_served() == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in linears.not_served()


PROGRAM = """
import pickle
from vllm.plugins import load_general_plugins
load_general_plugins()
import nvfp4_tensor.integrations.vllm as ours
from nvfp4_tensor.integrations.vllm import plugin
ours.register()
from vllm.model_executor.layers.quantization import get_quantization_config, modelopt
config = get_quantization_config("compressed-tensors")
assert config.__module__.startswith("nvfp4_tensor"), config
made = config({}, [], "nvfp4-pack-quantized")
assert type(pickle.loads(pickle.dumps(made))) is config
print("installed", plugin._installed, sorted(modelopt.LINEAR_METHOD_BUILDERS))
"""


def test_vllm_finds_the_entry_point(tmp_path):
    """That of pyproject.toml, as an installation has it, in a process of its own."""
    section = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."vllm.general_plugins"]\n')[1]
    name, value = section.split("\n")[0].replace('"', "").split(" = ")
    folder = tmp_path / "nvfp4_tensor-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nvfp4-tensor\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {value}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": path, serving.SETTING: "1"}
    environment.pop("VLLM_PLUGINS", None)
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert "installed True ['NVFP4', 'W4A16_NVFP4']" in run.stdout, run.stdout + run.stderr[-3000:]


@pytest.mark.parametrize("device, capability", [("cuda", (7, 5)), ("cuda", (10, 0)), ("rocm", None)])
def test_other_devices_stay_with_vllm(plugin, monkeypatch, device, capability):
    from vllm.platforms.interface import DeviceCapability

    from nvfp4_tensor.integrations.vllm import linears

    found = None if capability is None else DeviceCapability(*capability)
    asked = {"is_cpu": False, "is_cuda": device == "cuda", "get_device_capability": found}
    platform = SimpleNamespace(device_type=device, **{name: lambda value=value: value for name, value in asked.items()})
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    assert linears.not_served()


@pytest.mark.parametrize("kind, algorithm, served", [
    ("linear", "NVFP4", True), ("linear", "FP8", True), ("linear", "W4A8_NVFP4_FP8", False), ("linear", None, True),
    ("experts", "FP8_PER_CHANNEL_PER_TOKEN", False),
])  # fmt: skip
def test_mixed_precision_is_served_or_refused(plugin, kind, algorithm, served):
    """vLLM itself takes what it does not know for dense."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    layers = {"other": {"quant_algo": "NVFP4", "group_size": 16}} | (
        {"x": {"quant_algo": algorithm}} if algorithm else {}
    )
    fields = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    config = ModelOptMixedPrecisionConfig.from_config(fields)
    layer = MagicMock(spec=LinearBase if kind == "linear" else RoutedExperts)
    if not served:
        with pytest.raises(NotImplementedError, match=f"x: the server reads no {algorithm}.*convert"):
            config.get_quant_method(layer, "x")
        return
    assert isinstance(config.get_quant_method(layer, "x"), UnquantizedLinearMethod) == (algorithm is None)


def moe(**changes):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    parallel = SimpleNamespace(use_all2all_kernels=False, enable_eplb=False)
    fields = {
        "moe_backend": "auto", "activation": MoEActivation.SILU, "swiglu_limit": None, "swiglu_alpha": None,
        "swiglu_beta": None, "has_bias": False, "is_lora_enabled": False, "moe_parallel_config": parallel,
        "intermediate_size_per_partition": 48, "hidden_dim": 64,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("changes", [
    {"moe_backend": "marlin"}, {"swiglu_limit": 7.0}, {"has_bias": True}, {"is_lora_enabled": True},
    {"intermediate_size_per_partition": 40}, {"activation": "SWIGLUOAI"},
], ids=str)  # fmt: skip
def test_experts_that_stay_with_vllm(plugin, changes):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from nvfp4_tensor.integrations.vllm.experts import experts_not_served

    if "activation" in changes:
        changes = {"activation": MoEActivation[changes["activation"]]}
    assert experts_not_served(moe()) == ""
    assert experts_not_served(moe(**changes))


def test_vllm_has_our_activations(plugin):
    """Both compute the same from gate and up."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation

    x = torch.randn(5, 64)
    for combine in serving.Combine:
        activation = MoEActivation(combine.value)
        if not activation.is_gated:  # the gated ones are compiled code
            out = torch.empty_like(x)
            apply_moe_activation(activation, out, x.clone())
            torch.testing.assert_close(serving.combined(x, combine), out)

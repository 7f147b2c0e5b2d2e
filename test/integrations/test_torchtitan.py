"""torchtitan's linears with our recipes: override, converter, and Trainer with FSDP2 and tensor parallelism."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.run_ranks import run_ranks
from integrations.titan_llama import OVERRIDE, refused, trained
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, set_recipe, to_dense

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)  # 0.3 needs torch 2.13
titan = pytest.importorskip("nvfp4_tensor.integrations.torchtitan", exc_type=ImportError)
from torchtitan.config import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

pytestmark = pytest.mark.slow


def kinds(model_config):
    return {fqn: type(config) for fqn, config, *_ in model_config.traverse(Linear.Config)}


# --- configs ---------------------------------------------------------------------------------------------------------


def test_the_override_takes_the_linears_of_blocks():
    config = llama3_debugmodel()
    config.override = OverrideConfig(imports=[(OVERRIDE, {"recipe": "unbiased"})])
    assert len(apply_overrides(config.override, config)) == 30
    found = kinds(config.model_spec.model)
    assert found.pop("lm_head") is Linear.Config
    assert len(found) == 30 and set(found.values()) == {titan.NVFP4Linear.Config}
    first = config.model_spec.model.layers[0].feed_forward.w1
    assert (first.recipe, first.in_features, first.out_features) == ("unbiased", 256, 768)
    assert first.param_init is llama3_debugmodel().model_spec.model.layers[0].feed_forward.w1.param_init
    config = llama3_debugmodel()
    config.override = OverrideConfig(imports=[(OVERRIDE, {"recipe": "nvida"})])
    with pytest.raises(ValueError, match="unknown recipe 'nvida'"):
        apply_overrides(config.override, config)


def test_the_converter_leaves_the_tail_and_names_dense():
    converter = titan.NVFP4Converter.Config(recipe="accurate", dense_tail=0.15, dense=["layers.0.attention.*"])
    found = kinds(model_registry("debugmodel", converters=[converter]).model)
    dense = {fqn for fqn, kind in found.items() if kind is Linear.Config}
    last = {fqn for fqn in found if fqn.startswith("layers.5.")}
    assert dense == {"lm_head", "layers.0.attention.qkv_linear.wqkv", "layers.0.attention.wo", *last}
    assert len(found) == 31 and len(last) == 5


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"recipe": "x"}, "unknown recipe 'x'"),
        ({"dense_tail": 15}, "from 0 to 1, got 15"),
        ({"fqns": ["encoder.*"]}, "selects no Linear of Llama3Model.Config"),
        ({"dense_tail": 1.0}, "selects no Linear"),
    ],
)
def test_invalid_settings_of_the_converter_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        model_registry("debugmodel", converters=[titan.NVFP4Converter.Config(**settings)])


# --- the module ------------------------------------------------------------------------------------------------------


def linear_of(recipe, bias=False):
    linear = titan.NVFP4Linear.Config(in_features=64, out_features=96, bias=bias, recipe=recipe).build()
    linear.init_states()
    return linear


def gradients(linear, x, dy):
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_our_own_linear(recipe):
    torch.manual_seed(0)
    linear, x, dy = linear_of(recipe, bias=True), torch.randn(32, 64), torch.randn(32, 96)
    ours = nn.Sequential(nn.Linear(64, 96))
    ours[0].load_state_dict(linear.state_dict())
    quantize_(ours, NVFP4TrainingConfig(recipe))
    for mine, theirs in zip(gradients(linear, x, dy), gradients(ours[0], x, dy), strict=True):
        assert torch.equal(mine, theirs)


def test_the_forward_alone_goes_back_to_dense():
    torch.manual_seed(0)
    linear, x, dy = linear_of("nvidia"), torch.randn(32, 64), torch.randn(32, 96)
    dense = to_dense(copy.deepcopy(linear))
    assert type(dense) is Linear
    quantized = gradients(linear, x, dy)
    linear.weight.grad = None
    set_recipe(linear, forward="bf16")
    switched, whole = gradients(linear, x, dy), gradients(dense, x, dy)
    assert torch.equal(switched[0], whole[0]) and not torch.equal(quantized[0], whole[0])
    for mine, theirs in zip(switched[1:], whole[1:], strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert 0.05 < error < 0.3


# --- the Trainer -----------------------------------------------------------------------------------------------------


def test_trains_under_fsdp(tmp_path):
    (losses, linears, halves), other = run_ranks(trained, 2, str(tmp_path), "nvidia", 8, keep=False)
    assert other[0] == losses
    assert linears == 30 and halves == {(True, False)}
    (dense, none, _), _ = run_ranks(trained, 2, str(tmp_path), None, keep=False)
    assert none == 0
    assert losses != dense
    assert losses[0] > 7 and losses[-1] < losses[0] - 2
    assert abs(losses[-1] - dense[-1]) < 0.1 * dense[-1]


def test_trains_under_tensor_parallelism(tmp_path):
    (losses, linears, _), other = run_ranks(trained, 2, str(tmp_path), "nvidia", None, 2, keep=False)
    assert other[0] == losses and linears == 30
    ((alone, _, _),) = run_ranks(trained, 1, str(tmp_path), "nvidia", keep=False)
    assert losses[0] > 7 and losses[-1] < losses[0] - 2
    assert abs(losses[-1] - alone[-1]) < 0.1 * alone[-1]


def test_full_dtensor_is_refused(tmp_path):
    run_ranks(refused, 1, str(tmp_path), keep=False)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "partial_dtensor"), (1, "spmd_types")])
def test_its_own_command_line(ranks, backend, tmp_path):
    """Run torchtitan's train.py with torchrun; losses fall as in a dense run of the same batches."""
    script = Path(__file__).with_name("titan_llama.py")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)),
        *("--module", "integrations.titan_llama", "--config", "debug_llama_on_cpu"),
        *("--parallelism.spmd_backend", backend, "--override.imports", f'{OVERRIDE}={{"recipe":"nvidia"}}'),
    ]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TITAN_FOLDER": str(tmp_path)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss:\s+([0-9.]+)", said)]
    assert len(losses) == 6 * ranks and losses[0] > 7 and losses[-1] < losses[0] - 2
    assert len(re.findall(r"\[Override\] .*nvfp4_linear: .* with recipe='nvidia'", said)) >= 30

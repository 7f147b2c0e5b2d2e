"""MLX's folders against mlx, if it is installed."""

import json

import numpy as np
import pytest
import torch
from helpers.checkpoints import InMemory, same_parts
from safetensors import safe_open
from safetensors.torch import save_file

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.mlx import AMAX_OF_ONE, FORMAT

CONFIG = {"model_type": "llama", "dtype": "bfloat16"}
NAME = "model.layers.0.mlp.up_proj.weight"


def write(path, tensors, **options):
    FORMAT.write(InMemory(tensors, CONFIG), path, progress=False, **options)
    return FORMAT.read(path)


def of_one(rows=48, columns=80):
    """A weight whose per-tensor scale is 1, and a dense one."""
    return {NAME: quantize(torch.randn(rows, columns) * 9, amax=AMAX_OF_ONE), "model.norm.weight": torch.ones(80)}


def mlx_values(folder, name=NAME):
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    tensors = mx.load(str(folder / "model.safetensors"))
    stem = name.removesuffix("weight")
    factor = tensors.get(f"{stem}global_scale")
    return torch.from_numpy(
        np.array(
            mx.dequantize(tensors[name], tensors[f"{stem}scales"], mode="nvfp4", global_scale=factor, dtype=mx.float32)
        )
    )


@pytest.mark.parametrize(("rows", "columns"), [(48, 80), (3, 16)])
def test_round_trip(tmp_path, rows, columns):
    tensors = of_one(rows, columns)
    with write(tmp_path / "a", tensors) as checkpoint:
        assert FORMAT.detect(tmp_path / "a") and checkpoint.config == CONFIG
        assert same_parts(checkpoint.linear(NAME), parts_of(tensors[NAME]))
        assert torch.equal(checkpoint.dense("model.norm.weight"), torch.ones(80))
        FORMAT.write(checkpoint, tmp_path / "b", progress=False)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    written = json.loads((tmp_path / "a/config.json").read_text())
    assert written["quantization"] == written["quantization_config"] == {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "mlx"}
        assert file.get_slice(NAME).get_dtype() == "U32" and file.get_slice(NAME).get_shape() == [rows, columns // 8]


@pytest.mark.parametrize("factor", [1.0, 0.25, 4.0])
def test_mlx_decodes_the_same(tmp_path, factor):
    want = of_one()[NAME]._replace(per_tensor_scale=torch.tensor(factor))
    scale = want.scale.float()  # whose products with the factor are e4m3 numbers
    want = want._replace(scale=torch.where((scale > 100) | (scale < 0.1), 1.0, scale).to(want.scale.dtype))
    with write(tmp_path / "a", {NAME: want}) as checkpoint:
        parts = checkpoint.linear(NAME)
    assert parts.per_tensor_scale == 1.0
    assert torch.equal(tensor_of(parts, torch.float32).dequantize(), want.dequantize())
    assert torch.equal(mlx_values(tmp_path / "a"), want.dequantize())


@pytest.mark.parametrize(("mode", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_what_mlx_writes_is_read(tmp_path, mode, group):
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    codes, scales = mx.quantize(mx.random.normal((32, 96)), mode=mode)
    (tmp_path / "a").mkdir()
    mx.save_safetensors(str(tmp_path / "a/model.safetensors"), {NAME: codes, NAME[:-6] + "scales": scales})
    config = {"quantization": {"group_size": group, "bits": 4, "mode": mode}}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    with FORMAT.read(tmp_path / "a") as checkpoint:
        got = tensor_of(checkpoint.linear(NAME), torch.float32).dequantize()
        assert checkpoint.per_tensor_scale(NAME) == checkpoint.linear(NAME).per_tensor_scale
    want = mx.dequantize(codes, scales, mode=mode, dtype=mx.float32)
    assert torch.equal(got, torch.from_numpy(np.array(want)))


def test_lossy_quantizes_again(tmp_path):
    want = quantize(torch.randn(48, 80) * 3)
    with write(tmp_path / "a", {NAME: want}, lossy=True) as checkpoint:
        got = tensor_of(checkpoint.linear(NAME), torch.float32)
    assert torch.equal(got.dequantize(), quantize(want.dequantize(), amax=AMAX_OF_ONE).dequantize())
    error = (got.dequantize() - want.dequantize()).norm() / want.dequantize().norm()
    assert 0 < error < 0.07


def test_a_global_scale(tmp_path):
    want = quantize(torch.randn(48, 80) * 0.01)
    with write(tmp_path / "a", {NAME: want}, global_scale=True) as checkpoint:
        assert same_parts(checkpoint.linear(NAME), parts_of(want))
    assert torch.allclose(mlx_values(tmp_path / "a"), want.dequantize(), rtol=1e-6, atol=0)
    scale = next(s for s in torch.linspace(1, 2, 1000) if s * 2688 / 2688 != s)
    with write(
        tmp_path / "b", {NAME: want._replace(per_tensor_scale=scale)}, global_scale=True, lossy=True
    ) as checkpoint:
        assert checkpoint.linear(NAME).per_tensor_scale == pytest.approx(float(scale), rel=2**-23)


def test_rows_fold_each_by_its_own_scale(tmp_path):
    weight = of_one(32, 64)[NAME]
    rows = torch.cat([weight, weight._replace(per_tensor_scale=torch.tensor(0.5))])
    assert rows.per_tensor_scale.shape == (64,)
    with write(tmp_path / "a", {NAME: rows}) as checkpoint:
        assert torch.equal(tensor_of(checkpoint.linear(NAME), torch.float32).dequantize(), rows.dequantize())


def test_quantizing_for_mlx_needs_no_second_rounding(tmp_path):
    (tmp_path / "src").mkdir()
    x = torch.randn(48, 80)
    save_file({NAME: x}, tmp_path / "src/model.safetensors")
    checkpoints.quantize(tmp_path / "src", tmp_path / "a", to="mlx", progress=False)
    with checkpoints.read(tmp_path / "a") as checkpoint:
        assert checkpoint.format == "mlx"
        assert same_parts(checkpoint.linear(NAME), parts_of(quantize(x, amax=AMAX_OF_ONE)))
    checkpoints.quantize(tmp_path / "src", tmp_path / "b", to="mlx", progress=False, global_scale=True)
    with checkpoints.read(tmp_path / "b") as checkpoint:
        assert same_parts(checkpoint.linear(NAME), parts_of(quantize(x)))


def test_activations_are_omitted_with_a_warning(tmp_path):
    weight = of_one()[NAME]._replace(activation_spec=QuantizeSpec())
    with (
        pytest.warns(UserWarning, match="does not quantize activations"),
        write(tmp_path / "a", {NAME: weight}) as checkpoint,
    ):
        assert not checkpoint.linear(NAME).quantizes_activations

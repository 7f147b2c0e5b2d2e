"""Experts in GGUF: one tensor per layer and one scale per expert, against the package gguf, and round trips."""

import numpy as np
import pytest
import torch
from helpers.checkpoints import EXPERTS, expert_tensors, same_parts, write_gguf

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
UP = {"mixtral": "model.layers.1.block_sparse_moe.experts.{}.w3.weight",
      "qwen3_moe": "model.layers.1.mlp.experts.{}.up_proj.weight"}  # fmt: skip


@pytest.fixture(scope="module", params=EXPERTS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tensors(kind):
    """In NVFP4, the up projections with a static scale of activations for each expert."""
    torch.manual_seed(0)
    tensors = expert_tensors(kind)
    for expert, name in enumerate(UP[kind].format(expert) for expert in range(4)):
        static = {"activation_spec": QuantizeSpec(), "activation_amax": torch.tensor(2688.0 * (expert + 2))}
        tensors[name] = tensors[name]._replace(**static)
    return tensors


def write(path, tensors, kind, config=None, **options):
    return write_gguf(path, tensors, EXPERTS[kind] if config is None else config, **options)


def test_round_trip(tmp_path, kind, tensors):
    with write(tmp_path / "a.gguf", tensors, kind) as checkpoint:
        assert set(checkpoint.entries) == set(tensors)
        assert sum(entry.quantized for entry in checkpoint.entries.values()) == 2 * (4 + 3 * 4)
        for name, want in tensors.items():
            if isinstance(want, NVFP4Tensor):
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
                assert torch.equal(checkpoint.per_tensor_scale(name), want.per_tensor_scale)
            else:
                assert torch.equal(checkpoint.dense(name).to(want.dtype), want), name
        for key, value in EXPERTS[kind].items():
            assert checkpoint.config[key] == value, key
        FORMAT.write(checkpoint, tmp_path / "b.gguf", progress=False)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    stacked, scales = found["blk.1.ffn_up_exps.weight"], found["blk.1.ffn_up_exps.scale"]
    assert tuple(stacked.shape) == (128, 192, 4) and stacked.tensor_type.name == "NVFP4" and tuple(scales.shape) == (4,)
    values = gguf.quants.dequantize(stacked.data, stacked.tensor_type) * scales.data[:, None, None]
    for expert in range(4):
        want = tensor_of(parts_of(tensors[UP[kind].format(expert)]), torch.float32).dequantize()
        torch.testing.assert_close(torch.from_numpy(np.array(values[expert])), want, rtol=1e-6, atol=0)
    assert len(set(scales.data.tolist())) == 4


def test_dense_experts_and_routers(tmp_path, kind, tensors):
    dense = {name: t.dequantize() if isinstance(t, NVFP4Tensor) else t for name, t in tensors.items()}
    with write(tmp_path / "a.gguf", dense, kind, dense="Q8_0") as checkpoint:
        name, router = UP[kind].format(2), UP[kind].partition("experts")[0] + "gate.weight"
        got = checkpoint.dense(name).float()
        assert 0 < (got - dense[name].float()).abs().max() < 0.01 * dense[name].float().abs().max()
        assert torch.equal(checkpoint.dense(router), dense[router])  # what chooses is not rounded
    checkpoints.quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", to="gguf", tokenizer=None, progress=False)
    with FORMAT.read(tmp_path / "b.gguf") as checkpoint:
        quantized = {n for n, e in checkpoint.entries.items() if e.quantized}
        assert quantized == {n for n, t in tensors.items() if isinstance(t, NVFP4Tensor)}
        weight = tensor_of(checkpoint.linear(name), torch.float32).dequantize()
    assert (weight - got).norm() < 0.12 * got.norm()


def test_to_servers_and_back(tmp_path, kind, tensors, to="compressed-tensors"):
    write(tmp_path / "a.gguf", tensors, kind)
    with pytest.warns(UserWarning, match="10 groups of linears that servers join"):
        checkpoints.convert(tmp_path / "a.gguf", tmp_path / "b", to=to, progress=False)
    checkpoints.convert(tmp_path / "b", tmp_path / "c.gguf", to="gguf", progress=False, tokenizer=None)
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()

"""Writes into slices of an NVFP4Tensor: done in the whole, bit for bit, or refused."""

import copy
import gc

import pytest
import torch
from torchao.quantization import quantize_
from torchao.testing.utils import TorchAOIntegrationTestCase

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, quantize, quantize_experts

SLICES = {
    "rows on tiles": (0, 128, 128),
    "rows off tiles": (0, 40, 77),
    "columns on tiles": (1, 64, 64),
    "columns off tiles": (1, 16, 48),
    "last columns": (1, 96, 54),
}


def matrix(seed=0, factor=1.0, rows=300, columns=150):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * factor
    return x.bfloat16()


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_piece_with_the_same_scale(where):
    """Codes and scales in the slice are those of the piece, all others stay."""
    a, b = matrix(1), matrix(2)
    t, other = (quantize(x, amax=6.0) for x in (a, b))
    values, new = t.dequantize(), other.dequantize()
    t.narrow(*where).copy_(other.narrow(*where))
    values.narrow(*where).copy_(new.narrow(*where))
    assert torch.equal(t.dequantize(), values)


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_piece_into_zeros(where):
    """Any scale fits where nothing else is."""
    t, other = quantize(matrix()).new_zeros(300, 150), quantize(matrix(3))
    t.narrow(*where).copy_(other.narrow(*where))
    expected = torch.zeros(300, 150, dtype=torch.bfloat16)
    expected.narrow(*where).copy_(other.dequantize().narrow(*where))
    assert torch.equal(t.dequantize(), expected)


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_larger_scale_rounds_the_rest_and_a_smaller_is_refused(where):
    t, other = quantize(matrix(4)), quantize(matrix(5, 2.0))
    before = t.dequantize(torch.float32)
    t.narrow(*where).copy_(other.narrow(*where))
    assert torch.equal(t.narrow(*where).qdata, other.narrow(*where).qdata)
    expected = quantize(before, amax=other.per_tensor_scale * 2688).dequantize(torch.float32)
    expected.narrow(*where).copy_(other.dequantize(torch.float32).narrow(*where))
    assert torch.allclose(t.dequantize(torch.float32), expected, rtol=1e-6, atol=0)
    held = t.dequantize()
    with pytest.raises(RuntimeError, match="may not fit"):
        t.narrow(*where).copy_(quantize(matrix(6, 0.1)).narrow(*where))
    assert torch.equal(t.dequantize(), held)


def test_slices_of_slices():
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    values = t.dequantize()
    t[128:256][5:90].copy_(other[:85])
    values[133:218] = other.dequantize()[:85]
    assert torch.equal(t.dequantize(), values)


@torch.inference_mode()  # elsewhere autograd keeps the base of a view
def test_a_copy_does_not_keep_the_whole_and_says_that_a_write_would_be_lost():
    t = quantize(matrix())
    part, where = t[3:40], t.qdata.untyped_storage()._weak_ref()
    del t
    gc.collect()
    assert torch.UntypedStorage._expired(where)
    with pytest.raises(RuntimeError, match="the write would be lost"):
        part.copy_(quantize(matrix(1))[:37])


@pytest.mark.parametrize("start", [0, 3])
@torch.no_grad()
def test_a_deep_copy_of_a_slice_is_no_part(start):
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    before = t.dequantize()
    part = copy.deepcopy(t[start : start + 128])
    try:
        part.copy_(other[:128])
    except RuntimeError as error:
        assert "the write would be lost" in str(error)
    assert torch.equal(t.dequantize(), before)


def test_the_data_of_a_tensor_finds_it():
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    t.data.detach().narrow(0, 3, 40).copy_(other[:40])
    assert torch.equal(t[3:43].dequantize(), other[:40].dequantize())


def test_slices_and_aliases_do_not_hinder_a_module_from_moving():
    linear = torch.nn.Linear(64, 300, bias=False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    weight = linear.weight
    held = [weight.detach(), weight.data[3:40], linear.state_dict()["weight"]]
    before = weight.dequantize()
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16 and linear.weight is weight
    held[1].copy_(held[1])  # into the codes that moved away
    assert torch.equal(linear.weight.dequantize(torch.float32), before)


def test_experts_take_pieces_of_any_scale():
    whole, t = quantize_experts(torch.randn(4, 40, 64)), quantize_experts(torch.randn(4, 40, 64) * 3)
    for start, length in ((0, 1), (1, 3)):
        t.narrow(0, start, length).copy_(whole.narrow(0, start, length))
    assert torch.equal(t.dequantize(), whole.dequantize())


class AsVLLMLoads(TorchAOIntegrationTestCase):
    """torchao's own test, which wants an accelerator for its device alone."""

    def runTest(self):
        pass


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config(), NVFP4WeightOnlyConfig(block_rows=16)])
def test_slice_and_copy_as_vllm_does(config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("torchao.testing.utils.get_current_accelerator_device", lambda: "cpu")
    AsVLLMLoads()._test_slice_and_copy_similar_to_vllm(config)


def test_all_slices_as_vllm_does_give_the_loaded_weight():
    linear, loaded = (torch.nn.Linear(96, 384, bias=False, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        loaded.weight.mul_(3)
    for module in (linear, loaded):
        quantize_(module, NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(four_over_six=True)))
    for start in (0, 128, 256):
        data = linear.weight.data
        data = data.narrow(0, start, 128)
        data.copy_(loaded.weight.narrow(0, start, 128))
    assert torch.equal(linear.weight.dequantize(), loaded.weight.dequantize())

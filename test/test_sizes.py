"""Sizes of models by kind, with shared tensors counted once, and sizes computed by other libraries."""

import pytest
import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchaoConfig
from torchao.quantization import quantize_

from nvfp4_tensor import ModelSize, NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, model_size, quantize
from nvfp4_tensor.sizes import bits_per_weight

CODES, SCALES = 128 * 32, 128 * 4 + 4
"""Bytes of a weight of 128 x 64."""


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    return model


BATCH_NORM = 4 * 256 + 8  # weight, bias, mean and variance; a count in int64


def test_a_dense_model():
    size = model_size(net())
    dense = 128 * 64 * 2 + 256 + BATCH_NORM
    gradients, moments = dense - 4 * 128 - 8, 18 * 128 * 4 + 8 * 384  # buffers have none; two codes and scales each
    assert size == ModelSize(0, 0, dense, dense, gradients, moments) and size.total == dense
    assert str(size) == "0.0 MB: codes 0.0 MB, scales 0.0 MB, dense 0.0 MB"


TIES = {
    "parameter": lambda weight: weight,
    "tensor": lambda weight: nn.Parameter(weight.data, requires_grad=False),
    "parts": lambda weight: nn.Parameter(weight.data._replace(), requires_grad=False),
    "not": lambda weight: nn.Parameter(weight.data.clone(), requires_grad=False),
}


@pytest.mark.parametrize("tied", TIES)
def test_a_quantized_model_counts_what_is_shared_once(tied):
    model = net()
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    quantize_(model, NVFP4WeightOnlyConfig())
    model[1].weight = TIES[tied](model[0].weight)
    copies, size = 2 if tied == "not" else 1, model_size(model)
    assert (size.codes, size.scales, size.dense) == (copies * CODES, copies * SCALES, 256 + BATCH_NORM)
    assert size.unquantized == copies * 128 * 64 * 2 + 256 + BATCH_NORM


def test_parts_of_every_kind():
    experts = nn.Module()
    experts.weight = nn.Parameter(quantize(torch.randn(3, 40, 24)).mT, requires_grad=False)
    static = nn.Linear(64, 128, bias=False)
    quantize_(static, NVFP4Config())
    static.weight.activation_amax = torch.tensor(3.0)
    experts.static = static
    tile = 512  # 120 rows of two blocks, padded to 128 of four
    size = model_size(experts)
    assert (size.codes, size.scales, size.dense) == (3 * 40 * 16 + CODES, tile + 4 + SCALES + 4, 0)
    assert size.unquantized == (3 * 40 * 24 + 128 * 64) * 4
    assert str(size).endswith(f"; {size.total / size.unquantized:.3f} of 0.0 MB")


def test_tensors_of_other_libraries_and_without_memory():
    linear = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
    quantize_(linear, TorchaoConfig())
    size = model_size(linear)
    assert 128 * 32 < size.dense < 128 * 64 and size.codes == size.scales == 0
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 128), nn.Linear(64, 128))
    assert model_size(empty).total == 2 * (64 * 128 + 128) * 4


def test_what_others_count_is_what_is_stored():
    t = quantize(torch.randn(128, 64).to(torch.bfloat16))
    assert t.nbytes == t.stored_bytes == CODES + SCALES
    assert t.element_size() * t.numel() == t.untyped_storage().nbytes() == CODES + SCALES
    assert torch.nn.Parameter(t, requires_grad=False).nbytes == t.t().nbytes == t.nbytes


def test_memory_footprint_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=70, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    before = model.get_memory_footprint()
    quantize_(model.model, NVFP4WeightOnlyConfig())
    after = model.get_memory_footprint()
    assert after == pytest.approx(model_size(model).total, abs=0.5) and after < before
    assert before == model_size(model).unquantized


def test_bits_of_a_weight_count_its_scales_and_their_padding():
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(64, 8, bias=False))
    assert bits_per_weight(net, lambda module, name: name == "0") == 32
    t = NVFP4Tensor.to_nvfp4(torch.ones(128, 64))
    net[0].weight = nn.Parameter(t, requires_grad=False)
    assert bits_per_weight(net, lambda module, name: name == "0") == t.bits_per_element

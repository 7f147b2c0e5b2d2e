"""The plain tensors of a linear: round trips and errors."""

import pytest
import torch

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.io.sidecar import with_factors
from nvfp4_tensor.numerics import layout


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(130, 272), (7, 40), (3, 20, 48)])
def test_round_trip(shape):
    weight = quantize(torch.randn(shape))
    parts = parts_of(weight)
    assert parts.shape == shape
    values = layout.code_values(layout.unpack(parts.qdata)) * parts.scale.float().repeat_interleave(16, -1)
    assert torch.equal((values * parts.per_tensor_scale)[..., : shape[-1]], weight.dequantize())
    again = tensor_of(parts, torch.float32)
    assert torch.equal(again.qdata, weight.qdata) and same_bits(again.scale, weight.scale)
    assert torch.equal(again.per_tensor_scale, weight.per_tensor_scale) and again.shape == weight.shape
    assert not parts.quantizes_activations and parts.input_scale is parts.activation_divisor() is None


def test_experts_and_rows_keep_their_scales():
    experts = quantize_experts(torch.randn(3, 20, 48) * torch.tensor([1.0, 8.0, 0.1])[:, None, None])
    assert torch.equal(tensor_of(parts_of(experts), torch.float32).dequantize(), experts.dequantize())
    joined = torch.cat([quantize(torch.randn(20, 48)), quantize(torch.randn(12, 48) * 9)])
    assert parts_of(joined).per_tensor_scale.shape == (32,)
    assert torch.equal(tensor_of(parts_of(joined), torch.float32).dequantize(), joined.dequantize())


def w4a4(amax=None):
    weight = quantize(torch.randn(32, 64))
    return weight._replace(activation_spec=QuantizeSpec(), activation_amax=amax)


def test_a_static_activation_scale_is_its_amax_over_2688():
    parts = parts_of(w4a4(torch.tensor(5376.0)))
    assert parts.quantizes_activations and parts.input_scale == 2.0
    again = tensor_of(parts)
    assert again.activation_amax == 5376.0 and again.activation_spec == QuantizeSpec()


def test_what_a_file_had_is_kept_while_it_holds():
    # amax / 2688 of the amax that this scale decodes to is another float32: the one of the file has to be kept.
    scale = next(s for s in torch.linspace(1, 2, 1000) if (s * 2688.0) / 2688.0 != s)
    divisor = next(d for d in torch.linspace(1, 2, 1000) if d.reciprocal().reciprocal() != d)
    parts = parts_of(w4a4()).replace(input_scale=scale, per_tensor_scale=divisor.reciprocal(), divisor=divisor)
    kept = {"divisor": divisor.item(), "input_divisor": scale.reciprocal().item()}
    assert parts_of(tensor_of(parts)).input_scale != scale
    again = with_factors(parts.replace(divisor=None), kept)
    assert again.activation_divisor() == scale.reciprocal() and again.weight_divisor() == divisor
    changed = parts.replace(per_tensor_scale=torch.tensor(3.0), input_scale=torch.tensor(7.0), divisor=None)
    again = with_factors(changed, kept)
    assert again.divisor is again.input_divisor is None and again.weight_divisor() == torch.tensor(3.0) ** -1


def test_what_no_format_supports_raises_an_error():
    with pytest.raises(ValueError, match="transposed"):
        parts_of(quantize(torch.randn(32, 64)).t())
    with pytest.raises(ValueError, match="hadamard_sign 0xd7e8"):
        parts_of(quantize(torch.randn(32, 64), QuantizeSpec(hadamard_sign=True)))
    parts = parts_of(quantize(torch.randn(32, 64)))
    with pytest.raises(ValueError, match=r"block scales \(32, 4\).*found \(32, 3\)"):
        tensor_of(parts.replace(scale=parts.scale[:, :3]))

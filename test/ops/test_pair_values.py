"""quantize_pair_values: the codes of quantize_pair, decoded, by whatever serves the CPU."""

import pytest
import torch
from torch.library import opcheck

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.ops import composite as ops

N = torch.ops.nvfp4
PAIRS = {
    "nearest": (QuantizeSpec(), QuantizeSpec(hadamard_sign=True)),
    "stochastic": (QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="stochastic", hadamard_sign=True)),
    "search": (QuantizeSpec(scale_search="mse"), QuantizeSpec()),
    "eden": (QuantizeSpec(round_mode="eden"), QuantizeSpec(round_mode="eden")),
}
WIDTHS = {"nearest": (50, 48), "stochastic": (50, 48), "search": (50, 33), "eden": (128, 128)}


@pytest.mark.parametrize("codes_t", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_values_are_what_the_codes_decode_to(pair, codes_t):
    """A matrix of 33 x 50: what is transformed keeps its padding."""
    x, state = torch.randn(33, 50).bfloat16(), torch.tensor([3, 4])
    packed = [spec.pack() for spec in PAIRS[pair]]
    amaxes = torch.tensor(4.0), torch.tensor(5.0)
    qdata, scale, factor, *transposed = ops.quantize_pair(x, *amaxes, state, *packed, 0, 0, 0, 0, 7)
    width, width_t = WIDTHS[pair]
    got = N.quantize_pair_values(x, *amaxes, state, *packed, codes_t, 0, 0, 0, 0, 7)
    assert torch.equal(got[0], reference.dequantize(qdata, scale, None, width, torch.bfloat16))
    assert got[1] == factor and got[4] == transposed[2]
    if codes_t:
        assert torch.equal(got[2], transposed[0])
        assert torch.equal(got[3].view(torch.uint8), transposed[1].view(torch.uint8))
    else:
        assert torch.equal(got[2], reference.dequantize(*transposed[:2], None, width_t, torch.bfloat16))
        assert got[3].shape == (0,)


@pytest.mark.parametrize("codes_t", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_op_is_one(pair, codes_t):
    x, amax = torch.randn(33, 50).bfloat16(), torch.tensor(4.0)
    packed = [spec.pack() for spec in PAIRS[pair]]
    opcheck(N.quantize_pair_values.default, (x, amax, amax, torch.tensor([3, 4]), *packed, codes_t))


@pytest.mark.parametrize("pair", PAIRS)
def test_amaxes_are_those_of_the_transforms(pair):
    spec, spec_t = PAIRS[pair]
    x, state = torch.randn(33, 50).bfloat16(), torch.tensor([3, 4])
    x[3, 5], x[20, 40] = float("inf"), 100.0
    amax, amax_t = N.amax_pair_by_spec(x, state, spec.pack(), spec_t.pack(), 128, 256)
    assert amax == ops.own_amax(x, spec, state, 256) and amax_t == ops.own_amax(x.t().contiguous(), spec_t, state, 128)
    opcheck(N.amax_pair_by_spec.default, (x, state, spec.pack(), spec_t.pack()))


def test_rotate_back():
    x, state = torch.randn(5, 200).bfloat16(), torch.tensor([3, 4])
    rotated = N.rotate(x, state, False, 128)
    back = N.rotate_back(rotated, state, 200, 128)
    assert torch.equal(back, N.rotate(rotated, state, True, 128)[:, :200].bfloat16())
    assert (back - x).abs().max() < 0.02 and back.is_contiguous()
    opcheck(N.rotate_back.default, (rotated.bfloat16(), state, 100))
    with pytest.raises((ValueError, RuntimeError), match="columns is at most the 256 of x, not 300"):
        N.rotate_back(rotated, state, 300)

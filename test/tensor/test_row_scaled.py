"""One scale per row: each row is quantized independently of the others, from the op to a training step."""

import pytest
import torch
from helpers.bits import MAGNITUDES, MODES, assert_same_bits, inputs
from helpers.refusals import refuses
from torch import nn

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, QuantizeSpec, calibrate, fake_quantize, quantize, quantize_experts

ROWS = QuantizeSpec(row_scaled=True)
CHOICES = [
    {}, {"scale_rounding": "up"}, {"four_over_six": "mse"}, {"four_over_six": "mae", "scale_ceiling": 448},
    {"scale_search": "mse"}, {"hadamard_sign": True},
]  # fmt: skip


def uneven(rows=20, columns=100, dtype=torch.float32, magnitude=1.0):
    """Return rows of very different magnitudes, including a row of zeros and one that is not finite."""
    x = inputs((rows, columns), dtype, magnitude, poison=False).float()
    x = (x * torch.logspace(-2, 0, rows)[:, None]).to(dtype)
    x[4], x[5, 3], x[6, 7] = 0, float("nan"), float("inf")
    return x


@pytest.mark.parametrize(("mode", "choice"), [*zip(MODES, CHOICES[1:], strict=True), *((mode, {}) for mode in MODES)])
def test_a_row_is_a_tensor_by_itself(mode, choice, device):
    spec, state = QuantizeSpec(row_scaled=True, **mode, **choice), torch.tensor([3, 4], device=device)
    for dtype, magnitudes in MAGNITUDES.items():
        x = uneven(dtype=dtype, magnitude=magnitudes[-2]).to(device)
        whole = quantize(x, spec, rng_state=state)
        for i, row in enumerate(x):
            alone = quantize(
                row[None], spec.replace(row_scaled=False), rng_state=state, origin=(i, 0), full_width=x.shape[1]
            )
            assert_same_bits(
                (whole.qdata[i : i + 1], whole.unswizzled_scale()[i : i + 1], whole.per_tensor_scale[i]),
                (alone.qdata.cpu(), alone.unswizzled_scale().cpu(), alone.per_tensor_scale.cpu()),
                f"row {i} of {dtype} by {spec}",
            )


def test_a_given_amax():
    x = torch.randn(2, 5, 32)
    amax = x.abs().amax(-1)
    assert torch.equal(quantize(x, ROWS, amax=amax).qdata, quantize(x, ROWS).qdata)
    assert torch.equal(quantize(x, ROWS, amax=2 * amax).per_tensor_scale, 2 * quantize(x, ROWS).per_tensor_scale)
    assert torch.equal(fake_quantize(x, ROWS, amax=amax), fake_quantize(x, ROWS))
    for wrong in (1.0, torch.ones(2), torch.ones(10, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one number per row, 10 in total"):
            quantize(x, ROWS, amax=wrong)
    for given, spec, message in (
        (amax.view(-1)[:3], ROWS, r"amax .*float32 \(10,\)"),
        (None, QuantizeSpec(), "a spec with row_scaled=True"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            torch.ops.nvfp4.quantize_rows(x, given, None, spec.pack())


STATIC = {"activation_spec": ROWS, "activation_amax": torch.ones(())}
test_what_it_does_not_go_with = refuses(
    (lambda: QuantizeSpec(row_scaled=True, block_rows=16), "row_scaled"),
    (lambda: QuantizeSpec(row_scaled=1), "row_scaled"),
    (lambda: QuantizeSpec(row_scaled=True, round_mode="eden"), "row_scaled"),
    (lambda: calibrate(nn.Sequential(nn.Linear(16, 16)), [], NVFP4Config(row_scaled=True)), "row_scaled"),
    (lambda: NVFP4Tensor(**quantize(torch.ones(2, 16))._fields() | STATIC), "row_scaled"),
)


def test_experts_have_a_scale_for_each_of_their_rows():
    x = torch.randn(3, 8, 32) * torch.logspace(-6, 6, 8).unsqueeze(1)
    experts = quantize_experts(x, ROWS)
    assert experts.per_tensor_scale.shape == (3, 8)
    for expert, dense in zip(experts, x, strict=True):
        alone = quantize(dense, ROWS)
        assert torch.equal(expert.dequantize(), alone.dequantize())
        rows = torch.randn(4, 32)
        assert torch.equal(nn.functional.linear(rows, expert), nn.functional.linear(rows, alone))

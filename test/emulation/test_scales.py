"""Scale modes by their table, and against torchao's MX; by their definitions: test_brute_force.py."""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation.elements import ELEMENTS
from nvfp4_tensor.emulation.modes import ScaleMode
from nvfp4_tensor.emulation.scales import SCALES

pytestmark = pytest.mark.slow


def test_e2m1_as_its_table_says():
    """e - f of each mode, for r = 1, 1.5, 1.75 and just above each."""
    above = torch.tensor([1.0, 1.0001, 1.5, 1.5001, 1.75, 1.7501, 1.9999])
    rows = {
        "floor": [0, 0, 0, 0, 0, 0, 0],
        "ceil": [0, 1, 1, 1, 1, 1, 1],
        "midmax": [0, 0, 0, 0, 0, 1, 1],
        "option3": [0, 0, 0, 0, 1, 1, 1],
        "topbinade": [0, 0, 0, 1, 1, 1, 1],
    }
    for mode, row in rows.items():
        scale = SCALES["e8m0"].of_blocks(above, torch.ones(()), ELEMENTS["e2m1"], ScaleMode.of(mode))
        assert (scale.view(torch.uint8).int() - 125).tolist() == row


# --- torchao ---------------------------------------------------------------------------------------------------------

THEIRS = {
    ScaleMode.FLOOR: ScaleCalculationMode.FLOOR,
    ScaleMode.CEIL: ScaleCalculationMode.CEIL,
    ScaleMode.OPTION3: ScaleCalculationMode.EVEN,
    ScaleMode.TOPBINADE: ScaleCalculationMode.RCEIL,
}
"""Our modes and torchao's; midmax has no counterpart."""
FORMATS = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("mode", THEIRS, ids=lambda mode: mode.value)
@pytest.mark.parametrize("format", FORMATS)
def test_torchao_has_the_same_bits(format, mode):
    generator = torch.Generator().manual_seed(4)
    # From 2^-110 to 2^110. Below 2^-126 / 2^emax torchao keeps a scale of 2^-127 and divides by 2^-126 all the same.
    x = torch.randn(4096, 64, generator=generator) * 2.0 ** torch.randint(-110, 110, (4096, 1), generator=generator)
    x[0] = 0
    for dtype in (torch.bfloat16, torch.float32):
        scale, data = to_mx(x.to(dtype), FORMATS[format], 32, THEIRS[mode])
        how = {"scale_mode": mode, "cast_mode": "compressed" if format == "mxfp4" else "actual"}
        ours = emulation.cast(x.to(dtype), format, **how)
        assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(ours.data, data.view(torch.uint8))


@pytest.mark.parametrize("mode", THEIRS, ids=lambda mode: mode.value)
def test_torchao_agrees_on_every_bfloat16(mode):
    """Use every magnitude as a block's largest, except those with torchao's smallest scale."""
    m = torch.arange(0x0500, 0x7F80, dtype=torch.int16).view(torch.bfloat16).unsqueeze(1).repeat(1, 32)
    scale, _ = to_mx(m, torch.float4_e2m1fn_x2, 32, THEIRS[mode])
    ours = emulation.cast(m, "mxfp4", scale_mode=mode, cast_mode="actual")
    assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))


def test_midmax_is_none_of_torchaos():
    x = torch.tensor([1.75]).repeat(32)  # the tie, which option3 takes up and midmax leaves
    assert emulation.cast(x, "mxfp4", scale_mode="midmax").tolist() == [1.5] * 32
    assert emulation.cast(x, "mxfp4", scale_mode="option3").tolist() == [2.0] * 32

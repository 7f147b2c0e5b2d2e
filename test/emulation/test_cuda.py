"""Emulation on a GPU gives the CPU's bits, with torch and with this package's kernels."""

import pytest
import torch

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation import FORMATS
from nvfp4_tensor.emulation.modes import POWERS_OF_TWO

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def sample():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 200, generator=generator) * 2.0 ** torch.randint(-140, 120, (64, 1), generator=generator)
    x[0], x[1, 3], x[2, 40] = 0, torch.inf, torch.nan
    return x


@pytest.mark.parametrize("compute_mode", ["torch", "native"])
@pytest.mark.parametrize("round_mode", ["even", "away", "zero", "stochastic"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:compute_mode 'native'")
def test_the_bits_are_the_cpus(name, round_mode, compute_mode):
    x, state = sample(), torch.tensor([3, 4])
    modes = (None,) if not FORMATS[name].scale.is_power_of_two or FORMATS[name].element.is_integer else POWERS_OF_TWO
    for mode in modes:
        how = {"round_mode": round_mode, "scale_mode": mode, "cast_mode": "compressed"}
        here = emulation.cast(x, name, rng_state=state, **how)
        there = emulation.cast(x.cuda(), name, rng_state=state.cuda(), compute_mode=compute_mode, **how)
        assert torch.equal(here.data, there.data.cpu())
        scales = (t.scale.view(torch.uint8 if t.scale.itemsize == 1 else torch.int16).cpu() for t in (here, there))
        assert torch.equal(*scales)
        assert torch.equal(here.dequantize().nan_to_num(7), there.dequantize().cpu().nan_to_num(7))


def test_products():
    x = torch.randn(8, 160)
    a, b = (emulation.cast(t, "nvfp4", cast_mode="actual") for t in (x, x.cuda()))
    assert torch.allclose(emulation.matmul(b, b).cpu(), emulation.matmul(a, a), rtol=1e-5, atol=1e-4)
    assert torch.allclose(
        emulation.matmul(b, b, torch.float64).cpu(), emulation.matmul(a, a, torch.float64), rtol=1e-14
    )

import copy
import pickle
import pickletools

import pytest
import torch

from nvfp4_tensor import FourOverSix, ProductBackend, RoundingMode, ScaleRounding, ScaleSearch
from nvfp4_tensor.numerics import layout


def test_codes_are_e2m1_and_the_even_element_is_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert layout.pack(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(layout.unpack(layout.pack(codes)), codes)
    values = layout.code_values(torch.arange(16, dtype=torch.uint8))
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(values[8:], -values[:8]) and torch.signbit(values[8])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (129, 5), (300, 9), (64, 130), (0, 3), (3, 0)])
def test_swizzle_puts_each_scale_at_the_offset_of_the_contract(rows, columns):
    scale = torch.randint(1, 127, (rows, columns), dtype=torch.uint8)
    swizzled = layout.swizzle(scale)
    assert swizzled.shape == (-(-rows // 128), -(-columns // 4), 32, 16)
    expected = torch.zeros(swizzled.numel(), dtype=torch.uint8)
    c4 = swizzled.shape[1]
    for r in range(rows):
        for c in range(columns):
            expected[((r // 128 * c4 + c // 4) * 32 + r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    assert torch.equal(swizzled.flatten(), expected)
    assert torch.equal(layout.unswizzle(swizzled, rows, columns), scale)


def test_rounding_mode_by_name():
    modes = {"rne": 0, "even": 0, "AWAY": 1, "zero": 2, "Stochastic": 3, "eden": 4, RoundingMode.AWAY: 1}
    assert {name: RoundingMode.of(name) for name in modes} == {name: RoundingMode(mode) for name, mode in modes.items()}


@pytest.mark.parametrize("choice", [RoundingMode.EDEN, *ScaleRounding, *FourOverSix, *ScaleSearch, *ProductBackend])
def test_choices_are_pickled_as_class_and_value(choice):
    """And by nothing else, whatever this Python's own enums do: torch.load(weights_only=True) knows the class alone."""
    named = [argument for opcode, argument, _ in pickletools.genops(pickle.dumps(choice, 2)) if opcode.name == "GLOBAL"]
    assert named == [f"nvfp4_tensor {type(choice).__name__}"]
    assert pickle.loads(pickle.dumps(choice)) is choice and copy.deepcopy(choice) is choice


@pytest.mark.parametrize("name", ["up", "", None, 7, True])
def test_unknown_rounding_mode_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="'rne', 'away', 'zero', 'stochastic', 'eden', 'even'"):
        RoundingMode.of(name)

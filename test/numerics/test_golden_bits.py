"""Codes, scales and random bits do not change: digests of what plain torch gives for fixed inputs.

Kernels are compared with plain torch bit for bit in test/ops, so what these pin, they have. Properties of these bits,
as what is unbiased, follow. ``PYTHONPATH=.:test python test/numerics/test_golden_bits.py`` writes the digests anew.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers.digests import SPECS, digest, inputs
from helpers.optimizer_steps import hyper, moments

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops.schemas import plain
from nvfp4_tensor.testing import selftest

FILE = Path(__file__).parents[1] / "data/bits.json"
STATE = torch.tensor([0x1234567890ABCDEF, 42])


def few_inputs():
    """Matrices (37, 83) of each dtype: several binades, extreme magnitudes, what is not finite, random bits."""
    return {name: x for name, x in inputs() if "(37, 83)" in name and not name.startswith(("zeros", "sparse"))}


def of_spec(spec):
    results = []
    for x in few_inputs().values():
        for op, arguments in selftest.calls(x, spec).items():
            found = getattr(plain, op)(*arguments)
            results += [found] if isinstance(found, torch.Tensor) else found
    return digest(tuple(results))


def of_optimizer():
    """Two steps of a matrix of codes, of bfloat16 and of float32, and of a vector, by gradients of many magnitudes."""
    wide, other = (x for name, x in few_inputs().items() if "float32" in name and name.startswith(("wide", "grid")))
    codes = list(plain.quantize(wide, None, None, QuantizeSpec().pack()))
    results = []
    for weight in (codes, [wide.bfloat16()], [wide.clone()]):
        op, state = plain.adamw_step if len(weight) == 1 else plain.adamw_step_codes, moments(*wide.shape)
        for step in (1, 2):
            op(*weight, other * wide.abs(), *state, hyper(step), STATE, 7)
        results += [*weight, *state]
    vector, state = wide.flatten().bfloat16(), [torch.zeros(wide.numel()) for _ in range(2)]
    for step in (1, 2):
        plain.adamw_step_vector(vector, (other * wide.abs()).flatten(), *state, hyper(step), STATE, 7)
    return digest((*results, vector, *state))


def of_products_operands():
    """Operands of FP8 products, and codes of a cache, rotated and not."""
    results = []
    for x in few_inputs().values():
        weight = plain.quantize(x, None, None, QuantizeSpec().pack())
        results += plain.fp8_operands(x, *weight)
        for rotated in (False, True):
            parts = [torch.zeros(1, 1, 48, n, dtype=torch.uint8) for n in (48, 6)] + [torch.zeros(1, 1, 48).byte()]
            parts += [part.clone() for part in parts]
            spec = QuantizeSpec(scale_search="mse").pack()
            plain.append_codes(x[None, None], x[None, None], spec, *parts, torch.tensor([3]), rotated)
            results += parts
    return digest(tuple(results))


CASES = {str(spec): lambda spec=spec: of_spec(spec) for spec in SPECS}
CASES |= {"AdamW": of_optimizer, "FP8 products and caches": of_products_operands}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_as_before(case):
    assert CASES[case]() == json.loads(FILE.read_text())[case]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: make() for name, make in CASES.items()}, indent=1) + "\n")

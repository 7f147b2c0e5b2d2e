"""NVFP4_TENSOR_PRINT_PLANS: a line for each distinct product on the CPU. (Of CUDA's choices: test_cuda_schedule.py.)"""

import os
import subprocess
import sys

import pytest
from helpers.instruction_sets import OF_PRODUCTS, ONLY_PRODUCTS

from nvfp4_tensor.ops import native

pytestmark = pytest.mark.slow

if native.instruction_set() == "torch":
    pytest.skip("the CPU library is not built", allow_module_level=True)

# Two rows twice, 40 rows, two rows of float32, x w of two rows, and rows whose sums before the scales would overflow.
PROGRAM = """
import torch, nvfp4_tensor
torch.set_num_threads(1)
w = nvfp4_tensor.quantize(torch.randn(48, 64))
def product(x, transposed=False):
    torch.ops.nvfp4.matmul(x, None, w.qdata, w.scale, w.per_tensor_scale, None, 64, transposed, x.dtype)
for rows in (2, 2, 40):
    product(torch.randn(rows, 64).bfloat16())
product(torch.randn(2, 64))
product(torch.randn(2, 48), transposed=True)
product(torch.full((3, 64), 2.0**127))
"""


def printed(isa: str, value: str | None) -> list[str]:
    environment = {key: held for key, held in os.environ.items() if key != "NVFP4_TENSOR_PRINT_PLANS"}
    environment |= {"NVFP4_TENSOR_ISA": isa} | ({} if value is None else {"NVFP4_TENSOR_PRINT_PLANS": value})
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "nvfp4.matmul" in line]


@pytest.mark.parametrize("isa", [name for name in OF_PRODUCTS if name in ("portable", *ONLY_PRODUCTS)])
def test_each_product_is_printed_once(isa):
    of_amx = "avx512" if "avx512" in OF_PRODUCTS else "portable"  # portable: an emulation
    wide = of_amx if isa == "amx" else isa.removesuffix("_bf16")
    two = "many" if isa == "amx" else "few"  # rows: AMX's tiles are faster from two on
    expected = [
        ("x (2, 64) bfloat16, w (48, 64)", two, isa, f"{two} rows of x"),
        ("x (40, 64) bfloat16, w (48, 64)", "many", isa, "many rows of x"),
        ("x (2, 64) float32, w (48, 64)", "few", wide, "few rows of x"),
        ("x (2, 48) float32, w (48, 64)", "across", wide, "x w, across the rows of w"),
        ("x (3, 64) float32, w (48, 64)", "many", wide, "the few rows would overflow before their block scales"),
    ]
    lines = [f"nvfp4_tensor: nvfp4.matmul {x}, cpu: {way} of {by}, 1 threads ({why})" for x, way, by, why in expected]
    assert printed(isa, "1") == lines


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_is_printed_unasked(value):
    assert printed("portable", value) == []

"""Digests of what the CPU kernels compute, to compare machines: ``PYTHONPATH=.:test python -m helpers.digests > FILE``.

Two machines whose files are equal quantize and decode to the same bits. Inputs come from integers and powers of two,
exactly, so that they do not depend on a library's logarithm. Each instruction set of the machine computes every case;
one that differs from the others ends the program. What products compute is in no file: they may add in another order.
"""

import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from helpers.instruction_sets import INSTRUCTION_SETS, each_instruction_set
from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops import native
from nvfp4_tensor.testing import selftest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((32, 256), (17, 272), (37, 83), (1, 16), (3, 1), (130, 40))
SPECS = (
    *selftest.SPECS,
    QuantizeSpec(round_mode="eden"),
    QuantizeSpec(round_mode="away", hadamard_sign=0x1234, scale_ceiling=256),
    QuantizeSpec(round_mode="zero", block_rows=16, scale_rounding="up"),
    QuantizeSpec(round_mode="stochastic", random_bits=8, block_rows=16, hadamard_sign=0xFFFF),
    QuantizeSpec(four_over_six="mae", round_mode="stochastic", scale_rounding="up"),
)


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Yield named matrices: several binades, ties, extreme magnitudes, zeros, what is not finite, and random bits."""
    random = np.random.Generator(np.random.PCG64(7))
    for dtype in DTYPES:
        for rows, columns in SHAPES:
            size = (rows, columns)
            whole = torch.from_numpy(random.integers(-(1 << 11), 1 << 11, size).astype(np.float64))
            wide = torch.from_numpy(np.ldexp(1.0, random.integers(-9, 9, size)))
            grid = torch.from_numpy(random.integers(-28, 29, size) * 0.25)
            holes = torch.from_numpy(random.integers(0, 3, size) > 0)
            kinds = {"wide": whole * wide / 1024, "grid": grid, "sparse": whole * holes, "zeros": whole * 0.0}
            largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
            kinds["huge"] = whole.sign() * largest * (grid.abs() / 8).clamp(max=1)
            kinds["tiny"] = grid * smallest
            broken = kinds["wide"].clone().view(-1)
            for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
                broken[(i * 41 + 5) % broken.numel()] = value
            kinds["not finite"] = broken.view(size)
            for kind, x in kinds.items():
                yield f"{kind} {tuple(size)} {dtype}", x.to(dtype)
            width = {2: np.int16, 4: np.int32}[dtype.itemsize]
            bits = random.integers(np.iinfo(width).min, np.iinfo(width).max, size, dtype=width, endpoint=True)
            yield f"random bits {tuple(size)} {dtype}", torch.from_numpy(bits).view(dtype)


def digest(results: Tensor | tuple) -> str:
    """Return a digest of tensors' bits; all NaNs are one."""
    total = hashlib.sha256()
    for t in (results,) if isinstance(results, Tensor) else results:
        if t.dtype == torch.float8_e4m3fn:
            t = t.view(torch.uint8)
        elif t.is_floating_point():
            t = torch.where(t.isnan(), torch.full((), torch.nan, dtype=t.dtype), t)
        total.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    if not INSTRUCTION_SETS:
        raise SystemExit(f"no CPU library: {native.library('cpu').reason}")
    cases = 0
    for name, x in inputs():
        for spec in SPECS:
            for op, arguments in selftest.calls(x, spec).items():
                found = {isa: digest(getattr(torch.ops.nvfp4, op)(*arguments)) for isa in each_instruction_set()}
                if len(set(found.values())) > 1:
                    raise SystemExit(f"{op} of {name} with {spec} differs: {found}")
                print(f"{found[INSTRUCTION_SETS[0]]} {op}, {name}, {spec}")
                cases += 1
    print(f"{cases} cases, each with {', '.join(INSTRUCTION_SETS)}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Digests of what the CPU kernels compute, to compare machines: ``PYTHONPATH=.:test python -m helpers.digests > FILE``.

Two machines whose files are equal quantize and decode to the same bits. Inputs come from integers and powers of two,
exactly, so that they do not depend on a library's logarithm. Each instruction set of the machine computes every case;
one that differs from the others ends the program. What products compute is in no file: they may add in another order.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

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
RNG = torch.tensor([0x1234567890ABCDEF, 42])
OPS = torch.ops.nvfp4


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


def results(x: Tensor, spec: QuantizeSpec) -> Iterator[tuple[str, tuple]]:
    """Yield ops by name, each with its results."""
    bits = spec.pack()
    amax, amax_t = selftest.own_amaxes(x, spec, RNG)
    quantized = OPS.quantize(x, amax, RNG, bits, 32, 128, 128 + x.shape[1])
    yield "quantize", quantized
    yield "quantize_pair", OPS.quantize_pair(x, amax, amax_t, RNG, bits, bits)
    for dtype in DTYPES:
        yield f"dequantize {dtype}", (OPS.dequantize(*quantized, quantized[0].shape[1] * 2, dtype),)
    yield "fake_quantize", OPS.fake_quantize(x, amax, RNG, bits, torch.float32, True)
    yield "quantize_activation", OPS.quantize_activation(x, RNG, bits, torch.bfloat16)
    for name, arguments in selftest.amax_arguments(x, spec, RNG).items():
        found = getattr(OPS, name)(*arguments)
        yield name, found if isinstance(found, tuple) else (found,)
    if not spec.is_eden and spec.block_rows == 1 and spec.scale_ceiling is None:
        by_row = dataclasses.replace(spec, row_scaled=True)
        yield "quantize_rows", OPS.quantize_rows(x, None, RNG, by_row.pack())


def digest(tensors: tuple) -> str:
    """Return a digest of tensors' bits; all NaNs are one."""
    total = hashlib.sha256()
    for t in tensors:
        if t.dtype == torch.float8_e4m3fn:
            t = t.view(torch.uint8)
        elif t.is_floating_point():
            t = torch.where(t.isnan(), torch.full((), torch.nan, dtype=t.dtype), t)
        total.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def instruction_sets() -> list[str]:
    """Return those of this machine, for what has the same bits on all of them."""
    names = []
    for name in ("avx512", "avx2", "neon", "portable"):
        try:
            native.set_instruction_set(name)
        except ValueError:
            continue
        names.append(name)
    return names


def main() -> None:
    sets = instruction_sets()
    if not sets:
        raise SystemExit(f"no CPU library: {native.library('cpu').reason}")
    cases = 0
    for name, x in inputs():
        for spec in SPECS:
            found: dict[str, dict[str, str]] = {}
            for isa in sets:
                native.set_instruction_set(isa)
                for op, tensors in results(x, spec):
                    found.setdefault(op, {})[isa] = digest(tensors)
            for op, by_set in found.items():
                if len(set(by_set.values())) > 1:
                    raise SystemExit(f"{op} of {name} with {spec} differs: {by_set}")
                print(f"{by_set[sets[0]]} {op}, {name}, {spec}")
                cases += 1
    print(f"{cases} cases, each with {', '.join(sets)}", file=sys.stderr)


if __name__ == "__main__":
    main()

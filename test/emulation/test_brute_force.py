"""Whole casts against a second implementation, one number after the other in exact arithmetic.

It is written from the OCP's MX specification, the definitions of the modes and the numerics contract, and shares no
line with the package: elements are lists of numbers, a scale is searched among all of its format's, fractions are
Python's and float32 is numpy's.
"""

import bisect
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation import BlockFormat

pytestmark = pytest.mark.slow

F = np.float32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POWERS = ["floor", "ceil", "midmax", "option3", "topbinade"]
BLOCK = 8


def small_floats(exponent_bits, mantissa_bits, bias, largest):
    """Return [(magnitude, code)] of a float format up to its largest value, from the definition of its fields."""
    found = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        field, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        q = mantissa + ((1 << mantissa_bits) if field else 0)
        value = q * Fraction(2) ** (max(field, 1) - bias - mantissa_bits)
        if value <= largest:
            found.append((value, code))
    return found


ELEMENTS = {  # name: numbers, mantissa bits, exponent of the largest
    "e2m1": (small_floats(2, 1, 1, 6), 1, 2),
    "e2m3": (small_floats(2, 3, 1, Fraction(15, 2)), 3, 2),
    "e3m2": (small_floats(3, 2, 3, 28), 2, 4),
    "e4m3": (small_floats(4, 3, 7, 448), 3, 8),
    "e5m2": (small_floats(5, 2, 15, 57344), 2, 15),
    "int8": ([(Fraction(i, 64), i) for i in range(128)], 6, 0),
    "int4": ([(Fraction(i, 4), i) for i in range(8)], 2, 0),
}
SCALES = {  # name: numbers, the largest under a tensor scale
    "e4m3": (small_floats(4, 3, 7, 448), 448),
    "e5m2": (small_floats(5, 2, 15, 57344), 57344),
    "float16": (small_floats(5, 10, 15, 65504), 1),
    "bfloat16": (small_floats(8, 7, 127, Fraction(float(torch.finfo(torch.bfloat16).max))), 1),
}
VALUES = {id(numbers): [value for value, _ in numbers] for numbers, *_ in (*ELEMENTS.values(), *SCALES.values())}
FLOAT32_MAX = F(np.finfo(F).max)


def nearest(a, numbers, mode):
    """Return (magnitude, code) of the number nearest to a >= 0, with ties resolved by the mode; saturates."""
    place = bisect.bisect_left(VALUES[id(numbers)], a)
    if place == len(numbers):
        return numbers[-1]
    if place == 0:
        return numbers[0]
    below, above = numbers[place - 1], numbers[place]
    to_below, to_above = a - below[0], above[0] - a
    if to_below == to_above:
        return {"even": min(below, above, key=lambda n: n[1] % 2), "away": above, "zero": below}[mode]
    return below if to_below < to_above else above


def floor_log2(m):
    e = m.numerator.bit_length() - m.denominator.bit_length()
    return e if m >= Fraction(2) ** e else e - 1


def power_of_two(m, name, mode):
    """Return the exponent of the scale of a block whose largest magnitude is m."""
    numbers, mantissa, emax = ELEMENTS[name]
    if m == 0:
        return -127
    largest = numbers[-1][0] / Fraction(2) ** emax
    f = floor_log2(m)
    r = m / Fraction(2) ** f
    if mode == "option3":
        step = Fraction(2) ** -mantissa
        up = round(r / step) * step == 2  # Python rounds a tie to even
    else:
        up = {"floor": False, "ceil": r > 1, "midmax": r > largest and 2 - r < r - largest, "topbinade": r > largest}[
            mode
        ]
    return min(max(f + up - emax, -127), 127)


def with_mantissa(m, name, encode, scale, mode):
    """The contract's order (section 2): encode * f32(1/largest) first."""
    largest = ELEMENTS[name][0][-1][0]
    numbers, _ = SCALES[scale]
    v = min(F(F(m) * F(encode * F(1 / float(largest)))), F(float(numbers[-1][0])))
    if mode == "nearest":
        return nearest(Fraction(float(v)), numbers, "even")[0]
    if v == 0 and m > 0:
        return numbers[1][0]
    return numbers[bisect.bisect_left(VALUES[id(numbers)], Fraction(float(v)))][0]


def brute(x, element, scale, two_level, scale_mode, round_mode):
    """Return (codes, scales, values decoded to x's dtype) as lists; a scale of None is NaN."""
    numbers = ELEMENTS[element][0]
    rows = [row.tolist() for row in x.float()]
    finite = [abs(v) for row in rows for v in row if np.isfinite(v)]
    encode, tensor_scale = F(1), None
    if two_level:
        amax = F(max(finite, default=0.0))
        ceiling = 1 if scale == "e8m0" else SCALES[scale][1]
        top = F(float(numbers[-1][0] * ceiling))
        encode = F(1) if amax == 0 else min(F(top / amax), FLOAT32_MAX)
        tensor_scale = F(1) if amax == 0 else F(amax / top)
    codes, scales, decoded = [], [], []
    for row in rows:
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            if not all(np.isfinite(v) for v in block):
                scales.append(None)
                decoded += [float("nan")] * len(block)
                codes += [None] * len(block)
                continue
            m = max(abs(v) for v in block)
            if scale == "e8m0":
                scaled = min(F(F(m) * encode), FLOAT32_MAX)
                s = Fraction(2) ** power_of_two(Fraction(float(scaled)), element, scale_mode)
            else:
                s = with_mantissa(m, element, encode, scale, scale_mode)
            scales.append(s)
            factor = F(0) if s == 0 else min(F(F(1) / F(F(float(s)) * F(F(1) / encode))), FLOAT32_MAX)
            for v in block:
                value, code = nearest(abs(Fraction(float(F(F(v) * factor)))), numbers, round_mode)
                negative = np.signbit(F(v))
                if element.startswith("int"):
                    bits = int(element[3:])
                    codes.append((-code if negative else code) % (1 << bits))
                    negative = negative and code > 0
                else:
                    codes.append(code + (1 << {"e2m1": 3, "e2m3": 5, "e3m2": 5}.get(element, 7)) * bool(negative))
                size = F(float(value * s)) if tensor_scale is None else F(F(float(value * s)) * tensor_scale)
                decoded.append(float(-size if negative else size))
    return codes, scales, torch.tensor(decoded, dtype=torch.float32).to(x.dtype)


def nasty(dtype, element):
    """Rows of two full blocks and a partial one: powers of two and their neighbours, ties, extreme values."""
    generator = torch.Generator().manual_seed(7)
    info = torch.finfo(dtype)
    numbers, _, emax = ELEMENTS[element]
    ratio = float(numbers[-1][0]) / 2.0**emax
    tops = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, ratio, (ratio + 2) / 2], dtype=dtype)
    tops = torch.cat((tops, torch.nextafter(tops, tops * 0), torch.nextafter(tops, tops * 4)))
    rows = []
    powers = (0, int(np.log2(info.tiny)) - 3, 100 if dtype == torch.float32 else 10)
    for power in powers:
        row = torch.randn(len(tops), 2 * BLOCK + 3, generator=generator).clamp(-0.99, 0.99).to(dtype)
        row[:, ::BLOCK] = tops.unsqueeze(1) * torch.tensor([1, -1, 1], dtype=dtype)
        rows.append((row.double() * 2.0**power).to(dtype))
    ties = torch.tensor([float((a + b) / 2) for (a, _), (b, _) in itertools.pairwise(numbers)])
    ties = torch.cat((ties, ties[: -len(ties) % BLOCK])).view(-1, BLOCK)
    ties = torch.nn.functional.pad(ties, (0, BLOCK + 3))
    ties[:, BLOCK] = ratio * 2.0**emax
    ties[:, 0], ties[:, 1] = ratio * 2.0**emax, -ties[:, 1]
    rows.append(ties.to(dtype))
    ends = torch.zeros(7, 2 * BLOCK + 3)
    ends[1] = -0.0
    ends[2, 3], ends[3, 9], ends[4, 16] = torch.nan, torch.inf, -torch.inf
    ends[5], ends[6, ::3] = info.max, -info.smallest_normal * info.eps
    return torch.cat((*rows, ends.to(dtype)))


@pytest.mark.parametrize("scale", ["e8m0", *SCALES])
@pytest.mark.parametrize("element", ELEMENTS)
@np.errstate(over="ignore", divide="ignore")
def test_every_combination(element, scale):
    """Each mode of the scale, under a tensor scale and without, with each rounding, and in another dtype each time."""
    modes = ["nearest", "up"] if scale != "e8m0" else ["floor"] if element.startswith("int") else POWERS
    inputs = {dtype: nasty(dtype, element) for dtype in DTYPES}
    kinds = itertools.product([False, True], modes, ["even", "away", "zero"])
    for i, (two_level, scale_mode, round_mode) in enumerate(kinds):
        if scale != "e8m0" and i % 3 != i // 3 % 3:
            continue  # each mode of the scale with one rounding: what is rounded knows no scale
        x = inputs[DTYPES[(i + i // 3) % 3]]
        codes, scales, decoded = brute(x, element, scale, two_level, scale_mode, round_mode)
        format = BlockFormat(name="own", element=element, scale=scale, block_size=BLOCK, two_level=two_level)
        how = {"scale_mode": scale_mode, "round_mode": round_mode}
        t, said = emulation.cast(x, format, cast_mode="actual", **how), (x.dtype, two_level, scale_mode, round_mode)
        got = [None if np.isnan(s) else Fraction(s) for s in t.scale.double().flatten().tolist()]
        assert got == scales, said
        kept = ~decoded.isnan()
        assert t.data.flatten()[kept].tolist() == [code for code in codes if code is not None], said
        packed = emulation.cast(x, format, cast_mode="compressed", **how)
        for values in (emulation.cast(x, format, **how), t.dequantize(), packed.dequantize()):
            values = values.flatten()
            assert torch.equal(values.isnan(), ~kept), said
            assert torch.equal(values[kept], decoded[kept]), said
            assert torch.equal(values[kept].signbit(), decoded[kept].signbit()), said

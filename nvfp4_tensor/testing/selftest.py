"""Compare every op on this machine with the reference, bit for bit: ``python -m nvfp4_tensor selftest``.

A kernel is correct if it gives the bits of the reference on the CPU, on every device. Only products may add in another
order, and have to stay within the error bound of a float32 sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nvfp4_tensor.info import info
from nvfp4_tensor.matmul import backends, fbgemm, scaled_mm
from nvfp4_tensor.matmul.product import product
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import FourOverSix, RoundingMode, ScaleRounding, ScaleSearch
from nvfp4_tensor.numerics.layout import DEFAULT_HADAMARD_SIGN
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import columns_of_values
from nvfp4_tensor.ops.schemas import plain
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts

_TWO_MODES = (RoundingMode.RNE, RoundingMode.STOCHASTIC)
SPECS = (
    *(QuantizeSpec(round_mode=mode) for mode in RoundingMode if mode != RoundingMode.EDEN),
    *(QuantizeSpec(round_mode=mode, scale_rounding=ScaleRounding.UP) for mode in _TWO_MODES),
    *(QuantizeSpec(round_mode=mode, block_rows=16) for mode in _TWO_MODES),
    *(QuantizeSpec(four_over_six=error) for error in FourOverSix),
    QuantizeSpec(four_over_six=FourOverSix.MSE, block_rows=16, scale_ceiling=448),
    QuantizeSpec(hadamard_sign=DEFAULT_HADAMARD_SIGN, round_mode=RoundingMode.STOCHASTIC),
    QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, random_bits=8),
    *(QuantizeSpec(scale_search=ScaleSearch.MSE, round_mode=mode) for mode in _TWO_MODES),
    QuantizeSpec(scale_search=ScaleSearch.MSE, block_rows=16),
)
SHAPES = ((128, 256), (37, 83), (1, 16))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Check:
    """The number of elements in which an op's results differ from the reference, for one config on one device."""

    op: str
    config: str
    device: str
    elements: int
    differing: int

    def __str__(self) -> str:
        verdict = f"{self.differing} of {self.elements} elements differ" if self.differing else "identical"
        return f"{self.device:<8} {self.op:<17} {self.config:<38} {verdict}"


def main() -> int:
    """Print versions, devices and the table of checks; return 1 if a check fails, and 0 otherwise."""
    print(info(), end="\n\n")
    checks = []
    for check in run():
        checks.append(check)
        print(check, flush=True)
    wrong = sum(check.differing > 0 for check in checks)
    print(f"\n{len(checks)} checks, " + (f"{wrong} DIFFER from the reference" if wrong else "all agree"))
    return 1 if wrong else 0


def run() -> Iterator[Check]:
    """Run all checks on the CPU and, if there is one, on a CUDA GPU."""
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for spec in SPECS:
            yield from check_spec(spec, device)
        yield check_hadamard(device)
        yield check_matmul(device)
        yield check_fp8(device)
        yield check_experts("grouped_linear", device, None)
        if backends.has_fp4_tensor_cores(torch.device(device)):
            yield check_fp4("scaled_mm", device, lambda a, b: product(a, b.t()))
        if backends.has_grouped_fp4(torch.device(device)):
            yield check_experts("scaled_grouped_mm", device, QuantizeSpec())
            if fbgemm.product().op is not None:
                by_fbgemm = functools.partial(scaled_mm.fbgemm_product, bias=None, alpha=1, out_dtype=torch.bfloat16)
                yield check_fp4("f4f4bf16", device, by_fbgemm)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16()


def samples() -> Iterator[Tensor]:
    """Yield Gaussian tensors of every dtype and shape that include zeros, tiny values, ties and non-finite elements."""
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        for rows, columns in SHAPES:
            x = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            x[rows // 2] = 0
            x[0, :8] = torch.tensor([0.25, -0.75, 1.25, 2.5, -3.5, 5.0, 6.0, -0.0], dtype=torch.float32)
            x[-1] *= 1e-4
            yield x.to(dtype)
            if rows > 1:
                x[1, 0], x[rows // 3, columns // 2] = float("nan"), float("inf")
                yield x.to(dtype)


def check_spec(spec: QuantizeSpec, device: str) -> Iterator[Check]:
    """Check the ops that quantize, dequantize or compute an amax, with one spec; for EDEN, also its rotation."""
    tally: dict[str, list[int]] = {}
    for x in samples():
        for name, given in calls(x, spec).items():
            _compare(tally.setdefault(name, [0, 0]), name, given, device)
    for name, (elements, differing) in tally.items():
        yield Check(name, str(spec), device, elements, differing)


def calls(x: Tensor, spec: QuantizeSpec) -> dict[str, tuple]:
    """Return the arguments of these ops, by name, for a matrix x; amaxes and codes are the reference's."""
    bits, rng = spec.pack(), torch.tensor([0x1234567890ABCDEF, 42], dtype=torch.int64)
    if spec.is_eden:
        amax, amax_t = plain.amax_rotated(x, rng), plain.amax_rotated(x.t(), rng)
        arguments: dict[str, tuple] = {"amax_rotated": (x, rng, 128), "rotate": (x, rng, False, 128)}
    else:
        sign = -1 if spec.hadamard_sign is None else spec.hadamard_sign
        amax, amax_t = plain.amax(x, sign), plain.amax(x.t(), sign)
        arguments = {"amax": (x, sign), "amax_pair": (x, rng, bits, bits)}
    shard = 32, spec.column_multiple, spec.column_multiple + x.shape[1]
    arguments |= {
        "quantize": (x, amax, rng, bits, *shard),
        "quantize_pair": (x, amax, amax_t, rng, bits, bits),
        "quantize_pair_values": (x, amax, amax_t, rng, bits, bits, False),
        "dequantize": (*plain.quantize(x, amax, rng, bits), columns_of_values(x.shape[1], bits), x.dtype),
        "fake_quantize": (x, amax, rng, bits, torch.bfloat16, False),
        "quantize_activation": (x, rng, bits, torch.bfloat16),
    }
    if spec.block_rows == 1 and not spec.is_eden:
        arguments["quantize_rows"] = (x, None, rng, spec.replace(row_scaled=True).pack(), *shard)
    return arguments


def check_hadamard(device: str) -> Check:
    """Check the Hadamard transform on all samples."""
    tally = [0, 0]
    for x in samples():
        _compare(tally, "hadamard", (x, DEFAULT_HADAMARD_SIGN), device)
    return Check("hadamard", f"hadamard {DEFAULT_HADAMARD_SIGN:#06x}", device, *tally)


def _compare(tally: list[int], name: str, arguments: tuple, device: str) -> None:
    """Run the op on the device and the reference, and add the numbers of elements and of differing ones to tally."""
    expected = getattr(plain, name)(*arguments)
    on_device = (value.to(device) if isinstance(value, Tensor) else value for value in arguments)
    actual = getattr(torch.ops.nvfp4, name)(*on_device)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    for e, a in zip(expected, actual, strict=True):
        tally[0] += e.numel()
        tally[1] += differing_bits(e, a.cpu())


def differing_bits(expected: Tensor, actual: Tensor) -> int:
    """Return how many elements differ in any bit; all, if shape or dtype differ. All NaNs are equal."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return max(expected.numel(), 1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    differ = expected.contiguous().view(integer) != actual.contiguous().view(integer)
    if expected.dtype.is_floating_point and expected.element_size() > 1:
        differ &= ~(expected.isnan() & actual.isnan())
    return int(differ.sum())


def check_matmul(device: str) -> Check:
    """Check x @ w^T and x @ w with bias, with sizes that are not multiples of any kernel's tiles."""
    generator = torch.Generator().manual_seed(2)
    elements = differing = 0
    for m, n, k in ((1, 96, 320), (5, 130, 83), (70, 64, 512)):
        w = quantize(_normal(generator, n, k))
        for transposed in (False, True):
            inner, outer = (n, k) if transposed else (k, n)
            x = _normal(generator, m, inner)
            bias = _normal(generator, outer)
            parts = (x, w.qdata, w.scale, w.per_tensor_scale, bias)
            on_device = [part.to(device) for part in parts]
            y = torch.ops.nvfp4.matmul(on_device[0], None, *on_device[1:], k, transposed, torch.bfloat16).cpu()
            dense = w.dequantize(torch.float32).double()
            dense = dense if transposed else dense.t()
            elements += y.numel()
            differing += outside_bound(y, x.double(), dense, bias.double())
    return Check("matmul", "within the bound of a float32 sum", device, elements, differing)


def check_fp8(device: str) -> Check:
    """Check the operands of FP8 products; the codes have all block scales, NaN included."""
    generator, tally = torch.Generator().manual_seed(6), [0, 0]
    for x in samples():
        blocks = layout.ceil_to(x.shape[1], layout.BLOCK) // layout.BLOCK
        qdata = torch.randint(0, 256, (131, blocks * 8), dtype=torch.uint8, generator=generator)
        scale = torch.randint(0, 256, (131, blocks), dtype=torch.uint8, generator=generator)
        weight = qdata, layout.swizzle(scale).view(torch.float8_e4m3fn), torch.tensor(0.0123, dtype=torch.float32)
        _compare(tally, "fp8_operands", (x, *weight), device)
    return Check("fp8_operands", "e4m3, a power of two per row", device, *tally)


def outside_bound(y: Tensor, a: Tensor, b: Tensor, bias: Tensor | float = 0.0) -> int:
    """Return how many elements of y exceed the error bound of a float32 sum in any order that is rounded once.

    a (M, K) and b (K, N) are float64; the exact result is a @ b + bias. The bound is half an ulp of y's dtype plus
    K + 2 float32 roundings of the sum of magnitudes.
    """
    exact = a @ b + bias
    magnitude = a.abs() @ b.abs() + (bias.abs() if isinstance(bias, Tensor) else abs(bias))
    bound = torch.finfo(y.dtype).eps / 2 * exact.abs() + (a.shape[1] + 2) * 2**-23 * magnitude
    return int((~((y.double() - exact).abs() <= bound)).sum())


def check_fp4(name: str, device: str, multiply: Callable[[NVFP4Tensor, NVFP4Tensor], Tensor]) -> Check:
    """Compare NVFP4 x NVFP4 on FP4 tensor cores, a @ b^T, with the product of the decoded operands."""
    generator = torch.Generator().manual_seed(3)
    elements = differing = 0
    for m, n, k in ((128, 128, 256), (37, 50, 83), (1, 96, 320)):
        a, b = (quantize(_normal(generator, rows, k).to(device)) for rows in (m, n))
        y = multiply(a, b).cpu()
        a64, b64 = (t.dequantize(torch.float32).cpu().double() for t in (a, b))
        elements += y.numel()
        differing += outside_bound(y, a64, b64.t())
    return Check(name, "within the bound of a float32 sum", device, elements, differing)


def check_experts(name: str, device: str, activation: QuantizeSpec | None) -> Check:
    """Check grouped products, with empty groups; ``activation`` is the spec that quantizes rows, or None."""
    generator = torch.Generator().manual_seed(5)
    elements = differing = 0
    for ends, n, k in (((1, 1, 3), 128, 256), ((20, 90, 90), 72, 320), ((150, 151, 300), 256, 96)):
        weight = _normal(generator, len(ends), n, k)
        w = quantize_experts(weight.to(device))._replace(activation_spec=activation)
        x = _normal(generator, ends[-1], k).to(device)
        y = torch._grouped_mm(x, w.mT, offs=torch.tensor(ends, dtype=torch.int32, device=device)).cpu()
        decoded = x if activation is None else quantize(x, activation).dequantize(torch.float32)
        x64, w64 = decoded.cpu().double(), w.dequantize(torch.float32).cpu().double()
        for expert, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            elements += y[start:end].numel()
            differing += outside_bound(y[start:end], x64[start:end], w64[expert].t())
    return Check(name, "within the bound of a float32 sum", device, elements, differing)

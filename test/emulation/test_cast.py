"""cast: NVFP4 equals quantize() bit for bit, every format follows its definition, and errors."""

import dataclasses
import warnings

import pytest
import torch
from helpers.instruction_sets import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import QuantizeSpec, emulation, fake_quantize, quantize
from nvfp4_tensor.emulation import FORMATS, BlockFormat
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.ops import native

pytestmark = pytest.mark.slow

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDS = ["even", "away", "zero", "stochastic"]
STATE = torch.tensor([11, 22])


def sample(shape, dtype=torch.float32, seed=0):
    """Return normal data whose rows differ in magnitude by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2.0 ** torch.randint(-8, 5, (*shape[:-1], 1), generator=generator)
    return (torch.randn(shape, generator=generator) * rows).to(dtype)


def reference_nvfp4(x, round_mode, scale_mode, amax=None):
    spec = QuantizeSpec(round_mode=round_mode, scale_rounding=scale_mode)
    largest = reference.amax(x) if amax is None else amax
    qdata, scale, tensor_scale = reference.quantize(x, largest, STATE, spec)
    rows = x.shape[:-1].numel()
    values = reference.dequantize(qdata, scale, tensor_scale, x.shape[-1], x.dtype)
    return qdata, layout.unswizzle(scale, rows, qdata.shape[-1] // 8).view(torch.uint8), tensor_scale, values


@given(data=st.data(), rows=st.integers(0, 5), columns=st.integers(0, 70), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_nvfp4_is_the_reference_for_any_values(data, rows, columns, dtype):
    width = {torch.float32: 32}.get(dtype, 16)
    floats = st.one_of(st.floats(width=width), st.sampled_from([0.0, -0.0, 1.0, 6.0, torch.inf, torch.nan]))
    values = data.draw(st.lists(floats, min_size=rows * columns, max_size=rows * columns))
    x = torch.tensor(values, dtype=torch.float32).reshape(rows, columns).to(dtype)
    round_mode, scale_mode = data.draw(st.sampled_from(ROUNDS)), data.draw(st.sampled_from(["nearest", "up"]))
    amax = data.draw(st.sampled_from([None, torch.tensor(0.0), torch.tensor(1.5), torch.tensor(1e30)]))
    qdata, scale, tensor_scale, values = reference_nvfp4(x, round_mode, scale_mode, amax)
    how = {"scale_mode": scale_mode, "round_mode": round_mode, "amax": amax, "rng_state": STATE}
    for compute_mode in ("torch", "native"):
        t = emulation.cast(x, "nvfp4", cast_mode="compressed", compute_mode=compute_mode, **how)
        assert torch.equal(t.data, qdata) and torch.equal(t.scale.view(torch.uint8).reshape(scale.shape), scale)
        assert torch.equal(t.tensor_scale, tensor_scale)
        assert_same_bits(t.dequantize(), values)
        assert_same_bits(emulation.cast(x, "nvfp4", compute_mode=compute_mode, **how), values)


# --- stochastic rounding ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", FORMATS)
def test_seeds_repeat_and_a_shard_of_the_rows_keeps_its_bits(name):
    def cast(x, **how):
        return emulation.cast(x, name, round_mode="stochastic", **how)

    x = sample((40, 64))
    y = cast(x, rng_state=STATE)
    assert torch.equal(y, cast(x, rng_state=STATE)) and not torch.equal(y, cast(x, rng_state=STATE + 1))
    amax = x.abs().max() if FORMATS[name].two_level else None
    assert torch.equal(y[:8], cast(x[:8], amax=amax, rng_state=STATE))
    assert torch.equal(*(cast(x, generator=torch.Generator().manual_seed(5)) for _ in range(2)))
    torch.manual_seed(6)
    drawn = cast(x)
    torch.manual_seed(6)
    assert torch.equal(drawn, cast(x))
    if name == "nvfp4":
        spec = QuantizeSpec(round_mode="stochastic")
        assert torch.equal(y, fake_quantize(x, spec, rng_state=STATE))
        packed = cast(x, cast_mode="compressed", rng_state=STATE)
        assert torch.equal(packed.data, quantize(x, spec, rng_state=STATE).qdata)


# --- compute modes, errors -------------------------------------------------------------------------------------------


def test_native_warns_and_torch_computes(monkeypatch):
    x = sample((4, 64))
    for name in set(FORMATS) - {"nvfp4"}:
        with pytest.warns(UserWarning, match=f"supports only nvfp4, not {name}: torch computes"):
            y = emulation.cast(x, name, compute_mode="native")
        assert torch.equal(y, emulation.cast(x, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulation.cast(x, FORMATS["nvfp4"].replace(name="another name"), compute_mode="native")
    monkeypatch.setitem(native._libraries, "cpu", native.Library(None, "not built here"))
    with pytest.warns(UserWarning, match="no library for cpu \\(not built here\\): torch computes"):
        y = emulation.cast(x, "nvfp4", compute_mode="native")
    assert torch.equal(y, emulation.cast(x, "nvfp4"))


@pytest.mark.parametrize("change, error, message", [
    ({"format": "mxfp5"}, ValueError, "unknown format 'mxfp5': use a BlockFormat or one of 'nvfp4', 'mxfp4'"),
    ({"scale_mode": "nearest"}, ValueError, "'nearest' is not supported for e8m0 scales of e2m1 elements: use 'floor'"),
    ({"scale_mode": "round"}, ValueError, "unknown scale_mode 'round': use a ScaleMode or one of 'floor'"),
    ({"format": "nvfp4", "scale_mode": "floor"}, ValueError, "e4m3 scales of e2m1 elements: use 'nearest', 'up'"),
    ({"format": "mxint8", "scale_mode": "ceil"}, ValueError, "e8m0 scales of int8 elements: use 'floor'"),
    ({"round_mode": RoundingMode.EDEN}, ValueError, "use fake_quantize"),
    ({"cast_mode": "fake"}, ValueError, "unknown cast_mode 'fake': use a CastMode or one of 'virtual', 'actual'"),
    ({"compute_mode": "gpu"}, ValueError, "unknown compute_mode 'gpu'"),
    ({"amax": 3.0}, ValueError, "mxfp4 has no tensor scale for amax to set"),
    ({"x": torch.ones(())}, ValueError, "use x.reshape\\(1\\)"),
    ({"x": torch.ones(4, dtype=torch.float64)}, TypeError, "bfloat16, float16 or float32, got .*float64"),
    ({"x": [1.0]}, TypeError, "use torch.as_tensor first"),
])  # fmt: skip
def test_invalid_arguments_raise(change, error, message):
    call = {"x": torch.ones(2, 32), "format": "mxfp4", **change}
    with pytest.raises(error, match=message):
        emulation.cast(call.pop("x"), call.pop("format"), **call)


def test_upcast():
    x = sample((3, 40), torch.bfloat16)
    t = emulation.cast(x, "mxfp8_e4m3", cast_mode="actual")
    assert emulation.upcast(t).dtype == torch.bfloat16
    assert torch.equal(emulation.upcast(t, torch.float32).bfloat16(), emulation.upcast(t))
    with pytest.raises(TypeError, match=r"a virtual cast is already dense"):
        emulation.upcast(x)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        emulation.upcast(t, torch.float64)


def test_formats():
    assert {name: format.bits_per_element for name, format in FORMATS.items()} == {
        "nvfp4": 4.5, "mxfp4": 4.25, "mxfp6_e2m3": 6.25, "mxfp6_e3m2": 6.25, "mxfp8_e4m3": 8.25, "mxfp8_e5m2": 8.25,
        "mxint8": 8.25, "int4": 4.5, "int8": 8.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="invalid block_size 3"):
        BlockFormat(name="x", element="e2m1", scale="e8m0", block_size=3)
    with pytest.raises(ValueError, match="2 to 8 bits, not 9"):
        emulation.Element("e5m3", bits=9, mantissa=3, emin=-14, emax=15, largest=61440.0)
    with pytest.raises(ValueError, match="unknown element 'e1m2'"):
        BlockFormat(name="x", element="e1m2", scale="e8m0", block_size=32)
    with pytest.raises(ValueError, match="unknown scale 'e3m4'"):
        BlockFormat(name="x", element="e2m1", scale="e3m4", block_size=32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["nvfp4"].block_size = 32
    with pytest.raises(TypeError, match="positional"):
        BlockFormat("x", "e2m1", "e8m0", 32)

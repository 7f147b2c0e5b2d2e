"""BlockTensor: packing, random access, block views; and products against float64."""

import pytest
import torch

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation import FORMATS
from nvfp4_tensor.emulation.blocks import pack, unpack

pytestmark = pytest.mark.slow


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_a_stream_of_bits(bits):
    codes = torch.randint(0, 1 << bits, (5, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = pack(codes, bits)
    assert data.shape == (5, 24 * bits // 8) and torch.equal(unpack(data, bits), codes)
    for row, stored in zip(codes.tolist(), data.tolist(), strict=True):
        stream = sum(code << i * bits for i, code in enumerate(row))
        assert bytes(stored) == stream.to_bytes(24 * bits // 8, "little")


@pytest.mark.parametrize("cast_mode", ["actual", "compressed"])
@pytest.mark.parametrize("name", FORMATS)
def test_any_element_and_any_block_is_the_whole_decoded(name, cast_mode):
    x = normal(2, 3, 75)
    t = emulation.cast(x, name, cast_mode=cast_mode)
    whole = t.dequantize()
    assert t[torch.tensor(1), 2, torch.tensor(74)] == whole[1, 2, 74]
    for i, j, k in [(0, 0, 0), (1, 2, 74), (-1, 0, -1), (0, 1, 40), (1, 1, 31), (1, 1, 32)]:
        assert t[i, j, k] == whole[i, j, k]
    size = t.format.block_size
    count = -(-75 // size)
    for number in range(count):
        block = t.block(1, -1, number)
        assert torch.equal(block.values(), whole[1, -1, number * size : (number + 1) * size])
        assert torch.equal(block.codes, t.codes()[1, -1, number * size : (number + 1) * size])
    assert len(t.block(0, 0, -1).codes) == 75 - (count - 1) * size
    assert t.nbytes == (450 if cast_mode == "actual" else 6 * count * size * t.format.element.bits // 8) + (
        6 * count * t.scale.itemsize + (4 if t.format.two_level else 0)
    )


def test_indices_that_do_not_fit():
    t = emulation.cast(normal(2, 40), "mxfp4", cast_mode="actual")
    for index in [(0,), (0, 40), (2, 0), (0, 0, 0), (0, 1.0), (slice(None), 0)]:
        with pytest.raises(IndexError, match=r"the index of one element must be 2 integers within \(2, 40\)"):
            t[index]
    with pytest.raises(IndexError, match="one block"):
        t.block(0, 2)
    assert repr(t) == "BlockTensor(mxfp4, shape=(2, 40), dtype=torch.float32, one code per byte)"


E5M2_SCALES = emulation.BlockFormat(name="a", element="e3m2", scale="e5m2", block_size=16, two_level=True)


@pytest.mark.parametrize(
    ("left", "right"),
    [*((name, name) for name in FORMATS), ("nvfp4", E5M2_SCALES), ("nvfp4", FORMATS["int4"].replace(block_size=16))],
    ids=str,
)
def test_matmul_is_float64s_with_the_tensor_scales_outside(left, right):
    a = emulation.cast(normal(5, 150) * 1e-3, left, cast_mode="compressed")
    b = emulation.cast(normal(7, 150, seed=1) * 1e3, right, cast_mode="actual")
    exact = a.dequantize().double() @ b.dequantize().double().t()
    size = a.dequantize().double().abs() @ b.dequantize().double().abs().t()
    assert ((emulation.matmul(a, b) - exact).abs() <= 2.0**-19 * size).all()
    assert ((emulation.matmul(a, b, torch.float64) - exact).abs() <= 2.0**-22 * size).all()  # decoding rounds
    assert emulation.matmul(a, b).dtype == torch.float32


def test_autocast_does_not_round_products():
    a, b = (emulation.cast(normal(n, 150, seed=n), "mxfp8_e4m3", cast_mode="actual") for n in (5, 7))
    with torch.autocast("cpu", torch.bfloat16):
        product = emulation.matmul(a, b)
    assert torch.equal(product, emulation.matmul(a, b))


def test_equality_is_identity():
    t, u = (emulation.cast(normal(2, 64), "mxfp4", cast_mode="actual") for _ in range(2))
    assert t == t and t != u and len({t, u}) == 2


def test_invalid_products_raise():
    a, b = (emulation.cast(normal(2, 64), name, cast_mode="actual") for name in ("nvfp4", "mxfp4"))
    with pytest.raises(ValueError, match="nvfp4 has 16 elements per block, mxfp4 has 32"):
        emulation.matmul(a, b)
    with pytest.raises(TypeError, match="BlockTensors, not a Tensor"):
        emulation.matmul(a, normal(2, 64))
    with pytest.raises(ValueError, match="float32 or float64"):
        emulation.matmul(a, a, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\(M, K\) and \(N, K\)"):
        emulation.matmul(a, emulation.cast(normal(2, 80), "nvfp4", cast_mode="actual"))

"""FP8Tensor: its values, products, copies and files, against dense mirrors."""

import copy
import math
import pickle

import pytest
import torch
from helpers.files import saved
from helpers.instruction_sets import assert_op, assert_same_bits, needs_library
from torch import nn
from torch.nn.functional import linear

from nvfp4_tensor import FP8Activations, FP8Spec, FP8Tensor, quantize
from nvfp4_tensor.numerics import fp8 as numerics
from nvfp4_tensor.tensor.fp8 import decode

E4M3 = torch.float8_e4m3fn
SHAPES = [(33, 50), (130, 300), (64, 128), (2, 40, 96), (1, 16)]
BLOCKS = [(0, 0), (1, 0), (128, 128), (1, 32), (16, 0)]
TENSOR, TOKEN, GROUP = FP8Activations
SPECS = [
    FP8Spec(), FP8Spec((1, 0)), FP8Spec((128, 128)), FP8Spec((0, 0), TENSOR), FP8Spec((1, 0), TOKEN),
    FP8Spec((128, 128), GROUP),
]  # fmt: skip


def fp8(shape, spec, dtype=torch.bfloat16, static=None, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=generator) * 40).to(E4M3)
    scale = torch.rand(spec.scale_shape(shape), generator=generator) * 0.01 + 1e-3
    static = None if static is None else torch.tensor(static)
    return FP8Tensor(codes, scale, spec, dtype, input_scale=static).to(device)


def spread(scale, block, shape):
    """Each element's scale."""
    for dim in (-2, -1):
        scale = scale.repeat_interleave(block[dim] or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scale


@needs_library
@pytest.mark.parametrize("block", [*BLOCKS, (7, 5), (3, 40)])
def test_all_instruction_sets_decode_the_same_bits(block):
    """All codes, NaN too, from any row on, at any byte, with scales that overflow and vanish."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((9, 300), (2, 3, 40, 31), (130, 64), (0, 16), (4, 0)):
        codes = torch.randint(256, (1 + math.prod(shape),), dtype=torch.uint8, generator=generator)[1:]
        codes = codes.view(shape).view(E4M3)
        sizes = FP8Spec(block).scale_shape(shape)
        scale = torch.randn(sizes, generator=generator) * 10.0 ** torch.randint(-42, 38, sizes, generator=generator)
        for first in {0, shape[-2] // 3} if block[0] else {0}:
            rows, values = codes[..., first:, :], numerics.decode(codes, scale, block)[..., first:, :]
            assert_same_bits(numerics.decode(rows, scale, block, first), values)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert_op(
                    lambda *args, dtype=dtype: decode(*args[:3], dtype, args[3]),
                    (rows, scale, block, first),
                    (values.to(dtype),),
                )


def test_the_operator_refuses_what_it_would_read_beyond_its_end(kernels):
    codes, out, op = torch.zeros(8, 32).to(E4M3), torch.zeros(8, 32), torch.ops.nvfp4.decode_fp8
    for message, arguments in (
        ("codes must be", (codes.float(), torch.ones(1, 1), 0, 0, 0, out)),
        ("scale must have", (codes, torch.ones(1, 2), 4, 16, 0, out)),
        ("scale must have", (codes, torch.ones(2, 2), 4, 16, 1, out)),
        ("scale must have", (codes, torch.ones(0), 0, 0, 0, out)),
        ("not be negative", (codes, torch.ones(1, 1), 0, 0, -1, out)),
        ("out must be", (codes, torch.ones(1, 1), 0, 0, 0, out[:4])),
        ("out must be", (codes, torch.ones(1, 1), 0, 0, 0, out.double())),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_values_are_code_times_scale_rounded_once(shape, block, device):
    w = fp8(shape, FP8Spec(block), device=device)
    expected = w.qdata.double() * spread(w.scale, block, shape).double()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(w.dequantize(dtype), expected.float().to(dtype))
    assert w.dequantize().dtype == w.dtype == torch.bfloat16
    for first, last in ((0, 1), (5, 20), (shape[-2] // 2, shape[-2]), (3, 3)):
        rows = decode(w.qdata[..., first:last, :], w.scale, block, torch.float32, first)
        assert torch.equal(rows, expected[..., first:last, :].float())


def rounded(x, w):
    """The activations that a product with w multiplies, float32."""
    if w.spec.activations is None:
        return x.float()
    step = w.spec.block[1] if w.spec.activations == GROUP else x.shape[-1]
    blocks = x.float().split(step, -1)
    if w.spec.activations == TENSOR and w.input_scale is not None:
        scales = [w.input_scale]
    else:
        largest = [b.abs().amax(-1, keepdim=True) for b in blocks]
        largest = [x.float().abs().reshape(1, -1).amax(1)] if w.spec.activations == TENSOR and x.numel() else largest
        scales = [torch.where(each == 0, 1, each / 448) for each in largest]
    each = zip(blocks, scales, strict=True)
    return torch.cat([(b / s).clamp(-448, 448).to(E4M3).float() * s for b, s in each], -1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(33, 50), (130, 300)])
def test_products(spec, shape, device):
    for static in (None, 0.002) if spec.activations == TENSOR else (None,):
        w, b = fp8(shape, spec, torch.float32, static, device=device), torch.randn(shape[0], device=device)
        for x in (
            torch.randn(3, 5, shape[1]),
            torch.zeros(4, shape[1]),
            torch.randn(shape[1]),
            torch.zeros(0, shape[1]),
        ):
            x = x.to(device)
            expected = linear(rounded(x, w), w.dequantize(), b)
            torch.testing.assert_close(linear(x, w, b), expected, rtol=2e-5, atol=2e-5)
    x = torch.full((2, shape[1]), float("nan"), device=device)
    assert linear(x, w).isnan().all()


@pytest.mark.parametrize("spec", SPECS[::2] + SPECS[3:4])
def test_what_happens_to_modules(spec):
    """torch.save, pickle, deepcopy, state_dict, .to and torch.compile keep the codes."""
    module = nn.Linear(96, 40, dtype=torch.bfloat16)
    module.weight = nn.Parameter(fp8((40, 96), spec, static=0.01 if spec.activations == TENSOR else None), False)
    loaded = nn.Linear(96, 40, device="meta")
    loaded.load_state_dict(saved(module.state_dict()), assign=True)
    copied = copy.deepcopy(module)
    copied.load_state_dict(module.state_dict())
    x = torch.randn(4, 96).bfloat16()
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for other in (loaded, copied, pickle.loads(pickle.dumps(module)), compiled):
            assert isinstance(other.weight, nn.Parameter) and isinstance(other.weight.data, FP8Tensor)
            assert torch.equal(other(x), expected)
        half = copied.to(torch.float16)
        assert half.weight.dtype == torch.float16 and half.weight.scale.dtype == torch.float32
        assert torch.equal(half.weight.qdata.view(torch.uint8), module.weight.qdata.view(torch.uint8))
        assert copy.copy(half).to("meta").weight.qdata.is_meta


@pytest.mark.parametrize("activations", [None, TOKEN])
def test_the_gradients_are_those_of_the_decoded_weight(activations):
    """The result has the bits of inference; a weight that takes a gradient has one, which an optimizer cannot use."""
    w = nn.Parameter(fp8((24, 32), FP8Spec((1, 0), activations)))
    dense, x = nn.Parameter(w.detach().dequantize()), torch.randn(2, 5, 32).bfloat16().requires_grad_()
    b, dy = torch.randn(24).bfloat16().requires_grad_(), torch.randn(2, 5, 24).bfloat16()
    y = linear(x, w, b)
    with torch.no_grad():
        assert torch.equal(y, linear(x, w, b))
    found = torch.autograd.grad(y, (x, w, b), dy) + torch.autograd.grad(x @ w.T, (x, w), dy)
    expected = torch.autograd.grad(linear(x, dense, b), (x, dense, b), dy) + torch.autograd.grad(
        x @ dense.T, (x, dense), dy
    )
    assert all(map(torch.equal, found, expected))
    if activations is None:
        assert torch.equal(torch.func.grad(lambda x: (linear(x, w, b) * dy).sum())(x), expected[0])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(type(t)) or t, lambda t: t):
        linear(x, w.detach()).sum()
    assert saved == [FP8Tensor]  # no decoded weight
    w.grad = found[1]
    with pytest.raises(RuntimeError, match="on an FP8Tensor, whose codes are read-only"):
        torch.optim.AdamW([w]).step()


def test_copies_between_dense_fp8_and_nvfp4():
    """load_state_dict copies codes of one form, and decodes for others; what would round to FP8 is refused."""
    spec, other = FP8Spec((1, 0)), FP8Spec()
    linears = {
        "fp8": fp8((40, 96), spec),
        "nvfp4": quantize(torch.randn(40, 96).bfloat16()),
        "dense": torch.ones(40, 96),
    }
    for name, kept in linears.items():
        for source in (fp8((40, 96), spec, torch.float16, seed=3), fp8((40, 96), other, seed=4)):
            module = nn.Linear(96, 40, bias=False)
            module.weight = nn.Parameter(kept.clone(), False)
            if name == "fp8" and source.spec != spec:
                with pytest.raises(
                    RuntimeError, match=r"codes of its own form only: load_state_dict\(..., assign=True\)"
                ):
                    module.load_state_dict({"weight": source})
                continue
            module.load_state_dict({"weight": source})
            values = source.dequantize(module.weight.dtype)
            assert type(module.weight.data) is type(kept)
            assert torch.equal(module.weight, quantize(values).dequantize() if name == "nvfp4" else values)
    for name in ("dense", "nvfp4"):
        with pytest.raises(RuntimeError, match="own form only"):
            linears["fp8"].copy_(linears[name])
    empty = nn.Parameter(linears["fp8"], False).to("meta")
    empty = torch.empty_like(empty, device="cpu").copy_(linears["fp8"])  # to_empty and a state dict
    assert isinstance(empty, FP8Tensor) and torch.equal(empty, linears["fp8"])


def test_storages_are_those_of_the_parts():
    w, other = fp8((40, 96), FP8Spec((0, 0), TENSOR), static=0.5), fp8((8, 16), FP8Spec((1, 0)), torch.float16)
    assert w.share_memory_().is_shared() and all(part.is_shared() for part in w._parts()) and len(w._parts()) == 3
    assert w.data_ptr() == w.qdata.data_ptr() and w.tolist() == w.dequantize().tolist()
    for call in (lambda: w.numpy(), lambda: torch.from_dlpack(w), lambda: torch.utils.dlpack.to_dlpack(w)):
        with pytest.raises(RuntimeError, match=r"an FP8Tensor does not have: use t.dequantize\(\)"):
            call()
    w.data = other
    assert (w.shape, w.dtype, w.spec) == (other.shape, other.dtype, other.spec) and torch.equal(w, other.dequantize())
    with pytest.raises(RuntimeError, match="an FP8Tensor needs an FP8Tensor, got Tensor"):
        w.data = torch.ones(8, 16)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_other_operators_decode_or_say_no(mode):
    w = fp8((3, 24, 32), FP8Spec())
    with mode():
        dense, x = w.dequantize(), torch.randn(3, 5, 32).bfloat16()
        assert torch.equal(x @ w.mT, x @ dense.mT) and torch.equal(w + 1, dense + 1)
        assert isinstance(w[1], FP8Tensor) and torch.equal(w[1].dequantize(), dense[1])
        assert w[1].qdata.data_ptr() == w.qdata[1].data_ptr()
        assert torch.equal(w.mT.dequantize(), dense.mT) and w.mT.stride() == dense.mT.stride()
        assert torch.equal(linear(x[0], w[1]), linear(x[0], dense[1]))
        assert torch.equal(x[0] @ w[2].t(), x[0] @ dense[2].t())
        for write in (lambda: w.zero_(), lambda: w.view(-1), lambda: w.mul_(2), lambda: w[:, 0], lambda: w[0, :4]):
            with pytest.raises(RuntimeError, match="codes are read-only: dequantize"):
                write()


def test_wrong_fields_are_refused():
    codes, one = torch.zeros(4, 8).to(E4M3), torch.ones(1, 1)
    for error, fields in (
        (TypeError, (codes.float(), one)), (TypeError, (codes, one.bfloat16())), (TypeError, (codes,)),
        (ValueError, (codes, torch.ones(4, 1))), (ValueError, (codes[0], one)),
        (TypeError, (codes, one, FP8Spec(), torch.float64)),
    ):  # fmt: skip
        with pytest.raises(error, match=r"codes|scales"):
            FP8Tensor(*fields)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [FP8Spec((0, 0), TENSOR), FP8Spec((1, 0), TOKEN), FP8Spec((0, 0), TOKEN)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensor_cores_multiply_the_same_codes(spec, dtype):
    from nvfp4_tensor.matmul import backends

    for shape in ((256, 512), (40, 96)):
        for static in (None, 0.01) if spec.activations == TENSOR else (None,):
            w = fp8(shape, spec, dtype, static, device="cuda")
            x, b = (
                torch.randn(7, shape[1], dtype=dtype, device="cuda"),
                torch.randn(shape[0], dtype=dtype, device="cuda"),
            )
            expected = linear(rounded(x, w), w.dequantize(torch.float32), b.float())
            error = (linear(x, w, b).float() - expected).abs().max() / expected.abs().max()
            assert error < (2**-11 if dtype == torch.float32 else 2**-8)  # FP8 cores keep 14 bits of a sum
            if backends.has_fp8_tensor_cores(x.device):
                assert "aten::_scaled_mm" in _ops(lambda x=x, w=w: linear(x, w))


def _ops(call):
    with torch.profiler.profile() as profile:
        call()
    return [each.key for each in profile.key_averages()]

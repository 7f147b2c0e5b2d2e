"""The operators' contracts with PyTorch: schema, tags, shape inference, no gradient, randomness as data."""

import functools
from pathlib import Path

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import optimizer_step, reference
from nvfp4_tensor.numerics.layout import DEFAULT_HADAMARD_SIGN
from nvfp4_tensor.ops import schemas

nvfp4 = torch.ops.nvfp4
GOLDEN = (Path(__file__).parents[1] / "data/op_schemas.txt").read_text().splitlines()
NAMES = [schema.removeprefix("nvfp4::").partition("(")[0] for schema in GOLDEN]
PLAIN, STOCHASTIC, EDEN = QuantizeSpec(), QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="eden")
TILES, TURNED = QuantizeSpec(block_rows=16), STOCHASTIC.replace(hadamard_sign=True)
BF16, F32 = torch.bfloat16, torch.float32


# --- schemas: C++ registers kernels under them, and exported programs contain them -----------------------------------


def test_every_op_has_a_golden_schema():
    """All ops of this subpackage. Others, as those of ``training``, are registered when their modules are imported."""
    assert sorted(schemas._parameters) == NAMES
    for name, schema in zip(NAMES, GOLDEN, strict=True):
        op = getattr(nvfp4, name).default
        assert str(op._schema) == schema
        seeded = [torch.Tag.nondeterministic_seeded] if name in ("draw_rng_state", "train_linear_forward") else []
        assert set(op.tags) == {torch.Tag.pt2_compliant_tag, *seeded}


def test_an_op_does_not_return_memory_without_values():
    """The dispatcher runs the fake if any argument is on the meta device."""
    x, w, spec = torch.randn(16, 32), torch.randn(16, 32, device="meta"), PLAIN.pack()
    with pytest.raises(RuntimeError, match="train_linear takes tensors on one device, got cpu and meta"):
        nvfp4.train_linear(x, None, w, None, None, spec, F32)
    state = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="quantize takes tensors on one device, got cpu and meta"):
        nvfp4.quantize(x, None, state, spec)
    with pytest.raises(RuntimeError, match="linears takes tensors on one device, got cpu and meta"):
        nvfp4.linears(x, [w], [w], [w], [])
    assert nvfp4.quantize(w, None, None, spec)[0].is_meta


def test_no_op_runs_python_for_autograd():
    """A graph would pass through it at each call, 5 us of a CPU, whether there is a gradient or not."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    ops = [name for name in registered("CompositeExplicitAutograd") if name.startswith("nvfp4::")]
    assert {"nvfp4::matmul", "nvfp4::fake_quantize", "nvfp4::quantize_activation"} < set(ops)
    # Those of training's experts are made for a gradient, and are there where another test has imported them.
    assert not [name for name in registered("Autograd") if name in ops and not name.startswith("nvfp4::train_")]


# --- opcheck ---------------------------------------------------------------------------------------------------------


class Operands:
    """Random operands on a device. Scales are bytes: opcheck compares with allclose, which torch lacks for float8."""

    def __init__(self, device):
        self.device, self.state = device, torch.tensor([1, 2], device=device)
        self.amax = torch.tensor(4.0, device=device)

    def x(self, *shape, dtype=BF16):
        return torch.randn(shape, device=self.device).to(dtype)

    def weight(self, *shape, spec=STOCHASTIC):
        qdata, scale, factor = nvfp4.quantize(self.x(*shape), None, self.state, spec.pack())
        return qdata, scale.view(torch.uint8), factor

    def weights(self, columns, *rows):
        return [list(parts) for parts in zip(*(self.weight(n, columns) for n in rows), strict=True)]

    def offs(self, *ends):
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def bytes(self, *shape):
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def moments(self, rows, columns):
        blocks = -(-columns // 16)
        return [self.bytes(rows, width) for width in (8 * blocks, blocks, 8 * blocks, blocks)]

    def cache(self, value_size=64):
        """Codes of 2 sequences, 3 heads and 32 tokens."""
        shapes = ((32, 32), (32, 4), (32,)), ((32, value_size // 2), (32, -(-value_size // 16)), (32,))
        return [self.bytes(2, 3, *shape) for each in shapes for shape in each]

    def token(self):
        """qkv of 6 heads for 2 of keys and values; no norms; a rotation; dense keys and values; the position."""
        keys, values = self.x(2, 2, 48, 64), self.x(2, 2, 48, 64)
        how = (None, None, 1e-5, 0.0, True, self.x(2, 64), self.x(2, 64))
        return self.x(2, 10 * 64), *how, keys, values, torch.tensor([7], device=self.device), 6

    def hyper(self):
        numbers = [0.7, 0.9, 0.1, 0.95, 0.05, 1e-3, 1.0, 16.0 * optimizer_step.UNBIASED]
        return torch.tensor(numbers, device=self.device)

    def fp8(self):
        values, x_scale, w, factor = nvfp4.fp8_operands(self.x(4, 50), *self.weight(33, 50))
        return values.view(torch.uint8), x_scale, w.view(torch.uint8), factor

    def backward(self, spec, spec_t, spec_w, x_t, keeps, transposes):
        codes_x = nvfp4.quantize_pair(self.x(37, 50), None, None, self.state, PLAIN.pack(), x_t.pack())[3:]
        codes_x = codes_x[0], codes_x[1].view(torch.uint8), codes_x[2]
        codes = self.weight(70, 50, spec=spec_w) if keeps else (None, None, None)
        packed, w = (spec.pack(), spec_t.pack(), spec_w.pack()), None if keeps else self.x(70, 50)
        return self.x(37, 70), self.state, *codes_x, w, *codes, *packed, transposes, BF16, F32


def attend_arguments(o, value_size, front):
    lengths, fronts = torch.tensor([30, 7], device=o.device), [None, None]
    if front:
        fronts = [o.x(2, 3, 3, 64), o.x(2, 3, 3, value_size)]
    first = torch.tensor([1, 0], device=o.device) if front else None
    latest = o.x(2, 3, 5, 64), o.x(2, 3, 5, value_size)
    more = (0.125, 20.0, 50) if front else (0.125,)
    return o.x(2, 6, 4, 64), *o.cache(value_size), lengths, first, *fronts, *latest, *more


def place_arguments(o):
    return *o.token(), 0, *(t[:, :2].contiguous() for t in o.cache()), torch.tensor([7, 7], device=o.device), True


PAIR = STOCHASTIC.pack(), TURNED.pack()
SPECS_W = PLAIN.pack(), PLAIN.replace(hadamard_sign=True).pack(), TILES.pack()
CASES = {
    "adamw_step": lambda o: [(o.x(8, 32), o.x(8, 32), *o.moments(8, 32), o.hyper(), o.state)],
    "adamw_step_codes": lambda o: [
        (*o.weight(8, 32, spec=PLAIN), o.x(8, 32), *o.moments(8, 32), o.hyper(), o.state, 5)
    ],
    "adamw_step_vector": lambda o: [(o.x(40), o.x(40), o.x(40, dtype=F32), o.x(40, dtype=F32), o.hyper(), o.state)],
    "amax": lambda o: [(o.x(33, 50),), (o.x(33, 50), DEFAULT_HADAMARD_SIGN)],
    "amax_pair": lambda o: [(o.x(33, 50), o.state, EDEN.pack(), PLAIN.pack(), 128, 256)],
    "amax_rotated": lambda o: [(o.x(33, 50), o.state, 128)],
    "append_codes": lambda o: [
        (o.x(2, 3, 5, 64), o.x(2, 3, 5, 32), PLAIN.pack(), *o.cache(32), torch.tensor([1, 2], device=o.device))
    ],
    "attend_codes": lambda o: [attend_arguments(o, 32, False), attend_arguments(o, 64, True)],
    "attend_one": lambda o: [
        (*o.token(), 0.125),
        (*o.token(), 0.125, 0, 0.0, None, torch.tensor([0, 3], device=o.device)),
    ],
    "decode_fp8": lambda o: [
        (o.bytes(3, 33, 50), o.x(3, 3, 4, dtype=F32), 16, 16, 2, o.x(3, 33, 50)),
    ],
    "dequantize": lambda o: [(*o.weight(33, 50), 50, BF16), (*o.weight(33, 50)[:2], None, 50, torch.float16)],
    "fake_quantize": lambda o: [
        (o.x(4, 5, 50), o.amax, o.state, spec.pack(), F32, scaled)
        for spec, scaled in ((STOCHASTIC, True), (TURNED, False), (EDEN, True))
    ],
    "fp8_matmul": lambda o: [(*o.fp8(), None, BF16), (*o.fp8(), o.x(33, dtype=F32), F32)],
    "fp8_operands": lambda o: [(o.x(4, 50), *o.weight(33, 50)), (o.x(2, 2, 50, dtype=F32), *o.weight(33, 50))],
    "gated": lambda o: [(o.x(3, 40), 0), (o.x(40, 3).t(), 1), (o.x(40, 3).t(), 3, 7.0, 1.702, True)],
    "grouped_linear": lambda o: [
        (o.x(6, 50), x_scale, *o.weight(2, 40, 50), o.offs(2, 5), F32) for x_scale in (None, o.x(6, dtype=F32))
    ],
    "grouped_matmul": lambda o: [
        (o.x(6, 50), o.x(6, dtype=F32), *o.weight(2, 40, 50), o.offs(2, 5), 50, False, F32),
        (o.x(6, 40), None, *o.weight(2, 40, 50), o.offs(2, 5), 50, True, BF16),
    ],
    "hadamard": lambda o: [(o.x(33, 50), DEFAULT_HADAMARD_SIGN)],
    "linear_row": lambda o: [(o.x(1, 64), o.x(20, 64))],
    "linears": lambda o: [
        (o.x(2, 64), *o.weights(64, 32, 48), []),
        (o.x(64, 2).t(), *o.weights(64, 32), []),
    ],
    "matmul": lambda o: [
        (o.x(4, 50), None, *o.weight(33, 50), None, 50, False, BF16),
        (o.x(2, 2, 50), o.x(2, 2, dtype=F32), *o.weight(33, 50), o.x(33), 50, False, F32),
        (o.x(4, 33, dtype=F32), o.amax, *o.weight(33, 50), o.x(50), 50, True, F32),
    ],
    "norm_linears": lambda o: [
        (o.x(2, 64), o.x(2, 64), o.x(64), 1e-5, 0.0, True, 1.0, None, *o.weights(64, 32, 48), []),
        (o.x(2, 64), None, None, 1e-5, 0.0, True, 1.0, None, *o.weights(64, 48, 48), [], 0),
    ],
    "place_one": lambda o: [place_arguments(o)],
    "quantize": lambda o: [
        (o.x(33, 50), o.amax, o.state, STOCHASTIC.pack(), 16, 32, 500, 1),
        (o.x(3, 11, 50, dtype=F32), o.amax, None, TILES.pack()),
        (o.x(33, 50), None, o.state, EDEN.pack()),
        (o.x(50, 33).t(), None, None, PLAIN.pack()),
        *((o.x(*shape), None, None, PLAIN.pack()) for shape in ((0, 50), (3, 0), (7,))),
    ],
    "quantize_activation": lambda o: [
        (o.x(4, 5, 50), o.state, spec.pack(), BF16)
        for spec in (PLAIN, TURNED, EDEN, STOCHASTIC.replace(row_scaled=True))
    ],
    "quantize_pair": lambda o: [
        (o.x(33, 50), o.amax, o.amax, o.state, *PAIR, 16, 32, 100, 200),
        (o.x(33, 50), None, None, o.state, EDEN.pack(), PLAIN.pack()),
    ],
    "quantize_pair_values": lambda o: [
        (o.x(33, 50), o.amax, o.amax, o.state, *PAIR, True),
        (o.x(33, 50), None, None, o.state, *PAIR, False),
        (o.x(33, 50), None, None, o.state, EDEN.pack(), EDEN.pack(), False),
        (o.x(33, 50), None, None, o.state, EDEN.pack(), PLAIN.pack(), True),
    ],
    "quantize_rows": lambda o: [(o.x(4, 5, 50), None, o.state, STOCHASTIC.replace(row_scaled=True).pack())],
    "rms_norm": lambda o: [
        (o.x(3, 40), None, o.x(40), 1e-5),
        (o.x(3, 40), o.x(3, 40), None, 1e-5, 1.0, False, 0.5, o.x(40)),
        (o.x(40, 3).t(), None, o.x(40), 1e-5, 0.0, True, 0.5),
        (o.x(40, 3).t(), o.x(40, 3).t(), o.x(40), 1e-5),
    ],
    "rotate": lambda o: [(o.x(3, 50), o.state), (o.x(3, 256), o.state, True, 128)],
    "rotate_back": lambda o: [(o.x(3, 256), o.state, 100)],
    "train_linear": lambda o: [(o.x(37, 50), None, o.x(70, 50), None, o.state, TILES.pack(), F32)],
    "train_linear_backward": lambda o: [
        o.backward(STOCHASTIC, TURNED, TILES, TURNED, True, False),
        o.backward(STOCHASTIC, TURNED, TILES, TURNED, False, True),
        o.backward(EDEN, EDEN, PLAIN, EDEN, True, False),
    ],
    "train_linear_forward": lambda o: [(o.x(1, 37, 50), o.x(70, 50), None, o.state, *SPECS_W, F32)],
    "transpose_codes": lambda o: [o.weight(*shape, spec=TILES)[:2] for shape in ((100, 80), (1, 17), (0, 32), (32, 0))],
}
ELSEWHERE = {"decode_layers", "decode_layers_plan", "decode_step", "draw_rng_state", "grouped_fp4_matmul"}
"""Those of whole models, of Blackwell, and the one that draws: below."""


@pytest.mark.parametrize("name", CASES)
def test_opcheck(device, name):
    """And results are contiguous, as kernels allocate them: a compiled graph relies on the strides of the fakes."""
    for arguments in CASES[name](Operands(device)):
        opcheck(getattr(nvfp4, name).default, arguments)
        assert all(t.is_contiguous() for t in tree_leaves(getattr(nvfp4, name)(*arguments)) if t is not None)


def test_opcheck_of_draws_and_that_all_are_listed(device):
    utils = "test_schema", "test_faketensor", "test_autograd_registration"
    opcheck(nvfp4.draw_rng_state.default, (torch.empty(3, device=device),), test_utils=utils)
    assert CASES.keys() | ELSEWHERE == set(NAMES) and not CASES.keys() & ELSEWHERE


# --- randomness ------------------------------------------------------------------------------------------------------


def test_draws_are_those_of_randint_and_follow_the_seed(device):
    torch.manual_seed(3)
    randint = functools.partial(torch.randint, -(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
    expected = [randint() for _ in range(3)]
    torch.manual_seed(3)
    assert all(torch.equal(nvfp4.draw_rng_state(torch.empty(0, device=device)), state) for state in expected)
    assert not torch.equal(expected[0], expected[1])


# --- products of experts ---------------------------------------------------------------------------------------------


def experts_of(device, rows):
    x = torch.randn(2, rows, 48, device=device)
    return reference.quantize(x, reference.amax(x), None, PLAIN)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "ends", [[3, 2], [-1, 4], [2, 6], [[2, 5]], [2, 5, 5], [5], torch.tensor([2, 5]), torch.tensor([2.0, 5.0])], ids=str
)
def test_offsets_that_are_no_ends_of_groups_raise(device, transposed, ends):
    """Rows that two experts multiply, or none: from the end, where Python counts those below zero."""
    x = torch.randn(5, 40 if transposed else 48, device=device)
    offs = ends.to(device) if isinstance(ends, torch.Tensor) else torch.tensor(ends, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"offs must be (int32 \(2,\)|ascending ends of groups from 0 to the 5)"):
        nvfp4.grouped_matmul(x, None, *experts_of(device, 40), offs, 48, transposed, F32)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_no_rows(transposed):
    x, offs = torch.randn(5, 0 if transposed else 48), torch.tensor([2, 5], dtype=torch.int32)
    y = nvfp4.grouped_matmul(x, None, *experts_of("cpu", 0), offs, 48, transposed, F32)
    assert torch.equal(y, torch.zeros(5, 48 if transposed else 0))


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_are_the_products_of_each_group(device, transposed):
    """With a scale per tensor, per expert and per row, of x and of w; rows behind the last group are zeros."""
    qdata, scale, factor = experts_of(device, 40)
    x, offs = torch.randn(9, 40 if transposed else 48, device=device), [2, 7]
    tensors = torch.tensor(offs, dtype=torch.int32, device=device)
    factors = factor, torch.tensor([[0.5], [2.0]], device=device), torch.rand(80, device=device)
    of_x = None, torch.tensor(0.3, device=device), torch.rand(9, device=device)
    for w_scale, x_scale in zip(factors, of_x, strict=True):
        y = nvfp4.grouped_matmul(x, x_scale, qdata, scale, w_scale, tensors, 48, transposed, F32)
        decoded = reference.dequantize(qdata, scale, None, 48, F32).double()
        decoded = decoded * (w_scale.double() if w_scale.dim() == 0 else w_scale.double().reshape(2, -1, 1))
        rows = x.double() * (1 if x_scale is None else x_scale.double().reshape(-1, 1))
        for expert, (start, end) in enumerate(((0, 2), (2, 7))):
            w = decoded[expert] if transposed else decoded[expert].t()
            bound = {"rtol": 1e-5, "atol": 1e-5 * y.abs().max().item()}
            torch.testing.assert_close(y[start:end].double(), rows[start:end] @ w, **bound)
        assert not y[7:].any()
        if not transposed:
            linear = nvfp4.grouped_linear(x.bfloat16(), x_scale, qdata, scale, w_scale, tensors, F32)
            torch.testing.assert_close(linear[:7], y[:7], rtol=0.02, atol=0.02 * y.abs().max().item())

"""A write changes what it would change in a dense tensor, or raises: it is never lost or in another tensor."""

import gc
import warnings

import pytest
import torch
from helpers.writes import BINARY, WRITES, linear_of, matrix
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchao.quantization import quantize_
from torchao.testing import utils as torchao_tests

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.quantization.linear import NVFP4Linear
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, refit_

ROWS = QuantizeSpec(row_scaled=True)


# --- operators that write --------------------------------------------------------------------------------------------

MAKE = {"matrix": matrix, "transposed": lambda: matrix().t(), "bfloat16": lambda: matrix().bfloat16()}


@pytest.mark.parametrize("write", WRITES)
def test_the_result_is_quantized_into_the_same_storage(write):
    for name, make in MAKE.items():
        t = make()
        other, expected = torch.rand(t.shape).to(t.dtype) + 0.5, t.dequantize().contiguous()
        WRITES[write](expected, other)
        pointers = [part.data_ptr() for part in t._parts()]
        assert WRITES[write](t, other) is t and pointers == [part.data_ptr() for part in t._parts()], name
        if not write.startswith(("fill_", "zero_")):
            expected = quantize((expected.mT if t.transposed else expected).contiguous()).dequantize()
            expected = expected.mT if t.transposed else expected
        torch.testing.assert_close(t.dequantize(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", BINARY)
def test_into_a_dense_tensor_goes_what_the_nvfp4_one_decodes_to(write):
    for dtype in (torch.float32, torch.bfloat16):
        dense, t = torch.rand(40, 48).to(dtype) + 1, matrix(40, 48).to(dtype)
        expected, kept = dense.clone(), t.dequantize()
        BINARY[write](expected, kept)
        assert BINARY[write](dense, t) is dense and torch.equal(t.dequantize(), kept)
        torch.testing.assert_close(dense, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", WRITES)
def test_an_unsupported_write_is_no_type_error(write):
    """torch turns a TypeError into NotImplemented, and Python then binds the name to a new tensor."""
    t, transformed = matrix(), matrix(16, 32, spec=QuantizeSpec(hadamard_sign=True))
    before, held = t.dequantize(), transformed.dequantize()
    if write != "zero_":
        with pytest.raises(RuntimeError, match=r"clone\(\) it"):
            WRITES[write](t[1:19], torch.rand(18, 128))
    if write not in ("copy_", "fill_", "fill_ tensor", "zero_"):
        with pytest.raises(RuntimeError, match="Hadamard"):
            WRITES[write](transformed, torch.rand(16, 32))
    assert torch.equal(t.dequantize(), before) and torch.equal(transformed.dequantize(), held)


def test_what_is_read_may_be_what_is_written():
    """Unlike dense tensors, which torch lets overwrite what the product still reads."""
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    for write, expected in (
        (lambda w: w.addmm_(w, w), lambda d: d + d @ d),
        (lambda w: torch.mm(w, w, out=w), lambda d: d @ d),
        (lambda w: w.index_copy_(0, torch.arange(31, -1, -1), w), lambda d: d.flip(0)),
    ):
        w = quantize(values)
        wanted = expected(w.dequantize())
        write(w)
        assert (w.dequantize() - wanted).norm() < 0.12 * wanted.norm()


def test_nothing_is_half_written():
    t, part, dense = matrix(), matrix()[0:128], torch.ones(256, 128)
    before = [t.dequantize(), part.dequantize()]
    with pytest.raises(RuntimeError, match="shares its per-tensor scale"):
        torch._foreach_mul_([dense, t, part], 2.0)
    with pytest.raises(RuntimeError, match="cannot be resized"), pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3, 4), 1, out=t)
    assert (dense == 1).all() and torch.equal(t, before[0]) and torch.equal(part, before[1])
    t = quantize(torch.full((4, 32), 2.0))
    torch._foreach_mul_([t, t], 3.0)  # the same tensor twice is written twice
    assert torch.allclose(t.dequantize(), torch.full((4, 32), 18.0), rtol=1e-6)


def test_experts_are_written_with_a_scale_each():
    w = quantize_experts(torch.stack([torch.randn(16, 32), 1e6 * torch.randn(16, 32)]))
    expected = torch.stack([quantize(matrix * 3).dequantize() for matrix in w.dequantize()])
    w *= 3
    assert w.per_tensor_scale.shape == (2, 1) and torch.equal(w.dequantize(), expected)
    whole, t = quantize_experts(torch.randn(4, 40, 64)), quantize_experts(torch.randn(4, 40, 64) * 3)
    for start, length in ((0, 1), (1, 3)):  # of any scale
        t.narrow(0, start, length).copy_(whole.narrow(0, start, length))
    assert torch.equal(t.dequantize(), whole.dequantize())


@pytest.mark.parametrize("write", ["*=", "_foreach_lerp_", "copy_", "+="])
def test_writes_in_a_graph_and_in_inference_mode(write):
    x, t, other = torch.randn(256, 128), matrix(), torch.rand(256, 128)
    dense, expected = x.clone(), t.clone()
    compiled = torch.compile(lambda *arguments: BINARY[write](*arguments), fullgraph=True, backend="aot_eager")
    compiled(t, other), compiled(dense, t)
    BINARY[write](expected, other), BINARY[write](x, expected)
    assert torch.equal(t.dequantize(), expected.dequantize()) and torch.equal(dense, x)
    with torch.inference_mode():
        t, expected = t.clone(), t.dequantize()
        BINARY[write](expected, other)
        assert BINARY[write](t, other) is t and torch.equal(t.dequantize(), quantize(expected).dequantize())


@pytest.mark.parametrize(
    "of_models, of_tensors",
    [(None, lambda a, b: a + (b - a) / 2), (get_ema_multi_avg_fn(0.75), lambda a, b: torch.lerp(a, b, 0.25))],
    ids=["swa", "ema"],
)
def test_an_average_of_models_takes_quantized_weights_and_warns_that_it_hardly_moves(of_models, of_tensors):
    models = [torch.nn.Linear(64, 48) for _ in range(2)]
    for model in models:
        model.weight = torch.nn.Parameter(quantize(model.weight.detach()), requires_grad=False)
    average = AveragedModel(models[0], multi_avg_fn=of_models)
    average.update_parameters(models[0])
    expected = of_tensors(average.module.weight.dequantize(), models[1].weight.dequantize())
    bias = of_tensors(models[0].bias, models[1].bias)
    with pytest.warns(UserWarning, match="average decoded weights"):
        average.update_parameters(models[1])
    assert torch.equal(average.module.weight.dequantize(), quantize(expected).dequantize())
    assert torch.equal(average.module.bias, bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._foreach_lerp_([matrix(spec=QuantizeSpec(round_mode="stochastic"))], [torch.ones(256, 128)], 0.01)


# --- per-tensor scales that the rest of a tensor shares --------------------------------------------------------------

PARTS = {
    "rows on tiles": lambda t: t[128:256], "rows off tiles": lambda t: t[40:117], "columns": lambda t: t[:, 16:64],
    "last columns": lambda t: t[:, 96:], "rows of columns": lambda t: t[:, 16:48][10:30],
    "rows of rows": lambda t: t[3:200][10:30], "columns of rows of a part": lambda t: t[3:200, 16:][5:25][:, 16:48],
}  # fmt: skip


@pytest.mark.parametrize("spec", [QuantizeSpec(), ROWS], ids=["one scale", "row scales"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_takes_any_scale_over_zeros_a_larger_one_that_rounds_the_rest_once_and_no_smaller(part, spec):
    t, zeros = matrix(300, 150, spec=spec), torch.zeros(300, 150)
    where = part(torch.arange(t.numel()).view(300, 150)).reshape(-1)
    inside = torch.zeros(t.numel(), dtype=torch.bool).index_fill(0, where, True).view(300, 150)
    source = quantize(torch.randn(part(zeros).shape) * 9, spec)
    before, old = t.dequantize(), t.per_tensor_scale.expand(300)
    rows = inside.any(-1) if spec.row_scaled else torch.ones(300, dtype=torch.bool)
    new = old.masked_scatter(rows, source.per_tensor_scale.expand(rows.sum()))
    part(t).copy_(source)
    after = t.dequantize()
    assert torch.equal(part(after), source.dequantize()) and torch.equal(t.per_tensor_scale.expand(300), new)
    once = quantize(before.masked_fill(inside, 0), ROWS, amax=2688 * new).dequantize()
    expected = torch.where(rows.view(-1, 1), once, before)[~inside]
    assert torch.allclose(after[~inside], expected, rtol=1e-6, atol=0)
    covered = spec.row_scaled and part(zeros).shape[1] == 150
    for write in () if covered else (lambda p: p.copy_(quantize(torch.ones(p.shape), spec)), lambda p: p.fill_(2.0)):
        with pytest.raises(RuntimeError, match=r"may not be representable.*clone\(\)|shares its per-tensor scale"):
            write(part(t))
        assert torch.equal(t.dequantize(), after)
    part(t)[...] = 0
    assert torch.equal(t.dequantize(), after.masked_fill(inside, 0))
    t.zero_()
    part(t).copy_(small := quantize(torch.randn(source.shape) * 1e-4, spec))
    part(zeros).copy_(small.dequantize())
    assert torch.equal(t.dequantize(), zeros)


def test_rows_of_experts_keep_to_the_scale_of_their_expert():
    t = quantize_experts(torch.randn(3, 40, 64) * torch.tensor([1.0, 8, 64]).view(3, 1, 1))
    before, scales = t.dequantize(), t.per_tensor_scale.clone()
    source = quantize(torch.ones(1, 4, 64) * 90, amax=2688.0)
    t[1:2, 5:9] = source
    assert torch.equal(t.dequantize()[1, 5:9], source.dequantize()[0])
    scales[1] = 1
    assert torch.equal(t.dequantize()[::2], before[::2]) and torch.equal(t.per_tensor_scale, scales)
    with pytest.raises(RuntimeError, match="more per-tensor scales"):
        t[:, 5:9] = quantize(torch.randn(3, 4, 64) * 1000, ROWS)


def test_what_has_a_scale_of_its_own_takes_any_values():
    x = torch.randn(128, 128) * 1000
    t = torch.cat([matrix(128), matrix(128, factor=50)])
    before = t.dequantize()
    t[128:256].copy_(x)
    assert torch.equal(t.dequantize(), torch.cat([before[:128], quantize(x).dequantize()]))
    for t, part in ((t, lambda t: t[:, 0:64]), (quantize_experts(x[None]), lambda t: t[:, 0:64]),
                    (quantize_experts(x[None]), lambda t: t[0][0:64])):  # fmt: skip
        before = t.dequantize()
        with pytest.raises(RuntimeError, match="shares its per-tensor scale"):
            part(t).copy_(part(before) * 1000)
        assert torch.equal(t.dequantize(), before)


@pytest.mark.parametrize("spec", [QuantizeSpec(), ROWS], ids=["one scale", "row scales"])
def test_what_is_empty_or_zero_needs_no_scale(spec):
    w = matrix(256, 128, 1e-4, spec=spec)
    before = w.dequantize()
    w[256:].copy_(quantize(torch.zeros(0, 128)))
    w[:, :0].copy_(quantize(torch.zeros(256, 0)))
    w[256:] = torch.zeros(0, 128)
    w[:0].mul_(3)
    w[3:3].fill_(2.0)
    assert torch.equal(w.dequantize(), before)
    w[:128].copy_(quantize(torch.zeros(128, 128)))
    assert torch.equal(w.dequantize()[128:], before[128:]) and not w.dequantize()[:128].any()
    for column in (0, 1):  # one code that is not zero, of the two in its byte, counts; -0 does not
        one_hot = torch.full((4, 32), -0.0).index_put_((torch.tensor(0), torch.tensor(column)), torch.tensor(1.0))
        t = quantize(one_hot, spec)
        t[1:2] = quantize(torch.full((1, 32), 8.0), spec)
        assert t.dequantize()[0, column] == pytest.approx(1, rel=0.1) and t[1:2].dequantize().mean() == pytest.approx(8)
        t[:2].zero_()
        t[1:2] = quantize(torch.full((1, 32), 1e-3), spec)
        assert t.dequantize()[1].tolist() == pytest.approx([1e-3] * 32) and not t.dequantize()[2:].any()


def test_a_block_of_nan_stays_one_when_others_are_rounded():
    x = torch.randn(32, 64)
    x[3, 20] = torch.nan
    t = quantize(torch.randn(32, 64), QuantizeSpec(block_rows=16), amax=4.0)
    t[3:4] = quantize(x, amax=4.0)[3:4]
    t[20:21] = quantize(torch.randn(1, 64), amax=8.0)
    assert torch.allclose(t.per_tensor_scale, torch.tensor(8 / 2688), rtol=1e-6)
    assert t.dequantize().isnan().sum() == 16 and t.dequantize()[3, 16:32].isnan().all()
    with pytest.raises(RuntimeError, match="NVFP4Tensor"):
        t[5:7] = quantize(torch.ones(2, 64)).fill_(torch.nan)


def test_dense_values_in_a_slice_name_a_way_that_works():
    t, x = matrix(), torch.randn(37, 128) / 100
    before = t.dequantize()
    for write in (lambda: t.__setitem__(slice(3, 40), x), lambda: t[3:40].mul_(2), lambda: t[3:40].normal_()):
        with pytest.raises(RuntimeError, match=r"no smaller scale .*amax=.*t\.dequantize\(\) and t\.copy_\(\) that"):
            write()
    with pytest.raises(RuntimeError, match="ends within a block"):
        t[:, :20] = 0
    with pytest.raises(RuntimeError, match="more than one element of this view"):
        t[:16].expand(2, 16, 128).zero_()
    assert torch.equal(t.dequantize(), before)
    values = t.dequantize()
    values[3:40] = x
    t.copy_(values)
    assert torch.equal(t.dequantize(), quantize(values).dequantize())
    t[3:40] = quantize(x, amax=9.0)
    assert torch.equal(t[3:40].dequantize(), quantize(x, amax=9.0).dequantize())


def static(amax):
    activations = {"activation_spec": QuantizeSpec(), "activation_amax": None if amax is None else torch.tensor(amax)}
    return matrix(300, 160, amax=6.0)._replace(**activations)


@pytest.mark.parametrize(("view", "amax", "expected", "compiled"), [
    (lambda t: t.detach(), 3.0, 3.0, True), (lambda t: t.mT, 9.0, 9.0, False), (lambda t: t.view(-1), 3.0, 5.0, False),
    (lambda t: t[3:40], 3.0, 5.0, False), (lambda t: t[3:40], 9.0, 9.0, False),
    (lambda t: t.mT[16:48], 9.0, 9.0, False),
])  # fmt: skip
def test_a_write_of_codes_brings_their_activation_amax(view, amax, expected, compiled):
    """That of a whole tensor, through any alias; through a part or a flat view, one that clips neither."""
    t, source = static(5.0), static(amax)
    held, part = t.detach(), t[7:9]

    def write(t, source):
        view(t).copy_(view(source))

    (torch.compile(write, fullgraph=True, backend="aot_eager") if compiled else write)(t, source)
    assert t.activation_amax == held.activation_amax == part.activation_amax == expected
    assert source.activation_amax == amax and t.activation_amax is not source.activation_amax


def test_a_slice_whose_activation_amax_is_not_fixed():
    t, fixed = static(None), static(5.0)
    t[3:40] = fixed[3:40]  # in each call, its own is right for any rows
    assert t.activation_amax is None
    before = fixed.dequantize()
    with pytest.raises(RuntimeError, match="activation_amax = None"):
        fixed[3:40] = static(None)[3:40]
    assert torch.equal(fixed.dequantize(), before) and fixed.activation_amax == 5
    assert fixed.copy_(matrix(300, 160)).activation_amax == 5  # of weight-only codes
    assert fixed.copy_(static(None)).activation_amax is None  # the old one could clip
    assert static(None).copy_(static(5.0)).activation_amax == 5
    assert matrix(300, 160).copy_(static(5.0)).activation_amax is None


# --- who writes, and what shows it -----------------------------------------------------------------------------------

VIEWS = [lambda t: t[3:40], lambda t: t[3], lambda t: t[128:][3:90], lambda t: t[:, 16:48], lambda t: t.view(-1, 128)]


@pytest.mark.parametrize("write", [
    lambda t: t.qdata.copy_(matrix(300, 64).qdata), lambda t: t.per_tensor_scale.mul_(2),
    lambda t: t.scale.copy_(t.scale.float().mul(0.5)), lambda t: torch._foreach_mul_([t], 2.0),
    lambda t: refit_(linear_of(t), {"weight": torch.randn(300, 64)}), lambda t: t.detach().view(5, 60, 64).zero_(),
    lambda t: linear_of(t).load_state_dict({"weight": matrix(300, 64)}), lambda t: by(NVFP4AdamW, t),
    lambda t: by(NVFP4Optimizer, t, inner=torch.optim.AdamW), lambda t: by(torch.optim.SGD, t, foreach=True),
])  # fmt: skip
def test_views_show_each_way_of_writing(write):
    t = matrix(300, 64)
    parts, before = [view(t) for view in VIEWS], t.dequantize()
    write(t)
    assert not torch.equal(t.dequantize(), before) and t.dequantize().isfinite().all()
    for part, view in zip(parts, VIEWS, strict=True):
        assert torch.equal(part.dequantize(), view(t.dequantize()))


def by(optimizer, t, **arguments):
    p = torch.nn.Parameter(t)
    stepper = optimizer([p], lr=0.1, **arguments)
    p.grad = torch.randn(300, 64)
    stepper.step()


def test_a_part_that_was_cut_from_another_tensor():
    a, b, other = (matrix(300, 150, amax=6.0) for _ in range(3))
    kept, t = a.dequantize(), a[3:40]
    t.data = b[50:87]
    t.copy_(other[:37])
    assert torch.equal(a.dequantize(), kept) and torch.equal(b[50:87].dequantize(), other[:37].dequantize())
    part, expected = b[3:40], b.dequantize()[3:40]
    b.data = matrix()
    del b
    gc.collect()  # the part keeps what it shows
    assert torch.equal(part.dequantize(), expected) and not part.zero_().dequantize().any()


def test_slices_and_aliases_do_not_hinder_a_module_from_moving():
    linear = torch.nn.Linear(64, 300, bias=False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    weight = linear.weight
    held = [weight.detach(), weight.data[3:40], linear.state_dict()["weight"]]
    before = weight.dequantize()
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16 and linear.weight is weight
    held[1].copy_(held[1])  # into the codes that moved away
    assert torch.equal(linear.weight.dequantize(torch.float32), before)


@pytest.mark.parametrize("module", [torch.nn.Linear, NVFP4Linear])
@torch.no_grad()
def test_a_compiled_function_reads_and_writes(module):
    t, x = matrix(300, 64, amax=6.0), torch.randn(2, 64)
    linear = linear_of(t[3:40])
    linear.__class__ = module
    compiled_linear = torch.compile(linear, backend="aot_eager")
    compiled = torch.compile(lambda t: (t[5:].dequantize(), t[:, 16:48], t[:16].zero_())[:2], backend="aot_eager")
    for _ in range(2):
        expected = t.dequantize()
        assert torch.equal(compiled_linear(x), torch.nn.functional.linear(x, t[3:40].clone()))
        values, part = compiled(t)
        assert torch.equal(values, expected[5:])
        expected[:16] = 0
        assert torch.equal(t.dequantize(), expected)
        t.mul_(2)
        assert torch.equal(part.dequantize(), t.dequantize()[:, 16:48])


@pytest.mark.parametrize("config", [NVFP4Config(), NVFP4WeightOnlyConfig(block_rows=16)], ids=["w4a4", "tiles"])
def test_slice_and_copy_as_vllm_does(config, monkeypatch):
    """torchao's own test, which needs an accelerator only for its device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torchao_tests, "get_current_accelerator_device", lambda: "cpu")
    name = "_test_slice_and_copy_similar_to_vllm"
    getattr(torchao_tests.TorchAOIntegrationTestCase(name), name)(config)

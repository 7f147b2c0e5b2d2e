"""Windows: views have the values of their tensor at any time, and writes into them change it, or raise an error.

What they do to per-tensor scales is here; ``test_aliasing.py`` compares them with views of dense tensors.
"""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torchao.quantization import quantize_
from torchao.testing.utils import TorchAOIntegrationTestCase

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.quantization.linear import NVFP4Linear
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, refit_

SLICES = {
    "rows on tiles": (0, 128, 128),
    "rows off tiles": (0, 40, 77),
    "columns on tiles": (1, 64, 64),
    "columns off tiles": (1, 16, 48),
    "last columns": (1, 96, 54),
}


def matrix(seed=0, factor=1.0, rows=300, columns=150):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * factor
    return x.bfloat16()


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_slice_with_the_same_scale(where):
    """Codes and scales in the slice are those of the source, all others are unchanged."""
    a, b = matrix(1), matrix(2)
    t, other = (quantize(x, amax=6.0) for x in (a, b))
    values, new = t.dequantize(), other.dequantize()
    t.narrow(*where).copy_(other.narrow(*where))
    values.narrow(*where).copy_(new.narrow(*where))
    assert torch.equal(t.dequantize(), values)


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_slice_of_zeros(where):
    """Any scale fits if all other values are zero."""
    t, other = quantize(matrix()).new_zeros(300, 150), quantize(matrix(3))
    t.narrow(*where).copy_(other.narrow(*where))
    expected = torch.zeros(300, 150, dtype=torch.bfloat16)
    expected.narrow(*where).copy_(other.dequantize().narrow(*where))
    assert torch.equal(t.dequantize(), expected)


@pytest.mark.parametrize("where", SLICES.values(), ids=SLICES)
def test_a_larger_scale_rounds_the_rest_and_a_smaller_raises(where):
    t, other = quantize(matrix(4)), quantize(matrix(5, 2.0))
    before = t.dequantize(torch.float32)
    t.narrow(*where).copy_(other.narrow(*where))
    assert torch.equal(t.narrow(*where).qdata, other.narrow(*where).qdata)
    expected = quantize(before, amax=other.per_tensor_scale * 2688).dequantize(torch.float32)
    expected.narrow(*where).copy_(other.dequantize(torch.float32).narrow(*where))
    assert torch.allclose(t.dequantize(torch.float32), expected, rtol=1e-6, atol=0)
    held = t.dequantize()
    with pytest.raises(RuntimeError, match="may not be representable"):
        t.narrow(*where).copy_(quantize(matrix(6, 0.1)).narrow(*where))
    assert torch.equal(t.dequantize(), held)


@pytest.mark.smoke
def test_slices_of_slices():
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    values = t.dequantize()
    t[128:256][5:90].copy_(other[:85])
    values[133:218] = other.dequantize()[:85]
    assert torch.equal(t.dequantize(), values)


NESTED = {
    "rows and columns": (lambda t: t, lambda t: t[10:30, 16:48]),
    "columns, then rows": (lambda t: t, lambda t: t[:, 16:48][10:30]),
    "rows of a view": (lambda t: t[0:128], lambda t: t[10:30]),
    "rows of a copy": (lambda t: t[3:200], lambda t: t[10:30]),
    "columns of rows of a copy": (lambda t: t[3:200, 16:], lambda t: t[5:25][:, 16:48]),
}


@pytest.mark.parametrize("row_scaled", [False, True])
@pytest.mark.parametrize("first, then", NESTED.values(), ids=NESTED)
def test_a_larger_scale_in_a_slice_of_a_slice_rounds_the_rest_once(first, then, row_scaled):
    t = quantize(matrix(4), QuantizeSpec(row_scaled=row_scaled))
    outer = first(t)
    inner = then(outer)
    before, scales = t.dequantize(torch.float32), t.per_tensor_scale.clone().expand(300).clone()
    source = quantize(matrix(5, 9.0, *inner.shape), QuantizeSpec(row_scaled=row_scaled))
    written = torch.zeros(t.shape, dtype=torch.bool)
    then(first(written)).fill_(True)
    inner.copy_(source)
    after = t.dequantize(torch.float32)
    assert torch.equal(inner.dequantize(), source.dequantize())
    assert torch.equal(after[written].view(inner.shape), source.dequantize(torch.float32))
    assert torch.equal(outer.dequantize(torch.float32), first(after))
    rows = written.any(-1) if row_scaled else torch.ones(300, dtype=torch.bool)
    scales[rows] = source.per_tensor_scale
    assert torch.equal(t.per_tensor_scale.expand(300), scales)
    amax = scales * 2688
    once = quantize(before.masked_fill(written, 0), QuantizeSpec(row_scaled=True), amax=amax).dequantize(torch.float32)
    expected = torch.where(rows.view(-1, 1), once, before)
    assert torch.allclose(after[~written], expected[~written], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(300, 150), (150,)])
@pytest.mark.parametrize("factor", [1.0, 9.0, 0.1])
def test_columns_of_rows_with_a_scale_each(shape, factor):
    """A row's scale applies to all of its columns, so it changes for all of them, or not at all."""
    spec = QuantizeSpec(row_scaled=True)
    t = quantize(matrix(7).view(-1)[: torch.Size(shape).numel()].view(shape), spec)
    source = quantize(matrix(8, factor)[: len(t), :16] if len(shape) == 2 else matrix(8, factor)[0, :16], spec)
    before = t.dequantize()
    try:
        t[..., :16] = source
    except RuntimeError as error:
        assert factor < 9 and "may not be representable" in str(error) and torch.equal(t.dequantize(), before)
        return
    assert factor > 0.1 and torch.equal(t[..., :16].dequantize(), source.dequantize())
    rest = (t.dequantize() - before).abs()[..., 16:].amax(-1)
    assert (rest <= 0.2 * before.abs().amax(-1)).all()


def test_rows_of_experts_keep_to_the_scale_of_their_expert():
    t = quantize_experts(torch.randn(3, 40, 64) * torch.tensor([1.0, 8, 64]).view(3, 1, 1))
    before, scales = t.dequantize(), t.per_tensor_scale.clone()
    source = quantize(torch.ones(1, 4, 64) * 90, amax=2688.0)
    t[1:2, 5:9] = source
    assert torch.equal(t.dequantize()[1, 5:9], source.dequantize()[0])
    scales[1] = 1
    assert torch.equal(t.dequantize()[::2], before[::2]) and torch.equal(t.per_tensor_scale, scales)
    with pytest.raises(RuntimeError, match="more per-tensor scales"):
        t[:, 5:9] = quantize(torch.randn(3, 4, 64) * 1000, QuantizeSpec(row_scaled=True))


@pytest.mark.parametrize("write", [
    lambda w: w[256:].copy_(quantize(torch.zeros(0, 128))), lambda w: w[:, :0].copy_(quantize(torch.zeros(256, 0))),
    lambda w: w.__setitem__(slice(256, None), torch.zeros(0, 128)), lambda w: w[:0].mul_(3),
    lambda w: w[3:3].fill_(2.0), lambda w: w[:128].copy_(quantize(torch.zeros(128, 128))),
], ids=["rows", "columns", "dense", "*=", "fill_", "zeros"])  # fmt: skip
@pytest.mark.parametrize("row_scaled", [False, True])
def test_what_is_empty_or_zero_needs_no_scale(write, row_scaled):
    w = quantize(torch.randn(256, 128) * 1e-4, QuantizeSpec(row_scaled=row_scaled))
    before = w.dequantize()
    write(w)
    zeros = (w.dequantize() == 0).all(-1).sum()
    assert zeros in (0, 128) and torch.equal(w.dequantize()[128:], before[128:])


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


def test_a_write_into_one_of_several_chunks_leaves_the_others():
    t = quantize(matrix())
    chunks = t.split(40)
    held = [chunk.dequantize() for chunk in chunks[1:]]
    chunks[0].copy_(quantize(matrix(1, 5.0))[:40])  # with a larger per-tensor scale, to which all of t is rounded
    values = t.dequantize().split(40)
    for chunk, value, old in zip(chunks[1:], values[1:], held, strict=True):
        assert torch.equal(chunk.dequantize(), value)
        assert (value.float() - old.float()).norm() < 0.05 * old.float().norm()


def test_data_set_to_a_slice_leads_to_what_that_was_cut_from():
    a, b, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2, 3))
    kept, t = a.dequantize(), a[3:40]
    t.data = b[50:87]
    t.copy_(other[:37])
    assert torch.equal(a.dequantize(), kept) and torch.equal(b[50:87].dequantize(), other[:37].dequantize())


def test_a_window_keeps_what_it_shows_alive():
    t = quantize(matrix())
    part, expected = t[3:40], t.dequantize()[3:40]
    t.data = quantize(matrix(1))
    del t
    gc.collect()
    assert torch.equal(part.dequantize(), expected)
    part.zero_()
    assert (part.dequantize() == 0).all()


@pytest.mark.parametrize("start", [0, 3])
@torch.no_grad()
def test_a_deep_copy_of_a_slice_is_no_part(start):
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    before = t.dequantize()
    copy.deepcopy(t[start : start + 128]).copy_(other[:128])
    parameter = copy.deepcopy(torch.nn.Parameter(t[start : start + 128], requires_grad=False))
    assert parameter.window is None and isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(t.dequantize(), before) and torch.equal(parameter.dequantize(), before[start : start + 128])


def test_the_data_of_a_tensor_finds_it():
    t, other = (quantize(matrix(seed), amax=6.0) for seed in (1, 2))
    t.data.detach().narrow(0, 3, 40).copy_(other[:40])
    assert torch.equal(t[3:43].dequantize(), other[:40].dequantize())


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


@pytest.mark.parametrize("optimizer", [
    lambda p: NVFP4AdamW([p], lr=0.1), lambda p: NVFP4Optimizer([p], torch.optim.AdamW, lr=0.1),
    lambda p: torch.optim.SGD([p], lr=0.1, foreach=True),
], ids=["NVFP4AdamW", "NVFP4Optimizer", "SGD"])  # fmt: skip
def test_an_optimizer_writes(optimizer):
    p = torch.nn.Parameter(quantize(matrix(columns=64)))
    parts = [view(p.detach()) for view in VIEWS]
    stepper = optimizer(p)
    p.grad = torch.randn(300, 64).bfloat16()
    stepper.step()
    for part, view in zip(parts, VIEWS, strict=True):
        assert torch.equal(part.dequantize(), view(p.detach().dequantize()))


VIEWS = [lambda t: t[3:40], lambda t: t[3], lambda t: t[128:][3:90], lambda t: t[:, 16:48], lambda t: t.view(-1, 128)]


@pytest.mark.parametrize("write", [
    lambda t: t.qdata.copy_(quantize(matrix(5, columns=64)).qdata), lambda t: t.per_tensor_scale.mul_(2),
    lambda t: t.scale.copy_(t.scale.float().mul(2)), lambda t: torch._foreach_mul_([t], 2.0),
    lambda t: refit_(linear_of(t), {"weight": matrix(2, columns=64)}), lambda t: t.detach().view(5, 60, 64).zero_(),
    lambda t: linear_of(t).load_state_dict({"weight": quantize(matrix(2, columns=64))}),
])  # fmt: skip
def test_each_way_of_writing(write):
    t = quantize(matrix(columns=64))
    parts = [view(t) for view in VIEWS]
    before = t.dequantize()
    write(t)
    assert not torch.equal(t.dequantize(), before)
    for part, view in zip(parts, VIEWS, strict=True):
        assert torch.equal(part.dequantize(), view(t.dequantize()))


def linear_of(t):
    linear = torch.nn.Linear(64, 300, bias=False)
    linear.weight = torch.nn.Parameter(t, requires_grad=False)
    return linear


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("module", [torch.nn.Linear, NVFP4Linear])
@torch.no_grad()
def test_a_compiled_function_reads_and_writes(module, backend):
    t, x = quantize(matrix(columns=64), amax=6.0), torch.randn(2, 64).bfloat16()
    linear = torch.nn.Linear(64, 37, bias=False)
    linear.weight = torch.nn.Parameter(t[3:40], requires_grad=False)
    linear.__class__ = module
    compiled_linear = torch.compile(linear, backend=backend)
    compiled = torch.compile(lambda t: (t[5:].dequantize(), t[:, 16:48], t[:16].zero_())[:2], backend=backend)
    for _ in range(2):
        expected = t.dequantize()
        assert torch.equal(compiled_linear(x), torch.nn.functional.linear(x, t[3:40].clone()))
        values, part = compiled(t)
        assert torch.equal(values, expected[5:])
        expected[:16] = 0
        assert torch.equal(t.dequantize(), expected)
        t.mul_(2)
        assert torch.equal(part.dequantize(), t.dequantize()[:, 16:48])


def test_experts_accept_slices_of_any_scale():
    whole, t = quantize_experts(torch.randn(4, 40, 64)), quantize_experts(torch.randn(4, 40, 64) * 3)
    for start, length in ((0, 1), (1, 3)):
        t.narrow(0, start, length).copy_(whole.narrow(0, start, length))
    assert torch.equal(t.dequantize(), whole.dequantize())


def static(amax, seed=0):
    activations = {"activation_spec": QuantizeSpec(), "activation_amax": None if amax is None else torch.tensor(amax)}
    return quantize(matrix(seed, columns=160), amax=6.0)._replace(**activations)


@pytest.mark.parametrize(("view", "amax", "expected", "compiled"), [
    (lambda t: t.detach(), 3.0, 3.0, False), (lambda t: t.detach(), 3.0, 3.0, True), (lambda t: t.mT, 9.0, 9.0, True),
    (lambda t: t.view(-1), 3.0, 5.0, False), (lambda t: t[3:40], 3.0, 5.0, False), (lambda t: t[3:40], 9.0, 9.0, False),
    (lambda t: t.mT[16:48], 9.0, 9.0, False),
])  # fmt: skip
def test_a_write_of_codes_brings_their_activation_amax(view, amax, expected, compiled):
    """That of a whole tensor, through any alias; through a part or a flat view, one that clips neither."""
    t, source = static(5.0), static(amax, 1)
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
        fixed[3:40] = static(None, 1)[3:40]
    assert torch.equal(fixed.dequantize(), before) and fixed.activation_amax == 5
    fixed.copy_(static(None, 1))
    assert fixed.activation_amax is None


def test_dense_values_in_a_slice_name_a_way_that_works():
    t, x = quantize(matrix()), 0.01 * matrix(1)[:37]
    before = t.dequantize()
    for write in (lambda: t.__setitem__(slice(3, 40), x), lambda: t[3:40].mul_(2), lambda: t[3:40].normal_()):
        with pytest.raises(RuntimeError, match=r"no smaller scale .*amax=.*t\.dequantize\(\) and t\.copy_\(\) that"):
            write()
    assert torch.equal(t.dequantize(), before)
    values = t.dequantize()
    values[3:40] = x
    t.copy_(values)
    assert torch.equal(t.dequantize(), quantize(values).dequantize())
    t[3:40] = quantize(x, amax=9.0)
    assert torch.equal(t[3:40].dequantize(), quantize(x, amax=9.0).dequantize())


class AsVLLMLoads(TorchAOIntegrationTestCase):
    """torchao's own test, which needs an accelerator only for its device."""

    def runTest(self):
        pass


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config(), NVFP4WeightOnlyConfig(block_rows=16)])
def test_slice_and_copy_as_vllm_does(config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("torchao.testing.utils.get_current_accelerator_device", lambda: "cpu")
    AsVLLMLoads()._test_slice_and_copy_similar_to_vllm(config)


def test_all_slices_as_vllm_does_give_the_loaded_weight():
    linear, loaded = (torch.nn.Linear(96, 384, bias=False, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        loaded.weight.mul_(3)
    for module in (linear, loaded):
        quantize_(module, NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(four_over_six=True)))
    for start in (0, 128, 256):
        data = linear.weight.data
        data = data.narrow(0, start, 128)
        data.copy_(loaded.weight.narrow(0, start, 128))
    assert torch.equal(linear.weight.dequantize(), loaded.weight.dequantize())


@pytest.mark.parametrize("view", [lambda t: t.mT, lambda t: t.mT[16:], lambda t: t[:, 5]], ids=["mT", "slice", "none"])
def test_a_view_keeps_no_tensor_of_its_callers(view):
    """The first of the two orders that are tried fits none of them, and the last raises an error."""

    class Mark:
        pass

    def call():
        mark = Mark()
        with contextlib.suppress(RuntimeError):
            view(t)
        return weakref.ref(mark)

    t = quantize(matrix())
    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()

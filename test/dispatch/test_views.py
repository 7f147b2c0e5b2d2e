"""Views, gathers and joins: which are possible, what they share, and which per-tensor scales they have."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers.refusals import refuses
from helpers.writes import matrix as matrix_of

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize

SHARE_ALL = {
    "view same": lambda t: t.view(t.shape), "reshape": lambda t: t.reshape(-1, t.shape[-1]), "t": lambda t: t.t(),
    "mT": lambda t: t.mT, "T": lambda t: t.T, "transpose": lambda t: t.transpose(0, 1), "alias": lambda t: t.detach(),
    "unsqueeze": lambda t: t.unsqueeze(0), "squeeze": lambda t: t[None, None].squeeze(),
    "flatten": lambda t: t.flatten(0, -2), "rows on a tile": lambda t: t[128:256], "rows to the end": lambda t: t[128:],
    "unflatten": lambda t: t.unflatten(0, (1, -1)), "own dtype": lambda t: t.view(torch.float32),
}  # fmt: skip
SHARE_CODES = {
    "columns on a tile": lambda t: t[..., 64:128], "rows off a tile": lambda t: t[1:19], "flat": lambda t: t.view(-1),
    "columns off a tile": lambda t: t[..., 16:48], "unflatten last": lambda t: t.unflatten(-1, (-1, 16)),
    "select": lambda t: t[1], "narrow": lambda t: t.narrow(-2, 1, 9), "split": lambda t: t.split(7),
    "step": lambda t: t[::3], "unbind": lambda t: t.unbind(), "chunk columns": lambda t: t.chunk(13, -1),
    "expand": lambda t: t[None].expand(4, 300, 208),
}  # fmt: skip
NEW = {
    "index_select": lambda t: t.index_select(0, torch.tensor([3, 0, 3])), "last block cut": lambda t: t[..., 16:41],
    "index": lambda t: t[torch.tensor([[3, 0], [1, 1]])], "mask": lambda t: t[torch.arange(t.shape[0]) % 3 == 1],
    "cat": lambda t: torch.cat([t, t[:3], t]), "cat columns": lambda t: torch.cat([t, t], -1),
    "cat one": lambda t: torch.cat([t]), "cat pieces": lambda t: torch.cat(t.split(5)),
    "cat chunks": lambda t: torch.cat(t.split(64, -1), -1), "stack": lambda t: torch.stack([t, t]),
    "vstack": lambda t: torch.vstack([t, t]), "hstack": lambda t: torch.hstack([t, t]), "clone": lambda t: t.clone(),
    "clone of a part": lambda t: t[0:128].clone(), "contiguous": lambda t: t[:, 16:].contiguous(),
}  # fmt: skip
TAKES = SHARE_ALL | SHARE_CODES | NEW


TRANSFORMED = QuantizeSpec(hadamard_sign=True)


def matrix(rows=300, columns=208, *args, **arguments) -> NVFP4Tensor:
    return matrix_of(rows, columns, *args, **arguments)


def storages(t):
    return {getattr(t, name).untyped_storage().data_ptr() for name in t.__tensor_flatten__()[0]}


@pytest.mark.parametrize("name", TAKES)
def test_an_ordinary_matrix_is_refused_nothing_ordinary(name):
    t = matrix()
    got, expected = ([r] if isinstance(r, torch.Tensor) else r for r in map(TAKES[name], (t, t.dequantize())))
    for a, b in zip(got, expected, strict=True):
        assert isinstance(a, NVFP4Tensor) and a.dtype == b.dtype and torch.equal(a.dequantize(), b)
        assert a.per_tensor_scale.dim() == 0
        shares = [
            getattr(a, part).untyped_storage().data_ptr() == getattr(t, part).untyped_storage().data_ptr()
            for part in ("qdata", "scale")
        ]
        assert shares == [name not in NEW, name in SHARE_ALL]
        if name not in NEW:
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
            assert a.is_contiguous() == b.is_contiguous()


def test_new_tensors_own_all_of_their_fields():
    """Eager and in a graph: a write into them changes no source, and a write into the source does not change them."""
    t = matrix(256, 128)._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2.0))
    before, makers = t.dequantize(), [make for name, make in NEW.items() if name != "last block cut"]
    traced = [NEW[name] for name in ("index", "mask", "cat", "cat chunks", "stack", "clone of a part", "contiguous")]
    compiled = torch.compile(lambda t: [make(t) for make in traced], fullgraph=True, backend="aot_eager")
    for new, of in (([make(t) for make in makers], makers), (compiled(t), traced)):
        for u, make in zip(new, of, strict=True):
            assert torch.equal(u.dequantize(), make(before)) and not storages(u) & storages(t)
            u.fill_(100.0)
            assert (u.dequantize() == 100).all() and torch.equal(t.dequantize(), before)


test_refused = refuses(
    (lambda: matrix().view(-1, 8), "or a block would be split"),
    (lambda: matrix()[:, 5:30], "must start at a multiple of 16"),
    (lambda: matrix()[:, 5], "with step 1"),
    (lambda: matrix()[3][5], "0-d view would split"),
    (lambda: matrix().as_strided((4, 208), (208, 1), 297 * 208), "beyond the end"),
    (lambda: matrix().t().view(-1), "copied to the order of its rows"),
    (lambda: matrix().unsqueeze(3), IndexError, "out of range"),
    (lambda: matrix().index_select(1, torch.tensor([0])), "split blocks of 16"),
    (lambda: matrix()[[0], [1]], "split blocks of 16"),
    (
        lambda: matrix(4, 100).flatten().dequantize(),
        "rows of 100 elements cannot become rows of 400, because 100 is not a multiple",
    ),
    (lambda: matrix(4, 64, spec=TRANSFORMED)[:, :40], "Hadamard-transformed block cannot be split"),
    (lambda: matrix(4, 32, spec=QuantizeSpec(row_scaled=True)).view(2, 64), "more than one per-tensor scale"),
    (lambda: torch.cat([matrix(4, 32), matrix(4, 32)], 1), "one amax"),
    (lambda: torch.cat([matrix(4, 30, amax=4.0)] * 2, 1), "multiples of 16 columns"),
    (lambda: torch.cat([matrix(4, 32), torch.randn(4, 32)]), "joined with dense"),
    (lambda: torch.cat([matrix(4, 32), matrix(4, 32).bfloat16()]), "differ in dtype"),
    (lambda: torch.cat([matrix(32, 32), matrix(32, 32).t()]), "transposition"),
    (lambda: torch.cat([matrix(4, 32), matrix(4, 32, spec=TRANSFORMED)]), "different Hadamard"),
    (
        lambda: torch.cat([t := matrix(4, 32), t._replace(activation_spec=QuantizeSpec())]),
        "different activation specs or product backends",
    ),
    (lambda: torch.cat([matrix(3, 30), matrix(3, 32)]), "differ outside of dimension"),
    (lambda: torch.stack([matrix(3, 30), matrix(3, 32)]), "differ outside of dimension"),
    (lambda: torch.nn.functional.pad(matrix(), [0, 8]), "along the rows"),
    (lambda: torch.nn.functional.pad(matrix(), [0, 0, 0, 8], value=1), "with zeros"),
    error=RuntimeError,
)


@pytest.mark.smoke
def test_joined_rows_keep_each_its_own_per_tensor_scale():
    parts = [matrix(5, 32, scale) for scale in (1.0, 1e-3, 1e4)]
    joined = torch.cat(parts)
    assert joined.per_tensor_scale.shape == (15,)
    for found, part in zip(joined.split(5), parts, strict=True):
        assert torch.equal(found.dequantize(), part.dequantize())
    whole = matrix(256, 32)
    for size in (128, 40):
        assert torch.equal(torch.cat(whole.split(size)).per_tensor_scale, whole.per_tensor_scale)
    a, b = (matrix(4, 32, amax=4.0) for _ in range(2))  # equal values in two storages
    assert torch.equal(torch.cat([a, b], 1).dequantize(), torch.cat([a.dequantize(), b.dequantize()], 1))


def test_shapes_without_elements():
    for shape, others in {(32, 0): [(0,), (5, 0), (0, 3), (2, 0, 16)], (0, 64): [(0,), (0, 3)]}.items():
        for spec in (QuantizeSpec(), QuantizeSpec(row_scaled=True)):
            t = quantize(torch.empty(shape), spec)
            assert t.dequantize().shape == shape
            for other in others:
                assert t.view(other).dequantize().shape == other
    for before, after in (((64, 0), (3, 200, 0)), ((0, 7, 0), (300, 0))):
        t = quantize(torch.empty(before)).view(after)
        product = torch.ones(*after[:-2], 2, 0) @ t.mT
        assert torch.equal(product, torch.zeros(*after[:-2], 2, after[-2]))


@pytest.mark.parametrize("rows", [128, 40])
def test_experts_keep_one_per_tensor_scale_each(rows):
    x = torch.randn(3, rows, 64) * torch.tensor([1.0, 50, 0.02]).view(3, 1, 1)
    parts = [quantize(e) for e in x]
    w = torch.stack(parts)
    assert w.per_tensor_scale.shape == (3, 1) and w.row_scale().shape == (3 * rows,)
    dense = torch.stack([part.dequantize() for part in parts])
    for take in (lambda t: t, lambda t: t.mT, lambda t: t[1], lambda t: t[1:], lambda t: t[[2, 0]],
                 lambda t: t.view(3 * rows, 64), lambda t: torch.cat([t, t], dim=1)):  # fmt: skip
        assert torch.equal(take(w).dequantize(), take(dense))
    assert torch.equal(torch.cat([w, w[:1]]).per_tensor_scale, w.per_tensor_scale[[0, 1, 2, 0]])
    target = torch.stack([matrix(rows, 64) for _ in range(3)])
    assert torch.equal(target.copy_(w).dequantize(), dense)
    by_row = torch.cat([part.unsqueeze(0) for part in parts]).view(-1, 64).clone().view(3, rows, 64)
    assert by_row.per_tensor_scale.dim() == 1 and torch.equal(by_row.copy_(w).dequantize(), dense)
    with pytest.raises(RuntimeError, match="more per-tensor scales"):
        target.copy_(by_row)
    assert w[1].per_tensor_scale.dim() == 0
    w[1].copy_(x[0])  # its scale is its own
    assert torch.equal(w.dequantize(), dense[[0, 0, 2]])


def test_a_join_of_static_scales_clips_nothing():
    static = {"activation_spec": QuantizeSpec()}
    q, k = (matrix(16, 32)._replace(**static, activation_amax=torch.tensor(m)) for m in (1.0, 9.0))
    assert torch.cat([q, k]).activation_amax == 9 and torch.stack([k, q]).activation_amax == 9
    assert torch.cat([q, k._replace(activation_amax=None)]).activation_amax is None


@pytest.mark.parametrize("view", [lambda t: t.mT, lambda t: t.mT[16:], lambda t: t[:, 5]], ids=["mT", "slice", "none"])
def test_a_view_keeps_no_tensor_of_its_callers(view):
    """The first of the two orders that are tried fits none of them, and the last raises an error."""

    def call():
        mark = set()
        with contextlib.suppress(RuntimeError):
            view(t)
        return weakref.ref(mark)

    t = matrix()
    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_a_view_out_of_a_graph_or_into_one_is_a_view():
    t = matrix(256, 128)
    part = torch.compile(lambda t: t[1:19], fullgraph=True, backend="aot_eager")(t)
    t.mul_(2)
    assert torch.equal(part.dequantize(), t.dequantize()[1:19]) and part.storage_offset() == 128
    before = t.dequantize()
    with pytest.raises(Exception, match="per-tensor scale"):
        torch.compile(lambda t: t.fill_(3.0), fullgraph=True, backend="aot_eager")(part)
    assert torch.equal(t.dequantize(), before)
    torch.compile(lambda t: t.zero_(), fullgraph=True, backend="aot_eager")(part)
    before[1:19] = 0
    assert torch.equal(t.dequantize(), before)


def test_rows_that_end_within_a_block():
    t = matrix(40, 100)
    blocks, dense = (x[:, :96].unflatten(-1, (6, 16)) for x in (t, t.dequantize()))
    assert torch.equal(blocks.dequantize(), dense)
    part = quantize(torch.randn(8, 64))[:, 16:40]
    assert part.qdata.shape == (8, 16) and not part.qdata[:, 12:].any() and part.qdata[:, :12].any()

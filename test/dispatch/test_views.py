"""Views, gathers and joins act as on a dense tensor, share storage where possible, and lose no write."""

import pytest
import torch

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts

TENSORS = {
    "vector": lambda: quantize(torch.randn(80)),
    "matrix": lambda: quantize(torch.randn(300, 208)),
    "odd": lambda: quantize(torch.randn(37, 41)),
    "batch": lambda: quantize(torch.randn(3, 128, 64).bfloat16()),
    "odd batch": lambda: quantize(torch.randn(2, 5, 7, 50).half(), QuantizeSpec(block_rows=16)),
    "transposed": lambda: quantize(torch.randn(300, 208)).t(),
    "transposed batch": lambda: quantize(torch.randn(3, 40, 70)).mT,
    "row scales": lambda: torch.cat([quantize(torch.randn(150, 96)), quantize(torch.randn(77, 96) * 50)]),
    "row scales, transposed": lambda: (
        torch.stack([quantize(torch.randn(20, 96)), quantize(torch.randn(20, 96) * 9)]).mT
    ),
}
FUNCTIONS = {
    "view same": lambda t: t.view(t.shape),
    "reshape": lambda t: t.reshape(-1, t.shape[-1]),
    "reshape up": lambda t: t.reshape(1, 1, *t.shape),
    "flatten leading": lambda t: t.flatten(0, -2),
    "flatten": lambda t: t.flatten(),
    "unflatten first": lambda t: t.unflatten(0, (1, -1)),
    "unflatten last": lambda t: t.unflatten(-1, (-1, 16)),
    "t": lambda t: t.t(),
    "mT": lambda t: t.mT,
    "T": lambda t: t.T,
    "transpose first two": lambda t: t.transpose(0, 1),
    "transpose back": lambda t: t.transpose(-1, -2).transpose(-1, -2),
    "permute": lambda t: t.permute(*range(1, t.dim() - 1), 0, t.dim() - 1),
    "permute all": lambda t: t.permute(*reversed(range(t.dim()))),
    "unsqueeze first": lambda t: t.unsqueeze(0),
    "unsqueeze middle": lambda t: t.unsqueeze(-2),
    "unsqueeze last": lambda t: t.unsqueeze(-1),
    "squeeze": lambda t: t.unsqueeze(0).unsqueeze(0).squeeze(),
    "squeeze dim": lambda t: t.unsqueeze(0).squeeze(0).squeeze(0),
    "select": lambda t: t[1],
    "select negative": lambda t: t.select(0, -1),
    "select second to last": lambda t: t.select(-2, 3),
    "select last": lambda t: t[..., 3],
    "rows on a tile": lambda t: t[128:256],
    "rows to the end": lambda t: t[128:],
    "rows off a tile": lambda t: t[1:19],
    "rows with a step": lambda t: t[::3],
    "no rows": lambda t: t[2:2],
    "columns on a tile": lambda t: t[..., 64:128],
    "columns to the end": lambda t: t[..., 64:],
    "columns off a tile": lambda t: t[..., 16:48],
    "columns that cut the last block": lambda t: t[..., 16:41],
    "columns that cut the first block": lambda t: t[..., 5:30],
    "narrow": lambda t: t.narrow(-2, 1, 9),
    "split": lambda t: t.split(2),
    "split sizes": lambda t: t.split([1, t.shape[0] - 1]),
    "split columns": lambda t: t.split(16, dim=-1),
    "chunk": lambda t: t.chunk(2),
    "chunk columns": lambda t: t.chunk(2, dim=-1),
    "unbind": lambda t: t.unbind(),
    "tensor_split": lambda t: t.tensor_split(3),
    "expand": lambda t: t.unsqueeze(0).expand(4, *t.shape),
    "expand same": lambda t: t.expand(*[-1] * t.dim()),
    "expand last": lambda t: t[..., None].expand(*t.shape, 3),
    "index_select": lambda t: t.index_select(0, torch.tensor([3, 0, 3])),
    "index": lambda t: t[torch.tensor([[3, 0], [1, 1]])],
    "index by mask": lambda t: t[torch.arange(t.shape[0]) % 3 == 1],
    "index two": lambda t: t[torch.tensor([1, 0]), torch.tensor([2, 3])],
    "cat rows": lambda t: torch.cat([t, t[:3], t]),
    "cat columns": lambda t: torch.cat([t, t], dim=-1),
    "cat of splits": lambda t: torch.cat(t.split(5)),
    "stack": lambda t: torch.stack([t, t]),
    "stack last": lambda t: torch.stack([t, t], dim=-1),
    "contiguous": lambda t: t.mT.contiguous(),
    "repeat": lambda t: t.repeat(*[1] * t.dim()),
}


def outcome(function, t):
    try:
        result = function(t)
        if isinstance(result, NVFP4Tensor):
            result.dequantize()  # t.flatten() is made when it is read
        return result
    except Exception as error:
        return error


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tensor", TENSORS)
def test_same_as_dense_or_an_error(tensor, function):
    t = TENSORS[tensor]()
    got, expected = outcome(FUNCTIONS[function], t), outcome(FUNCTIONS[function], t.dequantize())
    if isinstance(expected, Exception):
        assert isinstance(got, Exception), "an error on a dense tensor has to be one here"
    elif isinstance(got, Exception):
        assert isinstance(got, RuntimeError) and "dequantize() first" in str(got), repr(got)
    else:
        got, expected = (list(v) if isinstance(v, (list, tuple)) else [v] for v in (got, expected))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert isinstance(a, NVFP4Tensor) and a.shape == b.shape and a.dtype == b.dtype
            assert torch.equal(a.dequantize(), b)


SUPPORTED = [
    "view same", "reshape", "flatten leading", "flatten", "unflatten first", "unflatten last", "t", "mT", "T",
    "transpose first two", "unsqueeze first", "squeeze", "select", "rows on a tile", "rows off a tile",
    "columns on a tile", "columns off a tile", "columns that cut the last block", "narrow", "split", "chunk",
    "unbind", "expand", "index_select", "index", "index by mask", "cat rows", "cat columns", "stack", "contiguous",
]  # fmt: skip


@pytest.mark.parametrize("function", SUPPORTED)
def test_an_ordinary_matrix_is_refused_nothing_ordinary(function):
    assert not isinstance(outcome(FUNCTIONS[function], TENSORS["matrix"]()), Exception)


SHARE_SCALES = "view same", "reshape", "t", "mT", "unsqueeze first", "rows on a tile", "rows to the end"
GATHER_SCALES = "columns on a tile", "rows off a tile", "columns off a tile", "flatten", "unflatten last", "select"


@pytest.mark.parametrize("view", [*SHARE_SCALES, *GATHER_SCALES])
def test_what_shares_storage(view):
    t = TENSORS["matrix"]()
    piece = FUNCTIONS[view](t)
    assert piece.qdata.untyped_storage().data_ptr() == t.qdata.untyped_storage().data_ptr()
    shares = piece.scale.untyped_storage().data_ptr() == t.scale.untyped_storage().data_ptr()
    assert shares == (view in SHARE_SCALES)
    dense = FUNCTIONS[view](t.dequantize())
    assert (piece.stride(), piece.storage_offset()) == (dense.stride(), dense.storage_offset())
    assert piece.is_contiguous() == dense.is_contiguous()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tensor", ["matrix", "odd", "batch", "transposed", "row scales"])
def test_a_write_into_a_view_arrives_or_raises(tensor, function):
    t = TENSORS[tensor]()
    dense = t.dequantize()
    pieces, dense_pieces = outcome(FUNCTIONS[function], t), outcome(FUNCTIONS[function], dense)
    if isinstance(pieces, Exception):
        return
    pieces, dense_pieces = (v if isinstance(v, (list, tuple)) else [v] for v in (pieces, dense_pieces))
    for piece, dense_piece in zip(pieces, dense_pieces, strict=True):
        try:
            piece.zero_()
        except RuntimeError as error:
            assert "clone() it" in str(error)
            continue
        if dense_piece._base is None and not torch.equal(dense_piece, dense):
            continue  # a gather or a join: its own storage in both worlds
        dense_piece.zero_()
    assert torch.equal(t.dequantize(), dense)


def test_setitem_arrives_or_raises():
    t = TENSORS["matrix"]()
    expected = t.dequantize()
    for region in (slice(128, 256), slice(3, 5), (slice(None), slice(16, 48)), 7):
        t[region] = 0
        expected[region] = 0
        assert torch.equal(t.dequantize(), expected)
    for region in (slice(128, 256), slice(3, 5)):
        with pytest.raises(RuntimeError, match="per-tensor scale"):
            t[region] = 1.0
    with pytest.raises(RuntimeError, match="ends within a block"):
        t[:, :20] = 0


def test_joined_rows_keep_each_its_own_per_tensor_scale():
    parts = [quantize(torch.randn(5, 32) * scale) for scale in (1.0, 1e-3, 1e4)]
    joined = torch.cat(parts)
    assert joined.per_tensor_scale.shape == (15,)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    for index, part in enumerate(joined.split(5)):
        assert torch.equal(part.dequantize(), parts[index].dequantize())
    whole = quantize(torch.randn(256, 32))
    for size in (128, 40):
        assert torch.equal(torch.cat(whole.split(size)).per_tensor_scale, whole.per_tensor_scale)


def test_joining_along_blocks_needs_one_scale():
    a, b = quantize(torch.randn(4, 32)), quantize(torch.randn(4, 32))
    with pytest.raises(RuntimeError, match="one amax"):
        torch.cat([a, b], dim=1)
    with pytest.raises(RuntimeError, match="dense"):
        torch.cat([a, torch.randn(4, 32)])


def test_peers_defects_of_shape():
    """torchao: a view that changes the last dimension is silently wrong, (32, 0) becomes (64, 0), (0, 64) crashes,
    a swizzled 3-D tensor with rows not a multiple of 128 crashes."""
    t = quantize(torch.randn(64, 64))
    assert torch.equal(t.view(32, 128).dequantize(), t.dequantize().view(32, 128))
    with pytest.raises(RuntimeError, match="block would be split"):
        t.view(512, 8)
    with pytest.raises(
        RuntimeError, match="rows of 100 elements cannot become rows of 400, because 100 is not a multiple"
    ):
        quantize(torch.randn(4, 100)).flatten().dequantize()
    for shape in ((32, 0), (0, 64)):
        assert quantize(torch.empty(shape)).dequantize().shape == shape
        for spec in (QuantizeSpec(), QuantizeSpec(row_scaled=True)):
            for other in ((0,), (5, 0), (0, 3), (2, 0, 16)):
                assert quantize(torch.empty(shape), spec).view(other).dequantize().shape == other
    assert quantize(torch.randn(3, 20, 32))[2].shape == (20, 32)


def test_views_of_a_hadamard_transform_do_not_cut_it():
    t = quantize(torch.randn(4, 64), QuantizeSpec(hadamard_sign=True))
    assert torch.equal(t[:, 16:48].dequantize(), t.dequantize()[:, 16:48])
    with pytest.raises(RuntimeError, match="cannot be split"):
        t[:, :40]


@pytest.mark.parametrize("rows", [128, 40])
def test_experts_keep_one_per_tensor_scale_each(rows):
    x = torch.randn(3, rows, 64) * torch.tensor([1.0, 50, 0.02]).view(3, 1, 1)
    parts = [quantize(e) for e in x]
    w = torch.stack(parts)
    assert w.per_tensor_scale.shape == (3, 1) and w.row_scale().shape == (3 * rows,)
    dense = torch.stack([part.dequantize() for part in parts])
    assert torch.equal(w.dequantize(), dense) and torch.equal(w.mT.dequantize(), dense.mT)
    assert torch.equal(w[1].dequantize(), dense[1]) and torch.equal(w[1:].dequantize(), dense[1:])
    assert torch.equal(w[[2, 0]].dequantize(), dense[[2, 0]])
    assert torch.equal(w.view(3 * rows, 64).dequantize(), dense.view(-1, 64))
    assert torch.equal(torch.cat([w, w[:1]]).per_tensor_scale, w.per_tensor_scale[[0, 1, 2, 0]])
    assert torch.equal(torch.cat([w, w], dim=1).dequantize(), torch.cat([dense, dense], dim=1))
    target = torch.stack([quantize(torch.randn(rows, 64)) for _ in range(3)])
    assert torch.equal(target.copy_(w).dequantize(), dense)
    by_row = torch.cat([part.unsqueeze(0) for part in parts]).view(-1, 64).clone().view(3, rows, 64)
    assert by_row.per_tensor_scale.dim() == 1 and torch.equal(by_row.copy_(w).dequantize(), dense)
    with pytest.raises(RuntimeError, match="more per-tensor scales"):
        target.copy_(by_row)
    if rows == 128:
        assert w[1].per_tensor_scale.dim() == 0
        w[1].copy_(x[0])  # its scale is its own
        assert torch.equal(w.dequantize(), dense[[0, 0, 2]])


def test_reshaped_experts_are_written_with_the_scales_of_their_experts():
    t = quantize_experts(torch.stack([torch.randn(128, 64), 100 * torch.randn(128, 64)]))
    before = t.dequantize()
    for view in (t.view(256, 64), t.flatten(0, 1)[:128], t[:2].view(256, 64)):
        assert view.window is not None
        for write in (lambda v: v.fill_(3.0), lambda v: v.copy_(torch.zeros(v.shape))):
            with pytest.raises(RuntimeError, match=r"clone\(\)"):
                write(view[1:])
    assert torch.equal(t.dequantize(), before) and torch.equal(t.view(256, 64).dequantize(), before.view(256, 64))
    t[1].fill_(3.0)
    assert t.dequantize()[1].unique().tolist() == [pytest.approx(3)] and torch.equal(t.dequantize()[0], before[0])
    t.view(256, 64)[:128].zero_()
    assert (t.dequantize()[0] == 0).all() and (t.dequantize()[1] != 0).all()


def test_joins_compare_what_padding_hides():
    a, b = quantize(torch.ones(3, 30)), quantize(torch.ones(3, 32))
    for join in (torch.cat, torch.stack):
        for tensors in ([a, b], [b, a]):
            with pytest.raises(RuntimeError, match="differ outside of dimension"):
                join(tensors)


def test_a_join_of_static_scales_clips_nothing():
    spec = QuantizeSpec()
    q, k = (
        quantize(torch.randn(16, 32))._replace(activation_spec=spec, activation_amax=torch.tensor(m))
        for m in (1.0, 9.0)
    )
    assert torch.cat([q, k]).activation_amax == 9 and torch.stack([k, q]).activation_amax == 9
    assert torch.cat([q, k._replace(activation_amax=None)]).activation_amax is None
    with pytest.raises(RuntimeError, match="different activation specs or product backends"):
        torch.cat([q, quantize(torch.randn(16, 32))])


def test_unsqueeze_out_of_range():
    t = quantize(torch.randn(4, 32))
    assert t.unsqueeze(0).shape == t.unsqueeze(-3).shape == (1, 4, 32)
    for dim in (3, -4, 7):
        with pytest.raises(IndexError, match="out of range"):
            t.unsqueeze(dim)


@pytest.mark.parametrize("before, after", [((64, 0), (0, 5, 0)), ((64, 0), (3, 200, 0)), ((0, 7, 0), (300, 0))])
def test_rows_of_nothing_in_other_numbers(before, after):
    t = quantize(torch.empty(before)).view(after)
    assert t.dequantize().shape == after
    x = torch.ones(*after[:-2], 2, 0)
    assert torch.equal(x @ t.mT, torch.zeros(*after[:-2], 2, after[-2]))

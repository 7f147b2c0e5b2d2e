"""Codes that are not in the 16x16 tiles of their tensor's spec: whatever reads tiles reads the scales."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig, QuantizeSpec, quantize, quantize_experts, training
from nvfp4_tensor.tensor.tiles import tiled
from nvfp4_tensor.training.linear import plan

TILES = QuantizeSpec(block_rows=16)
ROWS, COLUMNS, STATE = 48, 64, torch.tensor([1, 2])


def generator():
    return torch.Generator().manual_seed(0)


def dense(rows=ROWS):
    """Rows of different sizes: a tile of them would lose the small ones."""
    sizes = torch.logspace(0, -3, rows)[torch.randperm(rows, generator=generator())]
    return torch.randn(rows, COLUMNS, generator=generator()) * sizes.view(-1, 1)


def in_tiles(rows=ROWS):
    """A tensor in tiles of rows of one size, in falling order."""
    return quantize(dense(rows).sort(0, descending=True)[0], TILES)


def copied(source):
    return in_tiles().copy_(source)


def loaded():
    source, target = (nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)) for _ in range(2))
    source[0].weight.data.copy_(dense())
    quantize_(source, NVFP4WeightOnlyConfig())
    training.to_nvfp4_parameters(target, TILES)
    target.load_state_dict(source.state_dict())
    return target[0].weight.detach()


def into_rows(start, length):
    t, source = in_tiles(), quantize(dense(), amax=in_tiles().per_tensor_scale * 2688)
    t.narrow(0, start, length).copy_(source[:length])
    return t


def written_back():
    return training.write_back(copied(quantize(dense())), 0.1 * dense(), rng_state=STATE)


WRITERS = {
    "quantize": in_tiles,
    "indexing": lambda: in_tiles()[torch.randperm(ROWS, generator=generator())],
    "mask": lambda: in_tiles(2 * ROWS)[torch.arange(2 * ROWS) % 2 == 0],
    "slice": lambda: in_tiles()[5:].clone(),
    "cat at odd rows": lambda: torch.cat([in_tiles()[:7], in_tiles()[20:33]]),
    "other rows": lambda: in_tiles().reshape(2 * ROWS, COLUMNS // 2).clone(),
    "padded": lambda: torch.constant_pad_nd(in_tiles(), [0, 0, 3, 2]),
    "copy_": lambda: copied(quantize(dense())),
    "load_state_dict": loaded,
    "copy_ into rows": lambda: into_rows(3, 20),
    "deepcopy": lambda: copy.deepcopy(copied(quantize(dense()))),
    "write_back": written_back,
}


def stepped(t, optimizer, **arguments):
    p = nn.Parameter(t.clone())
    p.grad = torch.zeros(p.shape)
    optimizer([p], lr=1e-2, **arguments).step()
    return p.detach()


def merged(t):
    return training.merge_low_rank(t, torch.zeros(4, t.shape[1]), torch.randn(t.shape[0], 4), round_mode="rne")


def beside_larger_rows(t):
    """The rows of t after a write of larger rows below them has changed the per-tensor scale, by which all share."""
    zeros = quantize(torch.zeros(16, t.shape[1]), t.spec)._replace(per_tensor_scale=t.per_tensor_scale)
    both = torch.cat([t, zeros])
    new = quantize(torch.ones(16, t.shape[1]), t.spec, amax=1.5 * 2688 * float(t.per_tensor_scale))
    both[t.shape[0] :].copy_(new)
    return both[: t.shape[0]]


def backward(t):
    """The weight that dgrad of a training linear reads, where products read transposed codes (Hopper, Blackwell)."""
    linear = nn.Linear(t.shape[1], t.shape[0], bias=False)
    quantize_(linear, training.NVFP4TrainingConfig())
    linear.weight = nn.Parameter(t.clone(), requires_grad=False)
    x = torch.zeros(16, t.shape[1], requires_grad=True)
    dys = (torch.zeros(16, t.shape[0]).index_fill_(1, row, 1.0) for row in torch.arange(t.shape[0]))
    return torch.stack([torch.autograd.grad(linear(x), x, dy)[0][0] for dy in dys])


ROUNDING = 0.15
"""The largest relative change of a row that is quantized again; 0.095 is the error of a normal one."""

READERS = {  # and how much they may change a row, relative to its norm
    "step": (lambda t: stepped(t, training.NVFP4Optimizer, inner=torch.optim.SGD, round_mode="stochastic"), 0),
    "step to nearest": (lambda t: stepped(t, training.NVFP4Optimizer, inner=torch.optim.SGD, round_mode="rne"), 0),
    "torch's step": (lambda t: stepped(t, torch.optim.SGD), ROUNDING),
    "operator on the transpose": (lambda t: t.clone().mT.mul_(1).mT, ROUNDING),
    "merge": (merged, ROUNDING),
    "other rows rescale": (beside_larger_rows, ROUNDING),
    "dgrad": (backward, 1e-5),
}
PAIRS = [(writer, "step") for writer in WRITERS]
PAIRS += [(writer, reader) for reader in list(READERS)[1:] for writer in ("quantize", "slice", "copy_")]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_reading_tiles_that_are_none_changes_nothing(writer, reader, monkeypatch):
    monkeypatch.setattr(plan, "reads_transposed", lambda device: True)
    t = WRITERS[writer]()
    assert t.spec == TILES
    before = t.dequantize().clone()
    read, limit = READERS[reader]
    after = read(t)
    after = after if type(after) is torch.Tensor else after.dequantize()
    assert ((after - before).norm(dim=1) <= limit * before.norm(dim=1)).all()


def test_tiles_stay_tiles():
    """A tensor in tiles stays in tiles, whatever rounds it again: their scales are those of the transpose."""
    t, update = in_tiles(), 0.3 * dense()
    written = (training.write_back(t, update, **how) for how in ({"rng_state": STATE}, {"round_mode": "rne"}))
    for each in (t.clone().mul_(1.3), merged(t), *written):
        assert tiled(each.unswizzled_scale()).all()


@pytest.mark.parametrize("rows", [16, 24])
def test_experts_have_tiles_of_their_own(rows):
    """Each expert has its tiles from its first row on, also where 16 does not divide its rows."""
    x = torch.stack([dense(rows).sort(0)[0], 3 * dense(rows).sort(0)[0]])
    t = quantize_experts(x, TILES)
    before = t.dequantize()
    t.mul_(1)
    assert torch.equal(t.dequantize(), before)
    assert all(tiled(scale).all() for scale in t.unswizzled_scale())


@pytest.mark.gpu
def test_a_gpu_reads_the_same_tiles():
    t = copied(quantize(dense()))
    on_gpu = t.cuda()
    assert torch.equal(tiled(on_gpu.unswizzled_scale()).cpu(), tiled(t.unswizzled_scale()))
    p = nn.Parameter(on_gpu.clone())
    p.grad = torch.zeros(p.shape, device="cuda")
    training.NVFP4Optimizer([p], torch.optim.SGD, lr=1e-2).step()
    assert torch.equal(p.detach().dequantize().cpu(), t.dequantize())
    again = t.clone().mul_(1.3), on_gpu.clone().mul_(1.3)
    assert torch.equal(again[0].dequantize(), again[1].dequantize().cpu())
    linear = nn.Linear(COLUMNS, ROWS, bias=False, device="cuda")
    quantize_(linear, training.NVFP4TrainingConfig())
    linear.weight = nn.Parameter(on_gpu, requires_grad=False)
    x = torch.zeros(ROWS, COLUMNS, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(linear(x), x, torch.ones(ROWS, ROWS, device="cuda"))  # ones round to themselves
    torch.testing.assert_close(dx[0], on_gpu.dequantize().sum(0), rtol=1e-3, atol=1e-3)

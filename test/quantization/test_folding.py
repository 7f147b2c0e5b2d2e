"""AWQ's scaling: the model computes what it did, and what is quantized after it errs less."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization import fold_scales
from nvfp4_tensor.quantization.folding import EXPONENTS

WIDTH = 64


class Block(nn.Module):
    def __init__(self, norm, reader=None):
        super().__init__()
        self.norm, self.reader = norm, reader
        self.q, self.k = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 32, bias=False)
        self.out = nn.Linear(80, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        inner = torch.cat((self.q(y), self.k(y)), dim=-1).tanh()
        return x + self.out(inner) + (self.reader(y) if self.reader else 0)


class ShiftedNorm(nn.RMSNorm):
    """Gemma's: the weight is what is added to 1."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape) * (1 + self.weight)


def make(norm=nn.RMSNorm, reader=None, dtype=torch.float32):
    torch.manual_seed(0)
    m = nn.Sequential(Block(norm(WIDTH), reader), Block(norm(WIDTH))).to(dtype)
    for block in m:
        # a few columns are fed much more than others, as in language models
        block.norm.weight.data[::16] *= 12
        if isinstance(block.norm, nn.LayerNorm):
            block.norm.bias.data.normal_()
    return m


def batches(dtype=torch.float32, count=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 40, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def run(m, data):
    with torch.no_grad():
        return torch.cat([m(x).float() for x in data])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_the_model_computes_what_it_did_and_errs_less(norm, dtype, tolerance):
    dense = make(norm, dtype=dtype)
    folded, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    folds = fold_scales(folded, batches(dtype), progress=False)
    assert [(fold.norm[0], list(fold.linears)) for fold in folds] == [
        ("0.norm", ["0.q", "0.k"]),
        ("1.norm", ["1.q", "1.k"]),
    ]
    assert all(fold.exponent in EXPONENTS and 0 < fold.loss < 0.8 * fold.before for fold in folds)
    unseen = batches(dtype, 4)[2:]
    expected = run(dense, unseen)
    assert torch.allclose(run(folded, unseen), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    for m in (folded, plain):
        quantize_(m, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith((".q", ".k")))
    errors = [(run(m, unseen) - expected).square().sum() for m in (folded, plain)]
    assert errors[0] < 0.85 * errors[1]


def test_a_loss_is_that_of_the_outputs():
    m = make()
    x = batches()
    before = copy.deepcopy(m)
    fold = fold_scales(m, x, progress=False)[0]
    for model, expected in ((before, fold.before), (m, fold.loss)):
        quantized = copy.deepcopy(model)
        quantize_(quantized, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name in ("0.q", "0.k"))
        found = 0.0
        for name in ("q", "k"):
            for batch in x:
                y = model[0].norm(batch)
                difference = getattr(quantized[0], name)(y) - getattr(model[0], name)(y)
                found += difference.square().sum().item()
        assert found == pytest.approx(expected, rel=1e-2)


def test_even_columns_are_left_alone():
    m = make()
    for block in m:
        block.norm.weight.data[::16] /= 12
    state = copy.deepcopy(m.state_dict())
    for fold in fold_scales(m, batches(count=1), progress=False):
        assert fold.loss > 0.9 * fold.before
        if fold.exponent == 0:
            prefix = fold.norm[0].split(".")[0]
            assert all(torch.equal(state[key], value) for key, value in m.state_dict().items() if key[0] == prefix)


def _shifted(m):
    m[0].norm = ShiftedNorm(WIDTH)
    m[0].norm.weight.data = torch.where(torch.arange(WIDTH) % 16 == 0, 11.0, 0.0)


def _times_a_constant(y):
    return nn.functional.linear(y, torch.ones(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "reader", torch.tanh),
        lambda m: setattr(m[0], "reader", _times_a_constant),
        lambda m: setattr(m[0].norm, "weight", m[1].norm.weight),
        _shifted,
    ],
    ids=["another reader", "a product of no linear", "a weight of two norms", "another form"],
)
def test_what_cannot_be_folded_stays_as_it_is(change):
    m = make()
    change(m)
    state = copy.deepcopy(m.state_dict())
    folds = fold_scales(m, batches(), progress=False)
    assert "0.norm" not in [fold.norm[0] for fold in folds]
    assert all(torch.equal(state[key], m.state_dict()[key]) for key in state if key.startswith("0."))


def test_linears_that_are_not_chosen_are_scaled_but_do_not_count():
    m = make()
    dense = copy.deepcopy(m)
    folds = fold_scales(m, batches(), filter_fn=lambda module, name: name == "0.k", progress=False)
    assert len(folds) == 1 and set(folds[0].linears) == {"0.q", "0.k"}
    assert torch.allclose(run(m, batches()), run(dense, batches()), atol=1e-4)


def test_there_must_be_batches():
    with pytest.raises(ValueError, match="at least one batch"):
        fold_scales(make(), [], progress=False)

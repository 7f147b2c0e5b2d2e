"""AWQ's scaling keeps the model's function and reduces the error of quantizing it."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig, quantize
from nvfp4_tensor.quantization import fold_scales
from nvfp4_tensor.quantization.accuracy.folding import EXPONENTS

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
    """Gemma's norm, which multiplies by 1 + weight."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape) * (1 + self.weight)


class SquaredNorm(nn.RMSNorm):
    """A norm of an unsupported form."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape) * self.weight.square()


class GatedNorm(nn.RMSNorm):
    """A norm with two inputs."""

    def forward(self, x, gate):
        return super().forward(x) * gate


def make(norm=nn.RMSNorm, reader=None, dtype=torch.float32):
    torch.manual_seed(0)
    m = nn.Sequential(Block(norm(WIDTH), reader), Block(norm(WIDTH))).to(dtype)
    for block in m:
        # a few columns are fed much more than others, as in language models
        block.norm.weight.data -= int(isinstance(block.norm, ShiftedNorm))
        block.norm.weight.data[::16] += 11.0
        if isinstance(block.norm, nn.LayerNorm):
            block.norm.bias.data.normal_()
    return m


def batches(dtype=torch.float32, count=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 40, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def run(m, data):
    with torch.no_grad():
        return torch.cat([m(x).float() for x in data])


@pytest.mark.parametrize(
    ("norm", "dtype", "tolerance"),
    [
        (nn.RMSNorm, torch.float32, 1e-5),
        (nn.LayerNorm, torch.bfloat16, 2**-5),
        (nn.LayerNorm, torch.float32, 1e-5),
        (ShiftedNorm, torch.bfloat16, 2**-5),
        (ShiftedNorm, torch.float32, 1e-5),
    ],
)
def test_the_model_computes_what_it_did_and_errs_less(norm, dtype, tolerance):
    dense = make(norm, dtype=dtype)
    folded, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    folds = fold_scales(folded, batches(dtype), progress=False)
    names = [(fold.norm[0], list(fold.linears)) for fold in folds]
    assert names == [("0.norm", ["0.q", "0.k"]), ("1.norm", ["1.q", "1.k"])]
    assert all(fold.exponent in EXPONENTS and 0 < fold.loss < 0.8 * fold.before for fold in folds)
    unseen = batches(dtype, 4)[2:]
    expected = run(dense, unseen)
    assert torch.allclose(run(folded, unseen), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    for m in (folded, plain):
        quantize_(m, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith((".q", ".k")))
    errors = [(run(m, unseen) - expected).square().sum() for m in (folded, plain)]
    assert errors[0] < 0.85 * errors[1]


def test_a_loss_is_that_of_the_outputs():
    m, x = make(), batches()
    before = copy.deepcopy(m)
    fold = fold_scales(m, x, progress=False)[0]
    for model, expected in ((before, fold.before), (m, fold.loss)):
        found = 0.0
        for name in ("q", "k"):
            linear = getattr(model[0], name)
            quantized = copy.deepcopy(linear)
            quantize_(quantized, NVFP4WeightOnlyConfig())
            found += sum((quantized(y) - linear(y)).square().sum().item() for y in map(model[0].norm, x))
        assert found == pytest.approx(expected, rel=1e-2)


def _gated(m):
    m[0].norm, norm = GatedNorm(WIDTH), m[0].norm
    m[0].norm.weight = norm.weight
    m[0].forward = lambda x: x + m[0].q(m[0].norm(x, x)) @ torch.ones(48, WIDTH)


def _returned_what_is_read(m):
    def forward(x):
        y = m[0].norm(x)
        return {"states": [y], "out": m[0].q(y)}

    m[0].forward, m[1] = forward, nn.Identity()


def read_by(reader):
    """Another reader of the first norm's output, given the model too."""
    return lambda m: setattr(m[0], "reader", lambda y: reader(m[0], y))


UNFOLDABLE = {
    "another reader": read_by(lambda block, y: torch.tanh(y)),
    "a product of no linear": read_by(lambda block, y: nn.functional.linear(y, torch.ones(WIDTH, WIDTH))),
    "a weight of two norms": lambda m: setattr(m[0].norm, "weight", m[1].norm.weight),
    "another form": lambda m: setattr(m[0].norm, "__class__", SquaredNorm),
    "two inputs": _gated,
    "a linear fed otherwise too": read_by(
        lambda block, y: nn.functional.linear(block.q(torch.ones(WIDTH)), torch.ones(WIDTH, 48))
    ),
    "a linear of two norms": lambda m: setattr(m[0], "q", m[1].q),
    "a weight read directly": read_by(lambda block, y: block.k.weight.sum(dim=0)),
    "a linear of codes": lambda m: setattr(m[0].k, "weight", nn.Parameter(quantize(m[0].k.weight.detach()), False)),
    "returned": _returned_what_is_read,
}


@pytest.mark.parametrize("change", UNFOLDABLE)
def test_what_cannot_be_folded_stays_as_it_is(change):
    m = make()
    UNFOLDABLE[change](m)
    state = copy.deepcopy(m.state_dict())
    folds = fold_scales(m, batches(), progress=False)
    assert "0.norm" not in [fold.norm[0] for fold in folds]
    assert all(torch.equal(state[key], m.state_dict()[key]) for key in state if key.startswith("0."))


@pytest.mark.parametrize("writes", range(1, 5))
def test_an_interrupt_leaves_no_half_of_a_fold(writes, monkeypatch):
    """A norm that is divided, while linears that read it are not yet multiplied, would be another model."""
    model, copied = Block(nn.LayerNorm(WIDTH)), Tensor.copy_
    x, count = torch.randn(32, WIDTH) * torch.logspace(-1, 1, WIDTH), itertools.count(1)

    def copy_(self, *args):
        result = copied(self, *args)
        if next(count) == writes:
            raise KeyboardInterrupt
        return result

    expected = model(x).detach()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tensor, "copy_", copy_)
        fold_scales(model, [x], progress=False)
    assert torch.equal(model(x), expected)
    assert fold_scales(model, [x], progress=False)[0].exponent > 0


def test_defaults_of_torch_and_autocast_change_nothing_but_what_the_model_computes(other_defaults):
    m, data = other_defaults(lambda: (make(), batches()))
    expected = other_defaults(make)
    other_defaults(lambda: fold_scales(expected, data, progress=False))
    fold = fold_scales(m, data, progress=False)[0]
    assert fold.exponent > 0
    assert other_defaults(lambda: all(map(torch.equal, m.state_dict().values(), expected.state_dict().values())))
    with torch.autocast("cpu", torch.bfloat16):
        again = other_defaults(lambda: fold_scales(make(), batches(), progress=False)[0])
    assert (again.exponent, again.loss) == (fold.exponent, fold.loss)
    with pytest.raises(ValueError, match="at least one batch"):
        fold_scales(make(), [], progress=False)


def test_linears_that_are_not_chosen_are_scaled_but_do_not_count():
    m = make()
    dense = copy.deepcopy(m)
    folds = fold_scales(m, batches(), filter_fn=lambda module, name: name == "0.k", progress=False)
    assert len(folds) == 1 and set(folds[0].linears) == {"0.q", "0.k"}
    assert torch.allclose(run(m, batches()), run(dense, batches()), atol=1e-4)

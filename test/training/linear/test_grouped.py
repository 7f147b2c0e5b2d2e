"""Experts: each group is a linear of its own."""

import pytest
import torch
from helpers.refusals import refuses

from nvfp4_tensor import training
from nvfp4_tensor.numerics.random_state import rng_state_of_expert

pytestmark = pytest.mark.slow


@pytest.fixture
def experts():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((60, 64), (4, 48, 64)))
    return x, w, torch.tensor([17, 17, 40, 57], dtype=torch.int32)


@pytest.mark.parametrize("recipe", ["nvidia", "accurate_eden", "forward_only"])
def test_groups_are_linears(experts, recipe):
    x, w, offs = experts
    dy = torch.randn(60, 48)
    state = torch.tensor([1, 2])
    y = training.grouped_linear(x, w, offs, recipe, rng_state=state)
    y.backward(dy)
    gradients = x.grad, w.grad
    begins = [0, *offs.tolist()]
    for e, (begin, end) in enumerate(zip(begins, offs.tolist(), strict=False)):
        if begin == end:
            assert (gradients[1][e] == 0).all()
            continue
        own_x, own_w = x.detach()[begin:end].requires_grad_(), w.detach()[e].requires_grad_()
        own = training.linear(own_x, own_w, None, recipe, rng_state=rng_state_of_expert(state, e))
        own.backward(dy[begin:end])
        assert torch.equal(y[begin:end], own)
        assert torch.equal(gradients[0][begin:end], own_x.grad) and torch.equal(gradients[1][e], own_w.grad)
    assert (y[57:] == 0).all() and (gradients[0][57:] == 0).all()


MIXED = training.RECIPES["nvidia"].replace(w_for_dx=training.RECIPES["nvidia"].dy, x_t=None, dy_t=None)


@pytest.mark.parametrize(
    "recipe, trained",
    [(recipe, "both") for recipe in ("nvidia", "accurate_eden", "weight_only", MIXED, training.Recipe(name="dense"))]
    + [("nvidia", "x"), ("nvidia", "w")],
    ids=str,
)
def test_one_graph_has_the_same_bits(experts, recipe, trained):
    """For any ends of groups; under autocast, if one of the two trains."""
    x, w, offs = experts
    x, w = (t if trained in ("both", name) else t.detach() for name, t in (("x", x), ("w", w)))
    wanted = [t for t in (x, w) if t.requires_grad]

    def call(x, w, offs):
        return training.grouped_linear(x * 2, w, offs, recipe)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ends in (offs, torch.tensor([0, 5, 5, 60], dtype=torch.int32)):
        outcomes = []
        for each in (compiled, call):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=trained != "both"):
                y = each(x, w, ends)
            outcomes.append([y, *torch.autograd.grad(y.float().square().sum(), wanted)])
        assert all(map(torch.equal, *outcomes))
    with pytest.raises(ValueError, match="ends of groups in order"):  # which are read when the graph runs
        compiled(x, w, offs.flip(0))


def test_autocast_and_no_rows(experts):
    x, w, offs = experts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = training.grouped_linear(x, w, offs)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and w.grad.dtype == torch.float32
    w.grad = None
    y = training.grouped_linear(x[:0], w, offs * 0)
    y.sum().backward()
    assert y.shape == (0, 48) and (w.grad == 0).all()


def grouped(offs=(17, 17, 40, 57), weight=None):
    weight = torch.ones(4, 48, 64) if weight is None else weight
    return training.grouped_linear(torch.ones(60, 64), weight, torch.tensor(offs, dtype=torch.int32))


test_errors = refuses(
    (lambda: grouped([17, 16, 40, 57]), "ends of groups in order"),
    (lambda: grouped([17, 17, 40, 61]), "from 0 to the 60 rows"),
    (lambda: grouped([17, 60]), r"offs is int32 \(4,\)"),
    (lambda: grouped(weight=torch.ones(4, 48, 60)), r"takes \(M, K\) and \(E, N, K\)"),
    (lambda: grouped(weight=torch.ones(4, 48, 64).char()), TypeError, "not a weight of torch.int8: cast it first"),
)

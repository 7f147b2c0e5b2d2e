"""Calls of a training linear: each has the bits of a fresh module's, op by op, whatever was called before."""

import contextlib
import copy
import functools
import random

import pytest
import torch
import torch.nn.utils.prune
from expecttest import assert_expected_inline
from helpers.count_ops import Ops
from helpers.product_operands import ProductOperands
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.quantization import quantize_

from nvfp4_tensor import quantize, training
from nvfp4_tensor.sharding.layout import LinearSharding, ShardedDim, TokenSharding
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig

DTYPES = [torch.float32, torch.bfloat16]
CODED = ["nvidia", "nvidia_4over6", "unbiased", "accurate", "accurate_eden"]


def linear_of(recipe="nvidia", seed=0, bias=True):
    torch.manual_seed(seed)
    linear = nn.Linear(48, 32, bias=bias)
    quantize_(linear, NVFP4TrainingConfig(recipe))
    return linear


def bytes_of(t):
    return None if t is None else t.detach().contiguous().flatten().view(torch.uint8)


def outcome(linear, x, mode="", autocast=None, seed=1):
    """The bytes of y, of all gradients and of the generator's state after a call; or the error."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_(mode != "no gradient of x")
    given = x if mode == "leaf" else x * 1
    calls = {
        "checkpoint": lambda: checkpoint(linear, given, use_reentrant=False),
        "reentrant": lambda: checkpoint(linear, given, use_reentrant=True),
        "twice": lambda: linear(given) + linear(given),
        "functional": lambda: torch.func.functional_call(linear, {"weight": linear.weight * 1.0}, (given,)),
    }
    quiet = torch.no_grad() if mode == "no_grad" else contextlib.nullcontext()
    try:
        with torch.autocast("cpu", autocast, enabled=autocast is not None), quiet:
            y = calls.get(mode, lambda: linear(given))()
        wanted = [p for p in (x, *linear.parameters()) if p.requires_grad] if y.requires_grad else []
        results = torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True) if wanted else ()
    except (RuntimeError, TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return [*map(bytes_of, (y, *results)), torch.get_rng_state()]


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q for p, q in zip(a, b, strict=True)
    )


def assert_as_fresh(linear, *call):
    """A call has the outcome of a copy's first one, run as the composite does."""
    fresh = copy.deepcopy(linear)
    with ProductOperands():
        expected = outcome(fresh, *call)
    got = outcome(linear, *call)
    assert equal(got, expected), call[1:]
    return got


# --- random calls, and changes between two ---------------------------------------------------------------------------


def random_input(choice, columns, dtype):
    """An input of any shape and layout, its columns and dtype mostly those given, with a NaN now and then."""
    columns += 16 * (choice.random() < 0.1)
    if choice.random() < 0.2:
        dtype = choice.choice([torch.float64, torch.float16, torch.float32, torch.bfloat16])
    rows = choice.choice(
        [(17,), (17,), (choice.randint(0, 9),), (2, choice.randint(0, 3)), (choice.randint(1, 2), 96), ()]
    )
    x = torch.randn(*rows, 2 * columns).to(dtype)
    x = x[..., ::2] if choice.random() < 0.2 else x[..., :columns].contiguous()
    if choice.random() < 0.1 and x.numel():
        x.view(-1)[0] = torch.nan
    return x


CHUNKED = [LinearSharding((TokenSharding(ShardedDim(), 1, chunks),)) for chunks in ((1, 0), (0, 2, 1))]
"""Of one rank, which has the chunks of each sequence in another order."""


@pytest.mark.parametrize("seed", range(16))
def test_random_calls(seed):
    choice = random.Random(seed)
    columns, dtype = choice.choice([16, 48, 64]), choice.choice(DTYPES)
    torch.manual_seed(seed)
    linear = nn.Linear(columns, choice.choice([1, 16, 32]), bias=choice.random() < 0.5, dtype=dtype)
    quantize_(linear, NVFP4TrainingConfig(choice.choice(CODED)))
    reuse = contextlib.ExitStack()
    modes = ["", "", "", "leaf", "no_grad", "no gradient of x", "checkpoint", "reentrant", "twice", "functional"]
    for call in range(12):
        if choice.random() < 0.2:
            reuse.enter_context(training.reuse_weight_codes(linear))
        if choice.random() < 0.1:
            reuse.close()
        if choice.random() < 0.1:
            with torch.no_grad():
                linear.weight.add_(0.01)
        if choice.random() < 0.1:
            training.set_recipe(linear, choice.choice(CODED))
        if choice.random() < 0.1:
            linear.sharding = choice.choice(CHUNKED)
        if choice.random() < 0.1:
            linear.to(choice.choice(DTYPES))
        linear.weight.requires_grad_(choice.random() < 0.9)
        x = random_input(choice, columns, choice.choice([linear.weight.dtype] * 3 + DTYPES))
        autocast = choice.choice([torch.bfloat16, torch.float16]) if choice.random() < 0.25 else None
        assert_as_fresh(linear, x, choice.choice(modes), autocast, 100 * seed + call)


def swapped_dtype(linear):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        linear.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def inference(linear):
    with torch.inference_mode():
        linear(torch.randn(8, 48))


def fake(linear):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        linear(mode.from_tensor(torch.randn(4, 48)))


def stored(linear):
    """A weight of codes, after a call of the dense one that trains as little."""
    training.set_recipe(linear, "accurate")
    linear.weight.requires_grad_(False)
    linear(torch.randn(5, 48, requires_grad=True))
    linear.weight = nn.Parameter(quantize(linear.weight.detach()), requires_grad=False)


CHANGES = {
    "nothing": lambda linear: None,
    "recipe": lambda linear: training.set_recipe(linear, "accurate"),
    "dense backward": lambda linear: training.set_recipe(linear, backward="bf16"),
    "dtype": lambda linear: linear.bfloat16(),
    "swapped dtype": swapped_dtype,
    "frozen weight": lambda linear: linear.weight.requires_grad_(False),
    "frozen codes": stored,
    "frozen bias": lambda linear: linear.bias.requires_grad_(False),
    "rounding state": lambda linear: setattr(linear, "rounding_state", torch.tensor([3, 4])),
    "weight": lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(32, 48))),
    "no outputs": lambda linear: (setattr(linear, "weight", nn.Parameter(torch.empty(0, 48))),
                                  setattr(linear, "bias", None)),
    "parametrized weight": lambda linear: nn.utils.parametrizations.weight_norm(linear),
    "pruned weight": lambda linear: nn.utils.prune.random_unstructured(linear, "weight", 0.5),
    "parametrized bias": lambda linear: nn.utils.parametrize.register_parametrization(linear, "bias", nn.Tanh()),
    "a call in inference mode": inference,
    "a call of fake tensors": fake,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_seen(change):
    linear, x = linear_of(), torch.randn(5, 48)
    outcome(linear, x)
    fresh, counted = copy.deepcopy(linear), copy.deepcopy(linear)
    for each in (linear, fresh, counted):
        torch.manual_seed(4)
        change(each)
    x = x.to(linear.weight.dtype)
    with Ops() as least:
        outcome(counted, x)
    with ProductOperands():
        expected = outcome(fresh, x)
    assert len(expected) > 2  # no error
    for _ in range(2):
        linear.calls = 0
        with Ops() as ops:
            assert equal(outcome(linear, x), expected)
        assert (ops.pairs, ops.products) == (least.pairs, least.products)  # nothing that nobody needs


# --- ops -------------------------------------------------------------------------------------------------------------


def test_the_ops_of_an_eager_step():
    """Each costs the host as much as a small kernel takes."""
    linear, x, dy = linear_of(bias=False), torch.randn(5, 48, requires_grad=True), torch.ones(5, 32)
    linear(x)
    with Ops() as ops:
        torch.autograd.grad(linear(x), (x, linear.weight), dy)
    assert_expected_inline(
        "\n".join(f"{name}: {count}" for name, count in ops.counts.items()),
        """\
nvfp4::train_linear_forward: 1
nvfp4::train_linear_backward: 1""",
    )


def test_the_ops_of_linears_with_one_input():
    """The first quantizes the input; each draws its own random state."""
    linears, x = [linear_of(bias=False) for _ in range(3)], torch.randn(2, 5, 48, requires_grad=True)
    for _ in range(2):
        with Ops() as ops:
            h = x * 1
            _ = [linear(h) for linear in linears]
    counts = {name: count for name, count in ops.counts.items() if name.startswith("nvfp4::")}
    assert counts == {"nvfp4::train_linear_forward": 1, "nvfp4::draw_rng_state": 2, "nvfp4::train_linear": 2}


def test_a_recipe_without_random_bits_draws_none():
    linear, x = linear_of(without_random_bits()), torch.randn(5, 48)
    outcomes = [outcome(linear, x, "", None, seed)[:-1] for seed in (1, 2)]
    torch.manual_seed(1)
    assert equal(*outcomes) and torch.equal(outcome(linear, x)[-1], torch.get_rng_state())


def without_random_bits():
    nearest = RECIPES["nvidia"].dy.replace(round_mode="rne")
    return RECIPES["nvidia"].replace(dy=nearest, dy_t=nearest.replace(hadamard_sign=True))


class Drawn(nn.Module):
    """A parametrization with random bits of its own, which counts its calls."""

    calls = 0

    def forward(self, w):
        self.calls += 1
        return w * torch.rand(())


@pytest.mark.parametrize("mode", ["", "no_grad", "no gradient of x", "another dtype"])
def test_a_call_reads_a_parametrized_weight_once(mode):
    linear, x, drawn = linear_of(), torch.randn(5, 48), Drawn()
    nn.utils.parametrize.register_parametrization(linear, "weight", drawn)
    outcome(linear, x)
    before = drawn.calls
    other = mode == "another dtype"
    assert_as_fresh(linear, x.bfloat16() if other else x, mode, torch.bfloat16 if other else None)
    assert drawn.calls == before + 1


# --- traces ---------------------------------------------------------------------------


def test_a_trace_contains_no_cached_codes():
    linear, x = linear_of(), torch.randn(4, 48)
    linear(x)
    graph = make_fx(linear)(x)
    with torch.no_grad():
        linear.weight.mul_(2)
        linear.bias.mul_(2)
    assert torch.equal(graph(x), linear(x))


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("recipe", ["nvidia", without_random_bits()], ids=str)
def test_a_checkpoint_of_the_first_calls(recipe, given):
    """A checkpoint compares what its two runs save, of which the second may know more of the module than the first."""
    linears, x = [linear_of(recipe), linear_of(recipe)], torch.randn(5, 48, requires_grad=True)
    outcomes = []
    for recomputes in (True, False):
        torch.manual_seed(2)
        for linear in linears:
            linear.rounding_state, linear.calls = torch.tensor([3, 4]) if given else None, 0

        def both(x):
            h = x * 1
            return linears[0](h) + linears[1](h)

        y = checkpoint(both, x, use_reentrant=False) if recomputes else both(x)
        parameters = [p for linear in linears for p in linear.parameters()]
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *parameters])])
    assert equal(*outcomes)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["linear", "grouped_linear", "module"])
def test_dropout_after_a_checkpoint_has_one_mask(kind, reentrant):
    weight, experts = torch.randn(32, 48, requires_grad=True), torch.randn(2, 32, 48, requires_grad=True)
    call = {
        "linear": lambda x: training.linear(x, weight),
        "grouped_linear": lambda x: training.grouped_linear(x, experts, torch.tensor([9, 20], dtype=torch.int32)),
        "module": linear_of(),
    }[kind]
    masks = []

    def block(x):
        masks.append(nn.functional.dropout(torch.ones(20, 32), 0.5))  # a draw before and one behind
        masks.append(nn.functional.dropout(torch.ones_like(y := call(x)), 0.5))
        return y * masks[-1]

    checkpoint(block, torch.randn(20, 48, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])


@pytest.mark.parametrize("keep_w", [True, False])
@pytest.mark.parametrize("saved", ["quantize_pair_values", "train_linear", "draw_rng_state"])
def test_a_selective_checkpoint_finds_what_it_saved(saved, keep_w):
    q, k, v = (linear_of(RECIPES["nvidia"].replace(keep_w=keep_w), seed) for seed in range(3))
    parameters = [p for linear in (q, k, v) for p in linear.parameters()]

    def policy(context, op, *args, **kwargs):
        kept = op is getattr(torch.ops.nvfp4, saved).default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def block(x):
        return q(x) * k(x) + v(torch.relu(q(x)).repeat(1, 2)[:, :48])

    outcomes = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)):
        torch.manual_seed(1)
        x = torch.randn(20, 48, requires_grad=True)
        h = x * 1
        k(h)  # a neighbour outside has had the input
        y = run(h)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *parameters])])
    assert equal(*outcomes)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("called", [True, False])
def test_errors_of_a_call(called):
    linear, x = linear_of(), torch.randn(5, 48)
    if called:
        outcome(linear, x)
    for other, error, message in (
        (torch.randn(5, 32), ValueError, r"takes an input \(\.\.\., 48\), got \(5, 32\)"),
        (x.bfloat16(), TypeError, r"NVFP4TrainingLinear.*is torch.bfloat16 and its weight torch.float32: cast one of"),
    ):
        with pytest.raises(error, match=message):
            linear(other.requires_grad_())
    with pytest.raises(RuntimeError, match=r'no second derivative.*set_recipe\(model, forward="bf16"'):
        x = x.requires_grad_()
        torch.autograd.grad(linear(x).sum(), x, create_graph=True)
    with pytest.raises(TypeError, match=r"is torch.float32 and its weight torch.bfloat16: cast one of"):
        linear.bfloat16()(x)
    linear.weight = nn.Parameter(torch.ones(32, 64))
    with pytest.raises(ValueError, match=r"takes an input \(\.\.\., 64\), got \(5, 48\)"):
        linear(x)
    linear.weight = nn.Parameter(torch.empty(32, 48, device="meta"))
    with pytest.raises(RuntimeError, match="takes tensors on one device, got cpu and meta"):
        linear(x)


TRANSFORMS = {
    "vmap": lambda call: torch.vmap(call)(torch.randn(3, 4, 48)),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(torch.randn(4, 48)),
    "jvp": lambda call: torch.func.jvp(call, (torch.randn(4, 48),), (torch.randn(4, 48),)),
}


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_raise(transform, called):
    linear = linear_of()
    if called:
        outcome(linear, torch.randn(4, 48))
    with pytest.raises(RuntimeError, match=r"NVFP4TrainingLinear\(in_features=48.* does not support transforms of"):
        transform(linear)
    training.set_recipe(linear, forward="bf16", backward="bf16")
    transform(linear)


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_tangent_is_not_dropped(called, trains):
    """Forward-mode derivatives are not supported: with nothing to train, the ops would return y without a tangent."""
    linear, x = linear_of(), torch.randn(5, 48)
    linear.requires_grad_(trains)
    for input in (x, x.clone().requires_grad_(trains)):
        if called:
            linear(input)
        with forward_ad.dual_level():
            with pytest.raises(RuntimeError, match=r"does not support transforms|implement the jvp function"):
                linear(forward_ad.make_dual(input, torch.ones_like(x)))
            assert torch.equal(linear(x), linear(x))  # without a tangent

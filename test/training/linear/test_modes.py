"""Training under torch's modes: inference, checkpoints, traces, transforms, threads, swaps of parameters."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.quantization import quantize_

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig
from nvfp4_tensor.training.linear.cache import WeightCodes
from nvfp4_tensor.training.linear.operands import quantize_operand


def linear_of(recipe="nvidia", seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(32, 32)
    quantize_(linear, NVFP4TrainingConfig(recipe))
    return linear


def step(call, parameters):
    torch.manual_seed(1)
    x = torch.randn(20, 32, requires_grad=True)
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- what is kept does not outlive its mode --------------------------------------------------------------------------


def test_a_training_step_after_inference_mode():
    linear = linear_of()
    with torch.inference_mode():
        linear(torch.randn(8, 32))
    fresh = linear_of()
    assert same(step(linear, linear.parameters()), step(fresh, fresh.parameters()))


def test_codes_of_fake_tensors_are_not_cached():
    linear = linear_of()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        linear(mode.from_tensor(torch.randn(4, 32)))
    fresh = linear_of()
    assert same(step(linear, linear.parameters()), step(fresh, fresh.parameters()))


def test_a_trace_contains_no_cached_codes():
    linear, x = linear_of(), torch.randn(4, 32)
    linear(x)
    graph = make_fx(linear)(x)
    with torch.no_grad():
        linear.weight.mul_(2)
        linear.bias.mul_(2)
    assert torch.equal(graph(x), linear(x))


@pytest.mark.parametrize("operation", ["to", "load_state_dict"])
def test_parameters_are_swapped(operation):
    linear, x = linear_of(), torch.randn(8, 32)
    linear(x).sum().backward()
    linear.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if operation == "to":
            assert linear.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
        else:
            other = linear_of(seed=1)
            linear.load_state_dict(other.state_dict())
            assert torch.equal(linear(x), other(x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_threads_never_see_a_new_key_with_old_codes():
    weight, spec = torch.randn(16, 16), QuantizeSpec()
    old = quantize_operand(weight, spec)
    seen = []

    class Watched(WeightCodes):
        """What another thread reads after each of its writes."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            seen.append(self.get(weight, spec))

    cache = WeightCodes()
    cache.put(weight, spec, old)
    weight.mul_(2)
    new = quantize_operand(weight, spec)
    cache.__class__ = Watched
    cache.put(weight, spec, new)
    assert seen and seen[-1] is new and not any(operand is old for operand in seen)


def test_a_linear_with_a_dense_weight_does_not_share_operands():
    first, second = linear_of(), linear_of()
    training.set_recipe(second, RECIPES["nvidia"].replace(name="x", w=None, w_for_dx=training.WeightForDx.DENSE))
    x = torch.randn(8, 32, requires_grad=True) * 1
    expected = second(x.clone())
    first(x)
    assert torch.equal(second(x), expected)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["linear", "grouped_linear", "module"])
def test_dropout_after_a_reentrant_checkpoint_has_one_mask(kind, reentrant):
    weight, experts = torch.randn(32, 32, requires_grad=True), torch.randn(2, 32, 32, requires_grad=True)
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

    checkpoint(block, torch.randn(20, 32, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])


@pytest.mark.parametrize("keep_w", [True, False])
@pytest.mark.parametrize("saved", ["quantize_pair_values", "train_linear", "draw_rng_state"])
def test_a_selective_checkpoint_finds_what_it_saved(saved, keep_w):
    recipe = RECIPES["nvidia"].replace(keep_w=keep_w)
    q, k, v = (linear_of(recipe, seed) for seed in range(3))

    def block(x):
        return q(x) * k(x) + v(torch.relu(q(x)))

    def policy(context, op, *args, **kwargs):
        kept = op is getattr(torch.ops.nvfp4, saved).default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    parameters = [p for linear in (q, k, v) for p in linear.parameters()]

    def checkpointed(x):
        k(x)  # a neighbour outside has had the input
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    def plain(x):
        k(x)
        return block(x)

    expected = step(plain, parameters)
    assert same(step(checkpointed, parameters), expected)


# --- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        lambda call: torch.vmap(call)(torch.randn(3, 4, 32)),
        lambda call: torch.func.grad(lambda x: call(x).sum())(torch.randn(4, 32)),
        lambda call: torch.func.jvp(call, (torch.randn(4, 32),), (torch.randn(4, 32),)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_transforms_of_torch_func_raise(transform):
    linear = linear_of()
    with pytest.raises(RuntimeError, match=r"NVFP4TrainingLinear\(in_features=32.* does not support transforms of"):
        transform(linear)
    training.set_recipe(linear, forward="bf16", backward="bf16")
    transform(linear)

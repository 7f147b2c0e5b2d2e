"""NVFP4TrainingLinear in a model: compiled, checkpointed, accumulated, cast, switched, saved."""

import copy
import functools

import pytest
import torch
from helpers.count_ops import Ops
from helpers.recipes import MORE
from helpers.refusals import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from nvfp4_tensor import training
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, NVFP4TrainingLinear, WeightForDx

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """k and v of one input, and an output."""

    def __init__(self, width):
        super().__init__()
        self.k, self.v = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.out(torch.relu(self.k(x)) + self.v(x)))


class Decoder(nn.Module):
    def __init__(self, width=32, blocks=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.lm_head = nn.Linear(width, 40)

    def forward(self, x, checkpointed=None):
        for block in self.layers:
            x = block(x) if checkpointed is None else checkpoint(block, x, use_reentrant=checkpointed)
        return self.lm_head(x)


def model_of(recipe="nvidia"):
    torch.manual_seed(0)
    model = Decoder()
    quantize_(model, NVFP4TrainingConfig(MORE.get(recipe, recipe)), filter_fn=training.keep_dense("lm_head"))
    return model


def step(model, call=None, seed=1, x=None):
    """y and all gradients of one forward and backward."""
    torch.manual_seed(seed)
    x = torch.randn(3, 7, 32) if x is None else x.detach()
    x.requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    y = (model if call is None else call)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- one graph, or none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["nvidia", "accurate_eden", "weight_only", "dense forward", "dense backward", "stochastic w again",
               "EDEN with a dense weight", "dy alone", "dy^T alone", "row scales"],
)  # fmt: skip
def test_compiled_bits_are_those_of_eager(recipe):
    """Where the forward is dense, torch 2.11 cut the gradient, and the graph drew its random bits in the backward."""
    block = model_of(recipe).eval().layers[0]  # compiled dropout has masks of its own
    model = nn.Sequential(nn.Tanh(), block)  # an input that eager mode shares
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in (1, 2, 3):
        with torch.autocast("cpu", torch.bfloat16, enabled=seed == 3 and recipe == "nvidia"):
            assert same(step(model, compiled, seed=seed), step(model, seed=seed))


def test_inductor_has_eagers_bits_and_those_of_a_dropout_by_fallback_random_alone():
    """Inductor's own dropout advances torch's generator otherwise, and what draws after it has other bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(1e-9), nn.Linear(64, 48))  # drops nothing
    quantize_(model, NVFP4TrainingConfig("nvidia"))
    x = torch.randn(32, 64)
    expected = step(model, x=x)
    for fallback in (True, False):
        torch._dynamo.reset()
        with torch._inductor.config.patch(fallback_random=fallback):
            found = step(model, torch.compile(model, fullgraph=True), x=x)
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        assert error < 1e-6 if fallback else error > 0.01


def test_a_compiled_graph_quantizes_a_shared_input_once_and_samples_per_layer():
    counts = {}

    def count(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function":
                counts[str(node.target)] = counts.get(str(node.target), 0) + 1
        return make_boxed_func(graph.forward)

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    model = model_of().layers[0]
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    step(model, torch.compile(model, fullgraph=True, backend=backend))
    # x of k and v; that of the output; three dy
    assert counts["nvfp4.quantize_pair_values.default"] == 2
    for name in ("train_linear_backward", "train_linear", "draw_rng_state"):
        assert counts[f"nvfp4.{name}.default"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvidia", "accurate_eden"])
def test_a_cuda_graph_replay_uses_current_weights_and_new_random_bits(recipe):
    model = model_of(recipe).cuda().eval()
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).square().sum().backward()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.square().sum().backward()
    seen = []
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        graph.replay()
        seen.append(model.layers[0].k.weight.grad.clone())
    assert not torch.equal(*seen), "every replay has new random bits"
    with torch.no_grad():
        model.layers[0].out.weight.mul_(2)
    graph.replay()
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs():
    model = model_of().cuda().eval()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(3, 64, 32, device="cuda")
    expected = step(model, x=x)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = step(model, compiled, x=x)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)


# --- what is quantized when ------------------------------------------------------------------------------------------


def quantized_weights(model, call=None):
    with Ops() as ops:
        step(model, call)
    return ops.weights


def test_reuse_weight_codes_quantizes_weights_once():
    model = model_of()
    weights = 3 * 2
    assert [quantized_weights(model) for _ in range(2)] == [weights] * 2
    with training.reuse_weight_codes(model):
        assert quantized_weights(model) == weights
        with training.reuse_weight_codes(model):
            assert quantized_weights(model) == 0, "gradient accumulation"
        call = functools.partial(model, checkpointed=False)
        assert quantized_weights(copy.deepcopy(model)) == weights, "a copy is another model"
        assert quantized_weights(model, call=call) == 0, "activation checkpointing"
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert quantized_weights(model) == weights, "an error of the caller, which is noticed"
        with torch.no_grad():
            model.layers[0].k.weight.mul_(2)
        assert quantized_weights(model) == 1, "another"
    assert quantized_weights(model) == weights


def test_sharing_changes_no_bit_and_saves_what_is_shared_once():
    block, saved = model_of().layers[0].eval(), []
    training.set_recipe(block.out, RECIPES["nvidia"].replace(w=None, w_for_dx=WeightForDx.DENSE))
    linears, x = (block.k, block.v, block.out), torch.randn(64, 32)
    expected = [step(linear, x=x.clone())[0] for linear in linears]
    torch.manual_seed(1)
    x = x.requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = [linear(x) for linear in linears[:2]]
    assert same([*found, block.out(x)], expected)  # which multiplies codes, and cannot share the others' values
    of_x = {t.untyped_storage().data_ptr() for t in saved if t.shape == (32, 64 // 2) and t.dtype == torch.uint8}
    assert len(of_x) == 1


# --- a model's life --------------------------------------------------------------------------------------------------


def test_parameters_and_state_dict_are_those_of_the_dense_model():
    """An optimizer that was made before has the same parameters, and a dense model takes the weights."""
    model, dense = Decoder(), Decoder()
    parameters = list(model.parameters())
    quantize_(model, NVFP4TrainingConfig(), filter_fn=training.keep_dense("lm_head"))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == dense.state_dict().keys()
    dense.load_state_dict(model.state_dict())
    x = torch.randn(4, 32)
    training.set_recipe(model, forward="bf16", backward="bf16")
    assert torch.equal(model.eval()(x), dense.eval()(x))


# --- errors ----------------------------------------------------------------------------------------------------------


def of(make):
    return lambda: quantize_(make(), NVFP4TrainingConfig(), filter_fn=lambda module, name: True)


test_modules_that_cannot_train_in_nvfp4_raise = refuses(
    (of(lambda: nn.Linear(16, 16).requires_grad_(False)), r"weight of Linear\(in_.* is frozen.*filter_fn"),
    (of(lambda: model_of().layers[0].k), "already: change its recipe with training.set_recipe"),
    (of(lambda: nn.MultiheadAttention(16, 2).out_proj), TypeError, "NonDynamicallyQuantizableLinear.*filter_fn"),
    (of(lambda: nn.Conv1d(1, 1, 1)), TypeError, "NVFP4 configs quantize nn.Linear, not Conv1d"),
)


def test_an_error_leaves_all_linears_unconverted():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16).double())
    with pytest.raises(TypeError, match=r"torch\.float64"):
        quantize_(model, NVFP4TrainingConfig())
    assert all(type(linear) is nn.Linear for linear in model)
    quantize_(model.float(), NVFP4TrainingConfig())
    assert all(type(linear) is NVFP4TrainingLinear for linear in model)


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["embedding"].weight
    quantize_(model, NVFP4TrainingConfig())
    model["head"](model["embedding"](torch.arange(8))).square().sum().backward()
    assert model["head"].weight is model["embedding"].weight and model["head"].weight.grad is not None

"""torch.compile, export, CUDA graphs and checkpointing: no graph break, the bits of eager, fresh draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.repeats import captured, times
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_
from torchao.utils import unwrap_tensor_subclass

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, fake_quantize, quantize

pytestmark = pytest.mark.slow

STOCHASTIC = QuantizeSpec(round_mode="stochastic")


def quantized_model(config, device="cpu"):
    m = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)).to(device)
    quantize_(m, config)
    return m


@pytest.mark.parametrize(("config", "backend"), [
    (NVFP4Config(round_mode="stochastic"), "inductor"), (NVFP4WeightOnlyConfig(), "aot_eager"),
], ids=["w4a4", "weight only"])  # fmt: skip
def test_a_compiled_model_gives_the_numbers_and_gradients_of_eager(device, config, backend):
    m = quantized_model(config, device)
    compiled = torch.compile(m, fullgraph=True, backend=backend)
    for rows in (3, 17, 1):  # recompiles once, with a dynamic batch
        x, found = torch.randn(rows, 64, device=device), []
        for function in (compiled, m):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(rows)
            y = function(leaf)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), (leaf, m[0].bias))])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert found[0][1].abs().sum() > 0


def test_dynamic_batches_do_not_recompile():
    m = quantized_model(NVFP4Config())
    counter = CompileCounter()
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for rows in (3, 5, 17, 64):
            compiled(torch.randn(rows, 64))
    assert counter.frame_count == 1


def test_draws_in_a_graph_are_those_of_eager_bit_for_bit(device):
    """And afresh at each site and in each call, also of a constant, which Inductor would fold."""
    constant = torch.linspace(0.1, 1, 2560, device=device).view(40, 64)

    def function(x):
        draws = [quantize(values, STOCHASTIC) for values in (x, x, constant * 1, constant * 1)]
        return *[t.qdata for t in draws], draws[0].per_tensor_scale, fake_quantize(x, STOCHASTIC), draws[0].dequantize()

    compiled = torch.compile(function, fullgraph=True)
    x = torch.randn(40, 64, device=device)
    torch.manual_seed(2)
    expected = function(x)
    torch.manual_seed(2)
    got, again = compiled(x), compiled(x)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    for group in ([*got[:2], *again[:2]], [*got[2:4], *again[2:4]], [got[5], again[5]]):
        assert len({tuple(draw.flatten().tolist()) for draw in group}) == len(group)


def test_a_tensor_goes_into_and_out_of_a_graph(device):
    t = quantize(torch.randn(32, 64, device=device))

    def function(t, x):
        return quantize(x), t.t(), torch.nn.functional.linear(x, t), t[16:].clone()

    x = torch.randn(8, 64, device=device)
    expected, got = function(t, x), torch.compile(function, fullgraph=True, backend="aot_eager")(t, x)
    assert isinstance(got[0], NVFP4Tensor) and got[0].spec == QuantizeSpec() and got[1].transposed
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t, n: quantize(x).dequantize(),
        lambda x, t, n: t[n:].dequantize(),
        lambda x, t, n: torch.cat([t, t]).dequantize(),
        lambda x, t, n: t.unswizzled_scale().float(),
        lambda x, t, n: t[torch.arange(n)].dequantize(),
    ],
)
def test_any_number_of_rows_is_a_graph_or_two(function):
    """One row, complete tiles of scales, and others need at most two graphs."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    for rows in (2, 5, 8, 16, 23, 32, 38):
        x = torch.randn(rows, 64)
        arguments = x, quantize(x), rows // 2
        assert torch.equal(compiled(*arguments), function(*arguments))
    assert counter["unique_graphs"] - before <= 4


def test_a_spec_is_an_argument_like_any_other():
    compiled = torch.compile(fake_quantize, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(32, 32)
    specs = [{}, {"block_rows": 16}, {"hadamard_sign": True}, {"hadamard_sign": 5}, {"scale_ceiling": 256}]
    for spec in [QuantizeSpec(**arguments) for arguments in specs]:
        assert torch.equal(compiled(x, spec), fake_quantize(x, spec))


@pytest.mark.parametrize("compile", [False, True])
def test_checkpointing_recomputes_the_same_bits(compile):
    seen = []

    def block(x):
        y = fake_quantize(x, STOCHASTIC)
        if not compile:
            seen.append(y.detach().clone())
        return (y * y).sin()

    def step(x):
        return checkpoint(block, x, use_reentrant=False).sum() + checkpoint(block, x * 2, use_reentrant=False).sum()

    x = torch.randn(16, 64)
    grads = []
    for function in (
        lambda x: block(x).sum() + block(x * 2).sum(),
        torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition") if compile else step,
    ):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(9)
        function(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-6)
    if not compile:
        assert len(seen) == 6 and torch.equal(seen[2], seen[5]) and torch.equal(seen[3], seen[4])
        assert not torch.equal(seen[2], seen[3])


def test_export():
    """With a dynamic batch, and unwrapped: torchao's way to plain tensors for runtimes without subclasses."""
    m, shapes = quantized_model(NVFP4Config()), ({0: torch.export.Dim("batch", min=2, max=64)},)
    inputs = [torch.randn(rows, 64) for rows in (2, 9)]
    expected = [m(x) for x in inputs]
    program = torch.export.export(m, (torch.randn(5, 64),), dynamic_shapes=shapes)
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(program.module()(x), y, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        program = torch.export.export(unwrap_tensor_subclass(m), (inputs[1],))
    assert torch.equal(program.module()(inputs[1]), expected[1])
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in program.state_dict.values())


def test_the_graph_of_a_w4a4_linear():
    m = nn.Linear(64, 48)
    quantize_(m, NVFP4Config(round_mode="stochastic"))
    names = []

    def backend(graph, inputs):
        names.extend(
            str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "nvfp4" in str(node.target)
        )
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    with torch.no_grad():
        torch.compile(m, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(torch.randn(3, 64))
    assert_expected_inline(
        "\n".join(names),
        """\
nvfp4.draw_rng_state.default
nvfp4.quantize_activation.default
nvfp4.matmul.default""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config()], ids=["weight only", "w4a4"])
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_kernels_that_let_the_next_begin(config, rows):
    """With Inductor's programmatic dependent launch, bits equal those of a run without overlap."""
    from torch._inductor import config as inductor

    layers = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    for layer in layers:
        quantize_(layer, config)

    def step(x):  # without sums of Inductor's own, whose order its tuning decides
        for layer in layers:
            x = x + layer(x.sin()).cos()
        return x

    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = torch.compile(step, fullgraph=True)(x)
        torch._dynamo.reset()
        with inductor.patch({"triton.enable_pdl": True}):
            compiled = torch.compile(step, fullgraph=True)
            compiled(x)
        graph, y = captured(lambda: compiled(x))
    for _ in times(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.gpu
def test_cuda_graph_replays_draw_afresh():
    x = torch.randn(64, 256, device="cuda")
    w = quantize(torch.randn(32, 256, device="cuda"))._replace(activation_spec=STOCHASTIC)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        quantize(x, STOCHASTIC), torch.nn.functional.linear(x, w)
    torch.cuda.synchronize()
    graph, (t, y) = captured(lambda: (quantize(x, STOCHASTIC), torch.nn.functional.linear(x, w)))
    draws = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        draws.append((t.qdata.clone(), y.clone()))
    assert not torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[1][0], draws[2][0])
    assert not torch.equal(draws[0][1], draws[1][1])


@pytest.mark.parametrize("call, message", [
    (lambda t: t.sort(), "aten.sort.default is not supported on an NVFP4Tensor; dequantize() first"),
    (lambda t: t[:, 3:5], "a range along the blocks must start at a multiple of 16"),
    (lambda t: t[3:40].fill_(3.0), "shares its per-tensor scale"),
], ids=["operator", "slice", "write"])  # fmt: skip
def test_unsupported_in_a_graph_is_a_runtime_error_with_the_message(call, message):
    t = quantize(torch.randn(64, 96))
    compiled = [torch.compile(call, fullgraph=fullgraph, backend="aot_eager") for fullgraph in (True, False)]
    for function in (call, *compiled):
        with pytest.raises(RuntimeError) as error:
            function(t)
        assert message in str(error.value) and (function is call or "got UnsupportedError(" in str(error.value))


def test_codes_into_a_slice_with_a_shared_scale_are_refused_in_a_graph_alone():
    t, source = (quantize(torch.randn(300, 64), amax=6.0) for _ in range(2))

    def write(t, source):
        t[128:256].copy_(source[:128])

    before = t.dequantize()
    with pytest.raises(RuntimeError, match="write outside of the compiled function"):
        torch.compile(write, fullgraph=True, backend="aot_eager")(t, source)
    assert torch.equal(t.dequantize(), before)
    write(t, source)
    assert torch.equal(t[128:256].dequantize(), source[:128].dequantize())


STALE = """
import torch
from nvfp4_tensor import quantize
from nvfp4_tensor.dispatch import linears
from nvfp4_tensor.tensor import description
torch.manual_seed(0)
x, w = torch.randn(4, 64), quantize(torch.randn(32, 64))
if NEW:  # another version of the package: its products are twice as large
    plain, description.source_digest = linears._matmul, lambda: "another version"
    torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag and "another version"  # before torch 2.13
    linears._matmul = lambda *arguments: plain(*arguments) * 2
y = torch.compile(torch.nn.functional.linear, fullgraph=True)(x, w)
assert torch.allclose(y, torch.nn.functional.linear(x, w.dequantize()) * (1 + NEW), rtol=1e-4, atol=1e-4), y
"""


@pytest.mark.exhaustive
def test_graphs_cached_by_another_version_are_not_used(tmp_path):
    """torch's cache key does not include our code, so equal linears of equal tensors have equal keys."""
    for new in (False, True):
        subprocess.run(
            [sys.executable, "-c", f"NEW = {new}\n{STALE}"],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            cwd=Path(__file__).parents[2],
            check=True,
        )

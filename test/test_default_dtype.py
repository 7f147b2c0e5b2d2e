"""No bit depends on torch.set_default_dtype: every factory says its dtype, and jobs give the bits of float32.

transformers sets the default dtype while it builds a model, and users set it to build one in bfloat16.
"""

import ast
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    calibrate,
    checkpoints,
    emulation,
    fake_quantize,
    quantize,
    quantize_experts,
    training,
)
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.ops.schemas import _parameters as OPS
from nvfp4_tensor.ops.schemas import plain

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "nvfp4_tensor").rglob("*.py")), *sorted((ROOT / "nvfp4_cli").rglob("*.py"))]

# --- the source ------------------------------------------------------------------------------------------------------

FACTORIES = {
    "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
LEGACY = {"Tensor", "FloatTensor", "get_default_dtype"}


def is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.Name):
        return node.id.isupper()
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def without_dtype(source: str) -> list[str]:
    """Calls whose result has the default dtype. ``dtype=None`` says that the values decide; arange counts integers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.args[0] if ast.unparse(node.func).endswith("partial") else node.func
        owner, _, name = ast.unparse(function).rpartition(".")
        if owner != "torch":
            continue
        named = {keyword.arg for keyword in node.keywords}
        floats = name == "where" and len(node.args) == 3 and all(map(is_number, node.args[1:]))
        if floats or name in LEGACY or (name in FACTORIES and not named & {"dtype", None}):
            found.append(ast.unparse(node))
    return found


def test_the_check_sees_factories():
    assert without_dtype("torch.ones(3); torch.tensor([1.0], device=d); torch.where(a < b, 1.0, -0.5)")
    assert without_dtype("functools.partial(torch.empty, device=d); torch.Tensor()")
    assert not without_dtype("torch.ones(3, dtype=d); torch.arange(4); torch.where(a, 1, 0); x.new_ones(3)")


ALLOWED = {"torch.where(magnitude < 4, 1.0, 0.5)"}  # reference.steps_per_unit casts the result


def test_factories_say_their_dtype():
    found = {str(path.relative_to(ROOT)): set(without_dtype(path.read_text())) - ALLOWED for path in FILES}
    assert not {path: calls for path, calls in found.items() if calls}


# --- jobs ------------------------------------------------------------------------------------------------------------


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def net(dtype=torch.bfloat16):
    """Return a model; modules are made under torch's own default dtype, as their parameters would follow another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    torch.set_default_dtype(before)
    for i, p in enumerate(model.parameters()):
        p.data = normal(*p.shape, seed=i) / p.shape[-1] ** 0.5
    return model.to(dtype)


def gradients(model, x):
    y = model(x)
    y.backward(normal(*y.shape, dtype=y.dtype, seed=9))
    return [y, *(p.grad for p in model.parameters())]


SPECS = [
    QuantizeSpec(), QuantizeSpec(round_mode="stochastic", scale_rounding="up"), QuantizeSpec(scale_search="mse"),
    QuantizeSpec(round_mode="stochastic", random_bits=8, block_rows=16), QuantizeSpec(four_over_six=True),
    QuantizeSpec(row_scaled=True), QuantizeSpec(hadamard_sign=0x5A5A),
]  # fmt: skip


def quantized():
    state = torch.tensor([3, 4], dtype=torch.int64)
    for spec, dtype in itertools.product(SPECS, (torch.bfloat16, torch.float16, torch.float32)):
        x = normal(32, 80, dtype=dtype)
        t = quantize(x, spec, rng_state=state if spec.is_stochastic else None)
        yield t, t.dequantize(), t[16:], t * 2, t.clone().zero_(), t.clone().fill_(3.0), t.new_ones(2, 16)
    yield quantize_experts(normal(3, 16, 32), SPECS[0])
    yield fake_quantize(normal(16, 256), QuantizeSpec(round_mode="eden"), rng_state=state)


def linears():
    for config, dtype, rows in (
        (NVFP4WeightOnlyConfig(), torch.float16, 3), (NVFP4WeightOnlyConfig(activations="fp8"), torch.float32, 800),
        (NVFP4Config(), torch.float32, 40), (NVFP4Config(row_scaled=True), torch.float16, 40),
    ):  # fmt: skip
        model = net(dtype)
        quantize_(model, config)
        yield gradients(model, normal(rows, 64, dtype=dtype).requires_grad_())
    batches = [normal(40, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    for config in (NVFP4Config(percentile=99.0), NVFP4Config(headroom=True)):
        yield list(calibrate(net(), batches, config, progress=False).parameters())


def trained():
    for name, recipe in training.RECIPES.items():
        model = net(torch.bfloat16)
        quantize_(model, training.NVFP4TrainingConfig(recipe))
        torch.manual_seed(5)
        yield name, gradients(model, normal(48, 64, dtype=torch.bfloat16))
    offsets = torch.tensor([16, 48], dtype=torch.int32)
    x, w = normal(48, 64, dtype=torch.bfloat16), normal(2, 32, 64, dtype=torch.bfloat16)
    yield training.grouped_linear(x, w, offsets, training.RECIPES["nvidia"])


def optimized():
    adamw = {"lr": 1e-2, "weight_decay": 0.1}
    sgd = {"inner": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}
    kinds = (
        (torch.float32, training.NVFP4AdamW, adamw), (torch.bfloat16, training.NVFP4AdamW, adamw),
        ("nvfp4", training.NVFP4AdamW, adamw), ("nvfp4", training.NVFP4Optimizer, adamw),
        ("nvfp4", training.NVFP4Optimizer, {**sgd, "error_feedback": "momentum"}),
    )  # fmt: skip
    for kind, cls, options in kinds:
        model = training.to_nvfp4_parameters(net()) if kind == "nvfp4" else net(kind)
        optimizer = cls(model.parameters(), **options)
        for step in range(4):
            x = normal(40, 64, dtype=torch.bfloat16 if kind == "nvfp4" else kind, seed=step)
            mse_loss(model(x).float(), normal(40, 32, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if cls is training.NVFP4AdamW and step == 1:  # beyond what float16 counts to
                for state in optimizer.state.values():
                    state["step"].fill_(3001)
        states = optimizer.state_dict()["state"]
        if kind == "nvfp4" and cls is training.NVFP4Optimizer:
            for state in states.values():
                state.pop("step", None)  # torch's own is float64 under that default
        yield list(model.parameters()), states
    w = quantize(normal(32, 64, dtype=torch.bfloat16))
    yield training.merge_low_rank(w, normal(4, 64), normal(32, 4), rng_state=torch.tensor([1, 2], dtype=torch.int64))
    model, dense = training.to_nvfp4_parameters(net()), net()
    for p in dense.parameters():
        p.data.mul_(1.01)
    training.refit_(model, dense.state_dict(), seed=1)
    yield list(model.parameters())


def stored(folder):
    weight_only = net()
    quantize_(weight_only, NVFP4WeightOnlyConfig())
    for name in ("modelopt", "compressed-tensors", "torchao", "comfy"):
        path = folder / f"{name}-{torch.get_default_dtype()}.safetensors"
        checkpoints.save(weight_only, path, format=name)
        yield checkpoints.load(net(), path).state_dict()
    dense = folder / "dense.safetensors"
    save_file({f"model.layers.0.mlp.{i}_proj.weight": normal(96, 64, seed=len(i)) for i in ("up", "gate")}, dense)
    for to, options in (
        ("modelopt", {"input_amax": {"model.layers.0.mlp.up_proj": 3.0}}), ("mlx", {}), ("torchao", {"spec": SPECS[1]}),
    ):  # fmt: skip
        path = folder / f"to-{to}-{torch.get_default_dtype()}.safetensors"
        checkpoints.quantize(dense, path, to=to, progress=False, **options)
        yield [load_file(file) for file in sorted(path.rglob("*.safetensors")) or [path]]


def emulated():
    for name in emulation.FORMATS:
        cast = emulation.cast(normal(32, 64), name, cast_mode="actual")
        yield emulation.upcast(cast), emulation.cast(normal(32, 64), name)


JOBS = {job.__name__: job for job in (quantized, linears, trained, optimized, stored, emulated)}
"""Those of whole models, test_combinations.py runs with two default dtypes."""


def contents(results) -> list:
    """Return dtype, shape and bytes of each tensor."""
    leaves = tree_leaves([list(t._fields().values()) if isinstance(t, NVFP4Tensor) else t
                          for t in tree_leaves(list(results))])  # fmt: skip
    return [
        (t.dtype, tuple(t.shape), t.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        if isinstance(t, torch.Tensor)
        else t
        for t in leaves
    ]


@pytest.fixture
def kernels(request):
    """Run the ops of a CPU as usual, or in plain torch."""
    if request.param == "the library":
        yield
        return
    library = torch.library.Library("nvfp4", "IMPL")
    try:
        for name in OPS:
            library.impl(name, getattr(plain, name), "CPU")
        yield
    finally:
        library._destroy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
@pytest.mark.parametrize(("name", "kernels"), [
    *((name, "the library") for name in JOBS), *((name, "plain torch") for name in ("quantized", "linears", "trained")),
], indirect=["kernels"])  # fmt: skip
def test_jobs_give_the_bits_of_float32(name, kernels, tmp_path):
    job = (lambda: JOBS[name](tmp_path)) if name == "stored" else JOBS[name]
    expected = contents(job())
    assert len(expected) > 3
    for dtype in (torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = contents(job())
        finally:
            torch.set_default_dtype(torch.float32)
        assert found == expected, dtype


def test_the_grid_is_float32_under_every_default():
    """float64 would round the sums of a search otherwise, and 2^17 is infinite in float16."""
    a = normal(100).abs().clamp(max=6)
    expected = reference.nearest_value(a)
    torch.set_default_dtype(torch.float64)
    try:
        found = reference.nearest_value(a)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)

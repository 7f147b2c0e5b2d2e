"""No bit depends on torch.set_default_dtype: every factory says its dtype, and jobs give the bits of float32.

transformers sets the default dtype while it builds a model, and users set it to build one in bfloat16. Nor do files,
texts and steps depend on the default device, which users set to "cuda".
"""

import ast
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Tensor,
    QuantizeSpec,
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
from nvfp4_tensor.quantization import generate_calibration_text

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


def trained():
    for name, recipe in training.RECIPES.items():
        model = nn.Linear(64, 32, device="cpu", dtype=torch.bfloat16)
        model.weight.data, model.bias.data = normal(32, 64, dtype=torch.bfloat16), normal(32, dtype=torch.bfloat16)
        quantize_(model, training.NVFP4TrainingConfig(recipe))
        x = normal(48, 64, dtype=torch.bfloat16).requires_grad_()
        torch.manual_seed(5)
        y = model(x)
        dy = normal(*y.shape, dtype=y.dtype, seed=9)
        yield name, y, torch.autograd.grad(y, [x, *model.parameters()], dy)
    offsets = torch.tensor([16, 48], dtype=torch.int32)
    x, w = normal(48, 64, dtype=torch.bfloat16), normal(2, 32, 64, dtype=torch.bfloat16)
    yield training.grouped_linear(x, w, offsets, training.RECIPES["nvidia"])


def emulated():
    for name in emulation.FORMATS:
        cast = emulation.cast(normal(32, 64), name, cast_mode="actual")
        yield emulation.upcast(cast), emulation.cast(normal(32, 64), name)


JOBS = {job.__name__: job for job in (quantized, trained, emulated)}
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
    *((name, "the library") for name in JOBS), *((name, "plain torch") for name in ("quantized", "trained")),
], indirect=["kernels"])  # fmt: skip
def test_jobs_give_the_bits_of_float32(name, kernels):
    job = JOBS[name]
    expected = contents(job())
    assert len(expected) > 3
    for dtype in (torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        assert contents(job()) == expected, dtype


def test_the_grid_is_float32_under_every_default():
    """float64 would round the sums of a search otherwise, and 2^17 is infinite in float16."""
    a = normal(100).abs().clamp(max=6)
    expected = reference.nearest_value(a)
    torch.set_default_dtype(torch.float64)
    found = reference.nearest_value(a)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


# --- the default device ----------------------------------------------------------------------------------------------

GRADIENTS = [normal(32, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
BATCHES = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 3]])]


def stepped(model, folder):
    weight = nn.Parameter(quantize(GRADIENTS[0], SPECS[0]))
    optimizer = training.NVFP4AdamW([weight], lr=0.1)
    for weight.grad in GRADIENTS:
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def loaded(model, folder):
    checkpoints.load(model, folder, progress=False)
    return list(model.parameters())


def distilled(model, folder):
    training.distill(model, BATCHES, steps=2, progress=False)
    return list(model.parameters())


def written(model, folder):
    return generate_calibration_text(model, 24, window=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        stepped,
        loaded,
        pytest.param(
            distilled,
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's AdamW counts on the default device"),
        ),
        written,
    ],
)
def test_jobs_leave_the_default_device_alone(job, tmp_path):
    pytest.importorskip("transformers")
    from helpers.tiny_models import tiny_model

    checkpoints.save(tiny_model("Llama"), tmp_path, progress=False)
    models = [tiny_model("Llama", quantized=False) for _ in range(2)]
    expected = contents(job(models[0], tmp_path))
    with torch.device("meta"):
        found = job(models[1], tmp_path)
    assert contents(found) == expected

"""Exports that know no NVFP4 say so, and torch.export works."""

import io
import itertools

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import FP8Tensor, NVFP4Config, NVFP4WeightOnlyConfig, training
from nvfp4_tensor.checkpoints.models.loading import load_open
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def in_fp8(model):
    """Load a checkpoint with weights in FP8."""
    weights = {
        name: FP8Tensor(p.to(torch.float8_e4m3fn), torch.ones(1, 1)) if p.dim() > 1 else p
        for name, p in model.state_dict().items()
    }
    load_open(model, ModelCheckpoint(weights, {}), progress=False)


KINDS = {
    "weight-only": lambda m: quantize_(m, NVFP4WeightOnlyConfig()),
    "W4A4": lambda m: quantize_(m, NVFP4Config()),
    "training": lambda m: quantize_(m, training.NVFP4TrainingConfig()),
    "NVFP4 parameters": training.to_nvfp4_parameters,
    "FP8": in_fp8,
}
X = torch.ones(8, 64)


@pytest.fixture(params=KINDS)
def model(request):
    m = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    KINDS[request.param](m)
    return m


def traced_in_inference(model):
    with torch.no_grad():
        torch.jit.trace(model.requires_grad_(False), X, check_trace=False)


def traced_after_a_step(model):
    model(X.clone().requires_grad_()).sum().backward()
    torch.jit.trace(model, X)


def to_onnx(model):
    pytest.importorskip("onnxscript")
    torch.onnx.export(model, (X,), io.BytesIO(), dynamo=True, verbose=False)


EXPORTS = {
    "traced": lambda model: torch.jit.trace(model, X),
    "traced in inference": traced_in_inference,
    "traced after a step": traced_after_a_step,
    "traced as function": lambda model: torch.jit.trace(lambda x: model(x), X),
    "scripted": torch.jit.script,
    "to ONNX by TorchScript": lambda model: torch.onnx.export(model, (X,), io.BytesIO(), dynamo=False),
    "to ONNX": to_onnx,
}


CLASSES = [*itertools.product(("weight-only", "training", "FP8"), EXPORTS)]
"""Of each class of weights or linears; the other kinds have one of these."""


@pytest.mark.parametrize(
    "model, export", [*CLASSES, ("W4A4", "traced"), ("NVFP4 parameters", "traced")], indirect=["model"]
)
def test_an_export_without_nvfp4_names_the_one_with_it(model, export):
    with pytest.raises(Exception, match=r"torch\.export\.export\(model, args\)"):
        EXPORTS[export](model)
    assert model(X).isfinite().all()  # the model is as it was


def test_the_export_that_it_names_works(model):
    file = io.BytesIO()
    torch.export.save(torch.export.export(model.eval(), (X,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(X), model(X))


@pytest.mark.parametrize("strict", [False, True])
def test_dense_models_are_exported_as_before(strict):
    model = nn.Linear(64, 32)
    assert torch.equal(torch.jit.trace(model, X)(X), model(X))
    assert torch.equal(torch.jit.script(model)(X), model(X))
    assert torch.export.export(model, (X,), strict=strict)

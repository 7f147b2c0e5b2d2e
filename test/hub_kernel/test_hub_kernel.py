"""The repository for Hugging Face's kernels: loaded by get_local_kernel, mapped onto a transformers model."""

import base64
import copy
import functools
import hashlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

import nvfp4_tensor
from nvfp4_tensor import NVFP4WeightOnlyConfig, QuantizeSpec

kernels = pytest.importorskip("kernels")
tomllib = pytest.importorskip("tomllib")  # of Python 3.11
pytest.importorskip("transformers")
from helpers.tiny_models import tiny_model  # noqa: E402

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("hub_kernel_make", ROOT / "hub_kernel/make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
SPEC = QuantizeSpec(four_over_six=True)
LAYERS = {"NVFP4Linear": False, "NVFP4DynamicLinear": True}
"""Names, and whether they quantize activations."""


def is_built(backend):
    """Whether `make hub` has built this variant from these sources."""
    cache = ROOT / f"build/hub-{backend}/CMakeCache.txt"
    library = ROOT / f"build/hub-{backend}/lib/libnvfp4_{backend}.so"
    return library.exists() and f"NVFP4_OPS:STRING={make.namespace(backend)}\n" in cache.read_text()


@pytest.fixture(scope="module", params=["plain", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def repository(request, tmp_path_factory):
    """(backend, folder of a repository with one variant)."""
    out = tmp_path_factory.mktemp("hub") / "repository"
    if request.param == "plain":
        make.write_plain_variant(out)
        return "cpu", out
    if not is_built(request.param):
        pytest.skip(f"`make hub` builds the library of {request.param}")
    make.write_variant(out, request.param, "")
    return request.param, out


@pytest.fixture
def mapped(repository):
    """Return kernelized(model, layer, mode); nn.Linear is unmarked afterwards."""
    backend, folder = repository

    def kernelized(model, layer, mode):
        (variant,) = (folder / "build").iterdir()  # named, as of a folder of several kernels takes torch's build's own
        found = kernels.LocalLayerRepository(variant, layer_name=layer)
        mapping = {"Linear": {backend: found}}
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(model.to(backend), mode=mode, device=backend, use_fallback=False)

    kernels.replace_kernel_forward_from_hub(nn.Linear, "Linear")
    yield kernelized
    for name in ("kernel_layer_name", "kernel_condition"):
        delattr(nn.Linear, name)


llama = functools.partial(tiny_model, "Llama", quantized=False, hidden_size=64, num_hidden_layers=2)
IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


def test_the_kernel_has_the_bits_of_the_package(repository):
    backend, folder = repository
    kernel = kernels.get_local_kernel(folder, backend=backend)
    x = torch.randn(200, 176, generator=torch.Generator().manual_seed(2)).to(backend)
    got, want = kernel.quantize(x), nvfp4_tensor.quantize(x, SPEC)
    assert torch.equal(got.qdata, want.qdata) and torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
    assert torch.equal(got.per_tensor_scale, want.per_tensor_scale)
    assert torch.equal(kernel.dequantize(got), want.dequantize(torch.bfloat16))
    rows = torch.randn(3, 5, 176, device=backend, dtype=torch.bfloat16)
    bias = torch.randn(200, device=backend, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(rows.double(), want.dequantize(torch.float32).double(), bias.double())
    torch.testing.assert_close(kernel.linear(rows, got, bias).double(), expected, rtol=2**-8, atol=1e-3)
    with pytest.raises(ValueError, match="x has 160 columns, but the weight has 176"):
        kernel.linear(rows[..., :160], got)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_model_runs_on_the_layers(mapped, repository, layer):
    """Its logits are those of a model whose linears were quantized by quantize_ one by one, by the same operators."""
    backend, _ = repository
    model = llama().to(backend)
    reference = copy.deepcopy(model)
    config = nvfp4_tensor.NVFP4Config if LAYERS[layer] else NVFP4WeightOnlyConfig
    activations = {"activation_spec": QuantizeSpec()} if LAYERS[layer] else {}
    for linear in [each for each in reference.modules() if type(each) is nn.Linear]:
        quantize_(linear, config(weight_spec=SPEC, **activations))
    model = mapped(model, layer, kernels.Mode.INFERENCE)
    ids = IDS.to(backend)
    with torch.no_grad():
        dense, got, want = llama().to(backend)(ids).logits, model(ids).logits, reference(ids).logits
    torch.testing.assert_close(got, want, rtol=2**-6, atol=0.02 * want.abs().max().item())
    assert (got - want).float().norm() < 0.2 * (dense - want).float().norm()


def rounded_input(module, x):
    """The product with the rounded input, whose gradients are those of the product with x."""
    y = nn.functional.linear(x, module.weight, module.bias)
    exact = nn.functional.linear(nvfp4_tensor.fake_quantize(x.detach(), QuantizeSpec()), module.weight, module.bias)
    return y + (exact - y).detach()


@pytest.mark.parametrize("layer", LAYERS)
def test_training_has_straight_through_gradients(mapped, repository, layer):
    backend, _ = repository
    model = llama().float().to(backend)
    decoded = copy.deepcopy(model)
    for module in decoded.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = nvfp4_tensor.quantize(module.weight.data, SPEC).dequantize(torch.float32)
            if LAYERS[layer]:
                module.forward = functools.partial(rounded_input, module)
    model = mapped(model, layer, kernels.Mode.TRAINING)
    ids = IDS.to(backend)
    for each in (model, decoded):
        each(ids, labels=ids).loss.backward()
    pairs = zip(model.named_parameters(), decoded.parameters(), strict=True)
    errors = {name: ((p.grad - q.grad).norm() / q.grad.norm()).item() for (name, p), q in pairs}
    assert len(errors) > 20 and all(error < 1e-3 for error in errors.values()), errors
    before = model(ids).logits.detach()
    torch.optim.SGD(model.parameters(), lr=0.05).step()  # the codes follow the weights
    after = model(ids, labels=ids)
    assert not torch.equal(after.logits, before) and torch.equal(model(ids).logits, after.logits)


def test_a_variant_stands_alone(repository):
    """Relative imports of the standard library and torch alone; digests of all files; operators under its id."""
    _, folder = repository
    (variant,) = (folder / "build").iterdir()
    described = json.loads((variant / "metadata.json").read_text())
    files = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*") if path.is_file()}
    files = {name: path for name, path in files.items() if name != "metadata.json" and "__pycache__" not in name}
    assert described["digest"]["files"].keys() == files.keys()
    for name, path in files.items():
        digest = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        assert described["digest"]["files"][name] == digest, name
        if path.suffix == ".py":
            imported = re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
            assert not any(each.startswith(("nvfp4_tensor", "torchao", "numpy", "nvfp4_cli")) for each in imported), (
                name
            )
    assert hasattr(getattr(torch.ops, described["id"]), "quantize") and described["license"] == "bsd-3-clause"


def test_the_sources_are_those_of_the_builder(tmp_path):
    make.write_sources(tmp_path)
    found = tomllib.loads((tmp_path / "build.toml").read_text())
    listed = {path for kernel in found["kernel"].values() for path in kernel["src"]}
    assert all((tmp_path / path).is_file() for path in listed | set(found["torch"]["src"]))
    compiled = {
        p.relative_to(tmp_path).as_posix() for p in (tmp_path / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")
    }
    assert {path for path in compiled if "neon" not in path} == {
        path for path in listed if path.endswith((".cpp", ".cu"))
    }
    assert found["torch"]["stable-abi"] == {"cpu": "2.11", "cuda": "2.11"}
    assert (tmp_path / "CARD.md").is_file() and (tmp_path / "torch-ext/nvfp4_tensor/layers.py").is_file()

"""Mixtures of experts: files have one tensor per expert, transformers models one parameter (E, N, K)."""

import filecmp

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize_experts
from nvfp4_tensor.checkpoints.quantizing import quantize
from nvfp4_tensor.integrations import transformers as nvfp4

pytestmark = pytest.mark.slow

SHARED = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.1, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {
    "mixtral": transformers.MixtralConfig(intermediate_size=96, num_local_experts=4, **SHARED),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        intermediate_size=96, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2, head_dim=16, **SHARED
    ),
}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def experts(model):
    return {name: weight for name, weight in model.named_parameters() if weight.dim() == 3}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_loaded_as_they_are(folder, tmp_path, ids, form):
    """Codes equal the file's, products those of the decoded model, and the saved file equals the original."""
    quantize(folder, tmp_path / "nvfp4", to=form, progress=False)
    nvfp4.read_compressed_tensors()
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
        exact = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32)
    finally:
        nvfp4.read_compressed_tensors(natively=False)
    assert len(experts(model)) == 4 and all(isinstance(weight, NVFP4Tensor) for weight in experts(model).values())
    with torch.no_grad():
        logits = exact(ids).logits
        decoded = exact.dequantize()(ids).logits
    assert (logits - decoded).norm() < 1e-4 * decoded.norm()
    model.save_pretrained(tmp_path / "again")
    if form == "modelopt":
        assert filecmp.cmp(tmp_path / "nvfp4/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)
    again = load_file(tmp_path / "again/model.safetensors")
    with checkpoints.read(tmp_path / "nvfp4") as stored:
        names = [name for name, entry in stored.entries.items() if entry.quantized]
        assert sum("experts" in name for name in names) == 24
        for name in names:
            assert torch.equal(again[name], stored.linear(name).qdata)


def test_quantized_while_loading(folder, tmp_path, ids):
    """Each expert uses the common amax of its gate and up, and is saved as checkpoints.quantize writes it."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nvfp4.NVFP4TensorConfig())
    assert all(isinstance(weight, NVFP4Tensor) for weight in experts(model).values())
    assert not isinstance(model.model.layers[0].mlp.gate.weight, NVFP4Tensor)
    planned = sum(
        model.hf_quantizer.param_element_size(model, name, torch.empty(p.shape, device="meta")) * p.numel()
        for name, p in model.named_parameters()
        if isinstance(p, NVFP4Tensor)
    )
    assert planned == sum(p.nbytes for p in model.parameters() if isinstance(p, NVFP4Tensor))
    for name, weight in experts(AutoModelForCausalLM.from_pretrained(folder)).items():
        expected, got = quantize_experts(weight.detach()), model.get_parameter(name)
        assert torch.equal(got.qdata, expected.qdata) and torch.equal(got.scale, expected.scale)
    model.save_pretrained(tmp_path / "nvfp4")
    quantize(folder, tmp_path / "expected", progress=False)
    assert filecmp.cmp(tmp_path / "nvfp4/model.safetensors", tmp_path / "expected/model.safetensors", shallow=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("made", ["from a folder", "while loading"])
def test_some_experts_are_dense(folder, tmp_path, ids, made):
    """Experts left dense are saved under the names in files of this architecture."""
    if made == "from a folder":
        quantize(folder, tmp_path / "nvfp4", exclude=["*layers.0*experts*"], progress=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    else:
        config = nvfp4.NVFP4TensorConfig(modules_to_not_convert=["lm_head", ".*layers.0.*experts"])
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        model.save_pretrained(tmp_path / "nvfp4")
    kinds = {name.split(".")[2]: isinstance(weight, NVFP4Tensor) for name, weight in experts(model).items()}
    assert kinds == {"0": False, "1": True}
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, NVFP4Tensor)
    dense, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "nvfp4/model.safetensors")
    for name in [name for name in dense if "layers.0" in name and "experts" in name]:
        assert torch.equal(saved[name], dense[name])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "again")
    assert filecmp.cmp(tmp_path / "nvfp4/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)


@pytest.mark.parametrize("known", [True, False], ids=["loaded", "in memory"])
def test_files_without_transformers_own_loader(folder, tmp_path, ids, known):
    """checkpoints.load and save use the names of experts and routers in the model's files."""
    quantize(folder, tmp_path / "nvfp4", progress=False)
    dense = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    model = checkpoints.load(dense, tmp_path / "nvfp4", progress=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    if not known:
        for module in model.modules():
            vars(module).pop("_nvfp4_origins", None)
    checkpoints.save(model, tmp_path / "again", progress=False)
    assert filecmp.cmp(tmp_path / "nvfp4/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)


@pytest.fixture
def granite(tmp_path):
    """A folder whose experts are one tensor, for which transformers has no converter that joins experts."""
    torch.manual_seed(0)
    config = transformers.GraniteMoeConfig(
        intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, **{**SHARED, "num_hidden_layers": 3}
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize("dense", [[], ["model.layers.1.block_sparse_moe.experts", "lm_head"]], ids=str)
def test_experts_of_a_family_whose_files_stack_them(granite, tmp_path, ids, dense):
    """Saved one by one, as ModelOpt does, they are joined again; they kept random values before."""
    settings = nvfp4.NVFP4TensorConfig(modules_to_not_convert=dense or None)
    model = AutoModelForCausalLM.from_pretrained(granite, quantization_config=settings)
    assert sum(isinstance(weight, NVFP4Tensor) for weight in experts(model).values()) == (4 if dense else 6)
    model.save_pretrained(tmp_path / "nvfp4")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    checkpoints.load(other, tmp_path / "nvfp4", progress=False)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected) and torch.equal(other(ids).logits, expected)
        again.save_pretrained(tmp_path / "again")
        assert filecmp.cmp(tmp_path / "nvfp4/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)
        decoded = again.dequantize()(ids).logits
        again.save_pretrained(tmp_path / "decoded")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")(ids).logits, decoded)


def test_experts_of_unknown_names_raise(granite, tmp_path):
    """transformers would leave them at random values, with a warning."""
    AutoModelForCausalLM.from_pretrained(granite, quantization_config=nvfp4.NVFP4TensorConfig()).save_pretrained(
        tmp_path / "nvfp4"
    )
    tensors = load_file(tmp_path / "nvfp4/model.safetensors")
    renamed = {name.replace("gate_proj", "w1").replace("up_proj", "w3"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "nvfp4/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"w[13].weight of the checkpoint belongs to no parameter of .*experts, a G"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")

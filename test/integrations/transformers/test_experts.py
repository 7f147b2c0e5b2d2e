"""Mixtures of experts: files have one tensor per expert, transformers models one parameter (E, N, K)."""

import pytest
import torch
import transformers
from helpers.checkpoint_folders import edit
from helpers.hub_models import SIZES, assert_kept, from_pretrained, quantized, same_file
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, checkpoints
from nvfp4_tensor.checkpoints.quantizing import quantize

pytestmark = pytest.mark.slow

CONFIGS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "head_dim": None},
}


def dense_folder(family, folder):
    torch.manual_seed(0)
    sizes = {name: size for name, size in {**SIZES, "intermediate_size": 96, **CONFIGS[family]}.items() if size}
    config = getattr(transformers, f"{family}Config")(**sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(params=["Mixtral", "Qwen3Moe"])
def folder(request, tmp_path):
    return dense_folder(request.param, tmp_path / "dense")


@pytest.fixture
def granite(tmp_path):
    """A folder whose experts are one tensor, for which transformers has no converter that joins experts."""
    return dense_folder("GraniteMoe", tmp_path / "dense")


def experts(model):
    return {name: weight for name, weight in model.named_parameters() if weight.dim() == 3}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_loaded_as_they_are(folder, tmp_path, ids, form, natively):
    """Codes equal the file's, products those of the decoded model, and the saved file equals the original."""
    quantize(folder, tmp_path / "nvfp4", to=form, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32)
    assert len(experts(model)) == 4 and all(isinstance(weight, NVFP4Tensor) for weight in experts(model).values())
    with torch.no_grad():
        logits, decoded = exact(ids).logits, exact.dequantize()(ids).logits
    assert (logits - decoded).norm() < 1e-4 * decoded.norm()
    base = AutoModel.from_pretrained(tmp_path / "nvfp4")  # whose names have no prefix
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    options = {"num_hidden_layers": 1, "output_loading_info": True}  # what is left is told of by parameter
    left = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", **options)[1]["unexpected_keys"]
    assert sorted(each for each in left if "experts" in each) == [
        f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")
    ]
    model.save_pretrained(tmp_path / "again")
    assert form != "modelopt" or same_file(tmp_path / "nvfp4", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    with checkpoints.read(tmp_path / "nvfp4") as stored:
        names = [name for name, entry in stored.entries.items() if entry.quantized]
        assert sum("experts" in name for name in names) == 24
        assert all(torch.equal(again[name], stored.linear(name).qdata) for name in names)


@pytest.mark.parametrize("made", ["from a folder", "while loading"])
def test_some_experts_are_dense(folder, tmp_path, ids, made):
    """Experts left dense are saved under the names in files of this architecture."""
    if made == "from a folder":
        quantize(folder, tmp_path / "nvfp4", exclude=["*layers.0*experts*"], progress=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    else:
        model = from_pretrained(folder, None, {"modules_to_not_convert": ["lm_head", ".*layers.0.*experts"]})
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
    assert same_file(tmp_path / "nvfp4", tmp_path / "again")


@pytest.mark.parametrize("dense", [[], ["model.layers.1.block_sparse_moe.experts", "lm_head"]], ids=str)
def test_experts_of_a_family_whose_files_stack_them(granite, tmp_path, ids, dense):
    """Saved one by one, as ModelOpt does, they are joined again; they kept random values before."""
    model = from_pretrained(granite, None, {"modules_to_not_convert": dense or None})
    assert len(quantized(model).keys() & experts(model).keys()) == (4 if dense else 6)
    assert_kept(model, ids, tmp_path / "nvfp4", decoded=True)


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("linear_1", "linear_2", "linear_3")])
def test_experts_of_other_names(granite, tmp_path, ids, names):
    """Those that some family has are read; of unknown ones, transformers would leave them at random values."""
    model = from_pretrained(granite, None)
    model.save_pretrained(tmp_path / "nvfp4")
    called = dict(zip(("gate_proj", "up_proj", "down_proj"), names, strict=True))

    def rename(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            expert, part, kind = name.rsplit(".", 2)
            tensors[f"{expert}.{called[part]}.{kind}"] = tensors.pop(name)

    edit(tmp_path / "nvfp4", rename)
    if names[0] == "linear_1":
        with pytest.raises(ValueError, match=r"no tensors for .*experts.gate_up_proj.* would keep random"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    else:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
        assert torch.equal(again(ids).logits, model(ids).logits)
        again.save_pretrained(tmp_path / "again")
        assert same_file(tmp_path / "nvfp4", tmp_path / "again")

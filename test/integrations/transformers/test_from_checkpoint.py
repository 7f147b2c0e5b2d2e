"""from_pretrained of ModelOpt's NVFP4 checkpoints: by either file of settings, in any dtype, weight-only; refusals."""

import pytest
import torch
from helpers.checkpoint_folders import edit, edit_json
from helpers.hub_models import quantized
from transformers import AutoConfig, AutoModelForCausalLM

from nvfp4_tensor import QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints.quantizing import quantize
from nvfp4_tensor.integrations import transformers as nvfp4

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("natively")]

SPEC = QuantizeSpec(four_over_six=True)


@pytest.fixture
def folder(llama, tmp_path):
    """Return a folder in ModelOpt's layout."""
    quantize(llama()[1], tmp_path / "nvfp4", spec=SPEC, progress=False)
    return tmp_path / "nvfp4"


@pytest.mark.parametrize("options", [{}, {"gguf_file": None, "revision": "main"}, None], ids=str)
def test_hf_quant_config_alone_is_enough(folder, tmp_path, ids, options):
    """ModelOpt's releases of 2024 leave config.json as it was.

    The class of the model passes more arguments on than AutoModelForCausalLM, for instance that there is no GGUF.
    """
    expected = AutoModelForCausalLM.from_pretrained(folder)
    edit_json(folder / "config.json", lambda fields: fields.pop("quantization_config"))
    models = [AutoModelForCausalLM.from_pretrained(folder, config=nvfp4.config_of(folder))]
    if options is None:
        models.append(AutoModelForCausalLM.from_pretrained(folder))
    else:
        models.append(type(expected).from_pretrained(folder, **options))
    for model in models:
        assert len(quantized(model)) == 14 and torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, expected(ids).logits)


def test_hf_quant_config_of_another_format_is_left_alone(folder, tmp_path):
    edit_json(folder / "config.json", lambda fields: fields.pop("quantization_config"))
    edit_json(folder / "hf_quant_config.json", lambda fields: fields["quantization"].update(quant_algo="W8A16"))
    for each in (folder, tmp_path / "dense"):
        assert getattr(AutoConfig.from_pretrained(each), "quantization_config", None) is None
    with pytest.raises(ValueError, match="found none"):
        nvfp4.config_of(tmp_path / "dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_is_the_callers(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_weight_only_by_choice(llama, tmp_path):
    _, folder = llama()
    amaxes = {"model.layers.0.mlp.down_proj": 2.5}
    quantize(folder, tmp_path / "nvfp4", input_amax=amaxes, progress=False)
    config = AutoConfig.from_pretrained(tmp_path / "nvfp4")
    config.quantization_config["quantize_activations"] = False
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", config=config)
    assert len(quantized(model)) == 14
    assert all(w.activation_spec is None and w.activation_amax is None for w in quantized(model).values())
    assert "quantize_activations" not in model.config.to_dict()["quantization_config"]


def test_the_scales_of_an_fp8_cache_are_left_out_quietly(folder):
    assert checkpoints.detect(folder) == "modelopt"
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}))
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_a_variant_needs_a_folder_of_its_own(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder, variant="other")
    with pytest.raises(ValueError, match=r"transformers loads .*other.*, but the folder's model is in"):
        AutoModelForCausalLM.from_pretrained(folder, variant="other")
    assert len(quantized(AutoModelForCausalLM.from_pretrained(folder))) == 14


def test_other_compressions_stay_with_transformers():
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils.quantization_config import CompressedTensorsConfig

    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert type(AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].from_dict(fields)) is CompressedTensorsConfig

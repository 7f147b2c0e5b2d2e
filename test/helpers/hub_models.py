"""Small models of transformers, and what must hold for each model that is saved with NVFP4 weights."""

import filecmp
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from helpers.bits import stored_bits
from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig

FOUR_OVER_SIX = NVFP4WeightOnlyConfig(four_over_six=True)
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "dtype": "bfloat16",
}  # fmt: skip
IDS = torch.arange(3, 19)[None]


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a bfloat16 model, equal at each call, whose parameters are large enough to affect the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def from_pretrained(folder: Path, config=FOUR_OVER_SIX, settings=None, **options) -> PreTrainedModel:
    """Return a dense folder's model, quantized while it is loaded with a config and settings of NVFP4TensorConfig."""
    quantization = NVFP4TensorConfig(config, **(settings or {}))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, **options)


def empty(folder: Path) -> PreTrainedModel:
    """Return a dense bfloat16 model, with values of its own, of a quantized folder's configuration."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of 16 tokens."""
    return model(IDS).logits


def quantized(model: torch.nn.Module) -> dict[str, NVFP4Tensor]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}


def same_codes(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether codes and scales are equal, to the bit."""
    return torch.equal(stored_bits(a), stored_bits(b))


def same_file(a: Path, b: Path, name: str = "model.safetensors") -> bool:
    return filecmp.cmp(a / name, b / name, shallow=False)


@torch.no_grad()
def assert_kept(model: PreTrainedModel, ids: torch.Tensor, folder: Path, decoded: bool = False) -> PreTrainedModel:
    """Save a model in ``folder``, check what reads it, and return the one that from_pretrained gives.

    Its logits and that of checkpoints.load are the model's, what it saves has the same bytes, and with ``decoded``, so
    does it once it is dense.
    """
    auto = type(model)
    model.save_pretrained(folder)
    again, expected = auto.from_pretrained(folder), model(ids).logits
    empty = auto._from_config(model.config, dtype=model.dtype).eval()
    made = checkpoints.load(empty, folder, progress=False)
    assert torch.equal(again(ids).logits, expected) and torch.equal(made(ids).logits, expected)
    again.save_pretrained(folder.parent / "again")
    assert same_file(folder, folder.parent / "again")
    if decoded:
        dense = auto.from_pretrained(folder).dequantize()
        dense.save_pretrained(folder.parent / "decoded")
        assert torch.equal(auto.from_pretrained(folder.parent / "decoded")(ids).logits, dense(ids).logits)
    return again

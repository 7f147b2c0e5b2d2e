"""Made the folders beside it: ModelOpt's own export of a tiny Llama, on a CPU, by nvidia-modelopt 0.47.0.

python test/data/checkpoints/make_modelopt.py test/data/checkpoints
"""

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

CONFIGS = {"modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG, "modelopt_w4a16": mtq.W4A16_NVFP4_CFG}


def make(folder: Path, config: dict) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 16))
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.08)
    model = mtq.quantize(model, copy.deepcopy(config), lambda each: each(ids))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        make(Path(sys.argv[1]) / name, config)

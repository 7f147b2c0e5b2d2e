"""Folders with weights in the codes of other quantizations, as their writers lay them out."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from helpers.checkpoint_folders import CONFIG


def write_coded(folder: Path, tensors, settings=None, metadata=None, **config):
    """Write a folder with one file of tensors, and these settings as quantization_config."""
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
    quantization = {"quantization_config": settings} if settings else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **quantization, **config}))
    return folder


def in_fp8(tensors, block=128):
    """Return tensors with their projections in FP8 with DeepSeek's names, and with the values of these codes."""
    coded, decoded = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj" in name:
            coded[name], coded[f"{name}_scale_inv"], values = in_blocks(weight.float(), block, block)
            decoded[name] = values.bfloat16()
    return coded, decoded


def in_blocks(weight, height, width):
    """Return the codes, scales and values of a weight in FP8 whose blocks of this size share a scale."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // height), -(-columns // width))
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            where = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = weight[where].abs().max() / 448
            codes[where] = (weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
            values[where] = codes[where].float() * scale[i, j]
    return codes, scale, values

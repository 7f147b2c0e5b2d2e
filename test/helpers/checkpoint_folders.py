"""Create, change and compare small checkpoint folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.io.safetensors import Shards

GOLDEN = Path(__file__).parents[1] / "data/checkpoints"
"""ModelOpt's own exports."""

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
ATTENTION = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


def dense_tensors(layers=2, hidden=64, dtype=torch.bfloat16):
    """Return the tensors of a small Llama; q, k and v have very different magnitudes."""
    tensors = {"model.embed_tokens.weight": torch.randn(80, hidden), "lm_head.weight": torch.randn(80, hidden)}
    for i in range(layers):
        for j, (name, rows) in enumerate(ATTENTION.items()):
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = torch.randn(rows, hidden) * 4.0**j
        tensors[f"model.layers.{i}.mlp.gate_proj.weight"] = torch.randn(96, hidden)
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = torch.randn(96, hidden) * 3
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = torch.randn(hidden, 96)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(hidden)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_dense(folder, tensors=None, files=1):
    """Write a folder of dense safetensors, in one file or in several with an index, and return the tensors."""
    tensors = dense_tensors() if tensors is None else tensors
    folder.mkdir()
    names = list(tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    where = {name: f"model-{i * files // len(names) + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tensors


def edit(folder, change):
    """Rewrite a folder with one file; ``change`` changes its tensors in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    metadata = Shards(file).metadata
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def assert_refused(folder, change, message):
    """Damage the tensors of a folder with one file by ``change``, and check that reading it raises a ValueError."""
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        checkpoints.read(folder)


def edit_json(file, change):
    """Rewrite a JSON file; ``change`` changes its value in place."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def content(folder):
    """Return dtype, shape and bytes of each tensor of a folder."""
    shards = Shards(folder)
    return {name: (info.dtype, info.shape, shards[name].reshape(-1).view(torch.uint8).tolist())
            for name, info in shards.info.items()}  # fmt: skip


def same_files(a, b):
    """Assert that two folders have the same files, byte for byte, and return True."""
    files = [sorted(file.name for file in folder.iterdir()) for folder in (a, b)]
    assert files[0] == files[1], files
    different = [name for name in files[0] if (a / name).read_bytes() != (b / name).read_bytes()]
    assert not different, different
    return True


def at_call(patch, owner, method, count, act):
    """Act before that call of a method, or raise what ``act`` is."""
    whole, seen = getattr(owner, method), []

    def call(self, *arguments):
        seen.append(arguments)
        if len(seen) == count:
            if isinstance(act, BaseException):
                raise act
            act()
        return whole(self, *arguments)

    patch.setattr(owner, method, call)

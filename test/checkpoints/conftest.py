"""What several files of this folder start from."""

import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, edit_json, write_dense
from helpers.checkpoints import quantized, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints


@pytest.fixture(scope="module")
def tensors():
    """Of a small Llama, by name, its projections in NVFP4."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return quantized(tiny_tensors())


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A folder with a small Llama in each format of safetensors, W4A4 of ModelOpt but for MLX; and MXFP4 experts."""
    folder = tmp_path_factory.mktemp("sources")
    golden, quiet = GOLDEN / "modelopt_nvfp4", {"progress": False}
    for format in ("modelopt", "compressed-tensors", "torchao"):
        checkpoints.convert(golden, folder / format, to=format, **quiet)
    (folder / "comfy").mkdir()
    checkpoints.convert(golden, folder / "comfy/model.safetensors", to="comfy", **quiet)
    mlx = {"to": "mlx", "global_scale": True, "lossy": True}
    checkpoints.convert(GOLDEN / "modelopt_w4a16", folder / "mlx", **mlx, **quiet)
    torch.manual_seed(0)
    write_dense(folder / "dense")
    blocks, scales = torch.randint(256, (2, 8, 2, 16)), torch.randint(115, 125, (2, 8, 2))
    write_dense(folder / "mxfp4", {"e.down_proj_blocks": blocks.byte(), "e.down_proj_scales": scales.byte()})
    edit_json(folder / "mxfp4/config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
    return folder


@pytest.fixture
def copy(sources, tmp_path):
    """Copy the folder of a format; return it and the path to read."""

    def copied(format):
        folder = shutil.copytree(sources / format, tmp_path / "src")
        return folder, folder / "model.safetensors" if format == "comfy" else folder

    return copied


@pytest.fixture(scope="session")
def gguf_source(tmp_path_factory):
    """A GGUF file of a small Llama with static activations."""
    pytest.importorskip("gguf")
    from helpers.checkpoints import write_gguf

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    static = {"activation_spec": QuantizeSpec(), "activation_amax": torch.tensor(5.0)}
    tensors = quantized(tiny_tensors())
    write_gguf(path, {n: t._replace(**static) if "_proj.weight" in n else t for n, t in tensors.items()})
    return path


@pytest.fixture
def w4a4(tmp_path):
    """A copy of a folder that ModelOpt wrote."""
    return shutil.copytree(GOLDEN / "modelopt_nvfp4", tmp_path / "src")

"""An invalid scale in a file raises an error with the file and the tensor, or is decoded as stored."""

import random
import shutil

import numpy as np
import pytest
import torch
from helpers.checkpoint_folders import edit, edit_json
from safetensors.torch import load_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.blocks import unpack_blocks
from nvfp4_tensor.numerics import layout

FACTOR, INPUT, BLOCKS = "per-tensor scale", "input scale", "block scales"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STEM = WEIGHT.removesuffix(".weight")
KEYS = {
    "modelopt": (f"{STEM}.weight_scale_2", f"{STEM}.input_scale", f"{STEM}.weight_scale"),
    "compressed-tensors": (f"{STEM}.weight_global_scale", f"{STEM}.input_global_scale", f"{STEM}.weight_scale"),
    "torchao": tuple(f"{STEM}._weight_{part}" for part in ("per_tensor_scale", "act_per_tensor_scale", "scale")),
    "comfy": (f"{STEM}.weight_scale_2", f"{STEM}.input_scale", f"{STEM}.weight_scale"),
    "mlx": (f"{STEM}.global_scale", None, f"{STEM}.scales"),
    "gguf": ("blk.0.attn_q.scale", "blk.0.attn_q.input_scale", "blk.0.attn_q.weight"),
}
VALUES = [-1.0, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38, 2.5, -1e-40]


def offsets_in_gguf(path):
    """By tensor's name: its first byte, its bytes."""
    import gguf

    return {t.name: (t.data_offset, t.n_bytes) for t in gguf.GGUFReader(path).tensors}


def said(format, path):
    """What a file says of the weight: (values in float64, input scale or None), by the layouts' own definitions."""
    factor_key, input_key, scale_key = KEYS[format]
    if format == "gguf":
        data, places = path.read_bytes(), offsets_in_gguf(path)
        floats = {key: np.frombuffer(data, "<f4", 1, places[key][0]).item() for key in (factor_key, input_key)}
        start, size = places[scale_key]
        codes, scale = unpack_blocks(
            torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8).view(128, -1)
        )
        rows = torch.arange(128).view(4, 2, 16).transpose(1, 2).reshape(-1).argsort()
        codes, scale, factor, static = codes[rows], scale[rows], floats[factor_key], floats[input_key]
    else:
        stored = load_file(path if path.is_file() else path / "model.safetensors")
        factor, scale = stored[factor_key].item(), stored[scale_key].view(torch.float8_e4m3fn)
        static = None if input_key not in stored else stored[input_key].item()
        names = {"compressed-tensors": f"{STEM}.weight_packed", "torchao": f"{STEM}._weight_qdata"}
        codes = stored[names.get(format, WEIGHT)].view(torch.uint8)
        codes = codes >> 4 | codes << 4 if format == "comfy" else codes
        if format in ("torchao", "comfy"):
            scale = layout.unswizzle(scale.view(-1, 1, 32, 16), len(codes), codes.shape[1] // 8)
    with np.errstate(all="ignore"):
        if format == "compressed-tensors":
            factor, static = (np.float32(1) / np.float32(each) for each in (factor, static))
    if format == "mlx":
        factor = np.float32(factor) / np.float32(2688)
    values = layout.code_values(layout.unpack(codes)).double().unflatten(1, (-1, 16))
    return (values * scale.double().unsqueeze(-1) * float(factor)).flatten(1), static


def damage(format, path, kind, rng):
    """One scale gets another value."""
    key = KEYS[format][[FACTOR, INPUT, BLOCKS].index(kind)]
    value, byte = rng.choice(VALUES), rng.randrange(256)
    if format == "gguf":
        start, size = offsets_in_gguf(path)[key]
        data = bytearray(path.read_bytes())
        at = start + rng.randrange(size // 36) * 36 + rng.randrange(4) if kind == BLOCKS else start
        data[at : at + (1 if kind == BLOCKS else 4)] = bytes([byte]) if kind == BLOCKS else np.float32(value).tobytes()
        path.write_bytes(data)
        return

    def change(tensors):
        if kind == BLOCKS:
            flat = tensors[key].view(torch.uint8).view(-1)
            flat[rng.choice(flat.nonzero().flatten().tolist())] = byte  # the padding stays zero
        else:
            tensors[key].fill_(value)

    edit(path.parent if path.is_file() else path, change)


def is_right(format, path):
    """Whether a file is read; then as it says, and if not, by an error with its name and the tensor's."""
    want, static = said(format, path)
    try:
        with checkpoints.read(path) as read:
            parts = read.linear(WEIGHT)
    except ValueError as error:
        assert path.name in str(error) and ("q_proj" in str(error) or "attn_q" in str(error)), error
        return False
    assert 0 <= parts.per_tensor_scale < float("inf")
    got = tensor_of(parts, torch.float32).dequantize().double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got, want.float().double(), rtol=1e-6, atol=0, equal_nan=True)
    assert not want.isinf().any() or parts.per_tensor_scale > 1e30
    assert static is None or (parts.input_scale == np.float32(static) and 0 < parts.activation_amax() < float("inf"))
    return True


@pytest.mark.parametrize("format", KEYS)
def test_random_scales(sources, tmp_path, format, request):
    rng, right = random.Random(format), []
    kinds = [kind for kind, key in zip((FACTOR, INPUT, BLOCKS), KEYS[format], strict=True) if key]
    for i in range(30):
        if format == "gguf":
            path = shutil.copyfile(request.getfixturevalue("gguf_source"), tmp_path / f"{i}.gguf")
        else:
            path = shutil.copytree(sources / format, tmp_path / str(i))
        path = path / "model.safetensors" if format == "comfy" else path
        damage(format, path, kinds[i % len(kinds)], rng)
        right.append(is_right(format, path))
    assert 2 < sum(right) < 28


@pytest.mark.parametrize("format", ["modelopt", "torchao", "comfy", "mlx"])
def test_a_weight_of_zeros_may_have_a_factor_of_zero(sources, tmp_path, format):
    """As ModelOpt and torchao write it; with other codes it is refused, and nothing is written."""
    folder, codes = shutil.copytree(sources / format, tmp_path / "x"), WEIGHT
    path = folder / "model.safetensors" if format == "comfy" else folder
    edit(folder, lambda tensors: tensors[KEYS[format][0]].fill_(0))
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {WEIGHT}: expected a {FACTOR} above zero"):
        checkpoints.convert(path, tmp_path / "out", to="modelopt", progress=False)
    assert not (tmp_path / "out").exists()
    codes = f"{STEM}._weight_qdata" if format == "torchao" else WEIGHT
    edit(folder, lambda tensors: tensors[codes].view(torch.uint8).fill_(0x88))
    with checkpoints.read(path) as read:
        assert not tensor_of(read.linear(WEIGHT)).dequantize().any()


def test_comfy_names_weights_without_input_scale(sources, tmp_path):
    """There each layer may have one or not: a warning."""
    folder = shutil.copytree(sources / "comfy", tmp_path / "x")
    edit(folder, lambda tensors: tensors.pop(f"{STEM}.input_scale"))
    with pytest.warns(UserWarning, match=rf"model\.safetensors: {WEIGHT} have no input scale, but other weights do"):
        checkpoints.read(folder / "model.safetensors")


@pytest.mark.parametrize("dynamic", [True, "local"])
def test_compressed_tensors_that_are_dynamic(sources, tmp_path, dynamic):
    """Without one input scale the configuration says whether any was wanted."""
    folder = shutil.copytree(sources / "compressed-tensors", tmp_path / "x")
    edit(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith("input_global_scale")])

    def change(config):
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"]["dynamic"] = dynamic

    edit_json(folder / "config.json", change)
    if dynamic is True:
        with checkpoints.read(folder) as read:
            entry = read.entries[WEIGHT]
            assert entry.quantizes_activations and not entry.has_input_scale
    else:
        with pytest.raises(ValueError, match=r"input_global_scale.*is missing"):
            checkpoints.read(folder)


# --- where the bytes of a GGUF lie -----------------------------------------------------------------------------------


def with_offset(path, name, offset):
    """The same file, with another offset of that tensor in its header."""
    import gguf

    field = next(t.field for t in gguf.GGUFReader(path).tensors if t.name == name)
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(path.read_bytes())
    data[at : at + 8] = int(offset(int.from_bytes(data[at : at + 8], "little"))).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (lambda o: o - 32, r"its bytes overlap with those of blk\.0\."),
        (lambda o: o + 4, "offset in multiples of 32"),
        (lambda o: o + 2**40, "but the file is shorter"),
    ],
)
def test_offsets_of_a_gguf(gguf_source, tmp_path, offset, message):
    path = shutil.copyfile(gguf_source, tmp_path / "a.gguf")
    with_offset(path, "blk.0.ffn_up.weight", offset)
    with pytest.raises(ValueError, match=rf"a\.gguf: .*{message}|a\.gguf.*not a complete"):
        checkpoints.read(path)

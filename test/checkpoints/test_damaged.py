"""Damaged checkpoints: reading raises a ValueError that names the file, or returns what the file says."""

import functools
import importlib.util
import math
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
from helpers.checkpoint_folders import dense_tensors, edit
from helpers.coded_folders import CODINGS, write_coded
from helpers.damage import damage, damage_a_tensor
from helpers.layouts import LAYOUTS, SMALL

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

pytestmark = pytest.mark.slow
FORMATS = ("modelopt", "compressed-tensors", "torchao", "comfy", "mlx", "mxfp4")


def damage_a_file(folder, rng):
    damage(rng.choice(sorted(file for file in folder.iterdir() if file.name != "tokenizer.json")), rng)


def damage_a_number(folder, rng):
    """Of a scale, or of a code; or the last byte is missing."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    at = rng.randrange(8 + int.from_bytes(data[:8], "little"), len(data) - 3)
    data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", rng.randbytes(4)))
    file.write_bytes(data[: rng.choice((None, None, len(data) - 1))])


def read_all(path, format):
    checkpoints.detect(path)
    with checkpoints.read(path, format) as read:
        for name, entry in read.entries.items():
            tensor = tensor_of(read.linear(name)) if entry.quantized else read.dense(name)
            assert isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == entry.shape


def is_refused(folder, call, *arguments, **options):
    """Whether a call raises a ValueError, which has the name of the folder; nothing is left of an output."""
    try:
        with warnings.catch_warnings(action="ignore"):
            call(*arguments, **options)
    except ValueError as error:
        assert str(folder) in str(error), error
        assert not list(folder.parent.glob("out*"))
        return str(error)
    shutil.rmtree(folder.parent / "out", ignore_errors=True)
    return ""


PUBLISHED = LAYOUTS if importlib.util.find_spec("compressed_tensors") else ()  # it writes them


@pytest.mark.parametrize("name", [*FORMATS, *CODINGS, *PUBLISHED])
def test_random_damage(sources, tmp_path, name):
    """The error names the file; of published layouts the tensor too, or the weight that it is part of."""
    rng, refused, source, out = random.Random(name), 0, tmp_path / "source", tmp_path / "out"
    torch.manual_seed(0)
    if name in FORMATS:
        source, count, ways = sources / name, 60, [damage_a_file]
    elif name in CODINGS:
        count, ways = 25, [damage_a_file, damage_a_tensor, damage_a_number]
        coding, settings = CODINGS[name]
        write_coded(source, coding(dense_tensors(1))[0], settings)
    else:
        count, ways = 8, [functools.partial(damage_a_tensor, part="proj")]
        LAYOUTS[name].write(source, SMALL)

    def is_refused_now(folder):
        if name in FORMATS:
            return is_refused(folder, read_all, folder / "model.safetensors" if name == "comfy" else folder, name)
        if name in CODINGS:
            return is_refused(folder, checkpoints.quantize, folder, out, progress=False)
        return is_refused(folder, checkpoints.convert, folder, out, to="modelopt", progress=False)

    assert not is_refused_now(source)
    for _ in range(count):
        folder = shutil.copytree(source, tmp_path / "x")
        key = rng.choice(ways)(folder, rng)
        error = is_refused_now(folder)
        refused += bool(error)
        assert not error or name not in LAYOUTS or key.rpartition(".")[0] in error, (key, error)
        shutil.rmtree(folder)
    assert count / 8 < refused < count or (name in LAYOUTS and refused > 2)


def test_random_damage_of_a_gguf(tmp_path, gguf_source):
    """Bytes of its header, keys and names, and of its tensors' places; or the file is cut."""
    rng, path, whole, refused = random.Random(0), tmp_path / "a.gguf", gguf_source.read_bytes(), 0
    start = whole.index(b"output_norm.weight")
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(start + 200)] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(start) if rng.random() < 0.1 else None])
        refused += bool(is_refused(tmp_path, read_all, path, "gguf"))
    assert 8 < refused < 80


# --- scales ----------------------------------------------------------------------------------------------------------

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
WRONG = {
    FACTOR: (-1.0, math.inf, -math.inf, math.nan),
    INPUT: (0.0, -1.0, math.inf, -math.inf, math.nan),
    BLOCKS: (0x80, 0xB8, 0xFE),
}
RIGHT = {FACTOR: (2.5, 1e-30), INPUT: (2.5, 1e-30), BLOCKS: (0x01, 0x7F, 0xFF)}
"""Bytes of block scales: negative ones are wrong, and NaN is right."""


def parts_of_file(path):
    with checkpoints.read(path) as read:
        return read.linear(WEIGHT)


def with_scale(format, path, kind, value):
    """Change one scale of a file."""
    import gguf

    key = KEYS[format][[FACTOR, INPUT, BLOCKS].index(kind)]
    data = np.frombuffer(bytes([value]) if kind == BLOCKS else np.float32(value).tobytes(), np.uint8)
    if format == "gguf":
        (start,) = (t.data_offset for t in gguf.GGUFReader(path).tensors if t.name == key)
        whole = bytearray(path.read_bytes())
        whole[start : start + len(data)] = data.tobytes()
        path.write_bytes(whole)
    else:
        place = lambda tensors: tensors[key].view(-1).view(torch.uint8)[: len(data)]  # noqa: E731
        edit(path.parent if path.is_file() else path, lambda t: place(t).copy_(torch.from_numpy(data.copy())))


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")
@pytest.mark.parametrize("format", KEYS)
def test_scales(sources, tmp_path, format, request):
    """They are read as the file says, or refused by the names of the file and the tensor."""
    source = request.getfixturevalue("gguf_source") if format == "gguf" else sources / format
    for kind, key in zip((FACTOR, INPUT, BLOCKS), KEYS[format], strict=True):
        for value in (*WRONG[kind], *RIGHT[kind]) if key else ():
            shutil.rmtree(tmp_path / "x", ignore_errors=True)
            path = tmp_path / "x/a.gguf"
            if format == "gguf":
                path.parent.mkdir()
                shutil.copyfile(source, path)
            else:
                path = shutil.copytree(source, tmp_path / "x")
            path = path / "model.safetensors" if format == "comfy" else path
            with_scale(format, path, kind, value)
            if value in WRONG[kind]:
                with pytest.raises(ValueError, match=rf"{path.name}.*(q_proj|attn_q).*{kind}"):
                    parts_of_file(path)
                continue
            number = np.float32(value)
            want = {"compressed-tensors": np.float32(1) / number, "mlx": number / np.float32(2688)}.get(format, number)
            parts = parts_of_file(path)
            found = {FACTOR: parts.per_tensor_scale, INPUT: parts.input_scale}
            assert found[kind] == want if kind in found else parts.scale.view(torch.uint8)[0, 0] == value
            assert parts.activation_amax() is None or 0 < parts.activation_amax() < math.inf


@pytest.mark.parametrize("format", ["modelopt", "torchao", "comfy", "mlx"])
def test_a_weight_of_zeros_may_have_a_factor_of_zero(copy, tmp_path, format):
    """As ModelOpt and torchao write it; with other codes it is refused, and nothing is written."""
    folder, path = copy(format)
    edit(folder, lambda tensors: tensors[KEYS[format][0]].fill_(0))
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {WEIGHT}: expected a {FACTOR} above zero"):
        checkpoints.convert(path, tmp_path / "out", to="modelopt", progress=False)
    assert not (tmp_path / "out").exists()
    codes = f"{STEM}._weight_qdata" if format == "torchao" else WEIGHT
    edit(folder, lambda tensors: tensors[codes].view(torch.uint8).fill_(0x88))
    with checkpoints.read(path) as read:
        assert not tensor_of(read.linear(WEIGHT)).dequantize().any()


def test_comfy_names_weights_without_input_scale(copy):
    """There each layer may have one or not: a warning."""
    folder, path = copy("comfy")
    edit(folder, lambda tensors: tensors.pop(f"{STEM}.input_scale"))
    with pytest.warns(UserWarning, match=rf"model\.safetensors: {WEIGHT} have no input scale, but other weights do"):
        checkpoints.read(path)


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

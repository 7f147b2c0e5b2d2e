"""Damage files of checkpoints."""

import json
import math

import torch

from helpers.checkpoint_folders import edit

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn)
OTHER_VALUES = [None, 3, -1, "x", [], {}, [1], {"a": 1}, True, "NVFP4", 1.5, ["Linear"]]


def changed(value, rng):
    """One node of a JSON value replaced by something else, or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[key]
        else:
            value[key] = changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        value[index] = changed(value[index], rng)
        return value
    return rng.choice(OTHER_VALUES)


def damage(file, rng):
    if file.suffix == ".json":
        file.write_text(json.dumps(changed(json.loads(file.read_text()), rng)))
        return
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    if rng.random() < 0.7:
        header = json.dumps(changed(json.loads(header), rng)).encode()
    else:
        at = rng.randrange(length)
        header = header[:at] + rng.randbytes(1) + header[at + 1 :]
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def damage_a_tensor(folder, rng, part=""):
    """One with this part of a name is missing, or has another name, dtype, shape, bytes or number; return its name."""
    keys = []

    def change(tensors):
        key = rng.choice(sorted(key for key in tensors if part in key))
        keys.append(key)
        t = tensors.pop(key)
        data = t.reshape(-1).view(torch.uint8).clone()
        data[rng.randrange(len(data)) :] = rng.randrange(256)
        others = [{}, {f"{key}x": t}, {f"x.{key}": t}, {key: t.to(rng.choice(DTYPES))}]
        others += [{key: data}, {key: data.view(t.dtype).reshape(t.shape)}]
        if t.dtype in (torch.float32, torch.bfloat16):
            numbers = 0.0, -1.0, math.nan, math.inf, 1e38, 1e-45
            others += [{key: torch.full_like(t, number)} for number in numbers]
        if t.dim():
            shapes = t[1:], t[..., 1:], t.reshape(-1), t.t() if t.dim() == 2 else t, t.unsqueeze(-1), torch.cat((t, t))
            others += [{key: each.contiguous()} for each in (*shapes, t[..., :0])]
        tensors |= rng.choice(others)

    edit(folder, change)
    return keys[0]

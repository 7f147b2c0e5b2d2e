"""Damage files of checkpoints."""

import json

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

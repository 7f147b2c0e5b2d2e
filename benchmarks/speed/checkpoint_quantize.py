"""Quantizing a folder of bfloat16 safetensors: time beside the machine's own limit, and peak memory.

    python -m benchmarks.speed.checkpoint_quantize --gigabytes 4
    python -m benchmarks.speed.checkpoint_quantize --gigabytes 4 --to compressed-tensors

The folder is generated, Llama-shaped, and lies on the disk of ``--folder``. The limit is a process that does nothing
but read the source's bytes and write as many as the result has, in pieces of the same size; it and the quantizations
take turns, each in a process of its own, whose peak memory is what the operating system says (``ru_maxrss``), Python
and torch with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from nvfp4_tensor.checkpoints.io.safetensors import CHUNK, ShardFile, write_json

HIDDEN, INNER, KEY_VALUE, VOCABULARY = 3072, 8192, 1024, 32000
SPECS = {"nearest": {}, "four_over_six": {"four_over_six": True}, "scale_search": {"scale_search": True}}


def shapes_of(layers: int) -> list[dict[str, tuple[int, int]]]:
    """By file, a quarter of the layers each: the weights' shapes."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    files: list[dict[str, tuple[int, int]]] = [{"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}, {}, {}, {}]
    for i in range(layers):
        files[4 * i // layers] |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return files


def generate(folder: Path, gigabytes: float) -> None:
    """A folder of about so many bytes, of normal numbers."""
    a_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * KEY_VALUE * HIDDEN + 3 * HIDDEN * INNER)
    layers = max(4, round((gigabytes * 1e9 - 2 * VOCABULARY * HIDDEN) / a_layer))
    folder.mkdir(parents=True)
    where = {}
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1 << 22, generator=generator).bfloat16()
    for number, shapes in enumerate(shapes_of(layers), 1):
        name = f"model-{number:05}-of-00004.safetensors"
        empty = {key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in shapes.items()}
        shard = ShardFile(folder / name, empty, {"format": "pt"})
        for key, (rows, columns) in shapes.items():
            for first in range(0, rows * columns, len(normal)):
                shard.write(key, normal[: min(len(normal), rows * columns - first)])
            where[key] = name
        shard.finish()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", {"model_type": "llama", "dtype": "bfloat16"})


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def copy(source: Path, target: Path, written: int) -> None:
    """Read every byte of the source, write so many."""
    buffer = bytearray(CHUNK)
    target.mkdir()
    with (target / "copy").open("wb", buffering=0) as out:
        for file in sorted(source.iterdir()):
            with file.open("rb", buffering=0) as opened:
                while count := opened.readinto(buffer):
                    part = min(written, count)
                    out.write(memoryview(buffer)[:part])
                    written -= part
    assert not written


WORK = """
import json, resource, sys, time
from pathlib import Path
task = json.loads(sys.argv[1])
if task["kind"] == "copy":
    from benchmarks.speed.checkpoint_quantize import copy
    run = lambda: copy(Path(task["source"]), Path(task["target"]), task["bytes"])
else:
    from nvfp4_tensor import QuantizeSpec, checkpoints
    spec = QuantizeSpec(**task["spec"])
    run = lambda: checkpoints.quantize(task["source"], task["target"], to=task["to"], spec=spec, progress=False)
start = time.perf_counter()
run()
print(json.dumps({"seconds": time.perf_counter() - start,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def run(task: dict[str, Any]) -> dict[str, float]:
    """In a process of its own; the target goes away afterwards."""
    target = Path(task["target"])
    shutil.rmtree(target, ignore_errors=True)
    done = subprocess.run([sys.executable, "-c", WORK, json.dumps(task)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    result["bytes"] = size_of(target)
    shutil.rmtree(target)
    return result


def measure(source: Path, folder: Path, to: str, rounds: int) -> dict[str, dict[str, Any]]:
    """By variant: medians and quartiles of the seconds, peak bytes; the copy's among them."""
    base = {"source": str(source), "target": str(folder / "target")}
    quantized = {name: {**base, "kind": "quantize", "to": to, "spec": spec} for name, spec in SPECS.items()}
    written = int(run(quantized["nearest"])["bytes"])
    tasks = {harness.COPY: {**base, "kind": "copy", "bytes": written}, **quantized}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            results[name].append(run(task))
            time.sleep(1)  # what is written goes on to the disk
    summary = {}
    for name, runs in results.items():
        seconds = sorted(each["seconds"] for each in runs)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        summary[name] = {"median": middle, "low": low, "high": high, "peak": max(each["peak"] for each in runs)}
    moved = size_of(source) + written
    for each in summary.values():
        each["bandwidth"] = moved / each["median"]
        each["share"] = summary[harness.COPY]["median"] / each["median"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--to", default="modelopt")
    parser.add_argument("--rounds", type=harness.at_least(2), default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on which disk")
    parser.add_argument("--out", type=Path, help="where results go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "source"
        generate(source, arguments.gigabytes)
        found = measure(source, Path(name), arguments.to, arguments.rounds)
        nbytes = size_of(source)
    rows = [
        [
            name,
            f"{r['median']:.2f} s",
            f"{r['bandwidth'] / 1e9:.2f} GB/s",
            f"{r['share']:.2f}",
            f"{r['peak'] / 1e6:.0f} MB",
        ]
        for name, r in found.items()
    ]
    text = f"{nbytes / 1e9:.2f} GB of bfloat16 to {arguments.to}\n"
    text += harness.table(["", "median", "read + written", "of the copy", "peak memory"], rows)
    print(text)
    device = torch.device("cpu")
    path = harness.result_path(device, "checkpoint_quantize", arguments.out)
    harness.save(path, harness.record(device, source_bytes=nbytes, to=arguments.to, variants=found), text)


if __name__ == "__main__":
    main()

"""Report versions, devices and the kernels in use."""

from __future__ import annotations

import dataclasses
import json
import platform

import torch

from nvfp4_tensor.matmul import fbgemm
from nvfp4_tensor.numerics.layout import FP4_CAPABILITY
from nvfp4_tensor.ops import native


@dataclasses.dataclass(frozen=True)
class Info:
    """Versions, devices, and which kernels are in use; ``str`` formats a table."""

    versions: dict[str, str]
    devices: list[str]
    cpu: str
    cuda: str
    cpu_instruction_set: str
    cuda_archs: list[str]
    fp4_scaled_mm: bool
    fbgemm: str

    def __str__(self) -> str:
        lines = {
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "devices": "; ".join(self.devices),
            "CPU ops": f"{self.cpu}, {self.cpu_instruction_set}" if self.cpu == "native" else self.cpu,
            "CUDA ops": self.cuda,
            "CUDA archs": ", ".join(self.cuda_archs) or "none compiled",
            "FP4 products": "scaled_mm on tensor cores" if self.fp4_scaled_mm else "decoded (no FP4 tensor cores here)",
            "fbgemm": self.fbgemm,
        }
        return "\n".join(f"{name:<13} {value}" for name, value in lines.items())


def info() -> Info:
    """Return versions, devices and which kernels are in use, with the reason if plain torch is used."""
    native.load()
    record = _build_record()
    return Info(
        versions=_versions(record),
        devices=_devices(),
        cpu=str(native.library("cpu")),
        cuda=str(native.library("cuda")),
        cpu_instruction_set=native.instruction_set(),
        cuda_archs=record.get("cuda_archs", []),
        fp4_scaled_mm=any(torch.cuda.get_device_capability(i) >= FP4_CAPABILITY for i in _cuda_devices()),
        fbgemm=fbgemm.product().text,
    )


def _build_record() -> dict:
    path = native.find("build.json")
    return json.loads(path.read_text()) if path else {}


def _versions(record: dict) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("nvfp4-tensor", "torch", "torchao"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "(not installed, source tree)" if name == "nvfp4-tensor" else "(missing)"
    versions["python"] = platform.python_version()
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if record:
        nvcc = f", nvcc {record['nvcc']}" if record["nvcc"] else ""
        versions["built with"] = f"{record['compiler']}{nvcc}, torch {record['torch']}"
    return versions


def _cuda_devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _devices() -> list[str]:
    names = [f"CPU {platform.machine()}, {torch.get_num_threads()} threads"]
    for i in _cuda_devices():
        major, minor = torch.cuda.get_device_capability(i)
        names.append(f"cuda:{i} {torch.cuda.get_device_name(i)}, sm_{major}{minor}")
    return names

"""Find and load the libraries of native kernels.

Two libraries register C++ kernels for the schemas of ``composite``: ``libnvfp4_cpu`` and, only if torch has CUDA,
``libnvfp4_cuda``. Neither is required: without them, plain torch computes the same bits more slowly, and
:func:`nvfp4_tensor.info` shows the reason. Environment variables: ``NVFP4_TENSOR_NATIVE=0`` disables both libraries;
``NVFP4_TENSOR_ISA=amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``neon_bf16``, ``neon`` or ``portable`` limits the
instruction set of the CPU kernels;
``NVFP4_TENSOR_LIB`` is a folder from which to load other builds of the libraries.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import warnings
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class Library:
    """A native library, or the reason why it is not in use."""

    path: Path | None
    reason: str
    """Why the library is not in use; empty if it is."""

    @property
    def loaded(self) -> bool:
        """Whether native kernels are in use."""
        return not self.reason

    def __str__(self) -> str:
        return "native" if self.loaded else f"plain torch ({self.reason})"


_libraries: dict[str, Library] = {}


def load() -> None:
    """Load the available libraries once, after the schemas; warn if a present device has no native kernels."""
    if _libraries:
        return
    _libraries["cpu"] = _load("cpu")
    _libraries["cuda"] = _load("cuda") if _torch_has_cuda() else Library(None, "this torch has no CUDA")
    disabled = os.environ.get("NVFP4_TENSOR_NATIVE") == "0"
    missing = [name for name, library in _libraries.items() if not library.loaded]
    if "cuda" in missing and not torch.cuda.device_count():  # NVML: does not initialize CUDA before a fork
        missing.remove("cuda")
    if missing and not disabled:
        why = "; ".join(f"{name}: {_libraries[name].reason}" for name in missing)
        warnings.warn(
            f"nvfp4_tensor: native kernels are not in use, plain torch is correct but slow ({why}). "
            "Build them with `make build` in a checkout, or `pip install .` and run Python outside of it",
            stacklevel=2,
        )


def _torch_has_cuda() -> bool:
    return torch.version.cuda is not None


def _load(name: str) -> Library:
    if os.environ.get("NVFP4_TENSOR_NATIVE") == "0":
        return Library(None, "disabled by NVFP4_TENSOR_NATIVE=0")
    path = find(f"libnvfp4_{name}.so")
    if path is None:
        return Library(None, f"libnvfp4_{name}.so was not built")
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return Library(path, f"{path.name} could not be loaded: {error}")
    return Library(path, "")


def library(name: str) -> Library:
    """Return the library for "cpu" or "cuda" after :func:`load`."""
    return _libraries[name]


def find(file_name: str) -> Path | None:
    """Return the path of a file in the package's lib folder, of a checkout or an editable install, or None."""
    import nvfp4_tensor

    named = os.environ.get("NVFP4_TENSOR_LIB")
    folders = [Path(named)] if named else [Path(folder) / "lib" for folder in nvfp4_tensor.__path__]
    return next((path for folder in folders if (path := folder / file_name).exists()), None)


def _cpu_library() -> ctypes.CDLL | None:
    library = _libraries.get("cpu")
    if library is None or not library.loaded:
        return None
    handle = ctypes.CDLL(str(library.path))
    handle.nvfp4_cpu_isa.restype = ctypes.c_char_p
    return handle


def instruction_set() -> str:
    """Return the CPU kernels' instruction set; "torch" without kernels.

    "amx", "avx512_bf16", "avx512", "avx2" on x86-64, "neon_bf16", "neon" on aarch64, "portable" on any.
    """
    handle = _cpu_library()
    return handle.nvfp4_cpu_isa().decode() if handle else "torch"


def set_instruction_set(name: str) -> None:
    """Set the instruction set of the CPU kernels ("" for the best available); for tests.

    Raises:
        ValueError: the machine or build does not support it, or there is no CPU library.
    """
    handle = _cpu_library()
    if handle is None or handle.nvfp4_cpu_set_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available, {instruction_set()!r} is in use")

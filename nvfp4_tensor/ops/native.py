"""The compiled kernels: found, loaded, and accounted for.

Two libraries register C++ under the schemas of ``composite``: ``libnvfp4_cpu`` and ``libnvfp4_cuda``, the latter
loaded only where torch has CUDA. Neither is required; without one, plain torch serves the same ops with the same bits,
more slowly, and :func:`nvfp4_tensor.info` says why. ``NVFP4_TENSOR_NATIVE=0`` in the environment leaves both out;
``NVFP4_TENSOR_ISA=avx512``, ``avx2`` or ``portable`` holds the CPU kernels to a smaller instruction set.
``NVFP4_TENSOR_LIB`` names a folder to take the libraries from in place of the package's own, for other builds of them.
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
    """One native library: what serves its device, and why."""

    path: Path | None
    reason: str
    """Why the library is not in use; empty where it is."""

    @property
    def loaded(self) -> bool:
        """Whether native code serves the device."""
        return not self.reason

    def __str__(self) -> str:
        return "native" if self.loaded else f"plain torch ({self.reason})"


_libraries: dict[str, Library] = {}


def load() -> None:
    """Load what is there, once, after the schemas. Warns where plain torch serves a device that is there."""
    if _libraries:
        return
    _libraries["cpu"] = _load("cpu")
    _libraries["cuda"] = _load("cuda") if _torch_has_cuda() else Library(None, "this torch has no CUDA")
    switched_off = os.environ.get("NVFP4_TENSOR_NATIVE") == "0"
    missing = [name for name, library in _libraries.items() if not library.loaded]
    if "cuda" in missing and not torch.cuda.device_count():  # asks NVML: CUDA stays untouched, for who forks later
        missing.remove("cuda")
    if missing and not switched_off:
        why = "; ".join(f"{name}: {_libraries[name].reason}" for name in missing)
        warnings.warn(
            f"nvfp4_tensor: plain torch serves in place of native kernels, correct but slow ({why}). "
            "Build them with `make build` in a checkout, or `pip install .` and run Python outside of it",
            stacklevel=2,
        )


def _torch_has_cuda() -> bool:
    return torch.version.cuda is not None


def _load(name: str) -> Library:
    if os.environ.get("NVFP4_TENSOR_NATIVE") == "0":
        return Library(None, "switched off by NVFP4_TENSOR_NATIVE=0")
    path = find(f"libnvfp4_{name}.so")
    if path is None:
        return Library(None, f"libnvfp4_{name}.so was not built")
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return Library(path, f"{path.name} does not load: {error}")
    return Library(path, "")


def library(name: str) -> Library:
    """That of "cpu" or of "cuda", once :func:`load` has looked."""
    return _libraries[name]


def find(file_name: str) -> Path | None:
    """A file of the package's lib folder, beside the sources or where an editable install put it."""
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
    """What the CPU kernels run on: "avx512_bf16", "avx512", "avx2", "portable"; "torch" where no library is loaded."""
    handle = _cpu_library()
    return handle.nvfp4_cpu_isa().decode() if handle else "torch"


def set_instruction_set(name: str) -> None:
    """Hold the CPU kernels to an instruction set, at most what the machine has ("" for the best); for tests.

    Raises:
        ValueError: the machine or the build lacks it, or there is no CPU library.
    """
    handle = _cpu_library()
    if handle is None or handle.nvfp4_cpu_set_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available here, {instruction_set()!r} is in use")

"""Write a repository of Hugging Face kernels from our sources: python hub_kernel/make.py OUT [--cuda-archs "80 90a"]

OUT gets what the hub shows and its builder reads (build.toml, flake.nix, CARD.md, torch-ext, csrc), and build/VARIANT,
which ``kernels`` loads. The kernels, their schemas and the reference are copies of nvfp4_tensor's, made here and
nowhere kept: a namespace of their own lets them live beside the package in one process.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "nvfp4_tensor"
NAME, VERSION, LICENSE = "nvfp4-tensor", 1, "bsd-3-clause"
MODULE = NAME.replace("-", "_")
ABI = "2.11"
COPIED = (
    "numerics/*.py",
    "ops/__init__.py",
    "ops/schemas.py",
    "ops/fakes.py",
    "ops/composite/*.py",
    "_compat/exports.py",
)
"""What the operators need: schemas, fakes, and the reference, which serves devices without a kernel."""

_OPS = '''"""Load the library of this variant, and define its operators."""

from pathlib import Path

import torch

from .ops import composite, fakes  # noqa: F401  define the operators

for _library in sorted(Path(__file__).parent.glob("*.abi3.so")):
    torch.ops.load_library(str(_library))

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
'''
_OLDER = '''"""The same module as in the folder above, for older versions of kernels."""

import importlib.util
import sys
from pathlib import Path

if "{namespace}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("{namespace}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{namespace}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{namespace}"])
globals().update(vars(sys.modules["{namespace}"]))
'''
_PICKLES = '''"""Nothing of this package is pickled under a name of its own."""


def pin(public, *, loadable=True):
    return public
'''


def namespace(backend: str) -> str:
    """Return the id of the kernel, which is the namespace of its operators: unique to the sources and the backend."""
    digest = hashlib.sha256()
    for path in sorted([*(PACKAGE / "csrc").rglob("*"), ROOT / "CMakeLists.txt"]):
        if path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"_{MODULE}_{backend}_{digest.hexdigest()[:7]}"


def rewritten(text: str, depth: int, name: str) -> str:
    """Return a module of nvfp4_tensor with relative imports and operators in the namespace ``name``."""
    text = re.sub(r"\bfrom nvfp4_tensor\.", f"from {'.' * (depth + 1)}", text)
    text = re.sub(r"\btorch\.ops\.nvfp4\b", f"torch.ops.{name}", text)
    text = re.sub(r"([\"'])nvfp4(::|\")", lambda found: f"{found[1]}{name}{found[2]}", text)
    if "import nvfp4_tensor" in text or "torch.ops.nvfp4." in text:
        raise RuntimeError("a module of nvfp4_tensor imports the package in a way that is not rewritten here")
    return text


def write_python(folder: Path, name: str) -> None:
    """Write the Python modules of a variant."""
    for path in sorted((HERE / "torch-ext" / MODULE).glob("*.py")):
        shutil.copy(path, folder / path.name)
    for pattern in COPIED:
        for path in sorted(PACKAGE.glob(pattern)):
            target = folder / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewritten(path.read_text(), len(target.relative_to(folder).parts) - 1, name))
    (folder / "_compat" / "__init__.py").write_text("")
    (folder / "_compat" / "pickles.py").write_text(_PICKLES)
    (folder / "_ops.py").write_text(_OPS.format(namespace=name))


def build(backend: str, archs: str, name: str) -> list[Path]:
    """Compile the libraries with their operators in the namespace, in build/hub-BACKEND; return their paths."""
    folder = ROOT / "build" / f"hub-{backend}"
    options = ["-DNVFP4_CUDA=OFF"] if backend == "cpu" else ["-DNVFP4_CUDA=ON", f"-DNVFP4_CUDA_ARCHS={archs}"]
    options += [f"-DNVFP4_OPS={name}", f"-DPython_EXECUTABLE={sys.executable}"]
    options.append(f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / 'lib'}")
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    # CMake beside this Python is new enough, the system's may not be.
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for command in (["cmake", "-B", str(folder), "-G", "Ninja", *options], ["cmake", "--build", str(folder)]):
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": tools}, check=True)
    libraries = [folder / "lib" / f"libnvfp4_{each}.so" for each in ("cpu", "cuda") if each in ("cpu", backend)]
    missing = [path.name for path in libraries if not path.exists()]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} was not built: see the output of CMake above")
    return libraries


def metadata(folder: Path, backend: str, name: str, archs: list[str]) -> dict[str, object]:
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {
        "id": name,
        "name": NAME,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": files},
    }


def write_variant(out: Path, backend: str, archs: str = "") -> Path:
    """Build a variant with libraries in OUT/build, and return its folder."""
    name = namespace(backend)
    libraries = build(backend, archs, name)
    record = json.loads((ROOT / "build" / f"hub-{backend}" / "lib" / "build.json").read_text())
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    kind = "cpu" if backend == "cpu" else f"cu{''.join(record['nvcc'].split('.')[:2])}"
    variant = f"torch-stable-abi{ABI.replace('.', '')}-{kind}-{machine}-{platform.system().lower()}"
    folder = out / "build" / variant
    folder.mkdir(parents=True)
    for path in libraries:
        shutil.copy(path, folder / f"{name}_{path.stem.removeprefix('libnvfp4_')}.abi3.so")
    return _finished(folder, backend, name, [_capability(arch) for arch in record["cuda_archs"]])


def write_plain_variant(out: Path, backend: str = "cpu") -> Path:
    """Write OUT/build/torch-BACKEND, in which plain torch serves: the same bits, slowly, on every platform."""
    folder = out / "build" / f"torch-{backend}"
    folder.mkdir(parents=True)
    return _finished(folder, backend, f"{namespace(backend)}_plain", [])


def _capability(arch: str) -> str:
    """Return "10.0a" for "100a"."""
    number = arch.rstrip("a")
    return f"{number[:-1]}.{number[-1]}{arch[len(number) :]}"


def _finished(folder: Path, backend: str, name: str, archs: list[str]) -> Path:
    """Write the Python modules and metadata.json, with the digests of all files."""
    write_python(folder, name)
    older = folder / MODULE  # where older versions of kernels look
    older.mkdir()
    (older / "__init__.py").write_text(_OLDER.format(namespace=name))
    described = metadata(folder, backend, name, archs if backend == "cuda" else [])
    (folder / "metadata.json").write_text(json.dumps(described, indent=2))
    return folder


def write_sources(out: Path) -> None:
    """Write what the hub's builder reads: build.toml with every source, the sources, and the Python modules."""
    shutil.copytree(PACKAGE / "csrc", out / "csrc")
    for name in ("CARD.md", "flake.nix"):
        shutil.copy(HERE / name, out / name)
    shutil.copy(HERE / "CARD.md", out / "README.md")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    package = out / "torch-ext" / MODULE
    package.mkdir(parents=True)
    write_python(package, f"_{MODULE}")
    (package / "_ops.py").unlink()  # the builder writes its own
    (out / "torch-ext" / "torch_binding.cpp").write_text(
        '// The operators are registered where they are defined, in csrc.\n#include "registration.h"\n\n'
        "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n"
    )
    (out / "build.toml").write_text(build_toml(out))


def build_toml(out: Path) -> str:
    """Return build.toml. A kernel is a set of flags: the kernels.cpp of each instruction set, and files beyond it."""
    sources = sorted(path.relative_to(out).as_posix() for path in (out / "csrc").rglob("*") if path.is_file())
    headers = [path for path in sources if path.endswith((".h", ".cuh")) and "/cuda/" not in path]
    cpu = [path for path in sources if path.endswith(".cpp") and "neon" not in path]
    each = [path for path in cpu if path.endswith("/kernels.cpp")]
    common = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-DNVFP4_OPS=TORCH_EXTENSION_NAME"]
    avx512 = [f"-mavx512{each}" for each in ("f", "bw", "vl", "dq", "vbmi")] + ["-mfma", "-mf16c"]
    bf16 = [path for path in cpu if Path(path).stem == "avx512_bf16"]
    kernels = {
        "cpu": ("cpu", [path for path in cpu if path not in each + bf16], []),
        "cpu_portable": ("cpu", each, ["-DNVFP4_ISA=portable"]),
        "cpu_avx2": ("cpu", each, ["-DNVFP4_ISA=avx2", "-mavx2", "-mfma", "-mf16c"]),
        "cpu_avx512": ("cpu", each, ["-DNVFP4_ISA=avx512", *avx512]),
        "cpu_avx512_bf16": ("cpu", bf16, [*avx512, "-mavx512bf16"]),
    }
    lines = [
        "[general]", f'name = "{NAME}"', f"version = {VERSION}", "edition = 5", f'license = "{LICENSE}"',
        'backends = ["cpu", "cuda"]', "", "[general.hub]", f'repo-id = "nvfp4-tensor/{NAME}"', "",
        "[torch]", 'src = ["torch-ext/torch_binding.cpp"]', "",
        "[torch.stable-abi]", f'cpu = "{ABI}"', f'cuda = "{ABI}"',
    ]  # fmt: skip
    for name, (backend, files, extra) in kernels.items():
        lines += ["", f"[kernel.{name}]", f'backend = "{backend}"', 'depends = ["torch"]', 'include = ["csrc"]']
        lines += [f"cxx-flags = {json.dumps(common + extra)}", f"src = {json.dumps(files + headers, indent=4)}"]
    cuda = [path for path in sources if path.endswith((".cu", ".cuh", ".h")) and "/cpu/" not in path]
    archs = ["8.0", "9.0a", "10.0a", "10.3a", "11.0a", "12.0a", "12.1a"]
    lines += ["", "[kernel.cuda]", 'backend = "cuda"', 'depends = ["torch"]', 'include = ["csrc"]']
    lines += [f"cuda-capabilities = {json.dumps(archs)}"]
    lines += [
        f"cuda-flags = {json.dumps(['--fmad=false', '--expt-relaxed-constexpr', '-DNVFP4_OPS=TORCH_EXTENSION_NAME'])}"
    ]
    lines += [f"src = {json.dumps(cuda, indent=4)}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--cuda-archs", metavar="ARCHS", help='also a variant for CUDA: "80 90a", or "" for all')
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    write_sources(given.out)
    print(write_plain_variant(given.out))
    print(write_variant(given.out, "cpu"))
    if given.cuda_archs is not None:
        print(write_variant(given.out, "cuda", given.cuda_archs))


if __name__ == "__main__":
    main()

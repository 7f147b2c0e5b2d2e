"""The package as it is shipped: the sdist is complete, and the wheel that is built from it imports and is typed.

Pure Python here, which takes seconds; `make wheel` builds the libraries from the sdist too, and runs them.
"""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("scikit_build_core")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
BUILT = {"lib", "__pycache__"}  # folders that are made, and belong to no sdist


def build(kind: str, source: Path, target: Path, settings: dict[str, str]) -> Path:
    """Calls the build backend as pip does, in a process of its own; the file that it made."""
    code = f"from scikit_build_core import build; print(build.build_{kind}({str(target)!r}, {settings!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return target / run.stdout.split()[-1]


def package_files(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.glob("nvfp4_*/**/*") if path.is_file())
    return {path.as_posix() for path in files if not BUILT & set(path.parts)}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's one folder."""
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, target, {})) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]  # since 3.11.4
        archive.extractall(target)
    (folder,) = (path for path in target.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"), {"wheel.cmake": "false"})


def test_the_sdist_holds_the_sources_and_nothing_built(unpacked: Path) -> None:
    assert package_files(unpacked) == package_files(ROOT)
    for name in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    shipped = {path.relative_to(unpacked) for path in unpacked.rglob("*")}
    assert not [path for path in shipped if path.suffix in (".so", ".pyc") or BUILT & set(path.parts)]
    assert not shipped & {Path(".venv"), Path("build"), Path("dist"), Path(".git")}


def test_the_wheel_holds_the_python_sources_and_the_mark_of_types(unpacked: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name and name[-1] != "/"}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(metadata))
    assert shipped == {name for name in package_files(unpacked) if not name.startswith("nvfp4_tensor/csrc/")}
    assert "nvfp4_tensor/py.typed" in shipped
    assert wheel.name == f"nvfp4_tensor-{facts['Version']}-py3-none-{wheel.stem.split('-')[-1]}.whl"
    assert facts["Requires-Python"] == ">=3.10" and "torch>=2.11" in facts.get_all("Requires-Dist")


def test_the_wheel_serves_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Imported from the wheel's own files, it quantizes as the package under test does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import torch, nvfp4_tensor\n"
        "print(nvfp4_tensor.__file__, nvfp4_tensor.__version__)\n"
        "print(nvfp4_tensor.quantize(torch.arange(32.0).view(1, 32)).dequantize().tolist())\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: no finder of an editable install
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "NVFP4_TENSOR_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    import nvfp4_tensor

    location, values = run.stdout.splitlines()
    assert location == f"{tmp_path / 'nvfp4_tensor' / '__init__.py'} {wheel.name.split('-')[1]}"
    assert values == str(nvfp4_tensor.quantize(torch.arange(32.0).view(1, 32)).dequantize().tolist())

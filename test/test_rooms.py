"""Rooms import downward only: numerics, ops, tensor, matmul, dispatch, quantization, and what stands on them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nvfp4_tensor"
FLOORS = [
    {"imports", "pickles"},
    {"numerics"},
    {"ops"},
    {"tensor"},
    {"matmul"},
    {"dispatch"},
    {"quantization"},
    {"training"},
    {"checkpoints"},
    {"distributed"},
    {"integrations", "emulation"},
    {"info", "sizes"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
UPWARD = {
    ("pickles", "tensor"),  # what a pickle names must be importable without torchao
    ("tensor", "dispatch"),  # the class fills its table of operators when the first one comes
}
"""The exceptions, inside functions both."""


def imports(path: Path) -> Iterator[str]:
    """The rooms of this package that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "nvfp4_tensor":
            names = [f"nvfp4_tensor.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "nvfp4_tensor" and rest:
                yield rest.partition(".")[0]


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in FLOOR, f"{room} has no floor: give it one here and in docs/design/architecture.md"
    for imported in imports(path):
        if imported not in FLOOR:  # a public name, for rooms above all that define one
            assert FLOOR[room] > FLOOR["quantization"], f"{path} imports nvfp4_tensor.{imported}"
        elif imported != room:
            assert FLOOR[imported] < FLOOR[room] or (room, imported) in UPWARD, f"{room} imports {imported}"


def test_the_check_sees_what_it_must(tmp_path):
    (tmp_path / "x.py").write_text(
        "from nvfp4_tensor.cli.demo import run\ndef f():\n    import nvfp4_tensor.matmul.product\n"
        "from nvfp4_tensor import quantize\nimport torch\n"
    )
    assert list(imports(tmp_path / "x.py")) == ["cli", "quantize", "matmul"]

"""Rooms import downward only, as the table of docs/design/architecture.md has them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nvfp4_tensor"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \|$", re.MULTILINE)
ENTRY = {"__init__", "__main__"}
"""The package itself: what it imports is what it makes public."""


def rooms_by_floor(page: str) -> list[set[str]]:
    """The rooms of each row of the table, the lowest first."""
    section = page.split("## The rooms\n")[1].split("\n## ")[0]
    return [set(re.findall(r"`(\w+)`", row)) for row in reversed(ROW.findall(section))]


FLOORS = rooms_by_floor((ROOT / "docs/design/architecture.md").read_text())
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports(path: Path) -> Iterator[str]:
    """The rooms that a file imports, inside functions too; a public name of the package as it is."""
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
            elif package == "nvfp4_cli":
                yield package


def room_of(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).parts
    return top if top != "nvfp4_tensor" else rest[0].removesuffix(".py")


FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "nvfp4_cli").rglob("*.py"))]


def upward(path: Path) -> Iterator[str]:
    """What is wrong with the imports of a file."""
    room = room_of(path)
    for imported in () if room in ENTRY else imports(path):
        if imported not in FLOOR:  # a public name, for rooms above all that define one
            if FLOOR[room] <= FLOOR["dispatch"]:
                yield f"{path} imports nvfp4_tensor.{imported}"
        elif imported != room and FLOOR[imported] >= FLOOR[room]:
            yield f"{path} of {room} imports {imported}"


def test_imports_go_down():
    assert [fault for path in FILES for fault in upward(path)] == []


def test_every_room_of_the_table_is_there():
    found = {room_of(path) for path in FILES} - ENTRY
    assert set(FLOOR) == found


def test_each_room_has_one_smoke_test():
    rooms = [room for room in FLOOR if (ROOT / "test" / room).is_dir()]
    files = {room: (ROOT / "test" / room).rglob("test_*.py") for room in rooms}
    marks = {room: sum(path.read_text().count("@pytest.mark.smoke\n") for path in files[room]) for room in rooms}
    assert marks == dict.fromkeys(rooms, 1)


def test_the_check_sees_what_it_must(tmp_path):
    (tmp_path / "x.py").write_text(
        "from nvfp4_tensor.training import linear\ndef f():\n    import nvfp4_tensor.matmul.product\n"
        "from nvfp4_tensor import quantize\nimport torch\nfrom nvfp4_cli.options import x\n"
    )
    assert list(imports(tmp_path / "x.py")) == ["training", "quantize", "nvfp4_cli", "matmul"]

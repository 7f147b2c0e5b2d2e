"""What benchmarks.compare finds between two result files: those that are kept, and changes planted in them."""

import copy
import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.harness import RESULTS

pytestmark = pytest.mark.slow

TIMED = [path for path in sorted(RESULTS.glob("*/*.json")) if '"median"' in path.read_text()]


def cpu_products() -> dict:
    return json.loads((RESULTS / "cpu" / "matmul.json").read_text())


def scale(case: dict, factor: float) -> None:
    for key in ("low", "median", "high"):
        case[key] *= factor


@pytest.mark.parametrize("path", TIMED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_timing_of_a_kept_result_has_its_own_name(path: Path) -> None:
    text = path.read_text()
    assert len(compare.timings(json.loads(text))) == text.count('"median"') > 0


def test_only_what_lies_beyond_the_quartiles_is_told() -> None:
    """One case is slower by more than its spread, one faster, one slower within it."""
    old = cpu_products()
    for case in old["runs"][0]["cases"][:3]:
        case["low"], case["high"] = 0.95 * case["median"], 1.05 * case["median"]
    new = copy.deepcopy(old)
    for case, factor in zip(new["runs"][0]["cases"], (1.25, 0.5, 1.09), strict=False):
        scale(case, factor)
    text, slower = compare.report(old, new)
    assert slower
    rows = [line.split() for line in text.splitlines() if line.endswith(("slower", "faster"))]
    assert [row[-2:] for row in rows] == [["0.500", "faster"], ["1.250", "slower"]]
    count = len(compare.timings(old))
    mean = (1.25 * 0.5 * 1.09) ** (1 / count)
    assert text.endswith(
        f"{count} timings: 1 slower and 1 faster beyond the quartiles, new / old {mean:.3f} in the geometric mean"
    )


def test_what_else_differs_is_told() -> None:
    old, new = cpu_products(), cpu_products()
    new["machine"]["processor"] = "another"
    new["versions"] = {"torch": "3.0"}
    del new["runs"][0]["cases"][0]
    text, slower = compare.report(old, new)
    assert not slower
    assert f"machine processor: {old['machine']['processor']} -> another" in text
    assert f"versions torch: {old['versions']['torch']} -> 3.0" in text
    assert f"versions torchao: {old['versions']['torchao']} -> None" in text
    assert f"only in the old file: {next(iter(compare.timings(old)))}" in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda runs: runs.append(runs[0]), "two timings are called"),
        (lambda runs: runs.clear(), "no entry has a median"),
        (lambda runs: scale(runs[0]["cases"][0], 0.0), "not a median between its quartiles"),
        (lambda runs: runs[0]["cases"][0].update(median=float("nan")), "not a median between its quartiles"),
    ],
)
def test_a_content_that_cannot_be_compared_is_refused(damage, message: str) -> None:
    content = cpu_products()
    damage(content["runs"])
    with pytest.raises(ValueError, match=message):
        compare.report(cpu_products(), content)


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """0: nothing is slower; 1: something is; 2: there is nothing to compare."""

    def run(*paths: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths)])
        return compare.main()

    old, slow = RESULTS / "cpu" / "matmul.json", tmp_path / "slow.json"
    content = cpu_products()
    case = content["runs"][0]["cases"][0]
    scale(case, 2 * case["high"] / case["low"])
    slow.write_text(json.dumps(content))
    assert run(old, old) == run(slow, old) == 0
    capsys.readouterr()
    assert run(old, slow) == 1
    assert "1 slower and 0 faster" in capsys.readouterr().out
    for other in (tmp_path / "missing.json", RESULTS / "cpu" / "matmul.txt", RESULTS / "cpu" / "quantize.json"):
        assert run(old, other) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("cannot compare") and not printed.out

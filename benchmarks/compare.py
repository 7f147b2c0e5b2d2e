"""Compare an old and a new result file of one benchmark: what became slower or faster beyond the quartiles.

    python -m benchmarks.compare old.json new.json

A time has changed if the two ranges from the lower to the upper quartile do not overlap; anything else may be chance.
The exit status is 0 if nothing became slower, 1 if something did, and 2 if the files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import seconds, table

# Keys that identify an entry of a list; all other keys are figures, or follow from these.
_IDENTITY = ("model", "shape", "threads", "batch", "prompt", "tokens", "rows", "m", "instruction_set", "recipe", "name")
_CONTAINERS = ("runs", "cases", "subjects", "rows", "tokens")  # lists whose name is not part of a timing's name
_CIRCUMSTANCES = ("command", "commit", "machine", "versions", "native")


class Time(NamedTuple):
    """A median and its quartiles in seconds."""

    low: float
    median: float
    high: float


def timings(content: dict) -> dict[str, Time]:
    """Return the timings of a result file by name: ``14336x8192, single, m 16, nvfp4``.

    Raises:
        ValueError: it has no timing, two of one name, or a quartile or median that is not a time.
    """
    found: dict[str, Time] = {}
    for name, time in _walk(content, ()):
        if name in found:
            raise ValueError(f"two timings are called {name!r}: benchmarks.compare must learn what tells them apart")
        if not 0 < time.low <= time.median <= time.high < math.inf:
            raise ValueError(f"{name}: {time} is not a median between its quartiles")
        found[name] = time
    if not found:
        raise ValueError("no entry has a median, low and high: not a result of a benchmark of time")
    return found


def _walk(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, Time]]:
    if isinstance(value, list):
        for entry in value:
            yield from _walk(entry, (*path, *_identity(entry)))
    elif isinstance(value, dict) and {"low", "median", "high"} <= value.keys():
        yield ", ".join(path), Time(value["low"], value["median"], value["high"])
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _walk(entry, path if key in _CONTAINERS else (*path, key))


def _identity(entry: object) -> Iterator[str]:
    if not isinstance(entry, dict):
        return
    for key in _IDENTITY:
        value = entry.get(key)
        if isinstance(value, str):
            yield value
        elif isinstance(value, int):
            yield f"{key} {value}"
        elif isinstance(value, list) and all(isinstance(size, int) for size in value):
            yield "x".join(map(str, value))


def circumstances(old: dict, new: dict) -> list[str]:
    """Return a line for each other difference between the runs, such as the machine, which may explain a time."""
    lines = []
    for field in _CIRCUMSTANCES:
        before, after = old.get(field), new.get(field)
        if isinstance(before, dict) and isinstance(after, dict):
            names = [*before, *(name for name in after if name not in before)]
            pairs = [(f"{field} {name}", before.get(name), after.get(name)) for name in names]
        else:
            pairs = [(field, before, after)]
        lines += [f"{name}: {was} -> {now}" for name, was, now in pairs if was != now]
    return lines


def report(old: dict, new: dict) -> tuple[str, bool]:
    """Return the text of the comparison, and whether anything became slower."""
    before, after = timings(old), timings(new)
    factors = {name: after[name].median / before[name].median for name in before if name in after}
    if not factors:
        raise ValueError("the two files time nothing in common")
    lines = circumstances(old, new)
    for name, times, others in (("old", before, after), ("new", after, before)):
        lines += [f"only in the {name} file: {what}" for what in times if what not in others]
    rows = []
    for name, factor in sorted(factors.items(), key=lambda each: abs(math.log(each[1])), reverse=True):
        was, now = before[name], after[name]
        if now.low > was.high or now.high < was.low:
            verdict = "slower" if factor > 1 else "faster"
            rows.append((name, seconds(was.median), seconds(now.median), f"{factor:.3f}", verdict))
    if rows:
        lines += ["", table(("what", "old", "new", "new / old", ""), rows), ""]
    slower, faster = (sum(row[-1] == verdict for row in rows) for verdict in ("slower", "faster"))
    lines.append(
        f"{len(factors)} timings: {slower} slower and {faster} faster beyond the quartiles, "
        f"new / old {statistics.geometric_mean(factors.values()):.3f} in the geometric mean"
    )
    return "\n".join(lines), slower > 0


def main() -> int:
    """Compare two files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a result file, as benchmarks/results holds them")
    parser.add_argument("new", type=Path, help="one of the same benchmark, taken later")
    options = parser.parse_args()
    try:
        text, slower = report(*(json.loads(path.read_text()) for path in (options.old, options.new)))
    except (OSError, ValueError) as error:
        print(f"cannot compare {options.old} with {options.new}: {error}", file=sys.stderr)
        return 2
    print(text)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())

"""Compare an old and a new result file of one benchmark: what became slower or faster beyond the quartiles.

    python -m benchmarks.compare old.json new.json

A time has changed if the two ranges from the lower to the upper quartile do not overlap; anything else may be chance.
The exit status is 0 if nothing became slower, 1 if something did, and 2 if the files cannot be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import seconds, table

# Keys that identify an entry of a list; all other keys are figures, or follow from these.
_IDENTITY = ("model", "shape", "threads", "batch", "prompt", "tokens", "rows", "m", "instruction_set", "recipe", "name")
_CONTAINERS = ("runs", "cases", "subjects", "rows", "tokens")  # lists whose name is not part of a timing's name
_CIRCUMSTANCES = ("command", "commit", "machine", "versions", "native")


@dataclasses.dataclass(frozen=True)
class Time:
    """A median and its quartiles in seconds."""

    low: float
    median: float
    high: float


@dataclasses.dataclass(frozen=True)
class Change:
    """One timing in both files."""

    what: str
    old: Time
    new: Time

    @property
    def factor(self) -> float:
        """The new time divided by the old; above 1 is slower."""
        return self.new.median / self.old.median

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" if the quartiles do not overlap, else empty."""
        if self.new.low > self.old.high:
            return "slower"
        return "faster" if self.new.high < self.old.low else ""


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


def changes(old: dict[str, Time], new: dict[str, Time]) -> list[Change]:
    """Return the timings that are in both files, sorted by how much they changed."""
    both = [Change(name, old[name], new[name]) for name in old if name in new]
    return sorted(both, key=lambda change: abs(math.log(change.factor)), reverse=True)


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
    old_times, new_times = timings(old), timings(new)
    compared = changes(old_times, new_times)
    if not compared:
        raise ValueError("the two files time nothing in common")
    lines = circumstances(old, new)
    for name, times, others in (("old", old_times, new_times), ("new", new_times, old_times)):
        lines += [f"only in the {name} file: {what}" for what in times if what not in others]
    told = [change for change in compared if change.verdict]
    if told:
        lines += ["", table(("what", "old", "new", "new / old", ""), [_row(change) for change in told]), ""]
    slower, faster = (sum(change.verdict == verdict for change in told) for verdict in ("slower", "faster"))
    lines.append(
        f"{len(compared)} timings: {slower} slower and {faster} faster beyond the quartiles, "
        f"new / old {_mean_factor(compared):.3f} in the geometric mean"
    )
    return "\n".join(lines), slower > 0


def _row(change: Change) -> tuple[str, ...]:
    times = seconds(change.old.median), seconds(change.new.median)
    return change.what, *times, f"{change.factor:.3f}", change.verdict


def _mean_factor(compared: Sequence[Change]) -> float:
    return math.exp(sum(math.log(change.factor) for change in compared) / len(compared))


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

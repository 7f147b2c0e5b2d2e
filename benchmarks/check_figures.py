"""Check the figures of README.md and docs against their result files: python -m benchmarks.check_figures

A figure is a number with a decimal point or a unit of measurement. Each figure needs one of these:

- An HTML comment before its paragraph, list or table. Paths are relative to benchmarks/results or the repository. For a
  .txt or .md file the comment has the number and the beginning of its line, for a .json file the number and a Python
  expression of the file's keys. "rows" is for a table in which every row matches a line of the file:

    <!-- figures h200/fsdp_step.txt: 179 [train nvidia, codes]; 174 [train bf16] -->
    <!-- figures h200/generate.json: 5.41 = runs[0]["rows"][1]["peak_bytes"] / 1e9 -->
    <!-- rows cpu/kv_cache.txt -->

  README.md has no comments: theirs are in readme_figures.txt, below the beginning of the line that they belong to.
- The words "no result file" in its section, or before the first section for the whole page: measured without a file.
- A pattern in check_figures_allowed.txt: constants of formats, versions, settings and other numbers not measured.

docs/performance.md (generated), docs/numerics.md (a specification) and docs/verified.md (a log) are not checked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ALLOWED = Path(__file__).with_name("check_figures_allowed.txt")
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
README_COMMENTS = Path(__file__).with_name("readme_figures.txt")
NO_FILE = "no result file"
_NUMBER = r"(?<![\w.^/-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|\.\d)"
_UNIT = r"%|x|ns|us|ms|s|min|minutes?|seconds?|hours?|[KMGT]i?B|[KMGT]B/s|[GT]FLOP/s|tokens/s|dB|nats|cycles|times"
_FIGURE = re.compile(rf"{_NUMBER}(?=(?: (?:to|and|or) {_NUMBER})? ?(?:{_UNIT})(?![\w])(?! \d))|{_NUMBER}(?<=\.\d)|"
                     rf"{_NUMBER}(?<=\.\d\d)|{_NUMBER}(?<=\.\d\d\d)|{_NUMBER}(?<=\.\d\d\d\d)")  # fmt: skip
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)


@dataclass
class Block:
    """A paragraph, list or table, with its first line, text and comments."""

    line: int
    text: str
    section: int
    comments: list[str] = field(default_factory=list)


def value(figure: str) -> float:
    return float(figure.replace(",", ""))


def rounds_to(exact: float, figure: str) -> bool:
    """Return whether the value rounds to the figure, at the figure's number of digits."""
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
    return abs(exact - value(figure)) <= half * (1 + 1e-6)


def blocks(text: str) -> Iterator[Block]:
    """Return the blocks of a page, with code, addresses and comments blanked. Sections are numbered from 0."""
    text = re.sub(r"^```.*?^```$", lambda code: re.sub(r".+", "", code[0]), text, flags=re.MULTILINE | re.DOTALL)
    comments = {text.count("\n", 0, found.start()): found[1].strip() for found in _COMMENT.finditer(text)}
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|https?:\S+", lambda found: re.sub(r".", " ", found[0]), text)
    section, waiting, lines = 0, [], text.split("\n")
    start = None
    for number, line in enumerate([*lines, ""]):
        if start is not None and not line.strip():
            yield Block(start + 1, "\n".join(lines[start:number]), section, waiting)
            start, waiting = None, []
        if number in comments:
            waiting.append(comments[number])
        if line.strip() and start is None:
            start = number
        section += line.startswith("## ")


def text_of(page: Path) -> str:
    """Return the text of a page; README.md with its comments."""
    text = page.read_text()
    if page == ROOT / "README.md":
        for group in README_COMMENTS.read_text().split("\n\n"):
            line, *comments = group.strip().split("\n")
            if text.count(f"\n{line}") != 1:
                raise ValueError(f"{README_COMMENTS.name}: not the beginning of one line of README.md: {line}")
            text = text.replace(f"\n{line}", "\n" + "".join(f"<!-- {comment} -->\n" for comment in comments) + line)
    return text


def numbers(line: str) -> list[float]:
    return [value(found) for found in re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", line)]


def path_of(name: str) -> Path:
    return RESULTS / name if (RESULTS / name).exists() else ROOT / name


def in_file(path: Path, figure: str, where: str) -> bool:
    """Return whether the file has the figure: ``where`` is an expression for a .json, else the beginning of a line."""
    if path.suffix == ".json":
        return rounds_to(eval(where, {"sum": sum, "max": max, "min": min} | json.loads(path.read_text())), figure)
    lines = [line.strip().removeprefix("| ") for line in path.read_text().splitlines()]
    found = [line.removeprefix(where) for line in lines if line.startswith(where)]
    return any(rounds_to(number, figure) for line in found for number in numbers(line))


def rows_of(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Return the rows of a table without its head: the line, and the numbers in all cells except the first."""
    for line in block.text.split("\n")[2:]:
        cells = line.strip().strip("|").split("|")[1:]
        yield line, [found for cell in cells for found in re.findall(_NUMBER, cell)]


def stands_in_one_line(figures: list[str], lines: list[list[float]]) -> bool:
    def has_all(line: list[float]) -> bool:
        left = list(line)
        for figure in figures:
            match = next((number for number in left if rounds_to(number, figure)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    return any(map(has_all, lines))


def check(block: Block, comment: str) -> Iterator[str]:
    """Return the figures of a comment that its file does not have, and blank the others in the block."""
    kind, _, rest = comment.partition(" ")
    if kind == "rows":
        lines = [numbers(line) for line in path_of(rest.strip()).read_text().splitlines()]
        for line, figures in rows_of(block):
            if not stands_in_one_line(figures, lines):
                yield f"no line of {rest.strip()} has all of: {', '.join(figures)}"
            block.text = block.text.replace(line, "")
        return
    name, _, rest = rest.partition(":")
    separator = r"\s*=\s*(.*)" if name.strip().endswith(".json") else r"\s*\[(.*)\]"
    for entry in filter(None, (part.strip() for part in rest.split(";"))):
        parsed = re.fullmatch(rf"([\d.,]+){separator}", entry, re.DOTALL)
        if parsed is None:
            yield f"a comment that cannot be read: {entry}"
        elif not re.search(rf"(?<![\d.]){re.escape(parsed[1])}(?![\d]|\.\d)", block.text):
            yield f"{parsed[1]} has a comment and does not stand here"
        elif not in_file(path_of(name.strip()), parsed[1], " ".join(parsed[2].split())):
            yield f"{parsed[1]} is not what {name.strip()} gives for: {parsed[2]}"
        else:
            block.text = re.sub(rf"(?<![\d.]){re.escape(parsed[1])}(?![\d]|\.\d)", " ", block.text)


def problems(text: str, allowed: list[str]) -> tuple[list[str], int]:
    """Return the problems with the figures of a page, and the number of figures marked as without a file."""
    found, without, all_blocks = [], 0, list(blocks(text))
    no_file = {block.section for block in all_blocks if NO_FILE in " ".join(block.text.split())}
    for block in all_blocks:
        for comment in block.comments:
            if comment.split()[:1] in (["figures"], ["rows"]):
                found += [f"line {block.line}: {problem}" for problem in check(block, comment)]
        for pattern in allowed:
            block.text = re.sub(pattern, " ", block.text)
        left = _FIGURE.findall(block.text)
        if block.section in no_file or 0 in no_file:
            without += len(left)
        elif left:
            found.append(f"line {block.line}: no file for {', '.join(left)}")
    return found, without


def allowed() -> list[str]:
    lines = ALLOWED.read_text().splitlines()
    return [line.replace(" ", r"\s+") for line in lines if line and not line.startswith("#")]


def main() -> None:
    wrong = 0
    for page in PAGES:
        found, without = problems(text_of(page), allowed())
        name = page.relative_to(ROOT)
        for each in found:
            print(f"{name}: {each}")
        if without:
            print(f"{name}: {without} without a file")
        wrong += len(found)
    sys.exit(f"{wrong} to correct" if wrong else 0)


if __name__ == "__main__":
    main()

"""The documentation says what is so: its links, paths and figures, and the sections that the code cites."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

import nvfp4_tensor
from benchmarks import pages
from nvfp4_tensor.numerics import layout, philox

ROOT = Path(__file__).parents[2]
README_ROWS = ("bf16", "gptq_search", "four_over_six", "nearest")
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
SOURCES = sorted(
    path
    for folder in ("nvfp4_tensor", "test", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".h", ".cuh", ".cu", ".cpp"}
)


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link may have behind its #: the page's headings, as MkDocs and GitHub spell them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def dead_links(page: Path, text: str) -> Iterator[str]:
    """The links of a page to files that are not there, or to headings that they do not have."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_links_and_paths_lead_somewhere() -> None:
    """Files, headings, and what a page calls by its path in the repository; addresses elsewhere are not asked."""
    found = {page: list(dead_links(page, prose(page))) for page in PAGES}
    for page in PAGES:
        paths = re.findall(r"`((?:nvfp4_tensor|test|benchmarks|docs|tutorials)/[\w/.-]+)`", prose(page))
        found[page] += [path for path in paths if not (ROOT / path).exists()]
    assert not {str(page.relative_to(ROOT)): dead for page, dead in found.items() if dead}


def test_a_dead_link_is_found() -> None:
    """What the test above looks for, planted: a file that is not there, a heading that is not."""
    page = DOCS / "numerics.md"
    text = "[a](gone.md) [b](performance.md#gone) [c](#2-quantize) [d](design/glossary.md#numbers) [e](https://gone)"
    assert list(dead_links(page, text)) == ["gone.md", "performance.md#gone"]


def cited_sections(text: str) -> set[int]:
    """The sections of the contract that a source names: "contract, section 3", "contract, sections 2 to 5"."""
    cited = set()
    for first, word, last in re.findall(r"contract,[\s/*#]+sections?\s+(\d+)(?:\s+(to|and)\s+(\d+))?", text):
        cited |= set(range(int(first), int(last) + 1)) if word == "to" else {int(first), int(last or first)}
    return cited


def test_sections_that_the_code_cites_exist() -> None:
    """Of docs/numerics.md; and the code does cite them."""
    sections = set(map(int, re.findall(r"^## (\d+)\. ", (DOCS / "numerics.md").read_text(), re.MULTILINE)))
    cited = set().union(*(cited_sections(path.read_text()) for path in SOURCES if path != Path(__file__)))
    assert sections == set(range(1, len(sections) + 1))
    assert {1, 2, 3, 4, 5, 6, 7} <= cited <= sections
    assert cited_sections("(numerics contract, sections 2 to 5), contract, section 99.") == {2, 3, 4, 5, 99}


def test_known_answers_of_the_contract() -> None:
    """The known answers of Philox, read off the page, are what the reference gives; so is the place of a scale."""
    text = (DOCS / "numerics.md").read_text()
    lines = re.findall(r"^key ([0-9a-f ]+), counter ([0-9a-f ]+?)  +([0-9a-f ]+)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        key, counter, answer = ([torch.tensor(int(word, 16)) for word in part.split()] for part in line)
        key, counter = key * (2 // len(key)), counter * (4 // len(counter))
        assert philox.philox4x32_7(tuple(counter), tuple(key)) == answer

    formula = re.search(r"^(\(\(r // 128 .*?)  +C4 = padded columns / 4$", text, re.MULTILINE)
    assert formula is not None
    rows, columns = 200, 10
    scale = torch.arange(rows * columns).view(rows, columns)
    swizzled = layout.swizzle(scale).flatten()
    for r, c in ((0, 0), (31, 3), (32, 4), (127, 9), (128, 0), (199, 9)):
        assert swizzled[eval(formula[1], {"C4": 3, "r": r, "c": c})] == scale[r, c]


def test_tables_are_of_the_results() -> None:
    """Pages and the figure are what benchmarks/results give now: `make docs` makes them."""
    assert all(path.read_text() == pages.page(path) for path in pages.PAGES)
    for name, make in pages.FIGURES.items():
        assert (pages.IMAGES / f"{name}.svg").read_text() == make()
    runs = pages.load("h200", "matmul_published")["runs"]  # one row of it, worked out another way
    means = [statistics.geometric_mean(run["chain"][i]["ratio"]["nvfp4"] for run in runs) for i in range(12)]
    row = "| in a chain, geometric mean | " + " | ".join(f"{mean:.2f}" for mean in means) + " |"
    assert row in pages.PAGES[0].read_text().splitlines()


def test_figures_of_the_readme() -> None:
    """Its tables are of the newest results."""
    peaks = {row["recipe"]: row["peak_bytes"] for row in pages.load("h200", "generate")["runs"][0]["rows"]}
    speeds: dict[str, float] = {}
    for row in pages.load("h200", "generation_llama-8b")["rows"]:
        if row["batch"] == 1 and row["weights"] in ("bf16", "NVFP4"):
            speeds[row["weights"]] = max(speeds.get(row["weights"], 0), row["tokens_per_second"])
    quality = {row["name"]: row for row in pages.load("cpu", "perplexity")["rows"]}
    rows = [
        f"| {peaks['bf16'] / 1e9:.2f} GB | {peaks['weight-only'] / 1e9:.2f} GB |",
        f"| {speeds['bf16']:.0f} | {speeds['NVFP4']:.0f} |",
        *(f"| {quality[name]['perplexity']:.3f} | {quality[name]['bits']:.2f} |" for name in README_ROWS),
    ]
    readme = (ROOT / "README.md").read_text()
    assert not [row for row in rows if row not in readme]


def test_every_public_name_has_a_reference() -> None:
    """And every name of the reference is there."""
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert set(nvfp4_tensor.__all__) - {name.rpartition(".")[2] for name in named} == set()
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=[attribute]), attribute), name

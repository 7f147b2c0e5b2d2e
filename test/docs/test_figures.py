"""Figures in README.md and docs are those of their result files; a wrong, missing or unnamed one is found."""

import pytest

from benchmarks import check_figures

FSDP = "<!-- figures h200/fsdp_step.txt: {} -->\n"


@pytest.mark.parametrize("page", check_figures.PAGES, ids=lambda page: str(page.relative_to(check_figures.ROOT)))
def test_figures_are_those_of_the_files(page):
    found, _ = check_figures.problems(check_figures.text_of(page), check_figures.allowed())
    assert found == []


@pytest.mark.parametrize(
    "text, problem",
    [
        ("A step takes 179 ms.\n", "no file for 179"),
        ("It is 1.25 as fast, and the heads are 64.\n", "no file for 1.25"),
        (FSDP.format("180 [train nvidia, codes]") + "A step takes 180 ms.\n", "is not what"),
        (FSDP.format("179 [train nvidia, codes]") + "A step takes 180 ms.\n", "does not stand here"),
        (FSDP.format("179 train nvidia") + "A step takes 179 ms.\n", "cannot be read"),
        ('<!-- figures h200/fsdp_step.json: 0.99 = results["train bf16"]["held"] / 1e9 -->\n0.99 GB\n', "is not what"),
        ("<!-- rows cpu/kv_cache.txt -->\n| a | b | c |\n| - | - | - |\n| int4 | 10.511 | 0.0125 |\n", "no line"),
        ("## A\nMeasured once, no result file.\n\n## B\nA step takes 179 ms.\n", "no file for 179"),
    ],
)
def test_a_wrong_figure_is_found(text, problem):
    found, _ = check_figures.problems(text, [])
    assert any(problem in each for each in found)


@pytest.mark.parametrize(
    "text",
    [
        FSDP.format("179 [train nvidia, codes]; 174 [train bf16]") + "\nA step takes 179 ms instead of 174 ms.\n",
        '<!-- figures h200/fsdp_step.json: 2.01 = results["train bf16"]["held"] / 1e9 -->\n2.01 GB\n',
        "<!-- rows cpu/kv_cache.txt -->\n| a | b | c |\n| - | - | - |\n| int4 | 10.446 | 0.0125 |\n",
        "## A\nMeasured once, no result file.\n\nA step takes 179 ms.\n",
        "`x = 1.5` and [a](b1.5.md), commit 96aa372, 4096 x 4096, 16 rows\n\n```\n179 ms\n```\n",
    ],
)
def test_a_right_figure_passes(text):
    assert check_figures.problems(text, [])[0] == []

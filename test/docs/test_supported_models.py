"""The tables of docs/guides/supported_models.md have what the models of each family do now."""

import re

import pytest

transformers = pytest.importorskip("transformers", "5.21")
pytest.importorskip("gguf")

from benchmarks import supported_models  # noqa: E402

FEW = ("Llama", "Qwen3", "GPT-2", "Mixtral")
ROWS = supported_models.read(supported_models.PAGE.read_text())


def test_the_page_is_of_its_rows():
    text = supported_models.PAGE.read_text()
    assert list(ROWS) == list(supported_models.FAMILIES)
    assert supported_models.page(ROWS, re.search(r"with transformers ([\d.]+\d)", text)[1]) == text


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in supported_models.FAMILIES],
)
def test_a_row_is_what_the_models_do(family):
    assert supported_models.row(family) == ROWS[family]

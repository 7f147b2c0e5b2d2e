"""benchmarks/results/families.md has what quantizing, saving and loading a tiny model of each family does now."""

import pytest

transformers = pytest.importorskip("transformers", "5.21")

from benchmarks import families  # noqa: E402

FEW = (
    "minimax_m3_vl_text", "gpt2", "qwen3_next", "deepseek_v3", "granitemoe", "inkling2_text", "kimi_linear", "mamba",
    "hrm_text", "gemma4", "qwen3_vl_moe", "t5",
)  # fmt: skip
"""Families that are unlike each other: linear attention, Mamba, experts in one tensor and apart, vision and audio."""
TABLE = families.read()


@pytest.mark.skipif(transformers.__version__ not in families.TABLE.read_text(), reason="a table of another release")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*each, marks=() if each[0] in FEW else pytest.mark.exhaustive, id="-".join(each))
        for each in families.ROWS
    ],
)
def test_a_row_is_what_the_models_do(family, name):
    assert families.row(family, name) == TABLE[family, name]


def test_the_table_has_all_families_and_names_what_is_refused():
    assert list(TABLE) == families.ROWS
    unlike = {family for (family, _), cells in TABLE.items() if cells[3:5] != ["equal", "equal"]}
    assert unlike == {*families.NOT_RUN, "hrm_text", "lara_mini", "sarvam_moe"}  # one tensor of the file is several

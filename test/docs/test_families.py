"""The tables of docs/guides/supported_models.md have what tiny models of each family do now."""

import re

import pytest
from helpers.checkpoint_folders import content, edit

transformers = pytest.importorskip("transformers", "5.21")
pytest.importorskip("gguf")

from benchmarks import families  # noqa: E402
from nvfp4_tensor import checkpoints  # noqa: E402
from nvfp4_tensor.checkpoints.comparison import compare  # noqa: E402

FEW = (
    "minimax_m3_vl_text", "gpt2", "qwen3_next", "deepseek_v3", "granitemoe", "inkling2_text", "kimi_linear", "mamba",
    "gemma4", "qwen3_vl_moe", "t5", "llava", "vit", "aria_text", "gpt_neox", "hy_v4",
)  # fmt: skip
"""Families unlike each other: linear attention, Mamba, experts in one tensor, apart and renamed, vision and audio."""
TABLE, DECODING = families.read(), families.read_decoding(families.DECODING.read_text())


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
    assert unlike == set(families.NOT_RUN)


@pytest.mark.parametrize(
    ("family", "stored"), [("hrm_text", "gqkv_proj"), ("lara_mini", "in_proj"), ("sarvam_moe", "query_key_value")]
)
def test_linears_of_one_tensor_are_the_same_by_every_route(family, stored, tmp_path):
    dtype = families.make(family, dict(families.ROWS)[family], tmp_path / "dense")
    auto = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(tmp_path / "dense")
    loading = {"dtype": dtype, "quantization_config": families.nvfp4.NVFP4TensorConfig()}
    auto.from_pretrained(tmp_path / "dense", **loading).save_pretrained(tmp_path / "saved")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "folder", progress=False)
    saved, folder = (content(tmp_path / each) for each in ("saved", "folder"))
    assert saved.keys() == folder.keys()
    unlike = {name for name in saved if saved[name] != folder[name]}
    assert all(".mlp.gate." in name for name in unlike)  # transformers keeps routers in float32
    only = compare(tmp_path / "dense", tmp_path / "folder", progress=False).only_in_a
    assert all(".experts." in name for name in only)
    for part in ("dense", "folder"):
        loaded = checkpoints.load(auto.from_config(config, dtype=dtype), tmp_path / part, progress=False)
        assert families.difference(loaded, auto.from_pretrained(tmp_path / part, dtype=dtype)) == "equal"
    name = next(name for name in content(tmp_path / "dense") if name.endswith(f"{stored}.weight"))
    edit(tmp_path / "dense", lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    with pytest.raises(ValueError, match=f"tensor {name}: expected shares .* of its rows"):
        checkpoints.quantize(tmp_path / "dense", tmp_path / "none", progress=False)


def test_the_page_of_decoding_is_of_its_rows():
    text = families.DECODING.read_text()
    assert list(DECODING) == list(families.DECODERS)
    assert families.decoding_page(DECODING, re.search(r"with transformers ([\d.]+\d)", text)[1]) == text


@pytest.mark.slow
@pytest.mark.parametrize("family", families.DECODERS)
def test_a_row_of_decoding_is_what_the_models_do(family):
    assert families.decoding_row(family) == DECODING[family]

"""The tables of model families against what servers join."""

import json
from pathlib import Path

import pytest

from nvfp4_tensor.quantization.model_families import JOINED, JOINED_WHOLE
from nvfp4_tensor.quantization.names import joined_with

DATA = json.loads((Path(__file__).parents[1] / "data/servers/joined.json").read_text())
GROUPS = [tuple(row["parts"]) for row in DATA["groups"]]
EXCEPT = {
    ("a_proj", "b_proj", "g_proj", "k_proj", "q_proj", "v_proj"),  # Jet-Nemotron in SGLang; OLMo Hybrid's a and b
    # are apart in vLLM, and have the same names
    ("gate_proj", "up_proj", "w1", "w3"), ("k_proj", "q_proj", "v_proj", "wk", "wq", "wv"),  # two namings in one table
}  # fmt: skip
BESIDE = {("b_proj", "k_proj", "q_proj", "v_proj"): ("f_proj", "g_proj")}
"""Linears that are in the module too, where a table of vLLM has a part of SGLang's."""


def test_the_table_was_read_from_the_servers_that_our_integrations_support():
    assert DATA["versions"] == {"vllm": "0.33.0", "sglang": "0.5.23"}
    assert len(GROUPS) > 40 and set(GROUPS) >= EXCEPT and BESIDE.keys() <= set(GROUPS)


def test_linears_that_servers_join_are_one_group():
    for parts in set(GROUPS) - EXCEPT:
        names = {f"layers.0.attn.{part}.weight" for part in (*parts, *BESIDE.get(parts, ()), "o_proj", "down_proj")}
        groups = {joined_with(f"layers.0.attn.{part}.weight", names) for part in parts}
        assert len(groups) == 1 and {f"layers.0.attn.{part}.weight" for part in parts} <= set(*groups), parts


@pytest.mark.parametrize(
    ("present", "groups"),
    [
        (("w1", "w2", "w3"), {("w1", "w3"), ("w2",)}),
        (("gate_proj", "up_proj", "down_proj"), {("gate_proj", "up_proj"), ("down_proj",)}),
        (("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
         {("q_proj", "k_proj", "v_proj", "g_proj"), ("a_proj",), ("b_proj",)}),
        (("q_b_proj", "kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa"),
         {("q_b_proj",), ("kv_b_proj",), ("q_a_proj", "kv_a_proj_with_mqa")}),
        (("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj", "forget_gate.f_b_proj",
          "g_b_proj"),
         {("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj"),
          ("forget_gate.f_b_proj", "g_b_proj")}),
        (("indexer.wk", "indexer.wq_b", "indexer.weights_proj"),
         {("indexer.wk", "indexer.weights_proj"), ("indexer.wq_b",)}),
    ],
)  # fmt: skip
def test_groups_of_a_module(present, groups):
    names = {f"{part}.weight": None for part in present}
    found = {tuple(each.removesuffix(".weight") for each in joined_with(name, names)) for name in names}
    assert found == groups


def test_every_row_is_one_of_a_server():
    known = {part for parts in GROUPS for part in parts}
    assert {part for row in (*JOINED, *JOINED_WHOLE) for part in row} <= known

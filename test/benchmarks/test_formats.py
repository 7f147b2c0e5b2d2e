"""The comparison of formats, and of key-value caches: what they measure, and that they run."""

import json
import math
import sys

import pytest
import torch

from benchmarks import harness
from benchmarks.accuracy import formats

pytestmark = pytest.mark.slow


def test_drawn_data_have_unit_variance():
    for name in formats.DISTRIBUTIONS:
        x = formats.drawn(name, 1024).double()
        assert x.square().mean().item() == pytest.approx(1, abs=0.02) and abs(x.mean().item()) < 0.01, name


def test_the_error_is_that_of_a_known_grid():
    """Rounding to whole numbers: sqrt(1/12) over the data's size, in the mean over tensors of any number."""
    x = formats.drawn("normal", 256) * 50
    error = formats.relative_error(torch.round, [x, x[:16] * 1.0, x * 1.0])
    assert error == pytest.approx((1 / 12) ** 0.5 / 50, rel=0.02)
    assert formats.sqnr(error) == pytest.approx(20 * math.log10(50 * 12**0.5), abs=0.2)
    assert formats.relative_error(lambda y: y * 1.5, [x, x * 1e3]) == pytest.approx(0.5)


def test_stochastic_rounding_of_nothing_that_clips_has_twice_the_square():
    """A fraction evenly spread: variance 1/6 of a step's square by chance, 1/12 to nearest."""
    variants = formats.variants()
    x = [formats.drawn("normal", 512)]
    up, drawn = (
        formats.relative_error(variants[name][1], x) for name in ("NVFP4, scales up", "NVFP4, stochastic, scales up")
    )
    assert drawn / up == pytest.approx(2**0.5, rel=0.06)


def test_the_comparison_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "formats.png"
    arguments = ["--no-model", "--rows", "64", "--out", str(tmp_path), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["formats", *arguments])
    formats.main()
    content = json.loads((tmp_path / "cpu" / "formats.json").read_text())
    errors = {row["format"]: row["rmse"]["normal"] for row in content["rows"]}
    assert errors["NVFP4, scale search"] < errors["NVFP4, four-over-six"] < errors["NVFP4"] < errors["MXFP4, midmax"]
    assert errors["MXFP4, midmax"] < errors["MXFP4, floor"] < errors["MXFP4, topbinade"] < errors["MXFP4, ceil"]
    assert picture.stat().st_size > 10_000
    assert (tmp_path / "cpu" / "formats.txt").read_text().count("NVFP4, 16x16 tiles") == 2


def test_losses_of_a_cache_are_those_of_one_forward():
    transformers = pytest.importorskip("transformers")
    from benchmarks.accuracy import kv_cache

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 128, (70,))
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, :-1]
    whole = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    found = kv_cache.caches()
    assert torch.allclose(kv_cache.losses(model, ids, found[kv_cache.DENSE](config), 16), whole, atol=1e-4)
    sizes = {}
    for name, make in found.items():
        if "quanto" not in name and "hqq" not in name:
            cache = make(config)
            assert kv_cache.losses(model, ids, cache, 16).shape == (69,), name
            sizes[name] = kv_cache.stored_bytes(cache)
    numbers = 2 * 2 * 2 * 64 * 70
    assert sizes[kv_cache.DENSE] == 4 * numbers  # this model is in float32
    assert sizes["int4, groups of 32 (emulated)"] == numbers * 4.5 / 8
    assert sizes["NVFP4, the latest 128 dense"] == 4 * numbers
    # Two heads a store, with room for 128 tokens; of each token 32 bytes of codes, 4 block scales, a factor.
    assert sizes["NVFP4, to nearest"] == 4 * 2 * 128 * 37


def test_rows_of_an_earlier_record_stay(tmp_path):
    pytest.importorskip("transformers")
    from benchmarks.accuracy import kv_cache

    path = tmp_path / "kv_cache.json"
    earlier = [{"cache": "a", "bytes": 1}, {"cache": "b", "bytes": 2}]
    path.write_text(json.dumps({"tokens": 8, "piece": 4, "rows": earlier}))
    new = [{"cache": "b", "bytes": 3}, {"cache": "c", "bytes": 4}]
    merged = harness.with_earlier(new, path, "cache", tokens=8, piece=4)
    assert [(row["cache"], row["bytes"]) for row in merged] == [("a", 1), ("b", 3), ("c", 4)]
    assert harness.with_earlier(new, path, "cache", tokens=8, piece=2) == new
    assert harness.with_earlier(new, tmp_path / "none.json", "cache") == new
    assert list(kv_cache.chosen(["fp8"])) == [kv_cache.DENSE, "fp8 (transformers)"]

"""The benchmarks run, and what they print is right: the reference experiment in small, the harness, the reports."""

import dataclasses
import importlib.util
import json
import math
import sys
import time

import pytest
import torch

from benchmarks import experts, harness, matmul, peers, quantize, stochastic_rounding
from benchmarks.harness import Variant
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import swizzle
from nvfp4_tensor.testing import statistics

pytestmark = pytest.mark.slow


def run(module, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The module's main, as from the command line."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()


@pytest.mark.parametrize(("gpu", "folder"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ("NVIDIA GeForce RTX 4090", "4090"),
])  # fmt: skip
def test_the_folder_of_a_gpu(gpu: str, folder: str) -> None:
    assert harness.short_name(gpu) == folder


def test_the_report_of_stochastic_rounding(monkeypatch, tmp_path, capsys) -> None:
    run(stochastic_rounding, monkeypatch, "--device", "cpu", "--size", "512", "--draws", "64", "--out", str(tmp_path))
    content = json.loads((tmp_path / "cpu" / "stochastic_rounding.json").read_text())
    assert len(content["findings"]) > 700 and all(abs(f["z"]) <= statistics.Z_BOUND for f in content["findings"])
    control, *faults = content["faults"]
    assert control["failed"] == 0 and all(fault["failed"] for fault in faults)
    printed = capsys.readouterr().out
    assert "planted faults missed: none" in printed
    assert (tmp_path / "cpu" / "stochastic_rounding.txt").read_text().strip() in printed


def test_the_quantize_benchmark(monkeypatch, tmp_path, capsys, device: str) -> None:
    arguments = ("--device", device, "--shapes", "64x128", "32x16", "--repeats", "2", "--peers", "torchao", "mslk")
    run(quantize, monkeypatch, *arguments, "--out", str(tmp_path))
    (path,) = tmp_path.glob("*/quantize.json")
    content = json.loads(path.read_text())
    subjects = {subject["name"]: subject for subject in content["runs"][0]["subjects"]}
    elements = 64 * 128
    assert subjects["amax"]["moved"] == 2 * elements
    assert subjects["quantize, nearest"]["moved"] == 2 * elements + elements // 2 + elements // 16
    assert subjects["fake quantize, stochastic"]["moved"] == 4 * elements
    assert subjects["row and transpose, Hadamard, stochastic"]["moved"] == 2 * elements + elements + elements // 8
    for subject in subjects.values():
        assert 0 < subject["low"] <= subject["median"] <= subject["high"]
        assert subject["bandwidth"] == pytest.approx(subject["moved"] / subject["median"])
        assert subject["share"] == pytest.approx(subject["bandwidth"] / content["runs"][0]["copy"])
    if importlib.util.find_spec("torchao"):
        assert subjects["dequantize"]["times"]["torchao"] > 0
    assert all(taken > 0 for taken in content["host"].values())
    assert {"commit", "machine", "versions", "native"} <= content.keys() and str(tmp_path) not in content["command"]
    printed = capsys.readouterr().out
    assert "64x128, " in printed and "32x16, " in printed  # the comparison of shapes
    assert device == "cuda" or "peer mslk is absent: RuntimeError: needs CUDA" in printed
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_matmul_benchmark(monkeypatch, tmp_path, capsys, device: str) -> None:
    """Both measures, their figures consistent with each other and with the bytes that a product moves."""
    arguments = (
        "--device",
        device,
        "--shapes",
        "128x64",
        "64x48",
        "--rows",
        "1",
        "8",
        "--chain",
        "3",
        "--repeats",
        "2",
    )
    run(matmul, monkeypatch, *arguments, "--peers", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*/matmul.json")
    entry, other = json.loads(path.read_text())["runs"]
    assert entry["chain_length"] == 3
    for table, products in (("single", 1), ("chain", 3)):
        for m, row in zip((1, 8), entry[table], strict=True):
            assert row["m"] == m
            assert row["nvfp4"]["moved"] == products * (128 * 64 * 9 // 16 + 2 * m * (128 + 64))
            assert row["bf16"]["moved"] == products * (128 * 64 * 2 + 2 * m * (128 + 64))
            for way in ("nvfp4", "w4a4"):
                assert row["ratio"][way] == pytest.approx(row["bf16"]["median"] / row[way]["median"])
    printed = capsys.readouterr().out
    assert "single product" in printed and "chain of 3 weights, one product" in printed
    means = printed.split("2 weights, nvfp4 x bf16")[1].splitlines()[3:5]
    for mean, *rows in zip(means, entry["single"], other["single"], strict=True):
        ratios = [row["ratio"]["nvfp4"] for row in rows]
        assert mean.split()[:3] == [str(rows[0]["m"]), f"{math.prod(ratios) ** 0.5:.2f}x", f"{min(ratios):.2f}x"]


def test_the_matmul_benchmark_of_gradients(monkeypatch, tmp_path, device: str) -> None:
    sizes = ("--shapes", "128x64", "--rows", "8", "--chain", "2", "--repeats", "2")
    run(matmul, monkeypatch, "--device", device, "--gradients", *sizes, "--out", str(tmp_path))
    (path,) = tmp_path.glob("*/matmul_gradients.json")
    (entry,) = json.loads(path.read_text())["runs"]
    for table, products in (("single", 1), ("chain", 2)):
        (row,) = entry[table]
        assert list(row["ratio"]) == ["nvfp4"] and row["nvfp4"]["moved"] == products * (128 * 64 * 9 // 16 + 16 * 192)
    layer, g = matmul.Layer.random(128, 64, torch.device(device)), torch.randn(8, 128, device=device).bfloat16()
    w = reference.dequantize(layer.codes, layer.scale, layer.factor, 64, torch.float32)
    torch.testing.assert_close(layer.gradient(g).float(), g.float() @ w, rtol=2**-7, atol=1e-3)


def test_chains_exceed_the_cache() -> None:
    """60 MB of L2, four times over: what an H200 has."""
    assert matmul.chain_length(4096, 4096) == 29 and matmul.chain_length(14336, 8192) == 5
    for rows, columns in matmul.SHAPES["cuda"]:
        assert matmul.chain_length(rows, columns) * rows * columns * 9 / 16 > 4 * (60 << 20)


def checkpoint_weight(rows: int, columns: int) -> tuple[matmul.Layer, peers.Weight]:
    layer = matmul.Layer.random(rows, columns, torch.device("cpu"))
    return layer, layer.weight()


def test_a_peer_is_given_what_we_multiply_with() -> None:
    layer, weight = checkpoint_weight(160, 192)
    expected = reference.dequantize(layer.codes, layer.scale, layer.factor, 192, torch.float32)
    assert weight.codes.shape == (160, 96) and weight.scale.shape == (160, 12)
    assert torch.equal(weight.decoded(), expected)
    x = torch.randn(5, 192).bfloat16()
    assert peers.relative_error(layer.product(x), x.float() @ expected.mT) < 4e-3


def test_a_peer_that_multiplies_wrongly_is_left_out() -> None:
    """The faults that a wrong reading of the format would make, each far beyond the tolerance."""
    _, weight = checkpoint_weight(64, 128)
    report, x = harness.Report(), torch.randn(3, 128).bfloat16()

    def linear(weight: peers.Weight) -> peers.Linear:
        return lambda x: (x.float() @ weight.decoded().mT).bfloat16()

    def broken(weight: peers.Weight) -> peers.Linear:
        raise ImportError("no such package")

    swapped = dataclasses.replace(weight, codes=(weight.codes << 4) | (weight.codes >> 4))
    unscaled = dataclasses.replace(weight, factor=torch.ones(()))
    tiled = dataclasses.replace(weight, scale=swizzle(weight.scale)[0].transpose(0, 1).reshape(-1)[:512].view(64, 8))
    makers = {
        "right": linear,
        "nibbles swapped": lambda weight: linear(swapped),
        "factor forgotten": lambda weight: linear(unscaled),
        "scales tiled": lambda weight: linear(tiled),
        "not a number": lambda weight: lambda x: linear(weight)(x) * torch.nan,
        "not installed": broken,
    }
    assert list(peers.products(report, makers, [weight], [x])) == ["right"]
    assert [line.split(":")[0] for line in report.lines] == [
        *(f"peer {name} is left out" for name in list(makers)[1:-1]),
        "peer not installed is absent",
    ]


def test_quack_is_given_the_weight_in_its_layout() -> None:
    """quack's own decoding of our codes and scales, the factor left to its epilogue, has our values' bits."""
    formats = pytest.importorskip("quack.operand_transform.formats")
    _, weight = checkpoint_weight(256, 128)
    nvfp4 = formats.decode_format("nvfp4")
    assert torch.equal(nvfp4.dequant_reference(weight.codes, weight.scale) * weight.factor, weight.decoded())
    blob, strip = nvfp4.prepare(weight.codes, weight.scale)  # a permutation: every byte is there again
    assert torch.equal(blob.flatten().sort().values, weight.codes.flatten().sort().values)
    assert torch.equal(strip.flatten().sort().values, weight.scale.view(torch.uint8).flatten().sort().values)


def test_humming_is_given_the_weight_in_its_layout() -> None:
    schema = pytest.importorskip("humming.schema").BaseWeightSchema.from_config(peers.HUMMING_CONFIG)
    _, weight = checkpoint_weight(256, 128)
    attributes = schema.get_tensors_attrs(256, 128, torch.bfloat16)
    given = peers.humming_tensors(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in given.items()} == {
        name: (attribute["shape"], attribute["dtype"]) for name, attribute in attributes.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("peer", peers.PRODUCTS)
def test_a_peer_multiplies_on_the_gpu(peer: str) -> None:
    """Where it is installed its product is right, which is what the benchmark demands of it before timing it."""
    pytest.importorskip(peer)
    layers = [matmul.Layer.random(512, 1024, torch.device("cuda"), seed) for seed in range(2)]
    x, report = torch.randn(17, 1024, device="cuda").bfloat16(), harness.Report()
    found = peers.products(report, {peer: peers.PRODUCTS[peer]}, [layer.weight() for layer in layers], [x])
    assert not report.lines
    for layer, linear in zip(layers, found[peer], strict=True):
        assert peers.relative_error(linear(x), x.float() @ layer.weight().decoded().mT) < 4e-3


def test_the_report_of_experts(monkeypatch, tmp_path, capsys) -> None:
    arguments = "--device", "cpu", "--shrink", "32", "--tokens", "1", "5", "--repeats", "2", "--out", str(tmp_path)
    run(experts, monkeypatch, *arguments)
    mixtral, deepseek = json.loads((tmp_path / "cpu" / "experts.json").read_text())["runs"]
    assert [row["rows"] for row in mixtral["tokens"]] == [2, 10] and mixtral["tokens"][0]["active"] == 2
    assert [row["rows"] for row in deepseek["tokens"]] == [8, 40] and deepseek["tokens"][0]["active"] == 8
    assert "times bf16" in capsys.readouterr().out
    skewed = experts.group_ends(experts.MODELS["mixtral"], 5, True, torch.device("cpu"))
    assert torch.diff(skewed, prepend=skewed.new_zeros(1)).unique().tolist() == [0, 5]


def test_compiled_peer_is_given_the_reference() -> None:
    """What torch.compile is timed on gives the op's bits, uncompiled."""
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    state, amax = torch.tensor([1, 2]), torch.ops.nvfp4.amax(x, -1)
    assert torch.equal(quantize.reference_amax(x), amax)
    for spec in (quantize.NEAREST, quantize.STOCHASTIC, quantize.NEAREST.replace(block_rows=16)):
        qdata, scale = quantize.reference_quantize(x, amax, state, spec)
        expected = torch.ops.nvfp4.quantize(x, amax, state, spec.pack())
        assert torch.equal(qdata, expected[0])
        assert torch.equal(scale.view(torch.uint8), expected[1].view(torch.uint8))


def test_a_peer_that_fails_is_named_and_left_out() -> None:
    report = harness.Report()

    def broken() -> object:
        raise ValueError("no such kernel\nand more")

    found = peers.gather(report, {"absent": broken, "present": lambda: {"amax": int, "quantize": broken}})
    assert found == {"amax": {"present": int}}
    assert report.lines == [
        "peer absent is absent: ValueError: no such kernel",
        "peer present does not run 'quantize': ValueError: no such kernel",
    ]


def test_harness_takes_medians_of_interleaved_runs() -> None:
    order: list[str] = []

    def variant(name: str, pause: float) -> Variant:
        return Variant(name, lambda: (order.append(name), time.sleep(pause)), moved=1000)

    timings = harness.measure([variant("a", 0.002), variant("b", 0.02)], torch.device("cpu"), repeats=3)
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3  # each is warmed up and sized first
    assert 0.002 <= timings["a"].median < 0.02 <= timings["b"].median
    assert timings["b"].bandwidth == 1000 / timings["b"].median
    assert timings[harness.COPY].bandwidth > 1e8


@pytest.mark.gpu
def test_harness_replays_graphs_and_falls_back_to_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_SETTLE_SECONDS", 0.0)  # no uncounted rounds
    x = torch.ones(1024, device="cuda")
    variants = [Variant("graph", lambda: x.add_(1)), Variant("synchronizes", lambda: x.sum().item())]
    timings = harness.measure(variants, torch.device("cuda"), repeats=3)
    assert timings["graph"].method == "graph" and timings["synchronizes"].method == "events"
    assert x[0].item() == 1 + 3 + 3  # three to warm up, three replays; capturing runs nothing


def test_table_and_units() -> None:
    assert harness.table(["", "time"], [["amax", "1 us"], ["quantize", "12.5 ms"]]).splitlines() == [
        "             time",
        "--------  -------",
        "amax         1 us",
        "quantize  12.5 ms",
    ]
    assert [harness.seconds(value) for value in (2.5, 0.01234, 4.56e-5)] == ["2.5 s", "12.3 ms", "45.6 us"]

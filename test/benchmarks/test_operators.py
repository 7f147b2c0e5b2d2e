"""The benchmarks of operators run in small, time what they say, and leave out peers that compute something else."""

import copy
import dataclasses
import json
import sys
import time

import pytest
import torch
from helpers.instruction_sets import needs_library

from benchmarks import compare, experts, harness, matmul, peers, quantize
from benchmarks.harness import RESULTS, Variant
from nvfp4_tensor.numerics import reference

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Calls a benchmark's main with small sizes; its result, and what it printed."""

    def call(module, command: str) -> tuple[dict, str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *command.split(), "--out", str(tmp_path)])
        module.main()
        (path,) = tmp_path.rglob("*.json")
        printed = capsys.readouterr().out
        assert path.with_suffix(".txt").read_text().strip() in printed
        return json.loads(path.read_text()), printed

    return call


def test_quantize(run, device: str) -> None:
    content, _ = run(quantize, f"--device {device} --shapes 64x128 --repeats 1 --peers torchao")
    subjects = {subject["name"]: subject for subject in content["runs"][0]["subjects"]}
    elements = 64 * 128
    assert subjects["amax"]["moved"] == 2 * elements
    assert subjects["quantize, nearest"]["moved"] == 2 * elements + elements // 2 + elements // 16
    assert subjects["row and transpose, Hadamard, stochastic"]["moved"] == 2 * elements + elements + elements // 8
    for subject in subjects.values():
        assert 0 < subject["low"] <= subject["median"] <= subject["high"]
        assert subject["share"] == pytest.approx(subject["moved"] / subject["median"] / content["runs"][0]["copy"])
    assert subjects["dequantize"]["times"]["torchao"] > 0
    assert {"commit", "machine", "versions", "native"} <= content.keys()


def test_products(run, device: str) -> None:
    """Their bytes and ratios, single and in a chain; gradients are those of the decoded weight."""
    sizes = "--shapes 128x64 --rows 1 8 --chain 3 --repeats 1 --peers"
    content, _ = run(matmul, f"--device {device} {sizes}")
    for table, products in (("single", 1), ("chain", 3)):
        for m, row in zip((1, 8), content["runs"][0][table], strict=True):
            assert row["m"] == m
            assert row["nvfp4"]["moved"] == products * (128 * 64 * 9 // 16 + 2 * m * (128 + 64))
            assert row["bf16"]["moved"] == products * (128 * 64 * 2 + 2 * m * (128 + 64))
            for way in ("nvfp4", "w4a4"):
                assert row["ratio"][way] == pytest.approx(row["bf16"]["median"] / row[way]["median"])
    layer, g = matmul.Layer.random((128, 64), torch.device(device)), torch.randn(8, 128, device=device).bfloat16()
    w = reference.dequantize(layer.codes, layer.scale, layer.factor, 64, torch.float32)
    torch.testing.assert_close(layer.product(g, transposed=True).float(), g.float() @ w, rtol=2**-7, atol=1e-3)
    for rows, columns in matmul.SHAPES["cuda"]:  # a chain is larger than an H200's L2, four times over
        assert matmul.chain_length(rows, columns) * rows * columns * 9 / 16 > 4 * (60 << 20)


@needs_library
def test_products_by_instruction_set(run) -> None:
    (found,) = run(matmul, "--device cpu --shapes 64x64 --rows 1 4 --threads 1 --sets portable --repeats 2")[0]["runs"]
    assert found["threads"] == 1 and [row["m"] for row in found["single"] if row["ratio"]["portable"] > 0] == [1, 4]


def test_experts(run) -> None:
    content, _ = run(experts, "--device cpu --shrink 32 --tokens 1 5 --repeats 2")
    mixtral, deepseek = content["runs"]
    assert [row["rows"] for row in mixtral["tokens"]] == [2, 10] and mixtral["tokens"][0]["active"] == 2
    assert [row["rows"] for row in deepseek["tokens"]] == [8, 40] and deepseek["tokens"][0]["active"] == 8
    skewed = experts.group_ends(experts.MODELS["mixtral"], 5, True, torch.device("cpu"))
    assert torch.diff(skewed, prepend=skewed.new_zeros(1)).unique().tolist() == [0, 5]


# --- peers -----------------------------------------------------------------------------------------------------------


def test_peers_that_multiply_wrongly_or_raise_are_left_out_by_name() -> None:
    layer, report, x = (
        matmul.Layer.random((64, 128), torch.device("cpu")),
        harness.Report(),
        torch.randn(3, 128).bfloat16(),
    )
    weight = layer.weight()
    assert peers.relative_error(layer.product(x), x.float() @ weight.decoded().mT) < 4e-3

    def linear(weight: peers.Weight) -> peers.Linear:
        return lambda x: (x.float() @ weight.decoded().mT).bfloat16()

    def broken(*_: object) -> peers.Linear:
        raise ImportError("not here\nand more")

    swapped = dataclasses.replace(weight, codes=(weight.codes << 4) | (weight.codes >> 4))
    makers = {
        "right": linear,
        "nibbles swapped": lambda weight: linear(swapped),
        "not a number": lambda weight: lambda x: linear(weight)(x) * torch.nan,
        "not installed": broken,
    }
    assert list(peers.products(report, makers, [weight], [x])) == ["right"]
    assert [line.split(" is off")[0] for line in report.lines] == [
        "peer nibbles swapped is left out: its product", "peer not a number is left out: its product",
        "peer not installed is absent: ImportError: not here",
    ]  # fmt: skip


# --- the harness -----------------------------------------------------------------------------------------------------


def test_medians_of_interleaved_runs() -> None:
    order: list[str] = []

    def variant(name: str, pause: float) -> Variant:
        return Variant(name, lambda: (order.append(name), time.sleep(pause)), moved=1000)

    timings = harness.measure([variant("a", 0.002), variant("b", 0.02)], torch.device("cpu"), repeats=3)
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3  # each is warmed up and sized first
    assert timings["a"].median >= 0.002 and timings["b"].median >= 0.02  # a busy machine adds to it
    assert timings["b"].bandwidth == 1000 / timings["b"].median and timings[harness.COPY].bandwidth > 1e8


@pytest.mark.gpu
def test_graphs_are_replayed_and_events_are_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_SETTLE_SECONDS", 0.0)  # no uncounted rounds
    x = torch.ones(1024, device="cuda")
    variants = [Variant("graph", lambda: x.add_(1)), Variant("synchronizes", lambda: x.sum().item())]
    timings = harness.measure(variants, torch.device("cuda"), repeats=3)
    assert timings["graph"].method == "graph" and timings["synchronizes"].method == "events"
    assert x[0].item() == 1 + 3 + 3  # three to warm up, three replays; capturing runs nothing


def test_table_and_units() -> None:
    lines = harness.table(["", "time"], [["amax", "1 us"], ["quantize", "12.5 ms"]]).splitlines()
    assert lines == ["             time", "--------  -------", "amax         1 us", "quantize  12.5 ms"]
    assert [harness.seconds(value) for value in (2.5, 0.01234, 4.56e-5)] == ["2.5 s", "12.3 ms", "45.6 us"]
    assert [harness.short_name(gpu) for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")] == ["h100", "4090"]


# --- compare ---------------------------------------------------------------------------------------------------------


def cpu_products() -> dict:
    return json.loads((RESULTS / "cpu" / "matmul.json").read_text())


def scale(case: dict, factor: float) -> None:
    for key in ("low", "median", "high"):
        case[key] *= factor


def test_only_what_lies_beyond_the_quartiles_is_told() -> None:
    """One case is slower by more than its spread, one faster, one slower within it; another machine is named."""
    old = cpu_products()
    for case in (row["nvfp4"] for row in old["runs"][0]["single"][:3]):
        case["low"], case["high"] = 0.95 * case["median"], 1.05 * case["median"]
    new = copy.deepcopy(old)
    new["machine"]["processor"] = "another"
    for row, factor in zip(new["runs"][0]["single"], (1.25, 0.5, 1.09), strict=False):
        scale(row["nvfp4"], factor)
    text, slower = compare.report(old, new)
    assert slower and f"machine processor: {old['machine']['processor']} -> another" in text
    rows = [line.split() for line in text.splitlines() if line.endswith(("slower", "faster"))]
    assert [row[-2:] for row in rows] == [["0.500", "faster"], ["1.250", "slower"]]
    count = len(compare.timings(old))
    mean = (1.25 * 0.5 * 1.09) ** (1 / count)
    assert text.endswith(
        f"{count} timings: 1 slower and 1 faster beyond the quartiles, new / old {mean:.3f} in the geometric mean"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda runs: runs.append(runs[0]), "two timings are called"),
        (lambda runs: runs.clear(), "no entry has a median"),
        (lambda runs: scale(runs[0]["single"][0]["nvfp4"], 0.0), "not a median between its quartiles"),
    ],
)
def test_a_content_that_cannot_be_compared_is_refused(damage, message: str) -> None:
    content = cpu_products()
    damage(content["runs"])
    with pytest.raises(ValueError, match=message):
        compare.report(cpu_products(), content)

"""Reports are complete and need nothing else; their charts, and results as tables and JSON."""

import html
import math
import re
import shlex
from pathlib import Path

import pytest

from nvfp4_cli.report.charts import Mark, bars, line
from nvfp4_cli.results import plain, table

pytestmark = pytest.mark.slow

_FETCHING = re.compile(r"""(?:src|href|data)\s*=|@import|url\(|fetch\(|import\(|https?:""")


@pytest.fixture(scope="module")
def reports(dense, quantized, text):
    import nvfp4_cli

    files = {name: dense.parent / f"{name}.html" for name in ("inspect", "compare")}
    assert nvfp4_cli.main(["inspect", str(quantized), "--html", str(files["inspect"])]) == 0
    arguments = ["--text", str(text), "--tokens", "96", "--sweep", "2", "--html", str(files["compare"])]
    assert nvfp4_cli.main(["compare", str(dense), str(quantized), *arguments]) == 0
    return files


FORMATS = {"inspect": {"format": "modelopt"}, "compare": {"a": "dense", "b": "modelopt"}}


@pytest.mark.parametrize("name", FORMATS)
def test_a_report_is_whole_and_needs_nothing_else(reports, name):
    text = reports[name].read_text()
    for tag in ("html", "head", "body", "table", "tr", "td", "svg", "rect", "title", "style", "script", "pre"):
        opened = re.findall(rf"<{tag}\b[^>]*[^/]>|<{tag}>", text)
        assert len(opened) == text.count(f"</{tag}>"), tag
    assert text.startswith("<!doctype html>") and not _FETCHING.search(text)
    assert text.count("<td>model.layers") >= 14
    assert all(f"<b>{value}</b><span>{fact}</span>" in text for fact, value in FORMATS[name].items())
    assert text.count("<rect") >= {"inspect": 16 + 14, "compare": 14 + 14}[name]


def test_inspect_says_how_to_learn_what_it_cannot_know(reports, quantized, dense, text, tmp_path):
    """The command in its report, with the names put in, is one that runs."""
    import nvfp4_cli

    _, said = reports["inspect"].read_text().split("<h2>Errors, and what to leave dense</h2>")
    command = html.unescape(re.search(r"<pre>nvfp4 (.*)</pre>", said)[1])
    names = {"DENSE": str(dense), "TEXT": str(text), "compare.html": str(tmp_path / "compare.html")}
    arguments = [names.get(word, word) for word in shlex.split(command)]
    assert arguments[:3] == ["compare", str(dense), str(quantized)]
    assert nvfp4_cli.main([*arguments, "--tokens", "16"]) == 0
    assert "What to leave dense" in (tmp_path / "compare.html").read_text()


def heights(svg):
    return [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]


def test_bars_are_as_high_as_their_values():
    drawn = bars([Mark("a", 1.0, "a"), Mark("b", 4.0, "b"), Mark("c", 2.0, "c")], unit="x")
    low, high, middle = heights(drawn)
    assert low / high == pytest.approx(0.25, abs=1e-3) and middle / high == pytest.approx(0.5, abs=1e-3)
    places = [float(x) + float(w) / 2 for x, w in re.findall(r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', drawn)]
    labels = [float(x) for x in re.findall(r'class="tick middle" x="([\d.]+)"', drawn)]
    assert labels == pytest.approx(places, abs=0.02)
    marks = [Mark("a", 1.0, ""), Mark("b", 10.0, ""), Mark("none", 0.0, ""), Mark("c", 100.0, "")]
    one, ten, hundred = heights(bars(marks, unit="x", log=True))
    assert one == 0.5 and hundred / ten == pytest.approx(2, abs=1e-3)
    assert "<script>" not in bars([Mark("<script>", 1.0, "<script>")], unit="<script>")


def test_a_line_needs_two_places():
    assert all("nothing to draw" in bars(marks, unit="x") for marks in ([], [Mark("a", math.nan, "")]))
    assert "nothing to draw" in line([(1, 2, ""), (1, 3, "")], unit="y", below="x")
    drawn = line([(4, 17, "p"), (7, 16, "q"), (16, 14, "r")], unit="y", below="x")
    places = re.findall(r'<circle[^>]*cx="([\d.]+)" cy="([\d.]+)"', drawn)
    (x1, y1), (x2, y2), (x3, y3) = [(float(x), float(y)) for x, y in places]
    assert (x3 - x1, y3 - y1) == pytest.approx((628, 188 / 1.16), abs=0.1)  # a margin of 8 % above and below
    assert (x2 - x1) / (x3 - x1) == pytest.approx(1 / 4, abs=1e-3)
    assert (y2 - y1) / (y3 - y1) == pytest.approx(1 / 3, abs=1e-3)  # lower is further down the page


def test_tables_and_json_of_results():
    """JSON has neither NaN nor infinity."""
    assert plain({"a": [math.inf, 1.0, Path("x")], "b": math.nan}) == {"a": [None, 1.0, "x"], "b": None}
    assert table(("a", "bc"), [("long", "1")]).split("\n") == ["a     bc", "long   1"]

"""Results as JSON and as tables."""

import math
from pathlib import Path

from nvfp4_cli.results import plain, table


def test_json_has_neither_nan_nor_infinity():
    assert plain({"a": [math.inf, 1.0, Path("x")], "b": math.nan}) == {"a": [None, 1.0, "x"], "b": None}


def test_tables_are_aligned():
    assert table(("a", "bc"), [("long", "1")]).split("\n") == ["a     bc", "long   1"]

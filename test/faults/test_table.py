"""Each fault of the table has a place in the sources and tests that notice it."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = runpy.run_path(str(Path(__file__).with_name("table.py")))["FAULTS"]


@pytest.mark.smoke
def test_each_has_one_place_and_tests():
    assert len(FAULTS) >= 60
    for fault in FAULTS:
        text = (ROOT / "nvfp4_tensor" / fault.file).read_text()
        assert text.count(fault.old) == 1 and fault.old != fault.new, fault.name
        assert all((ROOT / "test" / each).exists() for each in fault.tests.split()), fault.name

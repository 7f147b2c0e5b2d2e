"""What the import changes in transformers, and what it leaves."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

CODE = """
    import warnings
    from transformers.quantizers import auto

    kinds, configs = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    before = dict(kinds), dict(configs)
    if {taken}:
        kinds["modelopt"] = configs["modelopt"] = object
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import nvfp4_tensor.integrations.transformers as nvfp4
    assert {taken} == any("by itself, so they are left to it" in str(each.message) for each in caught)
    assert (kinds["modelopt"] is nvfp4.CheckpointQuantizer) == (not {taken})
    assert kinds["nvfp4_tensor"] is nvfp4.WhileLoadingQuantizer
    assert {{name: kinds[name] for name in before[0]}} == before[0]
    assert {{name: configs[name] for name in before[1]}} == before[1]
    assert kinds["nvfp4"].__module__.startswith("transformers")
"""


@pytest.mark.parametrize("taken", [False, True], ids=["today", "once transformers reads modelopt"])
def test_nothing_that_was_there_changes(taken):
    code = textwrap.dedent(CODE.format(taken=taken))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

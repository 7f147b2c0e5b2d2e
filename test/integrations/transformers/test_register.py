"""What importing the package changes in transformers, and what it does not."""

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
    if {registered}:
        kinds["modelopt"] = configs["modelopt"] = object
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import nvfp4_tensor.integrations.transformers as nvfp4
    assert {registered} == any("already reads ModelOpt" in str(each.message) for each in caught)
    assert (kinds["modelopt"] is nvfp4.CheckpointQuantizer) == (not {registered})
    assert kinds["nvfp4_tensor"] is nvfp4.WhileLoadingQuantizer
    assert {{name: kinds[name] for name in before[0]}} == before[0]
    assert {{name: configs[name] for name in before[1]}} == before[1]
    assert kinds["nvfp4"].__module__.startswith("transformers")
"""


@pytest.mark.parametrize("registered", [False, True], ids=["today", "once transformers reads modelopt"])
def test_existing_registrations_do_not_change(registered):
    code = textwrap.dedent(CODE.format(registered=registered))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""What importing the package changes in transformers, and what it does not."""

import importlib
import warnings

import pytest
from transformers.quantizers import auto

from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.integrations.transformers.compressed_tensors import UNREAD


@pytest.mark.parametrize("registered", [False, True], ids=["today", "once transformers reads modelopt"])
def test_existing_registrations_do_not_change(registered, monkeypatch):
    mappings = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for mapping in mappings:
        for name in ("modelopt", "nvfp4_tensor"):
            monkeypatch.delitem(mapping, name)
        if registered:
            monkeypatch.setitem(mapping, "modelopt", object)
    before = [dict(mapping) for mapping in mappings]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(nvfp4)
    assert registered == any("already reads ModelOpt" in str(each.message) for each in caught)
    kinds, configs = mappings
    if not registered:
        assert (kinds["modelopt"], configs["modelopt"]) == (nvfp4.CheckpointQuantizer, nvfp4.CheckpointConfig)
    assert (kinds["nvfp4_tensor"], configs["nvfp4_tensor"]) == (nvfp4.WhileLoadingQuantizer, nvfp4.NVFP4TensorConfig)
    for mapping, old in zip(mappings, before, strict=True):
        kept = old.keys() - set(UNREAD)
        assert kept and {name: mapping[name] for name in kept} == {name: old[name] for name in kept}
    of_gptq = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "data_type": "int"}
    assert type(configs["auto-round"].from_dict(of_gptq)).__name__ == "AutoRoundConfig"
    assert kinds["nvfp4"].__module__.startswith("transformers")

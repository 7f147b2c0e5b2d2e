"""SGLang in one process on a CPU, with our plug-in, its hooks applied as SGLang applies them."""

import os

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


@pytest.fixture(scope="session", autouse=True)
def plugin():
    """Return the plug-in, installed. Each file of this folder is skipped where SGLang is not installed."""
    pytest.importorskip(
        "sglang.srt.layers.quantization.modelopt_quant",
        reason="SGLang's own dependencies are missing: pip install '.[serve-test-sglang]'",
        exc_type=ImportError,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry

    import nvfp4_tensor.integrations.sglang as ours
    from nvfp4_tensor.integrations.sglang import plugin

    assert list(plugin.differences()) == []
    ours.register()
    assert plugin._installed
    HookRegistry.apply_hooks()
    return plugin

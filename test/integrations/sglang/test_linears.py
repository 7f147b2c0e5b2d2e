"""SGLang's own layers and loaders with our methods, on a CPU, against dense mirrors of the weights.

Its engine does not run here: its compiled packages are not used.
"""

import pytest
import torch
from helpers.served_weights import INPUT_SCALE, decoded, error_by_column, rounded, tensors_of, weights_of

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations import sglang as ours

pytest.importorskip("sglang", reason="pip install '.[serve-test-sglang]' in an environment of its own")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HIDDEN, ROWS = 64, (64, 32, 32)
KINDS = ["NVFP4", "W4A16_NVFP4", "nvfp4", "nvfp4a16"]
"""Of ModelOpt, and of compressed-tensors."""


def method_of(kind):
    """Return SGLang's method resp. scheme for a checkpoint of the kind, as its configurations look it up."""
    if kind.startswith("nvfp4"):
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as ct

        return ct.CompressedTensorsW4A16Fp4(has_input_global_scale=kind == "nvfp4")
    from sglang.srt.layers.quantization import modelopt_quant

    config = modelopt_quant.ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16, exclude_modules=[])
    config.is_w4a16 = kind == "W4A16_NVFP4"
    names = {"NVFP4": "ModelOptFp4LinearMethod", "W4A16_NVFP4": "ModelOptNvFp4A16LinearMethod"}
    return getattr(modelopt_quant, names[kind])(config)


def stored(weight, kind):
    return tensors_of(weight, kind.startswith("nvfp4"), None if kind == "nvfp4a16" else INPUT_SCALE)


def assert_products(forward, weights, kind):
    """Compare the products of a layer with those of dense weights."""
    x = torch.randn(6, HIDDEN).bfloat16()
    expected = rounded(x, "dense" if "16" in kind else "static") @ decoded(weights).t()
    assert error_by_column(forward(x), expected) < 2**-8
    return x


class Fused(torch.nn.Module):
    """A linear whose parameters' loaders write rows of q, k and v."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.method = kind, method_of(kind)
        options = {"params_dtype": torch.bfloat16, "weight_loader": self.load}
        if kind.startswith("nvfp4"):
            self.method.create_weights(self, list(ROWS), HIDDEN, **options)
        else:
            self.method.create_weights(self, HIDDEN, list(ROWS), HIDDEN, sum(ROWS), **options)

    def load(self, parameter, loaded, shard):
        """What SGLang's v2 loaders of QKVParallelLinear do."""
        if parameter.dim() == 1:
            parameter.load_qkv_weight(loaded, shard_id=shard, num_heads=1, shard_size=1, shard_offset=0)
            return
        index = "qkv".index(shard)
        start = sum(ROWS[:index])
        parameter.data[start : start + ROWS[index]].copy_(loaded)

    def fill(self, weights, without=()):
        for shard, weight in zip("qkv", weights, strict=True):
            for name, tensor in stored(weight, self.kind).items():
                if (shard, name) not in without:
                    parameter = getattr(self, name)
                    parameter.weight_loader(parameter, tensor, shard)
        self.method.process_weights_after_loading(self)
        return self

    def forward(self, x):
        apply = self.method.apply_weights if self.kind.startswith("nvfp4") else self.method.apply
        return apply(self, x, None)


def weights():
    return weights_of(ROWS, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_weights_with_other_scales_are_exact(kind):
    """Made ready twice they stay the same, and loading again is refused."""
    layer = Fused(kind).fill(weights())
    x = assert_products(layer, weights(), kind)
    before = layer(x)
    layer.method.process_weights_after_loading(layer)
    assert torch.equal(layer(x), before)
    if not kind.startswith("nvfp4"):
        with pytest.raises(RuntimeError, match="start SGLang again"):
            layer.weight.weight_loader(layer.weight, weights()[0].qdata, "q")


@pytest.mark.parametrize("kind", ["NVFP4", "W4A16_NVFP4"])
def test_sglangs_layers_and_loaders(kind, monkeypatch):
    from sglang.srt.layers import linear
    from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

    found = {"quant_method": "modelopt", "quant_algo": kind, "group_size": 16, "ignore": ["lm_head"]}
    config = ModelOptFp4Config.from_config(found)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    options = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config}
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda _: None)  # one rank, without its groups
    monkeypatch.setattr(linear, "get_group_rank_size", lambda _: (0, 1))
    qkv = QKVParallelLinear(HIDDEN, 16, 4, 2, prefix="model.layers.0.self_attn.qkv_proj", **options)
    row = RowParallelLinear(HIDDEN, 80, prefix="model.layers.0.mlp.down_proj", **options)
    (down,) = weights_of((80,), HIDDEN, (1.0,))
    for layer, parts, shards in ((qkv, weights(), "qkv"), (row, [down], (None,))):
        for shard, weight in zip(shards, parts, strict=True):
            for name, tensor in stored(weight, kind).items():
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))
        layer.quant_method.process_weights_after_loading(layer)
        assert_products(lambda x, layer=layer: layer.quant_method.apply(layer, x, None), parts, kind)


@pytest.mark.parametrize("kind", ["NVFP4", "nvfp4"])
def test_setting_w4a16(kind, monkeypatch):
    monkeypatch.setenv(serving.SETTING, "w4a16")
    layer = Fused(kind).fill(weights())
    assert layer.method.activations == {"": serving.Activations.DENSE} and not hasattr(layer, "nvfp4_amax")


def test_sglang_looks_up_our_classes(plugin):
    """Also where it has imported them by name; and its loaders go by their names."""
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    from nvfp4_tensor.integrations.sglang import linears

    for kind in KINDS:
        assert isinstance(method_of(kind), linears._Served)
    assert type(method_of("NVFP4")).__name__ in WEIGHT_LOADER_V2_SUPPORTED


def test_other_devices_stay_with_sglang(plugin, monkeypatch):
    from sglang.srt.layers.quantization import modelopt_quant

    from nvfp4_tensor.integrations.sglang import linears

    monkeypatch.setattr(serving, "cannot_serve", lambda *_: "for this test")
    for original, replacement in linears.REPLACEMENTS.items():
        if original.__module__ == modelopt_quant.__name__:
            monkeypatch.setattr(original, "__init__", lambda self, config: None)  # it asks for backends
            config = modelopt_quant.ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16)
            assert type(replacement(config)) is original
        else:
            assert type(replacement(True)) is original and replacement(True).has_input_global_scale


def test_a_change_of_sglang_leaves_it_as_it_was(plugin, monkeypatch):
    monkeypatch.setattr(plugin, "_installed", False)
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.warns(UserWarning, match="leaves SGLang as it is: this is SGLang 0.6.0"):
        ours.register()
    monkeypatch.setenv(serving.SETTING, "0")
    ours.register()
    assert not plugin._installed

"""vLLM's own layers and loaders with our methods, against dense mirrors of the weights."""

import pytest
import torch
from helpers.served_weights import INPUT_SCALE, decoded, error_by_column, rounded, tensors_of, weights_of

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.serving import Activations

pytest.importorskip("vllm", reason="pip install '.[serve-test]' in an environment of its own")

HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16
KINDS = {
    "modelopt W4A16": ("modelopt", "W4A16_NVFP4", "dense"),
    "modelopt W4A4 static": ("modelopt", "NVFP4", "static"),
    "modelopt W4A4 dynamic": ("modelopt", "NVFP4", "dynamic"),
    "compressed-tensors W4A16": ("compressed-tensors", "NVFP4A16", "dense"),
    "compressed-tensors W4A4 static": ("compressed-tensors", "NVFP4", "static"),
    "compressed-tensors W4A4 dynamic": ("compressed-tensors", "NVFP4", "dynamic"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def config_of(kind, **changes):
    """Return vLLM's configuration of a checkpoint of the kind, by the class that vLLM chooses."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    method, algorithm, _ = KINDS[kind]
    if method == "modelopt":
        found = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head"]}
        return get_quantization_config("modelopt_fp4").from_config({**found, **changes})
    arguments = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "dynamic": False,
    }  # fmt: skip
    inputs = {**arguments, "dynamic": "local"} if algorithm == "NVFP4" else None
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}
    found = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return get_quantization_config("compressed-tensors").from_config(
        {**found, "config_groups": {"group_0": group}, **changes}
    )


def served(layer, weights, kind, shards="qkv"):
    """Return a layer that vLLM's loaders have filled, made ready."""
    parameters, (method, _, activations) = dict(layer.named_parameters()), KINDS[kind]
    scale = INPUT_SCALE if activations == "static" else None
    for shard, weight in zip(shards, weights, strict=True):
        for name, tensor in tensors_of(weight, method != "modelopt", scale).items():
            parameters[name].weight_loader(parameters[name], tensor, *([] if shard is None else [shard]))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def rows_of(name, kind, rows=80, columns=HIDDEN, ignore=("lm_head",), **options):
    """Return a linear of one weight of a class of vLLM's."""
    from vllm.model_executor.layers import linear

    return getattr(linear, name)(
        columns, rows, bias=False, quant_config=config_of(kind, ignore=list(ignore)), params_dtype=torch.bfloat16,
        **{"prefix": "model.layers.0.mlp.down_proj", **options},
    )  # fmt: skip


def qkv(kind, bias=False):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return QKVParallelLinear(
        HIDDEN, HEAD, HEADS, KV_HEADS, bias=bias, quant_config=config_of(kind), params_dtype=torch.bfloat16,
        prefix="model.layers.0.self_attn.qkv_proj",
    )  # fmt: skip


def qkv_weights(**options):
    return weights_of((64, 32, 32), HIDDEN, **options)


def layers(kind):
    """Yield (layer, weights, shard ids) of each class of linears."""
    yield qkv(kind), qkv_weights(), "qkv"
    options = {"rows": [48, 48], "prefix": "model.layers.0.mlp.gate_up_proj"}
    yield rows_of("MergedColumnParallelLinear", kind, **options), weights_of((48, 48), HIDDEN, (1.0, 700.0)), (0, 1)
    if "modelopt" in kind:  # weights that are fused in the file
        yield rows_of("MergedColumnParallelLinear", kind, **options), weights_of((96,), HIDDEN, (1.0,)), (None,)
    for name in ("ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"):
        yield rows_of(name, kind), weights_of((80,), HIDDEN, (3.0,)), (None,)


def mirror(x, weights, kind):
    return rounded(x, KINDS[kind][2]) @ decoded(weights).t()


def ours():
    from nvfp4_tensor.integrations.vllm import linears

    return linears


@kinds
def test_each_class_of_linears(kind):
    """Products, and codes, which stay where they are if the layer is made ready twice."""
    for layer, weights, shards in layers(kind):
        served(layer, weights, kind, shards)
        x = torch.randn(6, HIDDEN).bfloat16()
        before, addresses = layer(x)[0], {name: p.data_ptr() for name, p in layer.named_parameters()}
        assert error_by_column(before, mirror(x, weights, kind)) < 2**-8, type(layer).__name__
        assert torch.equal(layer.weight, torch.cat([weight.qdata for weight in weights]))
        for name in ("weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale"):
            assert not hasattr(layer, name)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer(x)[0], before)
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


def of_two_ranks(monkeypatch, rank):
    for module in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
        monkeypatch.setattr(f"{module}.get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(f"{module}.get_tensor_model_parallel_world_size", lambda: 2)


@kinds
def test_two_ranks(kind, monkeypatch):
    """Each rank of two loads its part by vLLM's loaders; the parts make up the whole. Half a block is refused."""
    weights, (down,) = qkv_weights(), weights_of((80,), 96, (3.0,))
    x, x_down = torch.randn(6, HIDDEN).bfloat16(), torch.randn(6, 96).bfloat16()
    outputs, sums = [], torch.zeros(6, 80, dtype=torch.float64)
    for rank in range(2):
        of_two_ranks(monkeypatch, rank)
        outputs.append(served(qkv(kind), weights, kind)(x)[0].split([32, 16, 16], dim=1))
        row = rows_of("RowParallelLinear", kind, columns=96, input_is_parallel=True, reduce_results=False)
        assert served(row, [down], kind, (None,)).weight.shape == (80, 24)
        columns = slice(rank * 48, rank * 48 + 48)
        part = x_down[:, columns].contiguous()
        got = row(part)[0].double()
        assert error_by_column(got, rounded(part, KINDS[kind][2]) @ decoded([down])[:, columns].t()) < 2**-8
        sums += got
    whole = torch.cat([torch.cat(part, dim=1) for part in zip(*outputs, strict=True)], dim=1)
    assert error_by_column(whole, mirror(x, weights, kind)) < 2**-8
    bound = 2**-7 if "dynamic" not in kind else 0.2  # a rank's part of a token has its own scale
    assert error_by_column(sums, mirror(x_down, [down], kind)) < bound
    with pytest.raises(ValueError, match="fewer ranks"):
        rows_of("RowParallelLinear", kind, columns=48)


# --- what must not go wrong in silence -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["modelopt W4A4 dynamic", "compressed-tensors W4A4 static"])
def test_setting_w4a16_keeps_activations_dense(kind, monkeypatch):
    monkeypatch.setenv(serving.SETTING, "w4a16")
    layer, x = served(qkv(kind), qkv_weights(), kind), torch.randn(6, HIDDEN).bfloat16()
    assert layer.quant_method.activations == {"": Activations.DENSE} and not hasattr(layer, "nvfp4_amax")
    assert error_by_column(layer(x)[0], mirror(x, qkv_weights(), "modelopt W4A16")) < 2**-8


@kinds
def test_latent_attention_reads_the_exact_weight(kind):
    """vLLM reads kv_b_proj as the product with an identity matrix."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    (weight,) = weights_of((80,), HIDDEN, (1.0,))
    layer = rows_of("ColumnParallelLinear", kind, prefix="model.layers.0.self_attn.kv_b_proj")
    read = get_and_maybe_dequant_weights(served(layer, [weight], kind, (None,)), out_dtype=torch.float32)
    torch.testing.assert_close(read, weight.dequantize(torch.float32), rtol=3e-7, atol=0)


@pytest.mark.parametrize("kind", ["modelopt W4A16", "modelopt W4A4 static", "compressed-tensors W4A4 static"])
def test_ignored_layers_and_heads(kind):
    """A head's rows are padded to 64 by vLLM; one that is the embedding is refused."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    dense = rows_of("ColumnParallelLinear", kind, ignore=["re:.*dense.*", "model.dense"], prefix="model.dense")
    assert isinstance(dense.quant_method, UnquantizedLinearMethod)
    if "compressed" in kind:  # its target "Linear" is no head
        return
    options = {"params_dtype": torch.bfloat16, "quant_config": config_of(kind, ignore=[]), "prefix": "lm_head"}
    head, weights, x = ParallelLMHead(90, HIDDEN, **options), weights_of((90,), HIDDEN, (1.0,)), torch.randn(4, HIDDEN)
    y = served(head, weights, kind, (None,)).quant_method.apply(head, x.bfloat16())
    assert y.shape == (4, 128) and not y[:, 90:].any()
    assert error_by_column(y[:, :90], mirror(x.bfloat16(), weights, kind)) < 2**-8
    embedding = VocabParallelEmbedding(96, HIDDEN, params_dtype=torch.bfloat16, quant_config=None)
    tied = ParallelLMHead(96, HIDDEN, **options).tie_weights(embedding)
    with pytest.raises(ValueError, match="tied"):
        tied.quant_method.process_weights_after_loading(tied)


def test_another_group_size_and_asked_for_kernels_stay_with_vllm(monkeypatch):
    from vllm.model_executor.layers.quantization import modelopt

    made = []
    monkeypatch.setattr(modelopt, "ModelOptLinearMethod", lambda *a: made.append(a) or "theirs")
    builder = modelopt.LINEAR_METHOD_BUILDERS["NVFP4"]
    config = config_of("modelopt W4A4 static", group_size=32)
    assert builder(config, "x") == "theirs"
    config = config_of("modelopt W4A4 static")
    assert isinstance(builder(config, "x"), ours().NVFP4TensorLinearMethod)
    monkeypatch.setattr(ours(), "asked_for", lambda: "marlin")
    assert builder(config, "x") == "theirs" and len(made) == 2


def test_a_model_with_loaders_of_its_own():
    """vLLM's Mamba sets those of weight, weight_scale and input_scale."""
    kind, (weight,), x = "modelopt W4A4 static", weights_of((80,), HIDDEN, (1.0,)), torch.randn(6, HIDDEN).bfloat16()

    def make():
        layer = rows_of("ColumnParallelLinear", kind, prefix="mixer.in_proj")
        for name in ("weight", "weight_scale", "input_scale"):
            getattr(layer, name).weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
        return layer

    assert error_by_column(served(make(), [weight], kind, (None,))(x)[0], mirror(x, [weight], kind)) < 2**-8
    lacking = make()
    lacking.weight_scale_2.weight_loader(lacking.weight_scale_2, weight.per_tensor_scale)
    with pytest.raises(ValueError, match="block scales were not loaded"):
        lacking.quant_method.process_weights_after_loading(lacking)

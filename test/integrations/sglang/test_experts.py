"""SGLang's own layer of experts and its loaders with our methods, on a CPU, against dense mirrors of the weights."""

import pytest
import torch
from helpers.served_weights import rounded, tensors_of
from torch.nn.functional import relu, silu

from nvfp4_tensor import quantize
from nvfp4_tensor.integrations import loading, serving

pytest.importorskip("sglang", reason="pip install '.[serve-test-sglang]' in an environment of its own")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COUNT, HIDDEN, INNER, TOP, TOKENS = 4, 64, 48, 2, 9
INPUT_SCALES = {"w1": 0.0015, "w3": 0.0015, "w2": 0.0006}
KINDS = ["NVFP4", "W4A16_NVFP4", "nvfp4", "nvfp4a16"]


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    from sglang.srt.runtime_context import get_context, get_parallel

    published = get_context().override_server_args()
    published.install()
    ranks = dict.fromkeys(("moe_ep_rank", "moe_tp_rank", "tp_rank"), 0)
    with get_parallel().override(tp_group=None, **ranks):
        yield
    published.restore()


class Config:
    """What a layer asks of SGLang's configuration of a compressed-tensors checkpoint."""

    def __init__(self, kind):
        self.kind = kind

    def get_name(self):
        return "compressed_tensors"

    def get_quant_method(self, layer, prefix):
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as ct

        layer.scheme = ct.CompressedTensorsW4A16Nvfp4MoE(has_input_global_scale=self.kind == "nvfp4")
        return ct.CompressedTensorsFusedMoEMethod(self)


def config_of(kind):
    if kind.startswith("nvfp4"):
        return Config(kind)
    from sglang.srt.layers.quantization import modelopt_quant

    config = modelopt_quant.ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16, exclude_modules=[])
    config.is_w4a16 = kind == "W4A16_NVFP4"
    return config


def layer_of(kind, **options):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE(
        num_experts=COUNT, hidden_size=HIDDEN, intermediate_size=INNER, layer_id=0, top_k=TOP,
        params_dtype=torch.bfloat16, quant_config=config_of(kind), prefix="model.layers.0.mlp.experts", **options,
    )  # fmt: skip
    layer.method = layer.scheme if kind.startswith("nvfp4") else layer.quant_method
    return layer


def weights(gated=True):
    """Gates, ups and downs of all experts, whose per-tensor scales differ."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows, columns, ratio):
        return quantize((torch.randn(rows, columns, generator=generator) * ratio / columns**0.5).bfloat16())

    return [
        {"w1": draw(INNER, HIDDEN, 1.0 + expert), "w2": draw(HIDDEN, INNER, 1.0)}
        | ({"w3": draw(INNER, HIDDEN, 0.02)} if gated else {})
        for expert in range(COUNT)
    ]


def fill(layer, kind, given, without=()):
    for expert, shards in enumerate(given):
        for shard, weight in shards.items():
            which = "w2" if shard == "w2" else "w13"
            scale = None if kind == "nvfp4a16" else INPUT_SCALES[shard]
            for name, tensor in tensors_of(weight, kind.startswith("nvfp4"), scale).items():
                if (expert, shard, name) in without:
                    continue
                parameter = getattr(layer, f"{which}_{name}")
                label = f"model.layers.0.mlp.experts.{which}_{name}"
                parameter.weight_loader(parameter, tensor, label, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def routed(layer, x, ids, factors):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return layer(x, StandardTopKOutput(topk_weights=factors, topk_ids=ids, router_logits=torch.zeros(len(x), COUNT)))


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    factors, ids = torch.rand(TOKENS, COUNT, generator=generator).topk(TOP)
    return x, ids.to(torch.int32), factors


def expected(kind, given, x, ids, factors):
    """The same in float64; each step of activations rounded as the layer rounds it."""

    def values(x, shard):
        return rounded(x, "dense" if "16" in kind else "static", INPUT_SCALES[shard])

    y = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token in range(len(x)):
        for expert, factor in zip(ids[token].tolist(), factors[token].tolist(), strict=True):
            if expert < 0:
                continue
            dense = {shard: weight.dequantize(torch.float32).double() for shard, weight in given[expert].items()}
            first = (values(x[token : token + 1], "w1") @ dense["w1"].t()).bfloat16()
            if "w3" in dense:
                up = (values(x[token : token + 1], "w3") @ dense["w3"].t()).bfloat16()
                hidden = silu(first) * up
            else:
                hidden = relu(first).square()
            y[token] += factor * (values(hidden, "w2") @ dense["w2"].t()).bfloat16().double()[0]
    return y


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_by_sglangs_layer_and_loaders(kind):
    given = weights()
    layer = fill(layer_of(kind, routed_scaling_factor=2.5), kind, given)
    assert layer.method.served
    x, ids, factors = inputs()
    ids[::2, 1], ids[1] = -1, -1  # experts of other ranks
    y = routed(layer, x, ids, factors)
    assert y.shape == x.shape and y.dtype == x.dtype and (y[1] == 0).all()
    # W4A4: a hidden value on a rounding border may become the neighbouring code
    assert error(y, 2.5 * expected(kind, given, x, ids, factors)) < (2**-8 if "16" in kind else 0.02)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(routed(layer, x, ids, factors), y)
    assert routed(layer, x[:0], ids[:0], factors[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("kind", ["W4A16_NVFP4", "nvfp4a16"])
def test_experts_without_gates(kind):
    given = weights(gated=False)
    layer = fill(layer_of(kind, activation="relu2", is_gated=False), kind, given)
    x, ids, factors = inputs()
    assert error(routed(layer, x, ids, factors), expected(kind, given, x, ids, factors)) < 2**-8


def test_setting_w4a16(monkeypatch):
    monkeypatch.setenv(serving.SETTING, "w4a16")
    layer = fill(layer_of("NVFP4"), "NVFP4", weights())
    assert set(layer.method.activations.values()) == {serving.Activations.DENSE}
    x, ids, factors = inputs()
    assert error(routed(layer, x, ids, factors), expected("W4A16", weights(), x, ids, factors)) < 2**-8


@pytest.mark.parametrize("options, reason", [
    ({"activation": "gelu"}, "activation gelu"), ({"swiglu_limit": 7.0}, "clamped"), ({"with_bias": True}, "bias"),
    ({"no_combine": True}, "sums itself"), ({"num_fused_shared_experts": 1}, "fused with others"),
])  # fmt: skip
def test_layers_that_stay_with_sglang(options, reason):
    from nvfp4_tensor.integrations.sglang import experts

    layer = layer_of("nvfp4a16", **options)
    assert not layer.method.served and reason in experts.layer_not_served(layer)
    assert not isinstance(layer.w13_weight_packed.weight_loader, loading.Loader)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("enable_eplb", True, "--enable-eplb"), ("enable_lora", True, "LoRA"), ("dwdp_size", 2, "--dwdp-size")],
)
def test_processes_that_stay_with_sglang(monkeypatch, field, value, reason):
    from sglang.srt.runtime_context import RuntimeContext

    from nvfp4_tensor.integrations.sglang import experts

    found = RuntimeContext.config_leaf
    monkeypatch.setattr(RuntimeContext, "config_leaf", lambda self, name: value if name == field else found(self, name))
    said = []
    monkeypatch.setattr(experts, "tell", lambda _, why, what: said.append((why, what)))
    assert not layer_of("nvfp4a16").method.served
    assert said == [(experts.process_not_served(), "experts")] and reason in said[0][0]


def test_sglang_looks_up_our_classes():
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    from nvfp4_tensor.integrations.sglang import experts

    assert layer.ModelOptNvFp4FusedMoEMethod is ModelOptNvFp4FusedMoEMethod
    assert issubclass(ModelOptNvFp4FusedMoEMethod, experts._ServedExperts)
    assert "ModelOpt" in ModelOptNvFp4FusedMoEMethod.__name__  # SGLang's loader goes by it


def test_a_subclass_of_sglangs_own_stays_sglangs(monkeypatch):
    """Its other methods expect the parameters of SGLang's kernels."""
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    original = ModelOptNvFp4FusedMoEMethod.__bases__[1]
    monkeypatch.setattr(original, "__init__", lambda self, config: None)  # it asks for backends
    assert not type("Own", (ModelOptNvFp4FusedMoEMethod,), {})(config_of("NVFP4")).served


@pytest.mark.parametrize("kind", ["W4A16_NVFP4", "nvfp4"])
def test_ranks_of_expert_parallelism_sum_to_one_rank(kind):
    from sglang.srt.runtime_context import get_parallel

    given, (x, ids, factors) = weights(), inputs()
    whole = routed(fill(layer_of(kind), kind, given), x, ids, factors)
    total = torch.zeros_like(whole, dtype=torch.float64)
    for rank in range(2):
        with get_parallel().override(tp_size=2, attn_tp_size=2, moe_ep_size=2, moe_ep_rank=rank, moe_tp_size=1):
            layer = fill(layer_of(kind), kind, given)
            assert layer.w13_weight.shape[0] == COUNT // 2
            total += routed(layer, x, ids, factors).double()
            with pytest.raises(ValueError, match="not loaded for all of 2 experts"):
                name = "weight_packed" if kind == "nvfp4" else "weight"
                fill(layer_of(kind), kind, given, without=[(2 * rank, "w1", name)])
    assert error(total, whole.double()) < 2**-7

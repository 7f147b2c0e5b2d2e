"""Experts: quantize_ with and without experts=True; calibration and GPTQ, to which each expert shows all tokens."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    calibrate,
    quantize,
    quantize_experts,
    quantize_model,
)
from nvfp4_tensor.quantization import gptq, routed_tokens, sensitivity
from nvfp4_tensor.quantization.accuracy.gptq.rounding import Factor, round_weight
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.experts import (
    UNROUTED,
    arguments_of,
    expert_weights,
    inputs_of,
    is_experts,
    is_transposed,
    matrix_of,
    tokens_of,
)
from nvfp4_tensor.quantization.observed_experts import observed_weights
from nvfp4_tensor.quantization.weights import dense_experts

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
OWN_SIZES = {
    "DeepseekV3": {"head_dim": 16},
    "Llama4": {"intermediate_size": 48, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
               "interleave_moe_layer_step": 1},
}  # fmt: skip
KINDS = {"Mixtral": 4, "Qwen3Moe": 4, "GptOss": 4, "DeepseekV3": 2, "Llama4": 4}
"""The number of experts' weights of each model."""
IDS = torch.arange(1, 33)[None]


def mixture(kind, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Llama4')}Config")
    config = config(**SIZES | OWN_SIZES.get(kind, {}) | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    return model


def linears(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_quantizes_experts_or_names_once_that_they_stay_dense(kind):
    model, config = mixture(kind), NVFP4Config if kind in ("Mixtral", "GptOss") else NVFP4WeightOnlyConfig
    exact = model(IDS).logits.float()
    dense = {each.name: (each.dense.detach(), is_transposed(each.module)) for each in dense_experts(model)}
    assert len(dense) == KINDS[kind]
    first = next(iter(dense)).replace(".", r"\.")
    with pytest.warns(
        UserWarning, match=rf"the experts stay dense, \d+% .*{first}, {KINDS[kind]} in all.*ts=True"
    ) as caught:
        quantize_(model, config(), filter_fn=lambda module, name: name.endswith("o_proj"))
    assert len(caught) == 1 and len(list(dense_experts(model))) == KINDS[kind]
    model = mixture(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, config(experts=False), filter_fn=lambda module, name: name.endswith("o_proj"))
        assert len(list(dense_experts(model))) == KINDS[kind]
        quantize_(
            model, config(experts=True), filter_fn=lambda m, name: linears(m, name) and not name.endswith("o_proj")
        )
    assert not list(dense_experts(model))
    for name, (weight, transposed) in dense.items():
        got = model.get_parameter(name)
        expected = quantize_experts(weight.mT.contiguous()).mT if transposed else quantize_experts(weight)
        assert isinstance(got, NVFP4Tensor) and torch.equal(got.dequantize(), expected.dequantize())
        assert (got.activation_spec is None) == (config is NVFP4WeightOnlyConfig)
    assert 0 < (model(IDS).logits.float() - exact).norm() / exact.norm() < 0.5


@pytest.mark.parametrize(("fails", "dense"), [("quantize", 0), ("quantize_experts", 4)])
def test_a_failure_between_weights_leaves_whole_ones(fails, dense, monkeypatch):
    model = mixture("Mixtral")
    monkeypatch.setattr(f"nvfp4_tensor.quantization.weights.{fails}", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(model, [IDS], NVFP4Config(experts=True), filter_fn=linears, progress=False)
    assert len(list(dense_experts(model))) == dense
    assert all(type(module) is nn.Linear for name, module in model.named_modules() if linears(module, name))
    assert not any("observed" in name for name, _ in model.named_modules())
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("route", ["quantize_", "calibrate", "gptq", "from_pretrained"])
def test_falcons_linears(route, tmp_path):
    """Falcon's linears are a subclass of nn.Linear with its own forward."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).bfloat16().eval()
    if route == "from_pretrained":
        nvfp4 = pytest.importorskip("nvfp4_tensor.integrations.transformers")
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=nvfp4.NVFP4TensorConfig())
    elif route == "quantize_":
        found = sensitivity(model, [IDS], filter_fn=linears, progress=False)
        assert all(part.called and part.loss > 0 for part in found.parts)
        quantize_(model.transformer, NVFP4WeightOnlyConfig())
    else:
        {"calibrate": calibrate, "gptq": gptq}[route](model.transformer, [IDS], progress=False)
    found = [name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)]
    assert len(found) == 4 and all("self_attention" in name or "mlp.dense" in name for name in found)
    linear = model.transformer.h[0].mlp.dense_h_to_4h
    assert type(linear).__name__ == "FalconLinear" and linear.forward.__func__ is type(linear).forward
    assert model(IDS).logits.isfinite().all()


# --- what experts observe ---------------------------------------------------------------------------------------------


def chosen(module, name):
    return linears(module, name) and not name.endswith(("gate", "router"))


def only_experts(module, name):
    return is_experts(module)


def experts_of(model):
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def calibrated(model, config=None):
    config = NVFP4Config(experts=True) if config is None else config
    return calibrate(model, [IDS], config, filter_fn=chosen, progress=False)


def inputs_in(model, batches):
    """(rows, weights) of each expert's inputs, by module, weight and expert, for each batch through the dense model."""
    rows = {}

    def hook(name):
        def record(module, args):
            for attribute, experts, x, weights in inputs_of(module, *arguments_of(args, {})):
                for i, expert in enumerate(range(4)[experts]):
                    own = torch.ones(len(x)) if weights is None else weights[:, i]
                    rows.setdefault((name, attribute, expert), []).append((x.float(), own))

        return record

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in experts_of(model).items()]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return rows


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("Mixtral", "eager"), ("Qwen3Moe", "grouped_mm"), ("GptOss", "batched_mm"), ("DeepseekV3", "grouped_mm")],
)
def test_inputs_are_those_of_the_products(kind, implementation):
    """The module's output is made again from the inputs that each expert is said to have."""
    model = mixture(kind)
    model.set_experts_implementation(implementation)
    module = next(iter(experts_of(model).values()))
    torch.manual_seed(0)
    hidden, weights = torch.randn(20, 64).bfloat16(), torch.rand(20, 2).bfloat16()
    choice = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
    again = torch.zeros(20, 64)
    for attribute, experts, x, counted in inputs_of(module, hidden, choice):
        expected = torch.stack([(choice == e).any(1) for e in range(4)[experts]], dim=1)
        assert torch.equal(counted, torch.where(expected, 1.0, UNROUTED))
        if attribute == "down_proj":
            expert = experts.start
            y = (x @ matrix_of(module, module.down_proj, expert).mT).float()
            y = y + module.down_proj_bias[expert] if module.has_bias else y
            again += y * ((choice == expert) * weights).sum(-1, keepdim=True)
        else:
            assert torch.equal(x, hidden)
    with torch.no_grad():
        y = module(hidden, choice, weights).float()
    assert (again - y).norm() < 0.01 * y.norm()


def test_tokens_that_other_ranks_have_do_not_count():
    module, hidden = mixture("Mixtral").model.layers[0].mlp.experts, torch.randn(3, 64).bfloat16()
    chosen = torch.tensor([[0, 4], [4, 2], [2, 7]])  # this rank has four experts
    assert tokens_of(4, hidden, chosen).tolist() == [1, 0, 2, 0]
    *_, counted = next(inputs_of(module, hidden, chosen))
    assert torch.equal((counted == 1).int(), torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_calibrate_and_gptq_have_the_statistics_of_all_tokens(kind):
    dense, batches = mixture(kind), [IDS, IDS.flip(1)]
    seen = inputs_in(dense, batches)
    make = NVFP4Config if kind in ("Mixtral", "Llama4") else NVFP4WeightOnlyConfig
    config = make(scale_search="mse", weighted=True, experts=True)
    model, fitted = copy.deepcopy(dense), copy.deepcopy(dense)
    calibrate(model, batches, config, filter_fn=chosen, progress=False)
    gptq(fitted, batches, filter_fn=only_experts, layers=[], progress=False)  # all inputs are those of the dense model
    for name, own in experts_of(dense).items():
        for attribute in expert_weights(own):
            w, f = (getattr(m.get_submodule(name), attribute) for m in (model, fitted))
            assert w.transposed == f.transposed == is_transposed(own)
            inputs = [seen[name, attribute, expert] for expert in range(4)]
            amax = max(x.abs().max() for every in inputs for x, _ in every) / 2688 * 2688  # as files keep it
            assert (w.activation_amax, w.activation_spec is None) == (
                (amax, False) if make is NVFP4Config else (None, True)
            )
            for expert, every in enumerate(inputs):
                matrix = matrix_of(own, getattr(own, attribute).detach(), expert)
                expected = quantize_weighted(matrix, w.spec, sum(count @ x.square() for x, count in every))
                same = matrix_of(own, w.dequantize(), expert) == expected.dequantize()
                assert same.float().mean() > 0.999  # sums of squares may differ in their last bits
                hessian = sum((x * count[:, None]).mT @ x for x, count in every)
                factor = Factor.of(hessian, 0.01, act_order=True)
                expected = round_weight(matrix.float(), factor, f.spec, torch.ops.nvfp4.amax(matrix.float()))
                same = matrix_of(own, f.dequantize(torch.float32), expert) == expected.dequantize(torch.float32)
                assert same.float().mean() > 0.999, (name, attribute, expert)  # sums of products may differ
    assert not observed_weights(model) and routed_tokens(model) == routed_tokens(fitted)
    # every token chose two experts (Llama 4: one)
    for counts in routed_tokens(model).values():
        assert len(counts) == 4 and sum(counts) == 64 * (1 if kind == "Llama4" else 2)


def test_outputs_flow_on_as_routed_and_the_static_amax_is_used():
    """Linears observe the same inputs whether experts are observed beside them or not."""
    models = [calibrated(mixture("Mixtral"), NVFP4Config(experts=experts)) for experts in (True, False)]
    amaxes = [[m.weight.activation_amax for name, m in model.named_modules() if chosen(m, name)] for model in models]
    assert len(amaxes[0]) == 8 and torch.equal(torch.stack(amaxes[0]), torch.stack(amaxes[1]))
    w = next(iter(experts_of(models[0]).values())).gate_up_proj
    x, offs = torch.randn(8, 64).bfloat16() / 16, torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    plain = w._replace(activation_spec=None, activation_amax=None)
    rows = ((x, w), (quantize(x, amax=w.activation_amax).dequantize(), plain), (quantize(x).dequantize(), plain))
    y, static, dynamic = (torch._grouped_mm(each, weight.mT, offs=offs).float() for each, weight in rows)
    assert (y - static).norm() < 0.01 * y.norm() and (y - dynamic).norm() > 0.05 * y.norm()
    model = mixture("Mixtral")
    list(experts_of(model).values())[-1].gate_up_proj.data[2] = float("nan")
    with pytest.warns(UserWarning, match=r"some inputs of model.layers.1.mlp.experts.down_proj.* were NaN"):
        calibrated(model)


def test_an_expert_that_nobody_chose_is_calibrated_and_told_of(capsys):
    models = [mixture("Qwen3Moe") for _ in range(2)]
    calibrate(models[0], [IDS[:, :3]], NVFP4Config(experts=True), filter_fn=chosen)
    gptq(models[1], [IDS[:, :3]], filter_fn=only_experts)
    counts = [routed_tokens(model) for model in models]
    assert counts[0] == counts[1] and all(sum(each) == 6 for each in counts[0].values())
    unused = [f"{name}.{e}" for name, each in counts[0].items() for e, count in enumerate(each) if not count]
    most = max(max(each) for each in counts[0].values())
    told = f"8 experts saw all tokens; the router sent 0 to {most} to each, none to {len(unused)} of them ({unused[0]}"
    assert unused and capsys.readouterr().err.count(told) == 2


def test_gptq_resumes_with_experts_and_takes_no_convolution_for_them(tmp_path):
    models = [mixture("GptOss") for _ in range(2)]
    for model in models:
        gptq(model, [IDS], filter_fn=only_experts, folder=tmp_path, progress=False)
    own, other = ({n: p for n, p in model.named_parameters() if isinstance(p, NVFP4Tensor)} for model in models)
    assert len(other) == 4 and all(p.transposed for p in other.values())
    assert all(torch.equal(p.dequantize(), other[name].dequantize()) for name, p in own.items())
    model = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(64, 16))
    gptq(model, [torch.randn(8, 16, 4)], progress=False)
    assert isinstance(model[2].weight, NVFP4Tensor) and type(model[0].weight.data) is torch.Tensor


@pytest.mark.parametrize("copied", ["deepcopy", "torch.save", "state_dict"])
def test_two_steps(copied):
    model, prepare = mixture("Mixtral"), NVFP4Config(step="prepare")
    expected = calibrate(copy.deepcopy(model), [IDS], NVFP4Config(experts=True), progress=False)
    quantize_model(model, prepare)
    with torch.no_grad():
        model(IDS)
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "torch.save":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        model = torch.load(file, weights_only=False)
    else:
        state, model = model.state_dict(), mixture("Mixtral")
        quantize_model(model, prepare)
        model.load_state_dict(state)
    quantize_model(model, NVFP4Config(step="convert"))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert routed_tokens(model) == routed_tokens(expected) and not observed_weights(model)


def test_autocast_rounds_no_statistics_and_convert_without_experts_leaves_no_observer():
    found, x = [], torch.randn(32, 64).bfloat16()
    for enabled in (False, True):
        model = mixture("Mixtral")
        quantize_(model, NVFP4Config(step="prepare", experts=True), filter_fn=chosen)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model.model.layers[0].mlp.experts(x, torch.arange(64).view(32, 2) % 4, torch.ones(32, 2).bfloat16())
        found.append(observed_weights(model)["model.layers.0.mlp.experts.gate_up_proj"].activation_squares)
    assert torch.equal(*found)
    model(IDS)
    quantize_(model, NVFP4Config(step="convert", experts=False))
    assert not observed_weights(model) and all(not m._forward_pre_hooks for m in experts_of(model).values())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_a_gpu_observes_the_same(kind):
    models = [mixture(kind), mixture(kind).cuda()]
    for model in models:
        ids = IDS.to(model.device)
        calibrate(model.model, [{"input_ids": ids}], NVFP4Config(experts=True), filter_fn=chosen, progress=False)
    for name, module in experts_of(models[0]).items():
        for attribute in expert_weights(module):
            a, b = (getattr(m.get_submodule(name), attribute) for m in models)
            assert b.is_cuda and torch.equal(a.qdata, b.qdata.cpu())
            torch.testing.assert_close(a.activation_amax, b.activation_amax.cpu(), rtol=0.05, atol=0)
    assert models[1](IDS.cuda()).logits.isfinite().all()

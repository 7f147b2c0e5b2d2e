"""Saving a model: identical bytes, one scale for joined linears, and errors."""

import json

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, content, edit
from helpers.user_warnings import user_warnings
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, calibrate, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.checkpoints.parts import with_scale
from nvfp4_tensor.quantization import gptq
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters


class Block(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            setattr(self, name, nn.Linear(hidden, 64, bias=False))
            getattr(self, name).weight.data.mul_(5.0**i)
        self.o_proj = nn.Linear(64, hidden)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))


@pytest.fixture
def block():
    return Block().bfloat16()


@pytest.fixture
def unshared(block):
    """A block whose linears were quantized one by one: each has its own per-tensor scale."""
    for linear in block.children():
        quantize_(linear, NVFP4WeightOnlyConfig())
    return block


@pytest.mark.parametrize(("format", "w4a4"), [("compressed-tensors", True), ("torchao", False), ("torchao", True)])
def test_round_trip(tmp_path, block, format, w4a4):
    quantize_(block, NVFP4WeightOnlyConfig(four_over_six=True)) if not w4a4 else calibrate(
        block, [torch.randn(8, 64).bfloat16()], NVFP4Config(), progress=False
    )
    checkpoints.save(block, tmp_path / "a", format=format, mismatched_scales="keep", progress=False)
    again = checkpoints.load(Block().bfloat16(), tmp_path / "a", progress=False)
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(again(x), block(x))
    checkpoints.save(again, tmp_path / "b", format=format, mismatched_scales="keep", progress=False)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_what_was_loaded_is_saved_byte_for_byte(tmp_path):
    pytest.importorskip("transformers")
    model = open_model(GOLDEN / "modelopt_nvfp4")
    checkpoints.save(model, tmp_path / "again", progress=False)
    one, other = (folder / "model.safetensors" for folder in (tmp_path / "again", GOLDEN / "modelopt_nvfp4"))
    assert one.read_bytes() == other.read_bytes()
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written["model_type"] == "llama" and written["quantization_config"]["quant_method"] == "modelopt"
    # The divisors of another layout survive a model too.
    checkpoints.save(model, tmp_path / "ct", format="compressed-tensors", progress=False)
    divisor = next(d for d in torch.linspace(1, 2, 1000) if d.reciprocal().reciprocal() != d)
    edit(tmp_path / "ct", lambda tensors: [t.fill_(divisor) for name, t in tensors.items() if "global_scale" in name])
    checkpoints.save(open_model(tmp_path / "ct"), tmp_path / "ct2", format="compressed-tensors", progress=False)
    assert content(tmp_path / "ct") == content(tmp_path / "ct2")


def test_a_static_amax_comes_back_as_it_was(tmp_path):
    """amax / 2688, which files hold, times 2688 is another number for one in five."""
    weight = quantize(torch.randn(16, 32))
    amaxes = torch.linspace(1, 7, 20)
    assert 2 < (amaxes / 2688 * 2688 != amaxes).sum() < 12
    state = {
        f"layers.{i}.weight": weight._replace(activation_spec=QuantizeSpec(), activation_amax=amax.clone())
        for i, amax in enumerate(amaxes)
    }
    checkpoints.save(state, tmp_path / "a", progress=False)
    checkpoints.convert(tmp_path / "a", tmp_path / "b", to="compressed-tensors", progress=False)
    checkpoints.convert(tmp_path / "b", tmp_path / "c", to="modelopt", progress=False)
    for folder in "abc":
        with checkpoints.read(tmp_path / folder) as read:
            found = [tensor_of(read.linear(f"layers.{i}.weight")).activation_amax for i in range(20)]
        assert torch.equal(torch.stack(found), amaxes), folder


def test_codes_get_the_static_scales_that_files_need(tmp_path, block):
    """As the message says: those of gptq, for instance, which its activations' scales do not come with."""
    x = torch.randn(8, 64).bfloat16()
    gptq(block, [x], NVFP4Config(), filter_fn=lambda module, name: isinstance(module, nn.Linear), progress=False)
    with pytest.raises(ValueError, match=r"static .*calibrate\(model, batches\), after model.requires_grad_\(\) if it"):
        checkpoints.save(block, tmp_path / "a", progress=False)
    codes = {name: weight.qdata.clone() for name, weight in block.named_parameters() if name.endswith("weight")}
    calibrate(block.requires_grad_(), [x], NVFP4Config(), progress=False)
    checkpoints.save(block, tmp_path / "a", progress=False)
    again = checkpoints.load(Block().bfloat16(), tmp_path / "a", progress=False)
    assert torch.equal(again(x), block(x)) and not block.q_proj.weight.requires_grad
    assert all(torch.equal(again.get_parameter(name).qdata, each) for name, each in codes.items())


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao"])
def test_activations_that_readers_round_otherwise_warn(tmp_path, block, format):
    calibrate(block, [torch.randn(8, 64).bfloat16()], NVFP4Config(four_over_six=True), progress=False)

    def warned(only):
        return user_warnings(
            lambda: checkpoints.save(block, tmp_path / f"{only}", format=format, weight_only=only, progress=False),
            __file__,
            "o_proj.weight are quantized by (rne, 1x16, 4/6 mse), which files do not say",
        )

    assert (warned(False), warned(True)) == (1, 0)


def scales_of(folder):
    with checkpoints.read(folder) as read:
        return [read.per_tensor_scale(f"{name}_proj.weight") for name in "qkvo"]


def test_joined_linears_are_requantized_with_a_warning(tmp_path, unshared):
    before = {name: parameter.detach() for name, parameter in unshared.named_parameters()}
    with pytest.warns(UserWarning, match=r"requantizing 1 groups.*q_proj\.weight and k_proj\.weight and v_proj"):
        checkpoints.save(unshared, tmp_path / "a", progress=False)
    q, k, v, o = scales_of(tmp_path / "a")
    assert q == k == v == before["v_proj.weight"].per_tensor_scale and o == before["o_proj.weight"].per_tensor_scale
    with checkpoints.read(tmp_path / "a") as read:
        assert torch.equal(read.linear("v_proj.weight").qdata, before["v_proj.weight"].qdata)  # the largest scale
        for name in ("q_proj.weight", "k_proj.weight"):
            dense = before[name].dequantize(torch.float32)
            got = tensor_of(read.linear(name), torch.float32).dequantize()
            expected = quantize(dense, amax=v * 2688).dequantize()
            assert torch.allclose(got, expected, rtol=1e-6) and (got - dense).norm() / dense.norm() < 0.1
    assert torch.equal(unshared.q_proj.weight.dequantize(), before["q_proj.weight"].dequantize())  # as it was


@pytest.mark.parametrize("optimizer", [NVFP4AdamW, NVFP4Optimizer])
def test_what_trained_in_nvfp4_is_rounded_no_more(tmp_path, block, optimizer):
    """Steps move scales that were shared apart, by powers of two."""
    steps = optimizer(to_nvfp4_parameters(block).parameters(), lr=1e-2)
    for _ in range(3):
        for parameter in block.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16()
        steps.step()
    before = {f"{name}_proj.weight": getattr(block, f"{name}_proj").weight.detach() for name in "qkv"}
    assert len({each.per_tensor_scale.item() for each in before.values()}) > 1
    checkpoints.save(block, tmp_path / "a", mismatched_scales="refuse", progress=False)
    q, k, v, _ = scales_of(tmp_path / "a")
    assert q == k == v
    with checkpoints.read(tmp_path / "a") as read:
        for name, weight in before.items():
            assert torch.equal(read.linear(name).qdata, weight.qdata)
            got = tensor_of(read.linear(name), torch.float32).dequantize()
            assert torch.equal(got, weight.dequantize(torch.float32))


@pytest.mark.parametrize(("own", "factor", "is_exact"), [(1.0, 4.0, True), (1.5, 1.0, True), (0.15, 0.1, False)])
def test_another_scale_has_the_same_values_or_is_none(own, factor, is_exact):
    """0.15 / 0.1 is 1.5 in float32, but 1.5 times 0.1 is another number than 0.15."""
    own, factor = torch.tensor(own), torch.tensor(factor)
    assert own / factor in (0.25, 1.5)
    parts = parts_of(quantize(torch.randn(16, 32), amax=2688.0))
    parts = parts.replace(scale=torch.full_like(parts.scale.float(), 2.0).to(parts.scale.dtype), per_tensor_scale=own)
    moved = with_scale(parts, factor)
    assert (moved is not None) == is_exact
    if moved is not None:
        assert moved.per_tensor_scale == factor and torch.equal(moved.qdata, parts.qdata)
        assert torch.equal(*(tensor_of(each, torch.float32).dequantize() for each in (moved, parts)))


def test_keep_and_refuse(tmp_path, unshared):
    with pytest.raises(ValueError, match=r"1 groups of linears that servers join have different per-tensor scales"):
        checkpoints.save(unshared, tmp_path / "a", mismatched_scales="refuse", progress=False)
    with pytest.raises(ValueError, match="mismatched_scales: expected 'requantize', 'keep' or 'refuse', found 'no'"):
        checkpoints.save(unshared, tmp_path / "a", mismatched_scales="no", progress=False)
    assert not list(tmp_path.iterdir())
    checkpoints.save(unshared, tmp_path / "a", mismatched_scales="keep", progress=False)
    assert scales_of(tmp_path / "a") == [getattr(unshared, f"{name}_proj").weight.per_tensor_scale for name in "qkvo"]


def test_a_weight_of_zeros_does_not_set_the_scale(tmp_path, block):
    block.k_proj.weight.data.zero_()
    for linear in block.children():
        quantize_(linear, NVFP4WeightOnlyConfig())
    assert block.k_proj.weight.per_tensor_scale == 1.0
    with pytest.warns(UserWarning, match="requantizing"):
        checkpoints.save(block, tmp_path / "a", progress=False)
    q, k, v, _ = scales_of(tmp_path / "a")
    assert q == k == v == block.v_proj.weight.per_tensor_scale
    with checkpoints.read(tmp_path / "a") as read:
        assert not tensor_of(read.linear("k_proj.weight")).dequantize().any()


def test_what_changed_since_is_saved_as_it_is_now(tmp_path, block):
    calibrate(block, [torch.randn(8, 64).bfloat16()], NVFP4Config(), progress=False)
    checkpoints.save(block, tmp_path / "a", format="compressed-tensors", mismatched_scales="keep", progress=False)
    again = checkpoints.load(Block().bfloat16(), tmp_path / "a", progress=False)
    static = {"activation_spec": QuantizeSpec(), "activation_amax": torch.tensor(5376.0)}
    changed = quantize(torch.randn(64, 64).bfloat16())._replace(**static)
    again.o_proj.weight = nn.Parameter(changed, requires_grad=False)
    checkpoints.save(again, tmp_path / "b", format="compressed-tensors", mismatched_scales="keep", progress=False)
    with checkpoints.read(tmp_path / "b") as read:
        parts = read.linear("o_proj.weight")
    assert parts.input_scale == 2.0 and torch.equal(parts.per_tensor_scale, changed.per_tensor_scale)
    assert torch.equal(parts.qdata, parts_of(changed).qdata)


def test_shared_tensors_are_written_once(tmp_path):
    model = nn.Module()
    model.embed, model.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
    model.head.weight = model.embed.weight
    checkpoints.save(model, tmp_path / "a", format="dense", progress=False)
    assert set(content(tmp_path / "a")) == {"embed.weight"}
    checkpoints.save(model.state_dict(), tmp_path / "b", format="dense", progress=False)  # which has both names
    assert content(tmp_path / "b")["embed.weight"] == content(tmp_path / "a")["embed.weight"]
    with pytest.warns(UserWarning, match="^the Module has only dense weights: .*format='dense'"):
        checkpoints.save(model, tmp_path / "c", progress=False)


IDLE = {"activation_spec": QuantizeSpec(), "activation_amax": torch.zeros(())}
SIGNED = dict.fromkeys(("weight_spec", "activation_spec"), QuantizeSpec(hadamard_sign=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.to("meta"), r"q_proj\.weight is on the meta device"),
        (lambda b: quantize_(b, NVFP4Config(**SIGNED)), r"q_proj\.weight: a weight quantized with hadamard_sign"),
        (lambda b: quantize_(b, NVFP4Config()), r"needs a static input scale: use calibrate\(model, batches\)"),
        (lambda b: quantize_(b, NVFP4Config(step="prepare")), '^q_proj is prepared, .* step "convert"'),
        (lambda b: {"a.weight": quantize(torch.randn(32, 64)).t()}, r"a\.weight: a transposed"),
        (lambda b: {"extra": {}}, "extra is a dict: checkpoints can only have tensors"),
        (
            lambda b: {"a.weight": quantize(torch.randn(32, 64)).fill_(float("nan"))},
            r"a\.weight: expected a per-tensor scale that is finite",
        ),
        (
            lambda b: {"a.weight": quantize(torch.randn(32, 64))._replace(**IDLE)},
            r"a\.weight: expected an input scale that is finite and above",
        ),
    ],
)
def test_an_error_writes_nothing(tmp_path, block, change, message):
    model = change(block) or block
    with pytest.raises(ValueError, match=message):
        checkpoints.save(model, tmp_path / "a", mismatched_scales="keep", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["alone", "tied"])
def coded_table(request):
    """A Llama with codes in its embedding, which its output layer may share."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=request.param == "tied")
    model = transformers.LlamaForCausalLM(config).bfloat16()
    table = model.model.embed_tokens
    table.weight = nn.Parameter(quantize(table.weight.detach()), requires_grad=False)
    if request.param == "tied":
        model.lm_head.weight = table.weight
    return model


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao"])
def test_codes_of_an_embedding_are_refused(tmp_path, coded_table, format):
    """Nothing reads them back. With a dense weight the model is read back to the bit."""
    for each in (coded_table, coded_table.state_dict()):
        with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is the NVFP4Tensor of an embedding"):
            checkpoints.save(each, tmp_path / "a", format=format, progress=False)
    assert not list(tmp_path.iterdir())
    table, head, ids = coded_table.model.embed_tokens, coded_table.lm_head, torch.arange(64)[None]
    quantize_(coded_table.model.layers, NVFP4WeightOnlyConfig())
    table.weight = nn.Parameter(table.weight.dequantize())
    head.weight = table.weight if coded_table.config.tie_word_embeddings else head.weight
    expected = coded_table(ids).logits
    checkpoints.save(coded_table, tmp_path / "a", format=format, progress=False)
    again = checkpoints.load(type(coded_table)(coded_table.config).bfloat16(), tmp_path / "a", progress=False)
    assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize(("format", "options"), [("gguf", {"tokenizer": None}), ("mlx", {"global_scale": True})])
def test_codes_of_an_embedding_where_they_are_read(tmp_path, coded_table, format, options):
    """By llama.cpp and MLX."""
    path = tmp_path / f"a{'.gguf' * (format == 'gguf')}"
    checkpoints.save(coded_table, path, format=format, progress=False, **options)
    with checkpoints.read(path) as checkpoint:
        got = tensor_of(checkpoint.linear("model.embed_tokens.weight"), torch.float32).dequantize()
    assert torch.equal(got, coded_table.model.embed_tokens.weight.dequantize(torch.float32))


def test_a_model_is_saved_with_its_own_dtype_class_and_generation_config(tmp_path):
    """As save_pretrained does. The config has the dtype that the model was made with, and perhaps no class."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, dtype="float32")
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.generation_config.eos_token_id = [2, 7]
    quantize_(model.model, NVFP4WeightOnlyConfig())
    checkpoints.save(model, tmp_path / "a", progress=False)
    written = json.loads((tmp_path / "a/config.json").read_text())
    assert written["dtype"] == "bfloat16" and written["architectures"] == ["LlamaForCausalLM"]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "a").eos_token_id == [2, 7]

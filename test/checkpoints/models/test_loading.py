"""Loading into a model: quantized, shared and joined parameters, and errors that change nothing."""

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, edit, same_files, write_dense
from safetensors.torch import load_file, save_file
from torch import nn

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.quantization import NVFP4Linear

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


def llama(folder=GOLDEN / "modelopt_nvfp4", **changes):
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.update(changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def on_meta(**changes):
    with accelerate.init_empty_weights(include_buffers=False):
        return llama(**changes)


@torch.no_grad()
def logits(model):
    return model(torch.arange(24)[None]).logits


@pytest.mark.parametrize(("make", "source"), [(llama, "modelopt_nvfp4"), (on_meta, "modelopt_w4a16")])
def test_every_tensor_is_the_files(make, source):
    model = checkpoints.load(make(), GOLDEN / source, progress=False)
    with checkpoints.read(GOLDEN / source) as read:
        assert set(dict(model.named_parameters())) == set(read.entries)
        for name, parameter in model.named_parameters():
            if read.entries[name].quantized:
                expected = tensor_of(read.linear(name))
                assert isinstance(parameter, NVFP4Tensor) and torch.equal(parameter.dequantize(), expected.dequantize())
                assert parameter.describe() == expected.describe() and not parameter.requires_grad
            else:
                assert torch.equal(parameter, read.dense(name)) and parameter.requires_grad
    linear = model.model.layers[0].mlp.up_proj
    assert type(linear) is NVFP4Linear and type(model.lm_head) is nn.Linear
    assert ("static" in linear.weight.describe()) == (source == "modelopt_nvfp4")


def test_a_static_scale_quantizes_the_activation(w4a4):
    """Scales of a key-value cache are passed by."""
    edit(w4a4, lambda t: t.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}))
    model = checkpoints.load(llama(), w4a4, progress=False)
    linear = model.model.layers[0].mlp.up_proj
    scale = load_file(GOLDEN / "modelopt_nvfp4/model.safetensors")["model.layers.0.mlp.up_proj.input_scale"]
    x = torch.randn(3, 64).bfloat16()
    rounded = quantize(x, amax=scale * 2688).dequantize(torch.float32)
    expected = rounded @ linear.weight.dequantize(torch.float32).t()
    assert torch.allclose(linear(x).float(), expected, rtol=2**-7, atol=1e-3)


def test_weight_only():
    model, other = (loaded(llama(), weight_only=weight_only) for weight_only in (True, False))
    one, two = (each.model.layers[0].mlp.up_proj.weight for each in (model, other))
    assert one.activation_spec is None and one.activation_amax is None and two.activation_spec is not None
    assert torch.equal(one.dequantize(), two.dequantize()) and not torch.equal(logits(model), logits(other))


def test_parameters_keep_their_dtypes():
    model = checkpoints.load(llama().half(), GOLDEN / "modelopt_w4a16", progress=False)
    assert {parameter.dtype for parameter in model.parameters()} == {logits(model).dtype} == {torch.float16}


@pytest.mark.parametrize("make", [llama, on_meta])
def test_tied_parameters_stay_tied(tmp_path, make):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    model = checkpoints.load(make(tie_word_embeddings=True), tmp_path / "q", progress=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    assert logits(model).isfinite().all()


def test_a_quantized_model_takes_another_checkpoint():
    model, expected = (
        checkpoints.load(m, GOLDEN / "modelopt_w4a16", progress=False) for m in (loaded(llama()), llama())
    )
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.gpu
def test_parameters_keep_their_device():
    # With activations in 4 bits a last bit of bfloat16 that differs can become a step of the codes: weights alone.
    there, here = (loaded(llama().to(device), weight_only=True) for device in ("cuda", "cpu"))
    for a, b in zip(there.parameters(), here.parameters(), strict=True):
        names = a.tensor_data_names if isinstance(a, NVFP4Tensor) else []
        pairs = [(getattr(a, name), getattr(b, name)) for name in names] or [(a, b)]
        assert a.device.type == "cuda"
        assert all(torch.equal(p.cpu().view(-1).view(torch.uint8), q.view(-1).view(torch.uint8)) for p, q in pairs)
    got = there(torch.arange(24, device="cuda")[None]).logits.cpu()
    assert torch.allclose(got.float(), logits(here).float(), rtol=0.05, atol=0.05)


def loaded(model, **options):
    return checkpoints.load(model, GOLDEN / "modelopt_nvfp4", progress=False, **options)


Q_PROJ = "model.layers.0.self_attn.q_proj"
ERRORS = {
    "missing": (
        lambda t: t.pop("model.norm.weight"),
        r"belongs to another model: the checkpoint has no tensors for model\.norm\.weight\. The model is unchanged",
    ),
    "unexpected": (
        lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
        r"belongs to another model: the model does not have model\.extra\.weight\.",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(65)}),
        r"model\.safetensors: tensor model\.norm\.weight: expected \[64\], found \[65\]",
    ),
    "rows": (
        lambda t: t.update({f"{Q_PROJ}.{x}": t[f"{Q_PROJ}.{x}"][:32].clone() for x in ("weight", "weight_scale")}),
        r"tensor .*q_proj\.weight: expected \[64, 64\], found \[32, 64\]",
    ),
    "embedding": (
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(64, 32, dtype=torch.uint8),
                            "model.embed_tokens.weight_scale": torch.zeros(64, 4).to(torch.float8_e4m3fn),
                            "model.embed_tokens.weight_scale_2": torch.ones(()),
                            "model.embed_tokens.input_scale": torch.ones(())}),
        r"expected a dense tensor for model\.embed_tokens\.weight of a Embedding, found NVFP4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_tensor_and_change_nothing(w4a4, case):
    change, message = ERRORS[case]
    edit(w4a4, change)
    model = llama()
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        checkpoints.load(model, w4a4, progress=False)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])
    assert not any(isinstance(module, NVFP4Linear) for module in model.modules())


def test_not_strict(w4a4):
    edit(w4a4, lambda t: (t.pop("model.norm.weight"), t.update({"x.weight": torch.zeros(2)})))
    model = llama()
    model.model.norm.weight.data.fill_(3.0)
    checkpoints.load(model, w4a4, strict=False, progress=False)
    assert (model.model.norm.weight == 3.0).all() and isinstance(model.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    with pytest.raises(ValueError, match=r"the checkpoint has no tensors for model\.norm\.weight"):
        checkpoints.load(on_meta(), w4a4, strict=False, progress=False)  # it would have no values


def test_tables_on_meta_raise_an_error():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq is on the meta device.*include_buffers=False"):
        checkpoints.load(model, GOLDEN / "modelopt_nvfp4", progress=False)


def test_a_tied_output_layer_that_is_quantized_alone_raises_an_error(tmp_path):
    write_dense(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", include=["lm_head"], progress=False)
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens, model.lm_head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"untie the output layer from the embedding first"):
        checkpoints.load(model, tmp_path / "q", strict=False, progress=False)


def test_a_module_that_is_a_linear_itself(tmp_path):
    save_file({"weight": torch.randn(32, 64), "bias": torch.ones(32)}, tmp_path / "model.safetensors")
    checkpoints.quantize(tmp_path / "model.safetensors", tmp_path / "q", progress=False)
    linear = checkpoints.load(nn.Linear(64, 32), tmp_path / "q", progress=False)
    assert isinstance(linear.weight, NVFP4Tensor) and torch.equal(linear.bias, torch.ones(32))


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel, torch.optim.swa_utils.AveragedModel]
)
def test_a_wrapper_of_torch_is_loaded_and_saved_as_its_model(tmp_path, wrap):
    """Its names have a prefix, _orig_mod or module, that no reader of files knows."""
    wrapped = wrap(llama())
    assert loaded(wrapped) is wrapped
    for name, model in {"a": wrapped, "b": loaded(llama())}.items():
        checkpoints.save(model, tmp_path / name, progress=False)
    assert same_files(tmp_path / "a", tmp_path / "b")

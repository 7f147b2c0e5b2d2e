"""Folders with FP8 beside NVFP4: the same values by every way in, kept as FP8 by every way out."""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from helpers.checkpoint_folders import content, edit, edit_json
from helpers.checkpoints import EXPERTS, TINY, expert_tensors, tiny_tensors
from helpers.hub_models import IDS, empty, logits
from helpers.mixed_layouts import LAYOUTS, rows
from safetensors.torch import load_file, save_file

import nvfp4_tensor.integrations.transformers as nv
from nvfp4_tensor import FP8Tensor, NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints, quantize_model, training
from nvfp4_tensor.checkpoints import comparison, inspection
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.step import decode_counts

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("compressed_tensors"), reason="it writes the folders"),
    pytest.mark.usefixtures("natively"),
]

CONFIG = TINY | {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 1}
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=LAYOUTS)
def published(request, tmp_path_factory):
    """A layout, a folder in it, and the values of its FP8 weights."""
    torch.manual_seed(0)
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp("mixed") / "model"
    return layout, folder, layout.write(folder, CONFIG, tiny_tensors(CONFIG))


def write(tmp_path, name, config=CONFIG):
    torch.manual_seed(0)
    LAYOUTS[name].write(tmp_path / "src", config, tiny_tensors(config))
    return tmp_path / "src"


def from_pretrained(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def loaded(folder, **options):
    return checkpoints.load(empty(folder), folder, progress=False, **options)


def test_reads_what_is_stored(published):
    layout, folder, values = published
    assert checkpoints.detect(folder) == layout.format and len(values) == 4
    stored = load_file(folder / "model.safetensors")
    with checkpoints.read(folder) as read:
        for name, expected in values.items():
            entry, w = read.entries[name], read.fp8(name)
            assert entry.kind == "FP8" and not entry.quantized and entry.dtype == torch.bfloat16
            assert torch.equal(w.dequantize(torch.float32), expected)
            assert torch.equal(w.qdata.view(torch.uint8), stored[name].view(torch.uint8))
            assert entry.has_input_scale == (w.input_scale is not None) == layout.static
            static = None if w.input_scale is None else stored[name.replace("weight", "input_scale")]
            assert static is None or w.input_scale == static.float()
            assert torch.equal(read.dense(name), expected.bfloat16())
            assert torch.equal(torch.cat(list(read.chunks(name, 48))), expected.bfloat16())
            with pytest.raises(ValueError, match="is dense"):
                read.linear(name)
        with pytest.raises(ValueError, match="is not FP8"):
            read.fp8(UP)
    found = {w.name: w for w in inspection.inspect(folder, progress=False).tensors}
    assert all(found[name].kind.startswith("FP8") and 8 <= found[name].bits < 8.6 for name in values)


def test_runs(published, tmp_path):
    """By all ways into a model: FP8 stays FP8, NVFP4 NVFP4, with equal logits; saved and loaded again, too."""
    layout, folder, values = published
    model = loaded(folder)
    found = logits(model)
    for other in (from_pretrained(folder), open_model(folder)):
        assert torch.equal(logits(other), found)
        for name, parameter in other.named_parameters():
            assert isinstance(parameter.data, FP8Tensor) == (name in values)
            assert isinstance(parameter.data, NVFP4Tensor) == ("mlp" in name)
    dense = loaded(folder, weight_only=True)
    weight_only = logits(dense)
    for name in values:
        linear = dense.get_submodule(name.removesuffix(".weight"))
        linear.weight = torch.nn.Parameter(linear.weight.dequantize(), False)
    assert torch.equal(logits(dense), weight_only)
    rounds = layout.activations is not None or layout.algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    error = ((found.float() - weight_only.float()).norm() / weight_only.float().norm()).item()
    assert 0.001 < error < 0.2 if rounds else error == 0
    checkpoints.save(model, tmp_path / "saved", format="compressed-tensors", progress=False)
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), found)
    if layout.to:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*keep activations dense, and vLLM")
            nv.attach_quantizer(model).save_pretrained(tmp_path / "hub")
        assert torch.equal(logits(from_pretrained(tmp_path / "hub")), found)
    assert model.get_memory_footprint() < 0.75 * dense.get_memory_footprint()
    decoded = from_pretrained(folder).dequantize()
    assert {type(p.data) for p in decoded.parameters()} == {torch.Tensor}
    assert torch.equal(decoded.get_parameter(Q), dense.get_parameter(Q))


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_is_converted_and_back(published, tmp_path, to):
    """The codes and scales of FP8 stay as they are; a format without a name for them refuses by name."""
    layout, folder, values = published
    convert = lambda src, dst, to, **options: checkpoints.convert(src, dst, to=to, progress=False, **options)  # noqa: E731
    if to == "modelopt" and not layout.to:
        with pytest.raises(ValueError, match=r"modelopt has no name for FP8 weights as model.*_proj.*weight_only"):
            convert(folder, tmp_path / "out", to)
        assert not list(tmp_path.iterdir())
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*keep activations dense, and vLLM")
        convert(folder, tmp_path / "out", to)
        convert(tmp_path / "out", tmp_path / "back", layout.format) if layout.to else None
    with checkpoints.read(folder) as before, checkpoints.read(tmp_path / "out") as after:
        for name, expected in values.items():
            old, new = before.fp8(name), after.fp8(name)
            assert torch.equal(new.dequantize(torch.float32), expected)
            assert torch.equal(new.qdata.view(torch.uint8), old.qdata.view(torch.uint8))
            assert new.spec.activations == old.spec.activations and new.input_scale == old.input_scale
    if layout.to:
        with checkpoints.read(tmp_path / "back") as back:
            assert {n: (e.shape, e.kind, e.has_input_scale) for n, e in back.entries.items()} == {
                n: (e.shape, e.kind, e.has_input_scale) for n, e in before.entries.items()
            }
    assert torch.equal(logits(from_pretrained(tmp_path / "out")), logits(from_pretrained(folder)))
    compared = comparison.compare(folder, tmp_path / "out", progress=False)
    assert compared.relative < 1e-6 and not compared.only_in_a and not compared.only_in_b
    if to == layout.format and layout.wide:
        assert content(tmp_path / "out") == content(folder)


@pytest.mark.parametrize("to", ["torchao", "mlx", "gguf", "comfy", "dense"])
def test_formats_without_fp8_refuse_it_by_name(tmp_path, to):
    folder = write(tmp_path, "ModelOpt FP8")
    with pytest.raises(ValueError, match=r"FP8.*q_proj|q_proj.* FP8|no NVFP4"):
        suffix = {"gguf": ".gguf", "comfy": ".safetensors"}.get(to, "")
        checkpoints.convert(folder, tmp_path / f"out{suffix}", to=to, progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["src"]


def test_compressed_tensors_reads_what_we_write(published, tmp_path):
    """Its decompressor, with the scheme of our configuration, gives the same values; so does transformers."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    layout, folder, values = published
    checkpoints.convert(folder, tmp_path / "ct", to="compressed-tensors", progress=False)
    written = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    assert written["format"] == "mixed-precision"
    stored = load_file(tmp_path / "ct/model.safetensors")
    for name, expected in values.items():
        module = name.removesuffix(".weight")
        (scheme,) = [g for g in config.config_groups.values() if any(match_name(module, t) for t in g.targets)]
        state = {key.rpartition(".")[2]: t for key, t in stored.items() if key.startswith(f"{module}.")}
        assert ("input_scale" in state) == layout.static
        assert bool(scheme.input_activations) == (read_spec(folder, name).activations is not None)
        decoded = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        assert torch.equal(decoded.float(), expected)
    nv.read_compressed_tensors(natively=False)
    theirs = from_pretrained(tmp_path / "ct")
    logits(theirs)  # it decompresses the weights
    torch.testing.assert_close(theirs.get_parameter(Q).float(), values[Q], rtol=2**-7, atol=0)  # scales in bfloat16


def read_spec(folder, name):
    with checkpoints.read(folder) as read:
        return read.entries[name].fp8


@pytest.mark.parametrize("name", ["ct, tensor, static", "ModelOpt FP8_PB_WO"])
def test_as_plain_tensors(tmp_path, name):
    """What else keeps an FP8Tensor, in a module too: test/tensor/test_fp8.py."""
    model = loaded(write(tmp_path, name))
    plain = checkpoints.to_plain(model.state_dict())
    save_file({key: t.contiguous() for key, t in plain.items()}, tmp_path / "plain.safetensors")
    again = empty(tmp_path / "src")
    again.load_state_dict(checkpoints.from_plain(load_file(tmp_path / "plain.safetensors")), assign=True)
    assert torch.equal(logits(again), logits(model))
    assert again.get_parameter(Q).spec == model.get_parameter(Q).spec


@pytest.mark.parametrize("name", ["ModelOpt FP8_PB_WO", "ModelOpt FP8"])
def test_decodes_natively(tmp_path, name):
    model = loaded(write(tmp_path, name, TINY))
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(IDS, **options)
    native = decode_natively(model)
    found = native.generate(IDS, **options)
    assert decode_counts(native).native == len(found.logits) > 1
    error = (found.logits[1] - expected.logits[1]).norm() / expected.logits[1].norm()
    assert error < (0.02 if name != "ModelOpt FP8" else 0.1)  # bfloat16 sums in another order, then 4-bit mantissas
    if name != "ModelOpt FP8":
        assert torch.equal(found.sequences, expected.sequences)


def test_is_not_quantized_again_or_merged(tmp_path):
    peft = pytest.importorskip("peft")
    folder = write(tmp_path, "ModelOpt FP8")
    model = from_pretrained(folder)
    before = model.get_parameter(Q)
    with pytest.raises(ValueError, match="is FP8: exclude it"):
        quantize_model(model, NVFP4WeightOnlyConfig())
    assert model.get_parameter(Q) is before
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    loss = adapted(IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    for merge in (lambda: training.merge_lora(adapted), adapted.merge_adapter):
        with pytest.raises(ValueError, match=r"FP8: merging an adapter would round it again"):
            merge()


def separate(tensors):
    """Return tensors of a Llama with q, k and v, and gate and up, of very different magnitudes."""
    return {
        name: t * 4.0 ** sorted("qkvo").index(name[-13]) if "self_attn" in name else t for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "heads"),
    [("ct, tensor, static", 2), ("ct, channel, per token", 8), ("ct, block", 2), ("ct, block", 8), ("ModelOpt FP8", 2)],
)
def test_q_k_and_v_that_the_model_joins(tmp_path, name, heads):
    """Rows of 128 and 256, or 64: the same values, and the same files again."""
    torch.manual_seed(0)
    config = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": heads}
    values = LAYOUTS[name].write(tmp_path / "src", config, separate(tiny_tensors(config)))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Phi3Config(**config | {"model_type": "phi3", "pad_token_id": 0}), dtype=torch.bfloat16
    ).eval()
    checkpoints.load(model, tmp_path / "src", progress=False)
    w = model.model.layers[0].self_attn.qkv_proj.weight
    assert isinstance(w.data, FP8Tensor)
    joined = torch.cat([values[Q.replace("q_proj", f"{each}_proj")] for each in "qkv"])
    assert torch.equal(w.dequantize(torch.float32), joined)
    found = logits(model)
    checkpoints.save(model, tmp_path / "saved", format="compressed-tensors", progress=False)
    with checkpoints.read(tmp_path / "src") as before, checkpoints.read(tmp_path / "saved") as after:
        for each, expected in values.items():
            assert torch.equal(after.fp8(each).dequantize(torch.float32), expected)
            assert after.entries[each].fp8 == before.entries[each].fp8
            assert after.fp8(each).input_scale == before.fp8(each).input_scale
    phi3 = {"model_type": "phi3", "pad_token_id": 0, "architectures": ["Phi3ForCausalLM"]}
    edit_json(tmp_path / "src/config.json", lambda c: c.update(phi3))
    assert torch.equal(logits(from_pretrained(tmp_path / "src")), found)


@pytest.mark.parametrize(
    ("name", "where"),
    [("ct, channel, per token", "mlp.experts"), ("ct, block", "self_attn"), ("ModelOpt FP8", "mlp.experts"),
     ("ModelOpt FP8_PB_WO", "mlp.experts")],
)  # fmt: skip
def test_experts(tmp_path, name, where):
    """Experts in FP8 or NVFP4, and attention in the other: joined by the model, and separate in files."""
    torch.manual_seed(0)
    config = EXPERTS["qwen3_moe"] | {"num_hidden_layers": 1}
    tensors = {n: t.dequantize() if isinstance(t, NVFP4Tensor) else t for n, t in expert_tensors("qwen3_moe").items()}
    tensors = {n: t for n, t in tensors.items() if "layers.1." not in n}
    values = LAYOUTS[name].write(tmp_path / "src", config, tensors, where)
    model = loaded(tmp_path / "src")
    experts, attention = (model.get_parameter(n) for n in ("model.layers.0.mlp.experts.gate_up_proj", Q))
    assert [isinstance(w.data, FP8Tensor) for w in (experts, attention)] == [
        where == "mlp.experts",
        where != "mlp.experts",
    ]
    found = logits(model)
    assert found.isfinite().all() and torch.equal(logits(from_pretrained(tmp_path / "src")), found)
    checkpoints.save(model, tmp_path / "saved", format="compressed-tensors", progress=False)
    with checkpoints.read(tmp_path / "saved") as saved:
        for each, expected in values.items():
            assert torch.equal(saved.fp8(each).dequantize(torch.float32), expected)
    assert torch.equal(logits(loaded(tmp_path / "saved")), found)


def test_weights_that_the_model_joins_are_alike(tmp_path):
    """q in FP8 and k in NVFP4, or with other activations, are refused by name, and the model is unchanged."""
    folder = write(tmp_path, "ModelOpt FP8")
    name = Q.replace("weight", "input_scale")
    edit(folder, lambda t: t.pop(name))
    config = CONFIG | {"model_type": "phi3", "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Phi3Config(**config), dtype=torch.bfloat16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"k_proj.weight is FP8 .*static tensor\), but .* joins with it are FP8 .*dense\)"
    ):
        checkpoints.load(model, folder, progress=False)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_the_guide_says_so():
    guide = (Path(__file__).parents[3] / "docs/guides/checkpoints.md").read_text()
    assert "\n".join(rows()) in guide


SCALE, STATIC = Q.replace("weight", "weight_scale"), Q.replace("weight", "input_scale")
DAMAGE = {
    "no scale": ("ModelOpt FP8", lambda t: t.pop(SCALE), r"q_proj.weight_scale: expected floats .* found none"),
    "no input scale": ("ct, tensor, static", lambda t: t.pop(STATIC), r"q_proj.input_scale: expected .* found none"),
    "blocks of 64": ("ModelOpt FP8_PB_WO", lambda t: t.update({SCALE: torch.ones(4, 1, 4, 1)}), r"floats \[2, 2\]"),
    "integers": ("ModelOpt FP8", lambda t: t.update({SCALE: torch.ones((), dtype=torch.int32)}), "found I32"),
    "NaN": ("ct, block", lambda t: t[SCALE].fill_(torch.nan), r"q_proj.weight: expected .*weight_scale that is finite"),
    "zero": ("ModelOpt FP8", lambda t: t[STATIC].zero_(), r"expected .*input_scale above zero, found 0"),
    "another tensor": ("ModelOpt FP8", lambda t: t.update({f"{SCALE}_2": torch.ones(())}), "change the meaning"),
    "another dtype": ("ModelOpt FP8", lambda t: t.update({Q: t[Q].float().to(torch.float8_e5m2)}), "of another quant"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_changes_nothing(tmp_path, case):
    name, change, message = DAMAGE[case]
    folder = write(tmp_path, name)
    edit(folder, change)
    model = empty(folder)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for call in (
        lambda: checkpoints.load(model, folder, progress=False),
        lambda: checkpoints.convert(folder, tmp_path / "out", to="compressed-tensors", progress=False),
        lambda: from_pretrained(folder),
    ):
        with pytest.raises(ValueError, match=rf"model\.safetensors.*{message}"):
            call()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not (tmp_path / "out").exists()


GROUPS = {
    "asymmetric": (lambda g: g["weights"].update(symmetric=False), "expected symmetric FP8"),
    "MXFP8": (lambda g: g["weights"].update(scale_dtype="torch.uint8"), "with scales in floating point"),
    "no block": (lambda g: g["weights"].update(strategy="block"), "expected FP8 per tensor, channel, group or block"),
    "int8 activations": (lambda g: g.update(input_activations={"num_bits": 8, "type": "int"}), "of 8-bit floats per"),
    "static tokens": (lambda g: g["input_activations"].update(strategy="token"), "at each call per token"),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_are_not_read(tmp_path, case):
    change, message = GROUPS[case]
    folder = write(tmp_path, "ct, tensor, static")
    edit_json(folder / "config.json", lambda c: change(c["quantization_config"]["config_groups"]["group_0"]))
    with pytest.raises(ValueError, match=rf"src: model.*_proj\.weight: .*{message}"):
        checkpoints.read(folder)

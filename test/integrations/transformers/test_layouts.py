"""Folders in the layouts of published checkpoints: the same weights by every way in, and what each becomes by every
way out.

The guide's table has a row for each and says what these tests assert of it.
"""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from helpers.checkpoint_folders import content, edit, edit_json, write_dense
from helpers.checkpoints import TINY
from helpers.hub_models import IDS, empty, logits
from helpers.layouts import LAYOUTS, OPT_IN, TARGETS, table
from safetensors.torch import load_file
from torchao.quantization import quantize_

import nvfp4_tensor.integrations.transformers as nv
from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints, training
from nvfp4_tensor.checkpoints import comparison, inspection, tensor_of
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.checkpoints.understood import has_pre_scale, pre_scale_of
from nvfp4_tensor.distributed.frozen import NVFP4ParallelLinear
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.step import decode_counts
from nvfp4_tensor.quantization import NVFP4Linear
from nvfp4_tensor.sharding.layout import LinearSharding

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("compressed_tensors"), reason="it writes the folders")

GUIDE = Path(__file__).parents[3] / "docs/guides/checkpoints.md"
O_PROJ, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"
AWQ = [name for name, layout in LAYOUTS.items() if layout.awq]
CACHES = [name for name, layout in LAYOUTS.items() if layout.cache]


@pytest.fixture(scope="module", params=LAYOUTS)
def published(request, tmp_path_factory):
    """A layout, a folder in it, and the weights that its linears compute with."""
    torch.manual_seed(0)
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp("published") / "model"
    return layout, folder, layout.write(folder, TINY | {"num_hidden_layers": 1})


@pytest.fixture
def awq(tmp_path):
    torch.manual_seed(0)
    LAYOUTS["ModelOpt NVFP4_AWQ W4A16"].write(tmp_path / "awq")
    return tmp_path / "awq"


@pytest.fixture(autouse=True)
def as_it_was():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are MXFP4, which is not computed")
        yield
    nv.read_compressed_tensors(natively=False)


def from_pretrained(folder):
    nv.read_compressed_tensors(natively=checkpoints.detect(folder) in OPT_IN)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def both_ways(model, folder):
    return lambda: checkpoints.load(model, folder, progress=False), lambda: from_pretrained(folder)


def decoded(checkpoint, name):
    weight = tensor_of(checkpoint.linear(name), torch.float32).dequantize()
    if has_pre_scale(name, checkpoint.entries):
        weight = weight * checkpoint.dense(pre_scale_of(name)).float()
    return weight


def test_reads_what_is_stored(published):
    layout, folder, effective = published
    assert checkpoints.detect(folder) == layout.format
    with checkpoints.read(folder) as read:
        for name, weight in effective.items():
            entry = read.entries[name]
            assert entry.quantized and entry.quantizes_activations == entry.has_input_scale == layout.static
            torch.testing.assert_close(decoded(read, name), weight, rtol=1e-6, atol=0)
            parts = read.linear(name)
            assert torch.equal(read.per_tensor_scale(name), parts.per_tensor_scale)
            assert parts.input_scale is None or abs(parts.input_scale.item() * 2688 / 40 - 1) < 1e-6
    kinds = {w.name: w.kind for w in inspection.inspect(folder, progress=False).tensors}
    assert all(kinds[name] == ("W4A4" if layout.static else "W4A16") for name in effective)


def test_runs_with_them(published, tmp_path):
    """By all ways into a model: equal logits, and those of the dense weights but for rounding."""
    layout, folder, effective = published
    model = checkpoints.load(empty(folder), folder, progress=False)
    found = logits(model)
    assert torch.equal(logits(from_pretrained(folder)), found) and torch.equal(logits(open_model(folder)), found)
    dense = empty(folder)
    state = {name: t for name, t in model.state_dict().items() if name in dense.state_dict()}
    dense.load_state_dict(state | effective)
    with torch.no_grad():
        expected = dense.float()(IDS).logits
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (0.6 if layout.static else 0.05)  # 4-bit activations of a random model; bfloat16
    nv.attach_quantizer(model).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), found)


@pytest.mark.parametrize("to", TARGETS)
def test_becomes(published, tmp_path, to):
    """Equal values, also after the way back; or a refusal by name, and nothing written."""
    layout, folder, effective = published
    path = tmp_path / ("out" + {"gguf": ".gguf", "comfy": ".safetensors"}.get(to, ""))
    options = {"mlx": {"lossy": True, "global_scale": True}, "gguf": {"tokenizer": None}}.get(to, {})
    if to not in layout.targets:
        with pytest.raises(ValueError, match=f"{to} has no place for .*pre_quant_scale"):
            checkpoints.convert(folder, path, to=to, progress=False, **options)
        assert list(tmp_path.iterdir()) == []
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.convert(folder, path, to=to, progress=False, **options)
    assert checkpoints.detect(path) == to
    rounding = 2e-7 if to == "mlx" else 1e-6 if to == "compressed-tensors" else 0
    with checkpoints.read(folder) as before, checkpoints.read(path) as after:
        for name in effective:
            torch.testing.assert_close(decoded(after, name), decoded(before, name), rtol=rounding, atol=0)
    differs = [
        each.name for each in comparison.compare(folder, path, progress=False).layers if each.relative > rounding
    ]
    assert not differs
    if to == "modelopt" == layout.format:
        assert content(path) == content(folder)


# --- AWQ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [from_pretrained, lambda f: checkpoints.load(empty(f), f, progress=False)])
@pytest.mark.parametrize("name", AWQ)
def test_awq_multiplies_inputs_and_is_saved_again(tmp_path, name, route):
    torch.manual_seed(0)
    LAYOUTS[name].write(tmp_path / "awq")
    model = route(tmp_path / "awq")
    linear = model.get_submodule(DOWN)
    stored = load_file(tmp_path / "awq/model.safetensors")
    scale = stored[f"{DOWN}.pre_quant_scale"]
    assert torch.equal(linear.pre_quant_scale, scale) and not hasattr(
        model.model.layers[0].mlp.up_proj, "pre_quant_scale"
    )
    x = torch.randn(3, 192, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(linear(x), torch.nn.functional.linear(x * scale, linear.weight))
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), linear(x))
    checkpoints.save(model, tmp_path / "saved", progress=False)
    assert content(tmp_path / "saved") == content(tmp_path / "awq")
    quantization = json.loads((tmp_path / "saved/hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "NVFP4_AWQ" and quantization["pre_quant_scale"] is True
    with pytest.raises(ValueError, match=r"compressed-tensors has no place for .*pre_quant_scale, which multiply"):
        checkpoints.save(model, tmp_path / "ct", format="compressed-tensors", progress=False)
    assert not (tmp_path / "ct").exists()


def test_awq_leaves_with_its_weight(awq, tmp_path):
    """Another checkpoint takes the scales away, strictly or not; dequantize moves them to the weights."""
    torch.manual_seed(0)
    LAYOUTS["ModelOpt W4A16_NVFP4"].write(tmp_path / "plain")
    plain = logits(from_pretrained(tmp_path / "plain"))
    for strict in (True, False):
        model = checkpoints.load(from_pretrained(awq), tmp_path / "plain", strict=strict, progress=False)
        assert torch.equal(logits(model), plain) and not [n for n in model.state_dict() if "pre_quant" in n]
    model = from_pretrained(awq)
    before = logits(model).float()
    dense = model.dequantize()
    assert not [n for n in dense.state_dict() if "pre_quant" in n]
    assert (logits(dense).float() - before).norm() / before.norm() < 0.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_awq_decodes_natively(awq, device):
    with checkpoints.read(awq) as read:  # before norms, too: the same for the linears behind one
        widths = {name: entry.shape[1] for name, entry in read.entries.items() if entry.quantized}
    scales = {pre_scale_of(name): torch.linspace(0.5, 2, width).bfloat16() for name, width in widths.items()}
    edit(awq, lambda tensors: tensors.update(scales))
    model, ids = from_pretrained(awq).to(device), IDS.to(device)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    native = decode_natively(model)
    assert torch.equal(native.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert decode_counts(native).native >= 11


def test_awq_is_compared_by_what_linears_compute_with(tmp_path):
    torch.manual_seed(0)
    effective = LAYOUTS["ModelOpt NVFP4_AWQ"].write(tmp_path / "awq")
    write_dense(tmp_path / "dense", {name: weight.contiguous() for name, weight in effective.items()})
    for a, b in (("awq", "dense"), ("dense", "awq")):
        found = comparison.compare(tmp_path / a, tmp_path / b, progress=False)
        assert found.relative < 1e-6 and {each.name for each in found.layers} == set(effective)


def test_awq_is_no_second_quantization_merge_or_shard(awq):
    peft = pytest.importorskip("peft")

    model = from_pretrained(awq)
    with pytest.raises(ValueError, match="multiplies its inputs by pre_quant_scale"):
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith("o_proj"))
    with pytest.raises(ValueError, match="which tensor parallelism does not shard"):
        NVFP4ParallelLinear.convert(model.get_submodule(O_PROJ), LinearSharding())
    assert type(model.get_submodule(O_PROJ)) is NVFP4Linear
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False))
    with pytest.raises(ValueError, match="down_proj multiplies its inputs by pre_quant_scale"):
        training.merge_lora(adapted)
    with pytest.raises(ValueError, match="multiplies its inputs by pre_quant_scale"):
        adapted.merge_adapter()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:-1], r"o_proj\.pre_quant_scale: expected floats \[128\], found bfloat16 \[127\]"),
        (lambda s: s.to(torch.int32), r"o_proj\.pre_quant_scale: expected floats \[128\], found int32 \[128\]"),
        (lambda s: s.index_fill(0, torch.tensor(3), 0.0), r"o_proj\.pre_quant_scale: expected numbers above zero"),
        (lambda s: s.index_fill(0, torch.tensor(3), torch.nan), r"o_proj\.pre_quant_scale: expected numbers above"),
    ],
)
def test_awq_scales_that_are_none(awq, change, message):
    edit(awq, lambda t: t.update({f"{O_PROJ}.pre_quant_scale": change(t[f"{O_PROJ}.pre_quant_scale"])}))
    model = empty(awq)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for call in both_ways(model, awq):
        with pytest.raises(ValueError, match=rf"model\.safetensors: tensor model\.layers\.0.*{message}"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def small(config, folder, **settings):
    """Save a small model, and return it."""
    torch.manual_seed(0)
    settings |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96}
    config = config(num_hidden_layers=1, pad_token_id=0, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def quantized_with_pre_scales(folder, out, *lasts):
    """Quantize a folder, give the linears with these last names scales of their inputs, and return the names."""
    checkpoints.quantize(folder, out, progress=False)
    with checkpoints.read(out) as read:
        names = [name for name in read.entries if name.removesuffix(".weight").endswith(lasts)]
    scale = torch.rand(64).add(0.5).bfloat16()
    edit(out, lambda t: t.update({pre_scale_of(name): scale.clone() for name in names}))
    return names, scale


def split_qkv(tensors):
    joined = tensors.pop("model.layers.0.self_attn.qkv_proj.weight").chunk(3)
    named = zip("qkv", joined, strict=True)
    tensors.update({f"model.layers.0.self_attn.{each}_proj.weight": w.clone() for each, w in named})


def test_awq_of_q_k_and_v_that_the_model_joins(tmp_path):
    model = small(transformers.Phi3Config, tmp_path / "dense")
    edit(tmp_path / "dense", split_qkv)
    names, scale = quantized_with_pre_scales(tmp_path / "dense", tmp_path / "q", "q_proj", "k_proj", "v_proj")
    for i, call in enumerate(both_ways(model, tmp_path / "q")):
        loaded = call()
        assert torch.equal(loaded.model.layers[0].self_attn.qkv_proj.pre_quant_scale, scale)
        checkpoints.save(loaded, tmp_path / f"saved{i}", progress=False)
        assert content(tmp_path / f"saved{i}") == content(tmp_path / "q")
        nv.attach_quantizer(loaded).save_pretrained(tmp_path / f"theirs{i}")
        assert torch.equal(logits(from_pretrained(tmp_path / f"theirs{i}")), logits(loaded))
    for change, message in (
        (lambda t: t.update({pre_scale_of(names[0]): scale * 2}), r"expected numbers above zero, those of"),
        (lambda t: t.pop(pre_scale_of(names[0])), "multiply the inputs of weights that the model joins"),
    ):
        edit(tmp_path / "q", change)
        for call in both_ways(model, tmp_path / "q"):
            with pytest.raises(ValueError, match=message):
                call()


def test_awq_of_experts_is_refused(tmp_path):
    model = small(transformers.MixtralConfig, tmp_path / "dense", num_local_experts=2)
    quantized_with_pre_scales(tmp_path / "dense", tmp_path / "q", "w2")
    for call in both_ways(model, tmp_path / "q"):
        with pytest.raises(ValueError, match=r"w2\.pre_quant_scale.* multiply the inputs of weights that"):
            call()
    checkpoints.convert(tmp_path / "q", tmp_path / "out", to="modelopt", progress=False)
    assert content(tmp_path / "out") == content(tmp_path / "q")


# --- key-value caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", CACHES)
def test_scales_of_a_cache_are_kept(tmp_path, name, to):
    """Under the names that servers look for, with the settings by which they quantize; and back to the same bytes."""
    layout, other = LAYOUTS[name], next(LAYOUTS[each] for each in CACHES if LAYOUTS[each].format == to)
    layout.write(tmp_path / "src")
    checkpoints.convert(tmp_path / "src", tmp_path / "out", to=to, progress=False)
    before, after = load_file(tmp_path / "src/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for old, new in zip(layout.cache, other.cache, strict=True):
        for i in range(2):
            prefix = f"model.layers.{i}.self_attn."
            assert torch.equal(after[prefix + new], before[prefix + old])
    scheme = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert {"num_bits": 8, "type": "float", "dynamic": False}.items() <= scheme.items()
    if to == "modelopt":
        found = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
        assert found["kv_cache_quant_algo"] == "FP8"
    else:
        from compressed_tensors.quantization import QuantizationArgs

        assert QuantizationArgs.model_validate(scheme).num_bits == 8
    checkpoints.convert(tmp_path / "out", tmp_path / "back", to=layout.format, progress=False)
    assert content(tmp_path / "back") == content(tmp_path / "src")


@pytest.mark.parametrize("name", CACHES)
def test_scales_of_a_cache_that_a_format_has_no_place_for(tmp_path, name):
    layout = LAYOUTS[name]
    layout.write(tmp_path / "src")
    other = next(each for each in ("modelopt", "compressed-tensors") if each != layout.format)
    with pytest.warns(UserWarning, match=r"cache are omitted \(.*k_scale.*, because torchao has no place .*16 bits"):
        checkpoints.convert(tmp_path / "src", tmp_path / "torchao", to="torchao", progress=False)
    assert not [n for n in load_file(tmp_path / "torchao/model.safetensors") if n.endswith(("k_scale", "v_scale"))]
    per_head = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}}
    edit_json(tmp_path / "src/config.json", lambda c: c["quantization_config"].update(per_head))
    with pytest.warns(UserWarning, match=rf"because {other} has no place for those of .*attn_head"):
        checkpoints.convert(tmp_path / "src", tmp_path / "out", to=other, progress=False)
    found = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert not found.get("kv_cache_scheme")


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "SVDQuant": ("ModelOpt NVFP4", {"quant_algo": "NVFP4_SVD", "lora_rank": 32}, "lora_rank 32 rotates inputs, or"),
    "W4A8": ("ModelOpt NVFP4", {"quant_algo": "W4A8_NVFP4_FP8"}, "found W4A8_NVFP4_FP8"),
    "FP8": ("ModelOpt NVFP4", {"quant_algo": "FP8"}, r"is NVFP4 \(uint8\), and FP8 in the configuration"),
    "groups of 32": ("ModelOpt NVFP4", {"group_size": 32}, r"expected group_size 16, found \[32\]"),
    "groups of 8": ("AutoRound NVFP4", {"group_size": 8}, "found 4-bit nv_fp of group_size 8"),
    "E5M3": ("compressed-tensors NVFP4", {"format": "nvfp4-e5m3-pack-quantized"}, "found nvfp4-e5m3-pack-quantized"),
    "a transform": ("compressed-tensors NVFP4", {"transform_config": {"config_groups": {"R": {"type": "hadamard"}}}},
                    "transform_config .* rotates inputs"),
    "a rotation": ("AutoRound NVFP4", {"rotation_config": {"block_size": 128}}, "rotation_config .* rotates inputs"),
    "SpinQuant": ("AutoRound MXFP4", {"spinquant_config": {"r1": True}}, "spinquant_config .* rotates inputs"),
    "GPTQ": ("AutoRound NVFP4", {"packing_format": "auto_round:auto_gptq"}, "found auto_round:auto_gptq"),
    "MXFP8": ("AutoRound MXFP4", {"bits": 8}, "found 8-bit mx_fp of group_size 32"),
    "8-bit activations": ("AutoRound NVFP4", {"act_bits": 8, "act_data_type": "fp"}, "found 8-bit fp"),
    "a layer": ("AutoRound NVFP4", {"extra_config": {".*down_proj": {"group_size": 32}}}, "down_proj.*group_size 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path, case):
    """By every way in, before a byte is written."""
    layout, changes, message = REFUSED[case]
    LAYOUTS[layout].write(tmp_path / "src")
    edit_json(tmp_path / "src/config.json", lambda c: c["quantization_config"].update(changes))
    model = empty(tmp_path / "src")
    before = logits(model)
    calls = [
        lambda: checkpoints.read(tmp_path / "src"),
        lambda: inspection.inspect(tmp_path / "src", progress=False),
        lambda: checkpoints.load(model, tmp_path / "src", progress=False),
        lambda: checkpoints.convert(tmp_path / "src", tmp_path / "out", to="modelopt", progress=False),
        lambda: open_model(tmp_path / "src"),
    ]
    if layout.startswith("ModelOpt"):
        calls.append(lambda: from_pretrained(tmp_path / "src"))
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"quantized by|expected a dense model, found NVFP4"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "out", progress=False)
    assert torch.equal(logits(model), before) and [each.name for each in tmp_path.iterdir()] == ["src"]


def test_auto_round_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="AutoRound's folders are only read: choose compressed-tensors"):
        checkpoints.save({"a.weight": torch.zeros(16, 16)}, tmp_path / "out", format="auto-round", progress=False)
    assert not list(tmp_path.iterdir())


def test_groups_that_differ(tmp_path):
    """MXFP4 for some linears and NVFP4 for the others, in one folder of compressed-tensors."""
    torch.manual_seed(0)
    nvfp4, mxfp4 = LAYOUTS["compressed-tensors NVFP4A16"], LAYOUTS["compressed-tensors MXFP4"]
    effective = nvfp4.write(tmp_path / "src")
    torch.manual_seed(0)
    others = {name: w for name, w in mxfp4.write(tmp_path / "mx").items() if ".mlp." in name}
    packed = load_file(tmp_path / "mx/model.safetensors")

    def mix(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        tensors.update({name: t for name, t in packed.items() if ".mlp." in name})

    edit(tmp_path / "src", mix)
    of_mlp = {**mxfp4.config()["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]}
    edit_json(tmp_path / "src/config.json", lambda c: c["quantization_config"]["config_groups"].update(group_1=of_mlp))
    with checkpoints.read(tmp_path / "src") as read:
        for name, weight in (effective | others).items():
            torch.testing.assert_close(decoded(read, name), weight, rtol=1e-6, atol=0)
    model = from_pretrained(tmp_path / "src")
    assert all(isinstance(model.get_parameter(name), NVFP4Tensor) for name in effective)


def test_the_guides_table_says_what_the_tests_assert():
    assert table() in GUIDE.read_text(), f"the table is\n{table()}"

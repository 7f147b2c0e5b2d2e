"""compressed-tensors: our folders read by its package and by transformers, and its folders read by us."""

import json

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, edit, edit_json
from safetensors.torch import load_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["modelopt_nvfp4", "modelopt_w4a16"])
def folder(request, tmp_path):
    checkpoints.convert(GOLDEN / request.param, tmp_path / "ct", to="compressed-tensors", progress=False)
    return tmp_path / "ct"


@pytest.fixture
def w4a4(tmp_path):
    checkpoints.convert(GOLDEN / "modelopt_nvfp4", tmp_path / "ct", to="compressed-tensors", progress=False)
    return tmp_path / "ct"


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def change_quantization(folder, change):
    edit_json(folder / "config.json", lambda config: change(config["quantization_config"]))


def test_its_own_decoder(folder):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization(folder))
    scheme = config.config_groups["group_0"]
    assert (scheme.input_activations is None) == (
        not checkpoints.read(folder).entries[f"{Q_PROJ}.weight"].has_input_scale
    )
    assert NVFP4PackedCompressor.can_compress(torch.nn.Linear, scheme)
    stored = load_file(folder / "model.safetensors")
    with checkpoints.read(folder) as read:
        for name in (name for name, entry in read.entries.items() if entry.quantized):
            module = name.removesuffix("weight")
            state = {key.removeprefix(module): t for key, t in stored.items() if key.startswith(module)}
            assert set(NVFP4PackedCompressor.compression_param_names(scheme)) <= set(state)
            assert all(t.shape == (1,) for key, t in state.items() if key.endswith("global_scale"))
            theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
            ours = tensor_of(read.linear(name), torch.bfloat16).dequantize()
            assert theirs.dtype == torch.bfloat16
            assert torch.allclose(theirs.float(), ours.float(), rtol=2**-7, atol=0)  # theirs divides in bfloat16


def test_transformers_reads_it(folder):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
    )
    ours = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(GOLDEN / "modelopt_w4a16")
    )
    checkpoints.load(ours.to(torch.bfloat16).eval(), folder, weight_only=True, progress=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected, got = ours(ids).logits.float(), theirs.eval()(ids).logits.float()
    assert (got - expected).norm() / expected.norm() < 0.02
    for layer, other in zip(ours.model.layers, theirs.model.layers, strict=True):
        mine = layer.mlp.down_proj.weight.dequantize().float()
        assert torch.allclose(other.mlp.down_proj.weight.float(), mine, rtol=2**-7, atol=0)


def test_strategy_group(w4a4):
    change_quantization(w4a4, lambda q: q["config_groups"]["group_0"]["weights"].update(strategy="group"))
    before = checkpoints.read(w4a4).linear(f"{Q_PROJ}.weight").per_tensor_scale
    assert before == load_file(GOLDEN / "modelopt_nvfp4/model.safetensors")[f"{Q_PROJ}.weight_scale_2"]
    edit(w4a4, lambda t: t.pop(f"{Q_PROJ}.weight_global_scale"))
    assert checkpoints.read(w4a4).linear(f"{Q_PROJ}.weight").per_tensor_scale == 1.0


@pytest.mark.parametrize("dynamic", [True, "local"])
def test_without_input_scales(w4a4, dynamic):
    """The configuration says whether any was wanted."""
    edit(w4a4, lambda t: [t.pop(name) for name in list(t) if name.endswith("input_global_scale")])
    change_quantization(w4a4, lambda q: q["config_groups"]["group_0"]["input_activations"].update(dynamic=dynamic))
    if dynamic is True:
        entry = checkpoints.read(w4a4).entries[f"{Q_PROJ}.weight"]
        assert entry.quantizes_activations and not entry.has_input_scale
    else:
        with pytest.raises(ValueError, match=r"input_global_scale.*is missing"):
            checkpoints.read(w4a4)


def group(folder, **changes):
    return {**quantization(folder)["config_groups"]["group_0"], **changes}


def test_mixed_groups(w4a4, tmp_path):
    groups = {
        "group_0": group(w4a4, targets=["Linear"]),
        "group_1": group(w4a4, targets=["re:.*mlp.*"], input_activations=None),
        "group_2": group(w4a4, targets=["re:.*vision.*"], weights={"num_bits": 8, "type": "float"}),
    }
    change_quantization(w4a4, lambda q: q.update(format="mixed-precision", config_groups=groups))
    entries = checkpoints.read(w4a4).entries
    quantized = {name: entry.quantizes_activations for name, entry in entries.items() if entry.quantized}
    assert quantized and all(activations == (".mlp." not in name) for name, activations in quantized.items())
    checkpoints.convert(w4a4, tmp_path / "again", to="compressed-tensors", progress=False)
    assert checkpoints.read(tmp_path / "again").entries == entries
    written = quantization(tmp_path / "again")["config_groups"]
    assert [Q_PROJ in written[name]["targets"] for name in ("group_0", "group_1")] == [True, False]


def test_a_sidecar_that_does_not_fit_changes_nothing(w4a4):
    parts = checkpoints.read(w4a4).linear(f"{Q_PROJ}.weight")
    sidecar = w4a4 / "nvfp4_tensor.json"
    sidecar.write_text(json.dumps({"factors": {f"{Q_PROJ}.weight": {"per_tensor_scale": 3.0}}}))
    again = checkpoints.read(w4a4).linear(f"{Q_PROJ}.weight")
    assert torch.equal(again.per_tensor_scale, again.divisor.reciprocal())
    assert again.per_tensor_scale == pytest.approx(parts.per_tensor_scale.item(), rel=1e-6)

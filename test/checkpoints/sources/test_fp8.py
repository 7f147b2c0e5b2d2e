"""FP8 as DeepSeek, transformers, ModelOpt, compressed-tensors and fbgemm store it."""

import pytest
import torch
from helpers.checkpoint_folders import edit
from helpers.coded_folders import in_blocks, write_coded

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import inspection
from nvfp4_tensor.checkpoints.sources.reading import open_source

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROWS, COLUMNS = 300, 160


DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {"strategy": "block", "block_structure": [128, 128], "num_bits": 8, "type": "float"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": BLOCKS}}}
STORED = {
    "DeepSeek": ((128, 128), DEEPSEEK, "weight_scale_inv", lambda s: s),
    "DeepSeek, ue8m0": ((128, 128), DEEPSEEK, "weight_scale_inv", lambda s: s.to(E8M0)),
    "DeepSeek, other blocks": ((64, 32), {**DEEPSEEK, "weight_block_size": [64, 32]}, "weight_scale_inv", lambda s: s),
    "DeepSeek, its own names": ((128, 128), None, "scale", lambda s: s),
    "transformers, per tensor": ((ROWS, COLUMNS), {"quant_method": "fp8"}, "weight_scale_inv", lambda s: s[0, 0]),
    "fbgemm": ((1, COLUMNS), {"quant_method": "fbgemm_fp8"}, "weight_scale", lambda s: s),
    "compressed-tensors": ((128, 128), COMPRESSED, "weight_scale", lambda s: s.bfloat16()),
    "ModelOpt": ((ROWS, COLUMNS), {"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", lambda s: s[0, 0]),
    "ModelOpt, channels": ((1, COLUMNS), {"quant_method": "modelopt"}, "weight_scale", lambda s: s[:, 0]),
    "ModelOpt, blocks": ((128, 128), {"quant_method": "modelopt"}, "weight_scale", lambda s: s[:, None, :, None]),
    "MXFP8": ((1, 32), {"quant_method": "modelopt"}, "weight_scale", lambda s: s.to(E8M0).view(torch.uint8)),
    "ComfyUI": ((ROWS, COLUMNS), None, "scale_weight", lambda s: s[0, 0]),
}


@pytest.mark.parametrize("name", STORED)
def test_all_ways_to_store_it(tmp_path, name):
    block, settings, key, stored = STORED[name]
    codes, scale, _ = in_blocks(torch.randn(ROWS, COLUMNS), *block)
    kept = stored(scale)
    used = (kept.view(E8M0) if kept.dtype == torch.uint8 else kept).float().reshape(scale.shape)
    values = codes.float() * used.repeat_interleave(block[0], 0)[:ROWS].repeat_interleave(block[1], 1)[:, :COLUMNS]
    tensors = {"m.weight": codes, f"m.{key}": kept, "m.input_scale": torch.ones(()), "m.bias": torch.ones(ROWS)}
    with open_source(write_coded(tmp_path / "a", tensors, settings)) as source:
        source.check_values()
        assert source.entries.keys() == {"m.weight", "m.bias"}
        assert torch.equal(source.dense("m.weight"), values.bfloat16())
        assert "static scales of activations, 1 weights" in source.report(())
    (listed,) = inspection.inspect(tmp_path / "a", progress=False).listed
    assert "FP8" in listed.kind


REFUSED = {
    "no scale": (lambda t: t.pop("m.weight_scale_inv"), r"m\.weight: expected its scale, m\.weight_scale_inv or"),
    "its shape": (
        lambda t: t.update({"m.weight_scale_inv": torch.ones(2, 2)}), r"m\.weight_scale_inv: expected scales of .*F32"
    ),
    "its dtype": (lambda t: t.update({"m.weight_scale_inv": torch.ones(3, 2).int()}), r"found I32 \[3, 2\]"),
    "infinity": (lambda t: t.update({"m.weight_scale_inv": torch.full((3, 2), torch.inf)}), "found infinity or NaN"),
    "experts": (lambda t: t.update({"e": torch.ones(2, 16, 16).to(E4M3), "e_scale": torch.ones(())}), r"tensor e: "),
    "e5m2": (lambda t: t.update({"w.weight": torch.ones(16, 16).to(torch.float8_e5m2)}), r"w\.weight \(float8_e5m2\)"),
    "another tensor": (lambda t: t.update({"m.pre_quant_scale": torch.ones(160)}), r"m\.pre_quant_scale change"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_anything_is_written(tmp_path, name):
    change, message = REFUSED[name]
    codes, scale, _ = in_blocks(torch.randn(ROWS, COLUMNS), 128, 128)
    folder = write_coded(tmp_path / "a", {"m.weight": codes, "m.weight_scale_inv": scale}, DEEPSEEK)
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as raised:
        checkpoints.quantize(folder, tmp_path / "out", progress=False)
    assert "model.safetensors" in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]

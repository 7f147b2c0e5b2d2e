"""Models and pipelines of diffusers: quantized by every route, saved, loaded, offloaded, with adapters, for ComfyUI."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints, quantize, quantize_model

diffusers = pytest.importorskip("diffusers", "0.42")
pytest.importorskip("transformers", "5.21")
peft = pytest.importorskip("peft")

import nvfp4_tensor.integrations.diffusers as nvfp4  # noqa: E402

pytestmark = pytest.mark.slow

HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
MODELS = {
    "FluxTransformer2DModel": {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32,
        "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8), **HEADS,
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
        "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 64, **HEADS,
    },
    "LTXVideoTransformer3DModel": {
        "in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "num_layers": 1, "caption_channels": 32,
        **HEADS,
    },
    "WanTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 1, **HEADS,
    },
}  # fmt: skip
LAYERS = {
    "FluxTransformer2DModel": (17, "time_text_embed.timestep_embedder.linear_1", "embedder of a diffusion model"),
    "SD3Transformer2DModel": (9, "transformer_blocks.0.norm1.linear", "modulation of a norm"),
    "LTXVideoTransformer3DModel": (12, "proj_in", "in files, columns that are not a multiple of 16 cannot be NVFP4"),
    "WanTransformer3DModel": (11, "condition_embedder.text_embedder.linear_1", "embedder of a diffusion model"),
}
"""How many layers of each are NVFP4, and one that is not, and why."""


@pytest.fixture
def make(tmp_path):
    """Return a function that loads a tiny model from the folder ``dense``, which it makes first, or another one."""

    def call(name="FluxTransformer2DModel", folder="dense", **options):
        model_class = getattr(diffusers, name)
        if not (tmp_path / "dense").exists():
            torch.manual_seed(0)
            model_class(**MODELS[name]).bfloat16().save_pretrained(tmp_path / "dense")
        return model_class.from_pretrained(tmp_path / folder, dtype=torch.bfloat16, **options)

    return call


@torch.no_grad()
def image(model, device="cpu"):
    torch.manual_seed(1)
    shapes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32), "pooled_projections": (1, 32)}
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3), "timestep": torch.full((1,), 0.5)}
    return model(**{n: t.to(device, torch.bfloat16) for n, t in inputs.items()}, return_dict=False)[0]


def codes(model):
    weights = {name: weight for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}
    return {n: [w.qdata, w.scale.view(torch.uint8), w.per_tensor_scale] for n, w in weights.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:left dense")
def test_every_route_makes_the_same_bits(make, tmp_path, name):
    count, dense, reason = LAYERS[name]
    memory, loading = make(name), make(name, quantization_config=nvfp4.NVFP4TensorConfig())
    plan = quantize_model(memory)
    assert len(plan.quantized) == count and plan[f"{dense}.weight"].reason == reason and dense in plan.left_dense()
    checkpoints.quantize(tmp_path / "dense", tmp_path / "folder", progress=False)
    folder = checkpoints.load(make(name), tmp_path / "folder", progress=False)
    loading.save_pretrained(tmp_path / "loading", max_shard_size="20KB")  # several files
    nvfp4.attach_quantizer(memory).save_pretrained(tmp_path / "memory")
    expected = codes(memory)
    assert len(expected) == count
    checkpoints.save(memory, tmp_path / "saved", progress=False)
    checkpoints.quantize(tmp_path / "dense", tmp_path / "files", shard_bytes=20_000, progress=False)
    for other in (loading, folder, *(make(name, each) for each in ("loading", "memory", "folder", "saved", "files"))):
        torch.testing.assert_close(codes(other), expected, rtol=0, atol=0)
        for key, tensor in other.state_dict().items():
            assert key in expected or torch.equal(tensor, memory.state_dict()[key]), key


def test_the_file_for_comfyui_and_back(make, tmp_path):
    model = make(quantization_config=nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True)))
    model.save_pretrained(tmp_path / "saved")
    checkpoints.convert(tmp_path / "saved", tmp_path / "flux.safetensors", to="comfy", progress=False)
    again = checkpoints.load(make(), tmp_path / "flux.safetensors", progress=False)
    assert torch.equal(image(again), image(model)) and torch.equal(image(make(folder="saved")), image(model))


def test_activations_variants_and_single_files(make, tmp_path):
    model = make(quantization_config=nvfp4.NVFP4TensorConfig(NVFP4Config()))
    model.save_pretrained(tmp_path / "saved", variant="fp16")
    make().save_pretrained(tmp_path / "saved")  # beside it, with the config.json of a dense model
    (tmp_path / "saved/config.json").write_text(model.to_json_string())
    again = make(folder="saved", variant="fp16")
    spec = again.get_parameter("transformer_blocks.0.attn.to_q.weight").activation_spec
    assert spec is not None and torch.equal(image(again), image(model))
    searched = make(quantization_config=nvfp4.NVFP4TensorConfig(NVFP4Config(scale_search="mse")))
    with pytest.warns(UserWarning, match="quantized by .*search mse.*, which files do not say"):
        searched.save_pretrained(tmp_path / "searched")
    files = {"config": str(tmp_path / "dense"), "dtype": torch.bfloat16}
    single = diffusers.FluxTransformer2DModel.from_single_file(
        str(tmp_path / "dense/diffusion_pytorch_model.safetensors"),
        **files,
        quantization_config=nvfp4.NVFP4TensorConfig(),
    )
    torch.testing.assert_close(codes(single), codes(model), rtol=0, atol=0)


def test_a_whole_pipeline(make, tmp_path):
    from transformers import T5Config, T5EncoderModel

    encoder = T5EncoderModel(T5Config(vocab_size=100, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16))
    empty = dict.fromkeys(("vae", "text_encoder", "tokenizer", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    flux = {"scheduler": scheduler, "transformer": make(), "text_encoder_2": encoder.bfloat16()}
    diffusers.FluxPipeline(**flux, **empty).save_pretrained(tmp_path / "dense_pipeline")
    config = diffusers.quantizers.PipelineQuantizationConfig(
        quant_mapping={each: nvfp4.NVFP4TensorConfig() for each in ("transformer", "text_encoder_2")}
    )

    def load(name, **options):
        return diffusers.FluxPipeline.from_pretrained(tmp_path / name, dtype=torch.bfloat16, **empty, **options)

    pipeline = load("dense_pipeline", quantization_config=config)
    pipeline.save_pretrained(tmp_path / "pipeline")
    again = load("pipeline")
    for component, count in (("transformer", 17), ("text_encoder_2", 6)):
        found = codes(getattr(pipeline, component))
        assert len(found) == count
        torch.testing.assert_close(codes(getattr(again, component)), found, rtol=0, atol=0)
    assert torch.equal(image(again.transformer), image(pipeline.transformer))


def test_adapters_stay_apart_or_are_rounded(make, tmp_path):
    """Fused, a weight is that of quantize of the sum, by the config of the model."""
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
    model, path = make(quantization_config=config), "transformer_blocks.0.attn.to_q"
    before = image(model)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    adapters = {f"transformer.{n}": t for n, t in peft.get_peft_model_state_dict(model).items()}
    other = make(quantization_config=config)
    other.load_lora_adapter(adapters, prefix="transformer")
    assert not torch.equal(image(other), before) and torch.equal(image(other), image(model))
    with pytest.raises(ValueError, match="has adapters: save them by the pipeline's save_lora_weights"):
        other.save_pretrained(tmp_path / "unused")
    layer = other.get_submodule(path)
    expected = quantize(
        layer.base_layer.weight.dequantize() + layer.get_delta_weight("default_0"), config.config.weight
    )
    with pytest.warns(UserWarning, match="fuse_lora rounds the sums to NVFP4, and unfuse_lora rounds again") as caught:
        other.fuse_lora()
    assert caught[0].filename == __file__ and torch.equal(layer.base_layer.weight.qdata, expected.qdata)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_group_offload(make, kind, stream):
    if stream and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, device = make(quantization_config=nvfp4.NVFP4TensorConfig()), torch.device("cuda" if stream else "cpu")
    expected = image(model.to(device), device)
    model.to("cpu")
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(device, offload_type=kind, use_stream=stream, **options)
    assert all(torch.equal(image(model, device), expected) for _ in range(2))


def test_refusals_and_dequantize(make, tmp_path):
    with pytest.raises(ValueError, match="has no NVFP4 weights: call quantize_model"):
        nvfp4.attach_quantizer(make())
    with pytest.raises(ValueError, match="cannot be offloaded to a disk"):
        make(quantization_config=nvfp4.NVFP4TensorConfig(), device_map={"": "disk"})
    tensors = load_file(tmp_path / "dense/diffusion_pytorch_model.safetensors")
    del tensors["transformer_blocks.0.attn.to_k.weight"]
    shutil.copytree(tmp_path / "dense", tmp_path / "damaged")
    save_file(tensors, tmp_path / "damaged/diffusion_pytorch_model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"has transformer_blocks.0.attn.to_q.weight, \S+to_v.weight, but not what shares"
    ):
        make(folder="damaged", quantization_config=nvfp4.NVFP4TensorConfig())
    model = make(quantization_config=nvfp4.NVFP4TensorConfig())
    decoded = {name: model.get_parameter(name).dequantize() for name in codes(model)}
    model.dequantize()
    model.save_pretrained(tmp_path / "decoded")
    again = dict(make(folder="decoded").named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in decoded.items())

"""A checkpoint in vLLM's model class, filled by vLLM's loader, on a CPU. Attention alone is plain torch."""

import dataclasses

import torch


@dataclasses.dataclass
class Served:
    """A model of vLLM's and its configuration."""

    model: torch.nn.Module
    config: object

    def hidden(self, ids):
        """Return the last hidden states (T, K) of a text (T,)."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        context = set_forward_context(None, self.config, num_tokens=len(ids))
        with torch.no_grad(), set_current_vllm_config(self.config), context:
            return self.model(ids, torch.arange(len(ids)))

    def reload(self, folder=None, weights=None):
        """Load other weights by vLLM's reload_weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        with set_current_vllm_config(self.config):
            reload_weights(self.config, self.model, weights, None if folder is None else str(folder), True)


def serve(folder, monkeypatch, load_format="auto"):
    """Load the checkpoint of a folder."""
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # it asks for a GPU before torch 2.14
    monkeypatch.setattr(Attention, "forward", _attention)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
        ),
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format=load_format),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )
    with set_current_vllm_config(config):
        return Served(get_model(vllm_config=config), config)


def _attention(self, query, key, value, output_shape=None, **_):
    """Attention of one text, in place of vLLM's compiled code."""
    q, k, v = (
        each.view(len(query), heads, self.head_size).transpose(0, 1)
        for each, heads in ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
    )
    y = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True, scale=self.impl.scale
    )
    return y[0].transpose(0, 1).reshape(len(query), -1)

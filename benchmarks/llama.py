"""A minimal Llama-shaped decoder with the products of a serving engine.

RMSNorm, rotary embedding, grouped-query attention over a static key-value cache, SwiGLU. The projections to queries,
keys and values are one linear, as are gate and up, like in serving engines. A block receives and returns the residual
stream and the update that is not yet added to it, so that the addition fuses into the next norm even if each block is a
separate graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from nvfp4_tensor.numerics.layout import ceil_to

CACHE_MULTIPLE = 64
"""The cache's length is a multiple: attention kernels want rows of the mask aligned."""
CHOICE_PARTS = 32
"""Rows that logits are split into to choose from: one argmax over 128256 took 27 us of an H200, on few of its cores."""


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    eps: float = 1e-5


LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 500_000.0)
LLAMA_1B = Shape(16, 2048, 32, 8, 64, 8192, 128256, 500_000.0)
SMOLLM2_135M = Shape(30, 576, 9, 3, 64, 1536, 49152, 100_000.0)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.qkv = nn.Linear(shape.hidden, width + 2 * shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, T, hidden), the residual stream
        update: Tensor,  # (B, T, hidden), to be added to it
        rotation: Tensor,  # (T, 1, 2, head_dim) float32, cosines and sines
        bias: Tensor,  # (1, cache length), added to a single token's scores
        positions: Tensor,  # (T,) int64
        cache: Tensor,  # (B, 2 * kv_heads, cache length, head_dim), keys and values
    ) -> tuple[Tensor, Tensor]:
        x = x + update
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x)), rotation, bias, positions, cache))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x, self.down(silu(gate) * up)

    def _attend(self, qkv: Tensor, rotation: Tensor, bias: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        heads, kv_heads, depth = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        q, k, v = qkv.unflatten(-1, (-1, depth)).split([heads, kv_heads, kv_heads], dim=2)
        kv = torch.cat((rotate(k, rotation), v), dim=2)
        q, kv = rotate(q, rotation).transpose(1, 2), kv.transpose(1, 2)  # (B, heads, T, head_dim)
        cache.index_copy_(2, positions, kv)
        if q.shape[2] == 1:
            y = scaled_dot_product_attention(q, *cache.chunk(2, dim=1), attn_mask=bias, enable_gqa=True)
        else:
            y = scaled_dot_product_attention(q, *kv.chunk(2, dim=1), is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the halves (a, b) of each head of x (B, T, heads, head_dim) to (a cos - b sin, b cos + a sin).

    The sines in ``rotation`` have the sign of the first half already negated.
    """
    cos, sin = rotation.unbind(-2)
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Llama(nn.Module):
    """Computes logits of the last token. The caller owns the caches, one per layer: see :meth:`new_caches`."""

    rotations: Tensor

    def __init__(self, shape: Shape, max_length: int = 8192) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        with torch.device("cpu"):
            frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
            angles = torch.outer(torch.arange(max_length), frequencies)
            cos, sin = angles.cos(), angles.sin()
            rotations = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), dim=1).unsqueeze(1)
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> Tensor:
        """Return logits (B, vocab) for tokens (B, T) int64 at positions (T,).

        tokens is either one token at any position, or the full prompt from position 0.
        """
        x, update, rotation, bias = self.enter(tokens, positions, caches[0].shape[2])
        for layer, cache in zip(self.layers, caches, strict=True):
            x, update = layer(x, update, rotation, bias, positions, cache)
        return self.leave(x, update)

    def enter(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the first block, (x, update, rotation, bias), for a cache of ``length``."""
        x = self.embedding(tokens)
        past = torch.arange(length, device=x.device) <= positions[-1:, None]
        bias = torch.where(past, 0.0, float("-inf")).to(x.dtype)
        return x, torch.zeros_like(x), self.rotations[positions], bias

    def leave(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the logits of the last token from the outputs of the last block."""
        return self.head(self.norm((x + update)[:, -1]))

    def choose(self, logits: Tensor) -> Tensor:
        """Return the most likely token, (B, 1)."""
        best, index = logits.unflatten(-1, (CHOICE_PARTS, -1)).max(-1)
        part = best.argmax(-1, keepdim=True)
        return part * (logits.shape[-1] // CHOICE_PARTS) + index.gather(-1, part)

    def new_caches(self, batch: int, length: int) -> list[Tensor]:
        """Return empty caches for at least ``length`` positions."""
        shape = (batch, 2 * self.shape.kv_heads, ceil_to(length, CACHE_MULTIPLE), self.shape.head_dim)
        weight = self.embedding.weight
        return [torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in self.layers]

    def compile_parts(self, fullgraph: bool = True) -> None:
        """Compile each block, by default as one full graph, shared by all blocks, and the code before and after them.

        Inductor's kernels use programmatic dependent launch, in bf16 too: a decode step of Llama-8B's shape then took
        0.94 of the time on an H200, and in bf16 0.99.
        """
        torch._inductor.config.triton.enable_pdl = True
        torch._dynamo.config.recompile_limit = 64  # every recipe, batch and length is a graph of the same code
        compile = functools.partial(torch.compile, fullgraph=fullgraph, dynamic=False)
        for layer in self.layers:
            layer.forward = compile(layer.forward)
        self.enter, self.leave, self.choose = map(compile, (self.enter, self.leave, self.choose))

    def linears(self) -> Iterator[nn.Linear]:
        return (module for module in self.modules() if isinstance(module, nn.Linear))


def random_model(
    shape: Shape, config: AOBaseConfig | None, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Llama:
    """Return a model with Gaussian weights, created and quantized layer by layer to avoid a full dense model."""
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
    model.rotations = Llama(dataclasses.replace(shape, layers=0, vocab=1)).rotations.to(device)
    for part in (model.embedding, *model.layers, model.norm, model.head):
        part.to_empty(device=device)
        for parameter in part.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                nn.init.ones_(parameter)
        if config is not None:
            quantize_(part, config)
    return model.eval().requires_grad_(False)


class Generator:
    """Greedy generation with static shapes: one token buffer, one cache, and on CUDA one graph per step."""

    def __init__(self, model: Llama, prompt: Tensor, count: int) -> None:
        """prompt: int64 (B, T). count: number of tokens that :meth:`generate` adds."""
        self.model, self.prompt, self.count = model, prompt, count
        batch, length = prompt.shape
        self.tokens = torch.nn.functional.pad(prompt, (0, count))
        self.positions = torch.arange(length, device=prompt.device)
        self.position = self.positions.new_full((1,), length)
        self.caches = model.new_caches(batch, length + count)
        self.prefill()
        self.advance = self._capture() if prompt.is_cuda else self.step

    @torch.no_grad()
    def prefill(self) -> None:
        """Run the prompt and choose the first token."""
        logits = self.model(self.prompt, self.positions, self.caches)
        length = self.prompt.shape[1]
        self.tokens[:, length : length + 1] = self.model.choose(logits)
        self.position.fill_(length)

    @torch.no_grad()
    def step(self) -> None:
        """Run the token at ``position`` and choose the next one."""
        token = self.tokens.index_select(1, self.position)
        logits = self.model(token, self.position, self.caches)
        self.position += 1
        self.tokens.index_copy_(1, self.position, self.model.choose(logits))

    def decode(self) -> None:
        """Choose the tokens after the first, in ``count`` - 1 steps."""
        self.position.fill_(self.prompt.shape[1])
        for _ in range(self.count - 1):
            self.advance()

    def generate(self) -> Tensor:
        """Return the prompt followed by ``count`` tokens, (B, T + count)."""
        self.prefill()
        self.decode()
        return self.tokens

    def _capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()  # compiles, and lets libraries take their workspaces
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

"""Estimate the bytes and time of a Llama training step on many GPUs, by a model of ten lines.

    python -m benchmarks.scaling                     # the tables of docs/design/scaling.md

The model is FSDP2 over all GPUs, each with its own tokens: weights are all-gathered before forward and backward, and
gradients are reduce-scattered once. Every GPU sends and receives (n - 1) / n of the gathered bytes, over NVLink within
a host, and over all network cards of a host in parallel (one ring each) between hosts. There are two results: with all
communication overlapped with products except one block's all-gather, and with no overlap.
"""

from __future__ import annotations

import argparse
import dataclasses

BF16, FLOAT32 = 2.0, 4.0
NVFP4 = 0.5 + 1 / 16
"""Bytes an element: four bits, and a scale of one byte for sixteen."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of a Llama; gate and up are two linears."""

    name: str
    layers: int
    width: int
    key_value: int
    hidden: int
    vocabulary: int

    @property
    def linears(self) -> int:
        """Number of weights in the linears of the blocks."""
        attention = 2 * self.width * self.width + 2 * self.key_value * self.width
        return self.layers * (attention + 3 * self.hidden * self.width)

    @property
    def dense(self) -> int:
        """Number of weights of the embedding and the output layer."""
        return 2 * self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """Number of quantized tensors."""
        return 7 * self.layers


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Rates of one GPU: measured bfloat16 products in FLOP/s, links in bytes/s per direction."""

    flops: float = 560e12  # an H200, whole blocks: 8 of Llama-8B take 153 ms, results/h200/fsdp_step.json
    nvlink: float = 370e9
    network: float = 45e9  # nine tenths of 400 Gbit/s per GPU
    latency: float = 12e-6  # of a collective, per level of its tree
    gpus_of_a_host: int = 8

    def link(self, gpus: int) -> float:
        """Return bytes per second and GPU in a collective over ``gpus`` GPUs."""
        return self.nvlink if gpus <= self.gpus_of_a_host else min(self.nvlink, self.network * self.gpus_of_a_host)


@dataclasses.dataclass(frozen=True)
class Way:
    """Bytes per communicated element, and the time of linears relative to bfloat16."""

    name: str
    gathered: float
    reduced: float
    products: float
    amax: bool = False
    rounding: float = 0.0
    """Seconds a weight to round gradients for the wire and to add what comes."""


WAYS = [
    Way("bf16", BF16, BF16, 1.0),
    Way("NVFP4, bf16 gathered", BF16, BF16, 1.029),
    Way("NVFP4, codes gathered", NVFP4, BF16, 1.029, amax=True),
    Way("NVFP4, codes gathered, gradients in NVFP4", NVFP4, NVFP4, 1.029, amax=True, rounding=12.5e-12),
]
"""1.029: the recipe ``nvidia`` on an H200, the same file. FP4 tensor cores would have less than 1. 12.5 ps: there 15 ms
in bfloat16 and 22 by codes, and the 3 that the wire saves, for 1.75 billion weights; the mean of both."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one GPU: received bytes, and seconds."""

    gathered: float
    reduced: float
    products: float
    wire: float
    shown: float

    @property
    def hidden(self) -> float:
        """Seconds with communication overlapped where possible."""
        return max(self.products, self.wire) + self.shown

    @property
    def bare(self) -> float:
        """Seconds without overlap."""
        return self.products + self.wire + self.shown


def step(model: Llama, way: Way, gpus: int, tokens: int, cluster: Cluster) -> Step:
    """Estimate a step of ``gpus`` GPUs with ``tokens`` tokens each; embedding and output layer are sent in bfloat16."""
    part = (gpus - 1) / gpus
    gathered = 2 * part * (model.linears * way.gathered + model.dense * BF16)
    reduced = part * (model.linears * way.reduced + model.dense * BF16)
    products = 6 * tokens * (model.linears * way.products + model.dense / 2) / cluster.flops
    products += model.linears * way.rounding
    collective = (gpus - 1).bit_length() * cluster.latency
    wire = (gathered + reduced) / cluster.link(gpus) + 3 * model.layers * collective
    first = gathered / (2 * model.layers) / cluster.link(gpus) + collective
    return Step(gathered, reduced, products, wire, first + (2 * collective if way.amax else 0.0))


MEASURED = Llama("8 blocks of Llama-8B", 8, 4096, 1024, 14336, 0)
"""The stack of benchmarks/speed/fsdp_step.py."""

LLAMAS = [
    Llama("Llama-8B", 32, 4096, 1024, 14336, 128256),
    Llama("Llama-405B", 126, 16384, 1024, 53248, 128256),
]


def table(model: Llama, tokens: int, cluster: Cluster, sizes: tuple[int, ...] = (8, 64, 512, 4096)) -> str:
    """Return a table of bytes and time for each way and number of GPUs."""
    lines = [
        "| GPUs | way | gathered, GB | reduced, GB | products, ms | wire, ms | step, ms | of bf16's |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gpus in sizes:
        dense = step(model, WAYS[0], gpus, tokens, cluster)
        for way in WAYS:
            one = step(model, way, gpus, tokens, cluster)
            milliseconds = [f"{1e3 * value:.0f}" for value in (one.products, one.wire, one.hidden, one.bare)]
            lines.append(
                f"| {gpus} | {way.name} | {one.gathered / 1e9:.1f} | {one.reduced / 1e9:.1f} | {milliseconds[0]} | "
                f"{milliseconds[1]} | {milliseconds[2]} to {milliseconds[3]} | "
                f"{one.hidden / dense.hidden:.2f} to {one.bare / dense.bare:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a GPU and step")
    parser.add_argument("--gigabits", type=int, nargs="+", default=[400, 100], help="of the network, a GPU")
    options = parser.parse_args()
    print(f"{MEASURED.name}, {options.tokens} tokens a GPU\n\n{table(MEASURED, options.tokens, Cluster(), (1, 2))}\n")
    for model in LLAMAS:
        for gigabits in options.gigabits:
            cluster = Cluster(network=0.9 * gigabits * 1e9 / 8)
            print(f"{model.name}, {options.tokens} tokens and {gigabits} Gbit/s a GPU\n")
            print(table(model, options.tokens, cluster) + "\n")


if __name__ == "__main__":
    main()

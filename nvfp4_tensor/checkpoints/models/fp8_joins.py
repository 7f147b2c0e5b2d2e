"""Join weights in FP8 to one parameter of a model, q, k and v or experts, and split it again. No value changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from nvfp4_tensor.tensor.fp8 import E4M3, FP8Tensor

_BLOCK = 128


def join(groups: Sequence[Sequence[FP8Tensor]], stacked: bool) -> FP8Tensor:
    """Return weights (N, K) joined along their rows, and with ``stacked`` the groups as (E, N, K).

    They have the same columns in a block, and treat activations alike. The result has no input scale.
    """
    matrices = [_joined_rows(group) for group in groups]
    if not stacked:
        return matrices[0]
    if len({each.spec for each in matrices}) > 1:
        matrices = [_by_row(each) for each in matrices]
    codes = torch.stack([each.qdata.view(torch.uint8) for each in matrices]).view(E4M3)
    return matrices[0].replace(qdata=codes, scale=torch.stack([each.scale for each in matrices]), input_scale=None)


def split(w: FP8Tensor, rows: Sequence[int], stacked: bool) -> list[FP8Tensor]:
    """Return the parts of a weight with so many rows, of one expert after the other: what :func:`join` joined."""
    matrices = [w[e] for e in range(len(w.qdata))] if stacked else [w]
    starts = list(itertools.accumulate(rows, initial=0))
    return [_rows_of(each, *span) for each in matrices for span in itertools.pairwise(starts)]


def _joined_rows(parts: Sequence[FP8Tensor]) -> FP8Tensor:
    first, (height, _) = parts[0], parts[0].spec.block
    alike = len({each.spec for each in parts}) == 1
    if alike and not height and all(torch.equal(each.scale, first.scale) for each in parts):
        scale = first.scale
    else:
        if not alike or not height or any(len(each.qdata) % height for each in parts[:-1]):
            parts = [_by_row(each) for each in parts]
        scale = torch.cat([each.scale for each in parts])
    codes = torch.cat([each.qdata.view(torch.uint8) for each in parts]).view(E4M3)
    return parts[0].replace(qdata=codes, scale=scale, input_scale=None)


def _by_row(w: FP8Tensor) -> FP8Tensor:
    """Return a weight (N, K) with scales of its own for each row."""
    rows, (height, width) = len(w.qdata), w.spec.block
    scale = w.scale.repeat_interleave(height or rows, 0)[:rows]
    return w.replace(spec=dataclasses.replace(w.spec, block=(1, width)), scale=scale)


def _rows_of(w: FP8Tensor, first: int, last: int) -> FP8Tensor:
    """Return some rows of a weight (N, K), with larger blocks if the scales of their rows are equal."""
    height, width = w.spec.block
    assert first % max(height, 1) == 0  # join has split other blocks
    codes, scale = w.qdata[first:last], w.scale
    if height:
        scale = scale[first // height : -(-last // height)]
    part = FP8Tensor(codes, scale, w.spec, w.orig_dtype, input_scale=w.input_scale)
    taller = {0: 0, _BLOCK: _BLOCK}.get(width) if height == 1 else None
    if taller is None:
        return part
    larger = scale[:: taller or len(scale)]
    if not torch.equal(larger.repeat_interleave(taller or len(scale), 0)[: len(scale)], scale):
        return part
    return part.replace(spec=dataclasses.replace(w.spec, block=(taller, width)), scale=larger)

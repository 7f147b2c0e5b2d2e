"""gpt-oss folders with MXFP4 experts. They are read as NVFP4 with the same values, and cannot be written.

``experts.down_proj`` is stored as ``experts.down_proj_blocks``, uint8 (E, N, K/32, 16), and
``experts.down_proj_scales``, uint8 (E, N, K/32). The parameter is (E, N, K), with one per-tensor scale per expert.
"""

from __future__ import annotations

import torch

from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.formats.table import Layout, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint


class MXFP4(TableFormat):
    """gpt-oss's format, read-only."""

    name = "mxfp4"
    layout = Layout(keys={"qdata": "{name}_blocks", "scale": "{name}_scales"}, scale=torch.uint8)
    unwritable = "MXFP4 cannot be written, because the scales of NVFP4 are not powers of two: choose another format"

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        schemes = {}
        for name, blocks in checkpoint.shards.info.items():
            if not name.endswith("_blocks"):
                continue
            *leading, half = blocks.shape or (0,)
            if len(leading) not in (2, 3) or half != MX_BLOCK // 2:
                wanted = "uint8 (N, K/32, 16) or (E, N, K/32, 16)"
                raise ValueError(f"{blocks.file}: tensor {name}: expected {wanted}, found {blocks}")
            shape = (*leading[:-1], leading[-1] * MX_BLOCK)
            schemes[name.removesuffix("_blocks")] = Scheme(shape=shape, group=MX_BLOCK)
        return schemes


FORMAT = MXFP4()

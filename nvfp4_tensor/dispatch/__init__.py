"""What torch's operators mean on an NVFP4Tensor."""

import functools

import torch


@functools.cache
def register() -> None:
    """Fill the table of operators, once; the class calls it before its first one."""
    from nvfp4_tensor.dispatch import joins, products, storage, table, views  # noqa: F401  each registers its own

    if torch.distributed.is_available():
        from nvfp4_tensor.dispatch import collectives  # noqa: F401

    table.install()

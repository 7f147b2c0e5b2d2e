"""What torch's operators mean on an NVFP4Tensor."""

import functools


@functools.cache
def register() -> None:
    """Fill the table of operators, once; the class calls it before its first one."""
    from nvfp4_tensor.dispatch import joins, products, storage, table, views  # noqa: F401  each registers its own

    table.install()

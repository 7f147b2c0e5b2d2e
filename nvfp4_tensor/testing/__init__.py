"""Checks that are part of the package: the self-test, statistics of rounding, and the quality of a model."""

import nvfp4_tensor.dispatch  # noqa: F401  first: the tensor with its operators, and torchao without its log lines

"""Checks that are part of the package: the self-test, and the quality of a model."""

import nvfp4_tensor.dispatch  # noqa: F401  first: the tensor with its operators, and torchao without its log lines

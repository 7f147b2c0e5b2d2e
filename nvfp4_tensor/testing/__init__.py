"""Checks that ship: the self-test and the statistics of rounding."""

import nvfp4_tensor.dispatch  # noqa: F401  first: the tensor with its operators, and torchao without its log lines

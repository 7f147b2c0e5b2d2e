"""Where a tensor lies: in a larger one, and in memory.

What was undefined behaviour before, so that `make sanitize` stops where it comes back: the memset of the null pointers
of empty outputs (here and in test_native.py), the overflow of a block's number, and loads of numbers that do not begin
on a multiple of their size, which torch.frombuffer makes of any file.
"""

import pytest
import torch
from helpers.instruction_sets import assert_op, needs_library

from nvfp4_tensor import QuantizeSpec, dequantize

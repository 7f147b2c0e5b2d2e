"""NVFP4 in transformers. Importing this package registers it with from_pretrained and save_pretrained.

After the import, ``from_pretrained(..., quantization_config=NVFP4TensorConfig(...))`` quantizes while loading, and
checkpoints in ModelOpt's layout (``quant_method`` "modelopt") load on any device. ``save_pretrained`` writes the same
layout, which vLLM, SGLang and TensorRT-LLM read.
"""

import nvfp4_tensor.dispatch  # first: registers the tensor's operators and silences torchao's log lines

# isort: split
import warnings

import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.21"):  # older converters do not collect a quantizer's tensors
    raise ImportError(
        f"nvfp4_tensor.integrations.transformers needs transformers 5.21 or newer, not {transformers.__version__}: pip "
        "install -U transformers. nvfp4_tensor.checkpoints.load reads the same checkpoints into any version's models"
    )

import nvfp4_tensor._compat.transformers_import  # noqa: F401

# isort: split
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer

from nvfp4_tensor.generation.step import decode_natively
from nvfp4_tensor.integrations.transformers.compressed_tensors import UNREAD, read_compressed_tensors, read_natively
from nvfp4_tensor.integrations.transformers.config import METHOD, CheckpointConfig, NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.from_checkpoint import CheckpointQuantizer, attach_quantizer
from nvfp4_tensor.integrations.transformers.hf_quant_config import config_of, read_hf_quant_config
from nvfp4_tensor.integrations.transformers.saving import save
from nvfp4_tensor.integrations.transformers.training_experts import accept_checkpoint_names, train_experts
from nvfp4_tensor.integrations.transformers.while_loading import WhileLoadingQuantizer

__all__ = [
    "CheckpointConfig",
    "CheckpointQuantizer",
    "NVFP4TensorConfig",
    "WhileLoadingQuantizer",
    "accept_checkpoint_names",
    "attach_quantizer",
    "config_of",
    "decode_natively",
    "read_compressed_tensors",
    "save",
    "train_experts",
]

register_quantization_config(METHOD)(NVFP4TensorConfig)
register_quantizer(METHOD)(WhileLoadingQuantizer)
for method in UNREAD:
    read_natively(method)
if "modelopt" in AUTO_QUANTIZER_MAPPING:
    warnings.warn(
        f"transformers {transformers.__version__} already reads ModelOpt's checkpoints, and its reader is kept: use "
        "nvfp4_tensor.checkpoints.load for checkpoints that it cannot run here",
        stacklevel=2,
    )
else:
    register_quantization_config("modelopt")(CheckpointConfig)
    register_quantizer("modelopt")(CheckpointQuantizer)
    read_hf_quant_config()

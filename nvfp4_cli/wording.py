"""Replace Python arguments and functions in the library's messages by options and commands."""

from __future__ import annotations

WORDS = {
    "calibrate(model, batches), after model.requires_grad_() if it is NVFP4 already": "calibrate(model, batches)",
    "calibrate(model, batches)": "`nvfp4 quantize --calibrate TEXT` of the dense model",
    "checkpoints.quantize": "`nvfp4 quantize`",
    "checkpoints.convert": "`nvfp4 convert`",
    "config_from=PATH": "--config-from PATH",
    "exclude=[...]": "--exclude",
    "format=": "--from ",
    "global_scale=True": "--global-scale",
    "lossy=True": "--lossy",
    "quantize_lm_head=True": "--head",
    "to='mlx'": "--to mlx",
    "tokenizer=FOLDER": "--tokenizer FOLDER",
    "tokenizer=None": "--tokenizer none",
    "weight_only=True": "--w4a16",
    "give layers=[] to treat the model as one layer": "leave --gptq out, or use --weighted",
    "give it a weight of its own first: linear.weight = nn.Parameter(linear.weight.detach().clone())":
        "give --head for the output layer",
}  # fmt: skip
"""The command line's words for the library's. A test compares them with the library's messages."""


def in_options(text: str) -> str:
    """Return a message of the library in the words of the command line."""
    for python, option in WORDS.items():
        text = text.replace(python, option)
    return text

"""Messages of the library, which name arguments of Python, as the command line names its options."""

from __future__ import annotations

WORDS = (
    ("leave out quantize_lm_head=True", "leave out --head"),
    ("of which quantize_lm_head=True quantizes", "of which --head quantizes"),
    ("quantize_lm_head=True quantizes ", "--head quantizes "),
    (", which exclude leaves dense: give one of them", ", which --exclude leaves dense: give one of them"),
    ("calibrate(model, batches) gives it, or write the weights alone with weight_only=True",
     "`nvfp4 quantize --calibrate TEXT` of the dense model gives it, or write the weights alone with --w4a16"),
    ("quantize with amax=2688 (per-tensor scales of 1), allow lossy=True, or write global_scale=True",
     "quantize the dense model with --to mlx (per-tensor scales of 1), or give --lossy, or --global-scale"),
    ("or allow lossy=True", "or give --lossy"),
    ("allow lossy=True", "give --lossy"),
    ("tokenizer= takes one; None says that none is wanted", "--tokenizer takes a folder that has one, or none"),
    ("give the GGUF another tokenizer, or tokenizer=None", "give --tokenizer a folder that has one, or none"),
    ("give the tokenizer of another GGUF of this model, or tokenizer=None",
     "give --tokenizer none, for a file that runs on tokens alone"),
    ("load() it into a model and save() that, which requantizes them",
     "quantize the dense model with `nvfp4 quantize`, which gives them one"),
    ("and convert() what is quantized", "and `nvfp4 convert` what is quantized"),
    (": convert() it", ": `nvfp4 convert` it"),
    ("leave it dense (exclude it)", "leave it dense with --exclude"),
    ("give layers=[] to take the model as a whole", "leave --gptq out, or use --weighted"),
    ("give it a weight of its own first: linear.weight = nn.Parameter(linear.weight.detach().clone())",
     "give --head for the output layer"),
    ("load the model with transformers (quantization_config=NVFP4TensorConfig()) and save it",
     "load the model with transformers in Python, by this package's NVFP4TensorConfig, and save it"),
)  # fmt: skip
"""By the library's words, the command line's; a test asks all messages that name an argument."""


def in_options(text: str) -> str:
    """A message with the options of the command line in place of arguments of Python."""
    for python, option in WORDS:
        text = text.replace(python, option)
    return text

"""Importing this imports transformers' models without torchao's messages: they import its prototypes, too."""

from nvfp4_tensor._compat.torchao_import import quietly

with quietly():
    import transformers.modeling_utils  # noqa: F401

"""llama.cpp as an oracle for GGUF files, if it is installed."""

import numpy as np
import pytest
import torch


def rms(x):
    return x.double().square().mean().sqrt().item()


def llama_cpp_runner(path, **options):
    """Open a file with llama.cpp. Of longrope's factors it takes those for texts as long as its context."""
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, **options)


def llama_cpp_logits(path, ids):
    """Return the logits (T, V) along tokens (T,), with a cache in float32.

    Its own choice, float16, costs 0.3 % of the logits of a small random model.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    runner = llama_cpp_runner(path, logits_all=True, **kinds)
    runner.eval(ids.tolist())
    return torch.from_numpy(np.array(runner.scores[: len(ids)]))

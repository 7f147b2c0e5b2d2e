"""llama.cpp in a process without torch, for `benchmarks.speed.decode_cpu`.

    python -m benchmarks.speed.llama_cpp_process decode FILE.gguf THREADS LENGTH
    python -m benchmarks.speed.llama_cpp_process q4_0 DENSE.gguf TARGET.gguf THREADS

`decode` answers each line of its input, JSON of [tokens of a prompt, how many to write], by a line of JSON: [seconds,
seconds of processors, tokens], the times from the first token written to the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp


class Llama:
    """A GGUF file in llama.cpp, by its C interface: nothing of Python between two tokens but the call."""

    def __init__(self, path: str, threads: int, length: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = length, threads, threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def run(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        tokens = [self._next(prompt)]
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(count - 1):
            tokens.append(self._next(tokens[-1:]))
        return time.perf_counter() - start, time.process_time() - cpu_start, tokens

    def _next(self, ids: list[int]) -> int:
        array = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to it
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama.cpp could not decode")
        return llama_cpp.llama_sampler_sample(self.sampler, self.context, -1)


def q4_0(source: str, target: str, threads: int) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, threads
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings):
        raise RuntimeError(f"llama.cpp could not quantize {source}")


def main() -> None:
    what, path, *rest = sys.argv[1:]
    silent: Any = llama_cpp.llama_log_callback(lambda *_: None)  # llama.cpp tells much; ctypes keeps no reference
    llama_cpp.llama_log_set(silent, None)
    if what == "q4_0":
        target, threads = rest
        q4_0(path, target, int(threads))
        return
    answers = os.fdopen(os.dup(1), "w")  # what llama.cpp itself prints is no answer
    os.dup2(2, 1)
    llama = Llama(path, *map(int, rest))
    for line in sys.stdin:
        print(json.dumps(llama.run(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

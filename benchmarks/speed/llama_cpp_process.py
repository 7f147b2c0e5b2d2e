"""llama.cpp in a process without torch, for `benchmarks.speed.decode_cpu`.

    python -m benchmarks.speed.llama_cpp_process FILE.gguf THREADS LENGTH

It answers each line of its input, JSON of [tokens of a prompt, how many to write], by a line of JSON: the seconds from
the first token written to the last.
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

    def run(self, prompt: list[int], count: int) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        token, start = self._next(prompt), time.perf_counter()
        for _ in range(count - 1):
            token = self._next([token])
        return time.perf_counter() - start

    def _next(self, ids: list[int]) -> int:
        array = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to it
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama.cpp could not decode")
        return llama_cpp.llama_sampler_sample(self.sampler, self.context, -1)


def main() -> None:
    path, *rest = sys.argv[1:]
    silent: Any = llama_cpp.llama_log_callback(lambda *_: None)  # llama.cpp tells much; ctypes keeps no reference
    llama_cpp.llama_log_set(silent, None)
    answers = os.fdopen(os.dup(1), "w")  # what llama.cpp itself prints is no answer
    os.dup2(2, 1)
    llama = Llama(path, *map(int, rest))
    for line in sys.stdin:
        print(json.dumps(llama.run(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

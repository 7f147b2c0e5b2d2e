"""Plant the faults of the table one at a time, and report which test notices each: ``python test/faults [words]``.

It works in copies of the sources. Words choose the faults whose names contain one. It fails if a fault survives.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from table import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SITE = """import sys
editable = ("Editable", "Inplace")
sys.meta_path[:] = [f for f in sys.meta_path if not any(word in type(f).__name__ for word in editable)]
"""
HEADER = """#pragma once
#include <cstdlib>
#if defined(__CUDACC__)
#include <cuda_runtime.h>
static __device__ int nvfp4_planted;
static const cudaError_t nvfp4_plants = [] {
  const char* chosen = std::getenv("NVFP4_FAULT");
  const int number = chosen ? std::atoi(chosen) : -1;
  return cudaMemcpyToSymbol(nvfp4_planted, &number, sizeof number);
}();
__host__ __device__
#endif
inline bool planted(int number) {
#if defined(__CUDA_ARCH__)
  return nvfp4_planted == number;
#else
  static const char* const chosen = std::getenv("NVFP4_FAULT");
  return chosen && std::atoi(chosen) == number;
#endif
}
"""


def plant(root: Path, fault: Fault, number: int | None = None) -> str:
    """Put a fault into the sources, one that NVFP4_FAULT=number turns on if there is a number; return the old text."""
    file = root / "nvfp4_tensor" / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}: a fault needs one place")
    new = fault.new
    if number is not None and fault.old.endswith(";"):
        new = f"if (planted({number})) {{ {fault.new} }} else {{ {fault.old} }}"
    elif number is not None:
        new = f"(planted({number}) ? ({fault.new}) : ({fault.old}))"
    changed = text.replace(fault.old, new)
    if number is not None and "planted.h" not in text:
        changed = re.sub(r"^#include", '#include "planted.h"\n#include', changed, count=1, flags=re.M)
    file.write_text(changed)
    return text


def run(root: Path, fault: Fault, number: int) -> tuple[Fault, str]:
    """Return the fault and the first test that fails with it, "" if none does."""
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "NVFP4_FAULT": str(number)}
    options = ["-x", "-q", "-p", "no:cacheprovider", *(["-m", "gpu"] if fault.gpu else [])]
    command = [sys.executable, "-m", "pytest", *options, *(f"test/{each}" for each in fault.tests.split())]
    before = None if fault.is_native else plant(root, fault)
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return fault, "none ends"
    finally:
        if before is not None:
            (root / "nvfp4_tensor" / fault.file).write_text(before)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    killed = done.returncode not in (0, 5)  # 5: no test ran
    return fault, (found[1] if found else f"exit status {done.returncode}") if killed else ""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "--gpu", action="store_true", help="those that only a GPU's tests notice, instead of the others"
    )
    parser.add_argument("--archs", default="cpu", help="what .ci/native builds: 90a with --gpu")
    parser.add_argument("-j", type=int, default=1, help="processes")
    options = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if fault.gpu == options.gpu and (not options.words or any(word in fault.name for word in options.words))
    ]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "0"
        ignored = shutil.ignore_patterns(".*", "build", "results", "demo_output")
        shutil.copytree(ROOT, first, ignore=ignored, symlinks=True)
        shutil.copytree(ROOT / ".ci", first / ".ci")
        (first / "sitecustomize.py").write_text(SITE)  # an editable install would import the sources, not the copy
        if native := [(number, fault) for number, fault in chosen if fault.is_native]:
            (first / "nvfp4_tensor/csrc/planted.h").write_text(HEADER)
            for number, fault in native:
                plant(first, fault, number)
            binaries = Path(sys.executable).parent
            subprocess.run([first / ".ci/native", binaries, options.archs], check=True, stdout=subprocess.DEVNULL)
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(options.j):
            if i:
                shutil.copytree(first, first.with_name(str(i)), ignore=shutil.ignore_patterns("build"), symlinks=True)
            copies.put(first.with_name(str(i)))

        def each(job: tuple[int, Fault]) -> bool:
            root = copies.get()
            try:
                fault, by = run(root, job[1], job[0])
            finally:
                copies.put(root)
            print(f"{'noticed ' if by else 'SURVIVED'} {fault.name}   {by}", flush=True)
            return bool(by)

        with concurrent.futures.ThreadPoolExecutor(options.j) as pool:
            noticed = list(pool.map(each, chosen))
    print(f"{sum(noticed)} of {len(noticed)} faults noticed")
    sys.exit(not all(noticed))


if __name__ == "__main__":
    main()

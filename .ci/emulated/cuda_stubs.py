"""Stand-ins for the CUDA libraries that torch is linked against, so that its build for CUDA runs where there are none.

    python cuda_stubs.py TORCH/lib TOOLS

Every function that torch wants of them is there and fails (TOOLS: aarch64-linux-gnu-, say); torch finds no device. For
tests on the CPU: a torch that was built for CPUs alone needs nothing, and gets nothing.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

LIBRARY = re.compile(r"lib(cu|nccl|nv(rtc|shmem|jitlink|tx))")
FUNCTION = re.compile(r"(cu|nccl|nvrtc|nvshmem|__cuda)")
ERROR = 100  # cudaErrorNoDevice, and no status of success in any of the libraries


def read(tools: str, option: str, library: Path) -> list[str]:
    command = [f"{tools}readelf", "--wide", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def providers(lines: list[str]) -> dict[str, str]:
    """The library of each version that is needed."""
    found, library = {}, ""
    for line in lines:
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            found[match[1]] = library
    return found


def build(tools: str, folder: Path, name: str, functions: set[str], version: str) -> None:
    # Registering kernels, which happens as torch is loaded, has no error to report.
    lines = [f"long {f}(void) {{ return {0 if f.startswith('__cuda') else ERROR}; }}\n" for f in sorted(functions)]
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    source.write_text("".join(lines))
    script.write_text(f"{version} {{ global: *; }};\n")
    options = [f"-Wl,-soname,{name}"] + ([f"-Wl,--version-script={script}"] if version else [])
    command = [f"{tools}gcc", "-shared", "-fPIC", "-w", "-fno-builtin", *options, "-o", folder / name, source]
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink()


def main() -> None:
    folder, tools = Path(sys.argv[1]), sys.argv[2]
    needed: set[str] = set()
    versions: dict[str, str] = {}
    functions: dict[str, set[str]] = defaultdict(set)  # of each library; of "", those that name none
    for library in sorted(folder.glob("*.so*")):
        needed |= {name for line in read(tools, "--dynamic", library) for name in re.findall(r"NEEDED.*\[(.*)\]", line)}
        provider = providers(read(tools, "--version-info", library))
        for line in read(tools, "--dyn-syms", library):
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            name, _, version = fields[7].partition("@")
            version = version.lstrip("@")
            if version in provider:
                functions[provider[version]].add(name)
                versions[provider[version]] = version
            elif not version and FUNCTION.match(name):
                functions[""].add(name)
    missing = sorted(name for name in needed if LIBRARY.match(name) and not (folder / name).exists())
    for name in missing:
        # Functions of no version come from a library that has none: all of these have them, for not all are loaded.
        build(tools, folder, name, functions[name] if name in versions else functions[""], versions.get(name, ""))
    print(f"stand-ins for {len(missing)} CUDA libraries" if missing else "this torch needs no CUDA libraries")


if __name__ == "__main__":
    main()

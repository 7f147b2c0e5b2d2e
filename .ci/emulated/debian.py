"""Unpack Debian packages, and those that they depend on, into a folder: no root, no apt, any architecture.

    python debian.py FOLDER SUITE ARCHITECTURE PACKAGE...

DEBIAN_MIRROR is where to get them. Each file is held to the SHA-256 of the suite's index; signatures are not checked.
"""

import hashlib
import lzma
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")


def fetch(path: str) -> bytes:
    with urllib.request.urlopen(f"{MIRROR}/{path}", timeout=120) as response:
        return response.read()


def index(suite: str, architecture: str) -> dict[str, dict[str, str]]:
    text = lzma.decompress(fetch(f"dists/{suite}/main/binary-{architecture}/Packages.xz")).decode()
    paragraphs = (dict(re.findall(r"^(\S+): (.*)$", each, re.MULTILINE)) for each in text.split("\n\n"))
    return {fields["Package"]: fields for fields in paragraphs if fields}


def closure(packages: dict[str, dict[str, str]], wanted: list[str]) -> list[str]:
    """What is wanted and what that depends on: of alternatives the first, and no name that others only provide."""
    unknown = [name for name in wanted if name not in packages]
    if unknown:
        raise SystemExit(f"the suite has no package {', '.join(unknown)}")
    found: dict[str, None] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in found or name not in packages:
            continue
        found[name] = None
        depends = [packages[name].get(field, "") for field in ("Pre-Depends", "Depends")]
        waiting += [match[1] for each in ",".join(depends).split(",") if (match := re.match(r"\s*([^\s:(|]+)", each))]
    return list(found)


def main() -> None:
    folder, suite, architecture, *wanted = sys.argv[1:]
    packages = index(suite, architecture)
    downloads = Path(folder, "debs")
    downloads.mkdir(parents=True, exist_ok=True)
    for name in closure(packages, wanted):
        content = fetch(packages[name]["Filename"])
        if hashlib.sha256(content).hexdigest() != packages[name]["SHA256"]:
            raise SystemExit(f"{packages[name]['Filename']} is not the file of the suite's index")
        deb = downloads / f"{name}.deb"
        deb.write_bytes(content)
        subprocess.run(["dpkg-deb", "--extract", deb, folder], check=True)
        deb.unlink()
    downloads.rmdir()


if __name__ == "__main__":
    main()

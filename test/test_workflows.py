"""GitHub's workflows call what exists here: targets of the Makefile, scripts, packages of pyproject.toml."""

import os
import re
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path):
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        for step in job["steps"]:
            yield name, step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_targets_and_needs_exist(path):
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(path.read_text())["jobs"]
    called = [
        word
        for _, step in steps(path)
        for line in step.get("run", "").splitlines()
        if line.strip().startswith("make ")
        for word in line.split()[1:]
        if "=" not in word
    ]
    assert called and set(called) <= targets
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)


def test_only_a_tag_publishes():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    trusted = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert trusted == {"publish", "site"}
    assert all("ref_type == 'tag'" in jobs[name]["if"] for name in trusted)
    assert set(jobs["publish"]["needs"]) == {"wheel", "sdist", "docs"} and jobs["site"]["needs"] == "publish"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_a_release_is_checked_by_the_script_of_make_wheel():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made = project["tool"]["cibuildwheel"]
    script = ROOT / ".ci/check_wheel"
    assert ".ci/check_wheel" in made["test-command"] and os.access(script, os.X_OK)
    assert ".ci/check_wheel" in (ROOT / ".ci/wheel").read_text()
    for required in project["build-system"]["requires"]:
        assert required in made["before-build"]
    torch = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert torch in made["test-requires"] and torch in made["before-build"]


def test_the_cuda_job_expects_every_architecture():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r"set\(ALL_CUDA_ARCHS ([^)]*)\)", cmake)[1].split()
    job = (ROOT / ".github/workflows/ci.yml").read_text()
    assert f"len(found) == {len(listed) + 1}," in job  # and 110a, which nvcc 13 knows

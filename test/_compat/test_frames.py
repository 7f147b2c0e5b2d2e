"""Which caller a hook finds, the line at which a warning is the user's, and what torch's caches are told of us."""

import functools
from pathlib import Path

import pytest
import torch

from nvfp4_tensor._compat import frames
from nvfp4_tensor._compat.source_digest import source_digest


def caller_in(module):
    """Return a function of a module of this name that calls what it is given."""
    scope = {"__name__": module}
    exec("def call(run):\n    here = 'found'\n    return run()", scope)
    return scope["call"]


def hook(function="call", file="<string>"):
    return frames.caller_frame_locals(function, file)


def test_the_nearest_caller_of_a_name_and_a_file():
    call = caller_in("anything")
    assert call(hook)["here"] == "found" and hook() is None
    assert call(lambda: hook(file="other.py")) is None and call(lambda: hook("another")) is None

    def deeper(depth):
        return hook() if depth == 0 else deeper(depth - 1)

    assert call(lambda: deeper(frames._MAX_DEPTH - 3)) is not None  # its own frames and the lambda's are inspected, too
    assert call(lambda: deeper(frames._MAX_DEPTH - 2)) is None


@pytest.mark.parametrize("package, level", [("torch.nn", 3), ("peft", 3), ("copy", 3), ("torchvision", 2), ("mine", 2)])
def test_a_warning_names_the_first_line_outside_of_these_packages(package, level):
    """Of three frames: ours, which warns, its caller, and this test."""
    ours = functools.partial(caller_in("nvfp4_tensor.tensor"), frames.user_level)
    assert caller_in(package)(ours) == level


def test_every_warning_but_those_of_an_import_names_the_line_of_the_user():
    """A fixed number of frames is that of one caller: others warn at a line of ours."""
    package = Path(frames.__file__).parents[1]
    fixed = {str(path.relative_to(package)) for path in package.rglob("*.py") if "stacklevel" in path.read_text()}
    at_import = {"integrations/serving.py", "integrations/transformers/__init__.py", "ops/native.py"}
    assert fixed == {"_compat/frames.py", *at_import}


def test_older_versions_of_torch_have_a_digest_of_our_code_in_their_cache_keys():
    assert len(source_digest()) == 128
    assert (source_digest() in torch.compiler.config.cache_key_tag) == (torch.__version__ < "2.13")

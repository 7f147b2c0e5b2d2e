import importlib.util

import pytest

from nvfp4_tensor import cli
from nvfp4_tensor.testing import selftest


def test_info_names_versions_and_what_serves_each_device(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "CPU ops" in out and "CUDA ops" in out


@pytest.mark.parametrize("status", [0, 1])
def test_selftest_gives_its_exit_status(monkeypatch, status):
    monkeypatch.setattr(selftest, "main", lambda: status)
    assert cli.main(["selftest"]) == status


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
def test_wrong_arguments_exit_2_and_say_how(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m nvfp4_tensor" in capsys.readouterr().err


def test_demo_names_the_packages_it_misses(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "transformers" in out and "nvfp4-tensor[demo]" in out

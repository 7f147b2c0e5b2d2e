"""The folder that the benchmark generates, its copy, and one run of it in a process of its own."""

import pytest

from benchmarks.speed import checkpoint_quantize
from nvfp4_tensor import checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path, monkeypatch):
    for name, size in {"HIDDEN": 64, "INNER": 128, "KEY_VALUE": 32, "VOCABULARY": 100}.items():
        monkeypatch.setattr(checkpoint_quantize, name, size)
    checkpoint_quantize.generate(tmp_path / "source", gigabytes=1e-3)
    return tmp_path / "source"


def test_what_is_generated(source):
    assert 0.9e6 < checkpoint_quantize.size_of(source) < 1.2e6
    with checkpoints.read(source) as read:
        assert {entry.shard for entry in read.entries.values()} == {
            f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)
        }
        assert read.dense("model.layers.0.mlp.down_proj.weight").float().std().item() == pytest.approx(1, rel=0.05)


def test_one_run_and_the_copy(source, tmp_path):
    task = {"kind": "quantize", "source": str(source), "target": str(tmp_path / "target"), "to": "modelopt", "spec": {}}
    found = checkpoint_quantize.run(task)
    assert found["seconds"] > 0 and 5e7 < found["peak"] < 5e9
    assert found["bytes"] == pytest.approx(0.3 * checkpoint_quantize.size_of(source), rel=0.2)
    checkpoint_quantize.copy(source, tmp_path / "copy", int(found["bytes"]))
    assert checkpoint_quantize.size_of(tmp_path / "copy") == found["bytes"]

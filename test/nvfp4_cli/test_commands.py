"""The commands on a small model, against the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def _broken(folder: Path, quantized: Path) -> Path:
    """The checkpoint with its last bytes cut off."""
    folder.mkdir()
    for file in quantized.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    return folder


def test_what_a_user_gets_wrong_is_one_line_without_a_traceback(dense, quantized, tmp_path, text):
    """In processes of their own, as a shell runs them."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    broken = _broken(tmp_path / "broken", quantized)
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_text("")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    cases = [
        (["inspect", tmp_path / "empty"], "is not a checkpoint"),
        (["inspect", broken], "model.safetensors"),
        (["quantize", quantized, tmp_path / "x"], "dense"),
        (["quantize", dense, there], "already exists"),
        (["quantize", dense, tmp_path / "x", "--exclude", "*.nothing"], "matches no linear"),
        (["quantize", dense, there, "--calibrate", text], "already exists"),
        (["quantize", dense, tmp_path / "x", "--calibrate", tmp_path / "bytes.txt"], "not text in UTF-8"),
        (["convert", dense, tmp_path / "x"], "has no NVFP4"),
        (["convert", quantized, tmp_path / "x", "--to", "mlx"], "pass --lossy"),
        (["compare", dense, quantized, "--text", tmp_path / "bytes.txt"], "not text in UTF-8"),
        (["generate", alone, "hi"], "--config-from"),
    ]
    script = (
        "import json, sys, nvfp4_cli\nfor arguments in json.load(sys.stdin):\n"
        "    print('@', nvfp4_cli.main(arguments), file=sys.stderr)\n"
    )
    given = json.dumps([[str(each) for each in arguments] for arguments, _ in cases])
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    said = done.stderr.split("@ 1\n")[:-1]
    assert len(said) == len(cases), done.stderr
    for (arguments, wanted), error in zip(cases, said, strict=True):
        last = error.strip().splitlines()[-1]
        assert last.startswith("nvfp4: ") and wanted in last, (arguments, error)
    assert not (tmp_path / "x").exists()


def test_a_process_exits_1_and_says_it_in_json(tmp_path):
    command = [sys.executable, "-m", "nvfp4_tensor", "inspect", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    error = json.loads(done.stderr.strip().splitlines()[-1])
    assert error["type"] == "ValueError" and "is not a checkpoint" in error["error"]

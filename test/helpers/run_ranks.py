"""Run a function on several ranks of one machine: processes with gloo, or with NCCL and one GPU each.

Processes with gloo are forked from a server that has imported torch. If a rank fails, the run fails with its traceback.
If a rank hangs, the run fails when a collective or the run itself times out.
"""

import importlib.util
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_SECONDS = 20

on_devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
        ),
    ],
)
"""Parametrize a test with two ranks: processes with gloo, and GPUs with NCCL."""


def here() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


_PRELOADED = [
    "nvfp4_tensor.tensor", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "torchao.quantization", "nvfp4_tensor.training",
]  # fmt: skip


def _start_forkserver() -> None:
    """Start the server that forks ranks on CPUs. It hides GPUs, which FSDP2 would choose and no fork can use."""
    forkserver.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()


def run_ranks(body: Callable, world: int, *args: Any, device: str = "cpu", seconds: float = 120) -> list:
    """Call ``body(*args)``, a function of a test module, on each of ``world`` ranks and return the results.

    Raises:
        RuntimeError: if a rank raised an error; with the traceback of the first one, which makes others fail.
        TimeoutError: if a rank did not end.
    """
    _start_forkserver()
    function = inspect.getfile(body), body.__name__
    with tempfile.TemporaryDirectory() as folder:
        job = (function, world, device, folder, args)
        method = "forkserver" if device == "cpu" else "spawn"  # a fork cannot use CUDA if its parent did
        context = mp.start_processes(_rank, args=job, nprocs=world, join=False, start_method=method)
        end = time.monotonic() + seconds
        try:
            while not context.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"{body.__name__} ran for {seconds} s on {world} ranks")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RuntimeError(_first_error(folder) or str(error)) from None
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False, map_location="cpu") for rank in range(world)]


def _first_error(folder: str) -> str:
    errors = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return f"rank {errors[0].stem} raised\n{errors[0].read_text()}" if errors else ""


def _rank(rank: int, function: tuple[str, str], world: int, device: str, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        body = getattr(_module(function[0]), function[1])
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        torch.manual_seed(0)
        torch.save(body(*args), f"{folder}/{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        raise


def _module(path: str) -> Any:
    name = f"ranks_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

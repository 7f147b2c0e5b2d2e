"""Run tests and functions on several ranks of one machine: processes with gloo, or with NCCL and one GPU each.

The processes stay from one run to the next; each run has a process group of its own. If a rank fails or a run does not
end, that run fails, with the rank's traceback, and all processes are killed: the next run starts new ones.
"""

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, forkserver
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COLLECTIVE_SECONDS = 20

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def on_ranks(*worlds: int, cuda: bool = False) -> Callable:
    """Let a test's body run on each of so many ranks: processes with gloo and, with ``cuda``, two GPUs with NCCL.

    The test's other arguments are sent to the ranks: a parameter is a value that can be pickled.
    """
    cases = [pytest.param(("cpu", world), id=f"{world}") for world in worlds]
    cases += [pytest.param(("cuda", 2), id="2 GPUs", marks=TWO_GPUS)] if cuda else []

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(ranks: tuple[str, int], **arguments: Any) -> None:
            run_ranks(body, ranks[1], device=ranks[0], **arguments)

        own = inspect.signature(body).parameters.values()
        first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", cases)(test)

    return decorate


def here() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def mesh_of_all() -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh(here().type, (dist.get_world_size(),))


def of_all_ranks(value: Any) -> list:
    """Return the values of all ranks in their order, on each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_ranks(
    body: Callable, world: int, *args: Any, device: str = "cpu", seconds: float = 120, keep: bool = True, **kwargs: Any
) -> list:
    """Call a function of a test module on each of ``world`` ranks and return the results.

    keep: let the next run use the same processes; False for a function that changes modules of torch for good.

    Raises:
        RuntimeError: if a rank raised an error; with the traceback of the first one, which makes others fail.
        TimeoutError: if a rank did not end.
    """
    ranks = _ranks(world, device)
    with tempfile.TemporaryDirectory() as folder:
        for process in ranks:
            process.connection.send((inspect.getfile(body), body.__name__, world, folder, args, kwargs))
        ended = False
        try:
            results = _results(ranks, body.__name__, time.monotonic() + seconds)
            ended = True
        finally:
            if not (ended and keep):
                _kill(device)
        return results


def _results(ranks: list, name: str, end: float) -> list:
    results: dict[Any, Any] = {}
    while len(results) < len(ranks):
        waited_for = [rank.connection for rank in ranks if rank.connection not in results]
        for one in connection.wait(waited_for, timeout=max(0.0, end - time.monotonic())):
            assert isinstance(one, connection.Connection)
            try:
                error, result = torch.load(io.BytesIO(one.recv_bytes()), weights_only=False, map_location="cpu")
            except EOFError:
                raise RuntimeError(f"a rank of {name} died") from None
            if error:
                # A rank that dies makes the others raise, and their message can come before its pipe closes.
                dead = connection.wait([rank.sentinel for rank in ranks], timeout=1)
                raise RuntimeError(f"a rank of {name} died; {error}" if dead else error)
            results[one] = result
        if len(results) < len(ranks) and time.monotonic() > end:
            raise TimeoutError(f"{name} did not end on {len(ranks)} ranks")
    return [results[rank.connection] for rank in ranks]


# --- the processes ---------------------------------------------------------------------------------------------------

_PRELOADED = [
    "nvfp4_tensor.tensor", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "torchao.quantization", "nvfp4_tensor.training", "torch._dynamo",
]  # fmt: skip
_started: dict[str, list] = {"cpu": [], "cuda": []}


def _ranks(world: int, device: str) -> list:
    """Return so many processes, of which each may have run other functions before."""
    started = _started[device]
    while len(started) < world:
        # Ranks on CPUs are forked from a server that has imported torch. It hides GPUs, which FSDP2 would choose and no
        # fork can use; a fork cannot use CUDA if its parent did.
        context = mp.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            forkserver.set_forkserver_preload(_PRELOADED)
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
                forkserver.ensure_running()
        ours, theirs = context.Pipe()
        process: Any = context.Process(target=_serve, args=(len(started), device, theirs), daemon=True)
        process.start()
        theirs.close()
        process.connection = ours
        started.append(process)
    return started[:world]


def _kill(device: str) -> None:
    for process in _started[device]:
        process.kill()
        process.connection.close()
    _started[device] = []


def _serve(rank: int, device: str, calls: Any) -> None:
    """Run one function after another, until the test process ends."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    while True:
        try:
            path, name, world, folder, args, kwargs = calls.recv()
        except EOFError:
            return
        file = io.BytesIO()
        try:
            torch.save((None, _called(rank, device, path, name, world, folder, args, kwargs)), file)
        except BaseException:
            file = io.BytesIO()
            torch.save((f"rank {rank} raised\n{traceback.format_exc()}", None), file)
        calls.send_bytes(file.getvalue())


def _called(rank: int, device: str, path: str, name: str, world: int, folder: str, args: tuple, kwargs: dict) -> Any:
    body = inspect.unwrap(getattr(_module(path), name))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    torch.manual_seed(0)
    torch._dynamo.reset()
    result = body(*args, **kwargs)
    dist.barrier()
    dist.destroy_process_group()
    return result


@functools.cache
def _module(path: str) -> Any:
    name = f"ranks_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """Collect the bytes that this rank gives to each all-gather of FSDP2."""
    sent: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = getattr(dist, name)

    def counted(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        sent.append(input_tensor.numel() * input_tensor.element_size())
        return real(output_tensor, input_tensor, **how)

    with mock.patch.object(dist, name, counted):
        yield sent

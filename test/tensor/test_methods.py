"""Methods of torch.Tensor that need a storage use the inner tensors or raise: no crash, no lost write."""

import copy
import multiprocessing
import subprocess
import sys

import pytest
import torch
from helpers.files import saved
from helpers.writes import linear_of, matrix

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize

pytestmark = pytest.mark.slow


# --- sharing between processes ---------------------------------------------------------------------------------------


def _zero_first_rows(queue, done):
    queue.get()[0:128].zero_()
    done.set()


def test_share_memory():
    t = matrix()._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2.0))
    before = t.dequantize()
    assert not t.is_shared() and t.share_memory_() is t and t.is_shared()
    assert all(part.is_shared() for part in t._parts()) and torch.equal(t.dequantize(), before)
    model = torch.nn.Sequential(linear_of(matrix()), torch.nn.Linear(256, 3))
    assert not model[0].weight.is_shared()
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    t = matrix()
    flat = t.view(-1)  # shared by its source
    assert not flat.is_shared() and flat.share_memory_() is flat and t.is_shared()


def test_a_write_of_another_process_arrives():
    t = matrix().share_memory_()
    before = t.dequantize()
    context = multiprocessing.get_context("fork")
    queue, done = torch.multiprocessing.get_context("fork").SimpleQueue(), context.Event()
    process = context.Process(target=_zero_first_rows, args=(queue, done))
    process.start()
    queue.put(t)
    assert done.wait(60)
    process.join(60)
    assert (t.dequantize()[:128] == 0).all() and torch.equal(t.dequantize()[128:], before[128:])


# --- what would crash ------------------------------------------------------------------------------------------------

REFUSED = {  # by the start of what the message names
    "apply_": lambda t: t.apply_(lambda value: value + 1),
    "map_": lambda t: t.map_(torch.ones(256, 128), lambda a, b: a + b),
    "numpy": lambda t: t.numpy(),
    "numpy forced": lambda t: t.numpy(force=True),
    "__array__": lambda t: __import__("numpy").asarray(t),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "dlpack of torch.utils": lambda t: torch.utils.dlpack.to_dlpack(t),
    "dlpack of a parameter": lambda t: torch.to_dlpack(torch.nn.Parameter(t, requires_grad=False)),
}


@pytest.mark.parametrize("call", REFUSED)
def test_methods_that_need_a_storage_raise_with_their_name(call):
    t = matrix()
    before = t.dequantize()
    with pytest.raises(RuntimeError, match=rf"{call.split()[0].removeprefix('from_')}.*dequantize\(\)"):
        REFUSED[call](t)
    assert torch.equal(t.dequantize(), before)
    x = torch.arange(4.0)  # other tensors have their dlpack
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).add_(1)
    assert x.tolist() == [1, 2, 3, 4]


EVERY_METHOD = """
import ctypes, os, signal, sys, torch
from nvfp4_tensor import FP8Tensor, quantize
x = torch.ones(4, 32)
source = quantize(x) if sys.argv[1] == "NVFP4Tensor" else FP8Tensor(x.to(torch.float8_e4m3fn), torch.ones(1, 1))
type(source).planted = lambda t: ctypes.string_at(0)
arguments = [(), (0,), (lambda value: value,), (x,), (x, lambda a, b: a), (0, 1), ((4, 32),), (x, x), (torch.int32,)]
shout = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
for name in [*(name for name in dir(torch.Tensor) if name != "__class__"), "planted"]:
    os.write(shout, name.encode() + b" ")
    signal.alarm(60)
    for given in arguments:
        t = source.clone()
        try:
            getattr(t, name)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in given))
            t.dequantize()
        except Exception:
            pass
"""


@pytest.mark.parametrize("kind", ["NVFP4Tensor", "FP8Tensor"])
def test_no_method_of_a_tensor_crashes(kind):
    """The process ends at the first that does: the last one, which is planted and reads a null pointer."""
    run = subprocess.run(
        [sys.executable, "-c", EVERY_METHOD, kind], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert run.returncode < 0 and run.stderr.split()[-1] == "planted", run.stderr


def test_data_ptr_tells_tensors_apart():
    a, b = matrix(), matrix()
    assert a.data_ptr() == a.qdata.data_ptr() == a.t().data_ptr() != b.data_ptr() != 0


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [
    lambda: quantize(torch.randn(256, 128) * 9, QuantizeSpec(block_rows=16)), lambda: matrix(40, 64),
    lambda: matrix(64, 96).t(), lambda: matrix().bfloat16(), lambda: matrix()[0:128],
])  # fmt: skip
def test_data_takes_the_parts_of_another(other):
    parameter, x = torch.nn.Parameter(matrix(), requires_grad=False), other()
    parameter.data = x
    assert isinstance(parameter, torch.nn.Parameter) and parameter.spec == x.spec and parameter.window is x.window
    assert (parameter.shape, parameter.stride(), parameter.dtype, parameter.device) == (
        x.shape, x.stride(), x.dtype, x.device,
    )  # fmt: skip
    assert all(a is b for a, b in zip(parameter._stored()[:3], x._stored()[:3], strict=True))
    assert torch.equal(parameter.dequantize(), x.dequantize())
    y = torch.randn(3, x.shape[1]).to(x.dtype)
    assert torch.equal(torch.nn.functional.linear(y, parameter), torch.nn.functional.linear(y, x))


def test_setting_data_to_a_dense_tensor_raises():
    model = linear_of(matrix())
    before = model.weight.dequantize()
    for write in (
        lambda: setattr(model.weight, "data", torch.randn(256, 128)),
        lambda: torch.nn.utils.vector_to_parameters(torch.randn(256 * 128), model.parameters()),
    ):
        with pytest.raises(RuntimeError, match=r"t\.copy_\(x\) to quantize x"):
            write()
    assert torch.equal(model.weight.dequantize(), before)


def test_weights_tied_by_data():
    a, b = linear_of(matrix()), linear_of(matrix())
    b.weight.data = a.weight.data
    a.weight.copy_(torch.randn(256, 128))
    assert torch.equal(a.weight.dequantize(), b.weight.dequantize())


# --- deep copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("view", "has_graph"), [(lambda t: t, False), (lambda t: t, True), (lambda t: t[3:40], True)])
def test_a_deep_copy_has_its_own_gradient_and_leaves_the_original(view, has_graph, monkeypatch):
    """The original keeps its gradient throughout, which another thread may accumulate into meanwhile."""
    p = torch.nn.Parameter(view(matrix()))
    p.note = ["mine"]
    p.dequantize().pow(3).sum().backward(create_graph=has_graph)
    grad, seen = p.grad, []
    clone = NVFP4Tensor._apply_fn_to_data
    monkeypatch.setattr(NVFP4Tensor, "_apply_fn_to_data", lambda *args: seen.append(p.grad is grad) or clone(*args))
    first, second = copy.deepcopy([p, p])
    assert seen and all(seen) and p.grad is grad and grad.is_leaf != has_graph
    assert first is second and isinstance(first, torch.nn.Parameter) and first.requires_grad and first.window is None
    assert first.grad.is_leaf and first.grad is not grad and torch.equal(first.grad, grad)
    assert torch.equal(first.detach().dequantize(), p.detach().dequantize())
    first.detach().zero_()
    first.grad.zero_()
    assert p.detach().dequantize().any() and p.grad.any() and p.note == ["mine"]


# --- to other processes and files ------------------------------------------------------------------------------------


def through_a_queue(value):
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(value)
    return queue.get()


@pytest.mark.parametrize("way", [saved, through_a_queue])
def test_a_part_stays_a_part(way):
    """As for dense tensors, storage is shared again after loading, and the slice does not rescale the rest."""
    t = matrix()
    before = t.dequantize()
    whole, part, row, flat, transposed = way([t, t[1:19], t[200], t.flatten(), t.t()])
    for view, rows in ((part, slice(1, 19)), (row, 200)):
        assert torch.equal(view.dequantize(), before[rows])
        with pytest.raises(RuntimeError, match=r"clone\(\) it"):
            view.fill_(100.0)
    assert torch.equal(whole.dequantize(), before) and torch.equal(flat.dequantize(), before.view(-1))
    part.zero_()
    rest = before.clone()
    rest[1:19] = 0
    assert torch.equal(whole.dequantize(), rest) and torch.equal(transposed.dequantize(), rest.t())
    assert torch.equal(t.dequantize(), rest if way is through_a_queue else before)

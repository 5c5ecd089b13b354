"""What no dispatch mode sees is found by replaced methods, which are gone behind the watch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_glue.proofs.sync_watch import SyncWatch

Call = Callable[[Tensor], object]


def kinds_of(call: Call) -> list[str]:
    x = torch.arange(6.0)
    watch = SyncWatch(nn.Module())
    watch.put_on_device(x)
    with watch:
        call(x)
    return sorted(read.kind for read in watch.reads.elements())


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize(
    ("kinds", "call"),
    [
        (["tolist"], lambda x: x.tolist()),
        (["tolist"], lambda x: (2 * x).tolist()),
        (["numpy"], lambda x: x.numpy()),
        (["numpy"], lambda x: np.asarray(x)),
        (["numpy"], lambda x: np.array(x, dtype=np.float64)),
        (["DLPack"], lambda x: np.from_dlpack(x)),
        (["DLPack"], lambda x: torch.utils.dlpack.to_dlpack(x)),
        (["print"], lambda x: repr(x)),
        (["print"], lambda x: f"{x}"),
        (["cpu"], lambda x: x.cpu()),
        (["to"], lambda x: x.to("cpu")),
        (["to"], lambda x: x.to(device="cpu", dtype=torch.float64)),
        (["item"], lambda x: torch.tensor([x[0], 1.0])),
        (["upload"], lambda x: torch.tensor([1, 2], device=x.device)),
        (["upload"], lambda x: torch.tensor(1.0, device=x.device)),
        (["upload"], lambda x: torch.as_tensor(np.zeros(3), device=x.device)),
        (["upload"], lambda x: x.new_tensor([1, 2])),
        (["upload"], lambda x: torch.from_numpy(np.zeros(3)).to(x.device)),
    ],
)
def test_what_waits_is_found(kinds: list[str], call: Call) -> None:
    assert kinds_of(call) == kinds


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.tensor([3, 4]).tolist(),
        lambda x: torch.tensor([3, 4]).numpy(),
        lambda x: torch.arange(3).tolist(),
        lambda x: torch.zeros(3, device="cpu").tolist(),
        lambda x: torch.from_numpy(np.zeros(3)).tolist(),
        lambda x: np.asarray(torch.zeros(3)),
        lambda x: repr(torch.zeros(3)),
        lambda x: torch.zeros(3).cpu(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(x.device),
        lambda x: torch.zeros(3, device=x.device),
        lambda x: torch.zeros(3).to(x.device, non_blocking=True),
        lambda x: torch.as_tensor(x, device=x.device),
        lambda x: x.new_zeros(3),
        lambda x: (x.shape, x.numel(), len(x), x.stride(), x.dtype),
    ],
)
def test_what_does_not_wait_is_not(call: Call) -> None:
    assert kinds_of(call) == []


def test_a_copy_on_the_host_is_read_once() -> None:
    assert kinds_of(lambda x: x.cpu().tolist()) == ["cpu"]
    assert kinds_of(lambda x: x.to("cpu").sum().item()) == ["to"]
    assert kinds_of(lambda x: (x.cpu(), x.sum().item())) == ["cpu", "item"]


def test_new_tensors_on_the_device_are_device_values() -> None:
    assert kinds_of(lambda x: torch.arange(3, device=x.device).tolist()) == ["tolist"]
    assert kinds_of(lambda x: torch.zeros(3).to(x.device, non_blocking=True).tolist()) == ["tolist"]


def order_in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.argsort(x.numpy()))


def test_a_kernel_in_numpy_takes_and_gives_device_values() -> None:
    assert kinds_of(lambda x: order_in_numpy(x)) == ["numpy"]
    assert kinds_of(lambda x: order_in_numpy(x).tolist()) == ["numpy", "tolist"]
    assert kinds_of(lambda x: order_in_numpy(torch.zeros(3)).tolist()) == []


def test_values_and_methods_are_what_they_were() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "to", "__repr__", "__array__")}
    functions = {name: getattr(torch, name) for name in ("zeros", "tensor", "from_numpy", "to_dlpack")}

    def check(x: Tensor) -> None:
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert x.cpu().dtype == torch.float32
        assert torch.equal(x.to("cpu", torch.int64), torch.arange(6))
        assert torch.tensor([1.5], device=x.device).tolist() == [1.5]

    kinds_of(check)
    assert all(getattr(torch.Tensor, name) is method for name, method in before.items())
    assert all(getattr(torch, name) is function for name, function in functions.items())
    assert "tolist" not in vars(torch.Tensor)


def test_they_are_gone_after_an_error() -> None:
    def fail(x: Tensor) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        kinds_of(fail)
    assert "tolist" not in vars(torch.Tensor)

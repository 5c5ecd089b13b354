"""FusedAdam of apex and of Transformer Engine against torch's fused AdamW, step by step, skipped steps included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_glue.backends import fused_adam
from megatron_glue.backends.fused_adam import LibraryAdamW, initial_adam_state
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.training.optimizer import GuardedAdamW, build_optimizer
from tests.support.tolerances import assert_close

LIBRARIES = ("apex", "te")
CPU = torch.device("cpu")
NORMS = [1.0, float("nan"), 1.0, float("inf"), float("inf"), 1.0]
"""Of six steps; the first step of another list is skipped too."""


@pytest.fixture(params=LIBRARIES)
def library(request):
    """Name and device, with the stand-in or the library behind it; see the fixtures of both."""
    return request.param


class Weights(nn.Module):
    """Matrices that decay, and vectors that do not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"matrix": (5, 4), "expert_bias": (2, 4), "norm": (4,), "scalar": (1,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def build(
    model: nn.Module, implementation: str, device: torch.device, reader: HostReader | None = None
) -> GuardedAdamW:
    return build_optimizer(
        model.named_parameters(),
        OptimizerConfig(),
        implementation,
        device,
        host_reader=reader,
        lr_multiplier_of=lambda name: 0.5 if name == "norm" else 1.0,
    )


def take_step(model: nn.Module, optimizer: GuardedAdamW, seed: int, norm: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)
    if not norm < float("inf"):
        next(model.parameters()).grad.fill_(float("nan"))
    optimizer.step(0.1 / (1 + seed), torch.tensor(norm, device=next(model.parameters()).device))


def everything(model: nn.Module, optimizer: GuardedAdamW) -> dict[str, torch.Tensor]:
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, _, state in optimizer.named_state():
        tensors |= {f"{name}/{key}": value.clone() for key, value in state.items()}
    return tensors


def check_against_torch(name: str, device: torch.device) -> None:
    for norms in (NORMS, [float("nan"), 1.0, 1.0]):
        ours, theirs, reader = Weights().to(device), Weights().to(device), HostReader()
        optimizers = build(ours, name, device, reader), build(theirs, "fused", device)
        for seed, norm in enumerate(norms):
            before = everything(ours, optimizers[0])
            take_step(ours, optimizers[0], seed, norm)
            take_step(theirs, optimizers[1], seed, norm)
            actual, expected = everything(ours, optimizers[0]), everything(theirs, optimizers[1])
            assert actual.keys() == expected.keys()
            for key, value in expected.items():
                assert actual[key].dtype == value.dtype
                assert_close(actual[key], value, what=f"{key} after {norms[: seed + 1]}")
            if not norm < float("inf"):
                assert all(torch.equal(actual[key], before[key]) for key in before), "f113: nothing moves"
        skipped = sum(not norm < float("inf") for norm in norms)
        assert [optimizer.num_skipped_updates for optimizer in optimizers] == [skipped] * 2
        assert reader.count == 0


def test_apex_takes_the_steps_of_torch_and_skips_with_it(apex_device):
    check_against_torch("apex", apex_device)


def test_te_takes_the_steps_of_torch_and_skips_with_it(te_device):
    check_against_torch("te", te_device)


@pytest.mark.usefixtures("stand_ins")
def test_a_run_goes_on_from_the_state_of_torchs(library):
    source, target = Weights(), Weights()
    fused, ours = build(source, "fused", CPU), build(target, library, CPU)
    for seed in range(3):
        take_step(source, fused, seed, 1.0)
    target.load_state_dict(source.state_dict())
    for (_, _, moments), (_, _, saved) in zip(ours.named_state(), fused.named_state(), strict=True):
        for key, tensor in moments.items():
            tensor.copy_(saved[key])
    take_step(source, fused, 3, 1.0)
    take_step(target, ours, 3, 1.0)
    for key, value in everything(source, fused).items():
        assert_close(everything(target, ours)[key], value, what=key)


@pytest.mark.usefixtures("stand_ins")
def test_gradients_of_any_strides(library):
    """The kernels read memory as it lies (torch's own fused kernel on a CPU does too, so this compares with itself)."""
    results = []
    for is_strided in (False, True):
        model = Weights()
        optimizer = build(model, library, CPU)
        for param in model.parameters():
            grad = torch.arange(float(param.numel())).view(param.shape).sin()
            param.grad = grad.mT.contiguous().mT if is_strided and grad.dim() == 2 else grad
        assert model.matrix.grad.is_contiguous() is not is_strided
        optimizer.step(0.1, torch.tensor(1.0))
        results.append(everything(model, optimizer))
    assert all(torch.equal(results[1][key], value) for key, value in results[0].items())


@pytest.fixture
def one_rank():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("stand_ins")
def test_the_library_sees_the_shards_of_dtensors_and_not_the_empty_ones(library, one_rank):
    def sharded(model: nn.Module, name: str, values: torch.Tensor) -> None:
        param = nn.Parameter(DTensor.from_local(values, one_rank, [Shard(0)], run_check=False))
        model.register_parameter(name, param)

    plain, split = Weights(), Weights()
    for name, param in list(split.named_parameters()):
        sharded(split, name, param.detach().clone())
    sharded(split, "zero_rows", torch.zeros(0, 4))
    optimizers = build(plain, "fused", CPU), build(split, library, CPU)
    for seed, norm in enumerate([1.0, float("nan"), 1.0]):
        take_step(plain, optimizers[0], seed, norm)
        for name, param in split.named_parameters():
            grad = torch.zeros(0, 4) if name == "zero_rows" else plain.get_parameter(name).grad
            param.grad = DTensor.from_local(grad.clone(), one_rank, [Shard(0)], run_check=False)
        optimizers[1].step(0.1 / (1 + seed), torch.tensor(norm))
    expected, actual = everything(plain, optimizers[0]), everything(split, optimizers[1])
    for key, value in expected.items():
        other = actual[key]
        assert_close(other.to_local() if isinstance(other, DTensor) else other, value, what=key)
    assert actual["zero_rows/step"] == 2, "a counter is the same on ranks that hold nothing"


@pytest.mark.usefixtures("stand_ins")
def test_a_rank_that_holds_nothing_at_all_takes_its_steps(library):
    model = nn.Module()
    model.register_parameter("zero_rows", nn.Parameter(torch.zeros(0, 4)))
    optimizer = build(model, library, CPU)
    take_step(model, optimizer, 0, 1.0)
    assert [state["step"] for _, _, state in optimizer.named_state()] == [1]


@pytest.mark.usefixtures("stand_ins")
def test_what_the_kernels_cannot_index_is_refused(monkeypatch, library):
    monkeypatch.setattr(fused_adam, "MAX_ELEMENTS", 19)
    with pytest.raises(ConfigError, match="32 bits, and a parameter has 20 elements") as caught:
        build(Weights(), library, CPU)
    assert (caught.value.field, caught.value.value) == ("--optimizer-backend", library)


def test_state_is_what_torchs_adamw_makes():
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones(3, 2)
    optimizer.step()
    ours = initial_adam_state(param, CPU)
    assert {key: (x.dtype, x.shape) for key, x in ours.items()} == {
        key: (x.dtype, x.shape) for key, x in optimizer.state[param].items()
    }
    assert not any(x.any() for x in ours.values())
    assert issubclass(LibraryAdamW, torch.optim.Optimizer)

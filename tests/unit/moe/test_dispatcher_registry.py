"""Names of dispatchers, and what is said where one cannot be had."""

from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import MoEConfig
from megatron_glue.moe.dispatcher import LocalDispatcher
from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher
from megatron_glue.moe.dispatcher_bounded import BoundedDispatcher
from megatron_glue.moe.dispatcher_registry import DISPATCHERS, DispatcherNeeds, load_dispatcher
from megatron_glue.moe.dispatcher_tokens import TokenDispatcher
from megatron_glue.ops.host_reader import HostReader


class FakeGroup:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def needs(**changes: Any) -> DispatcherNeeds:
    values: dict[str, Any] = {
        "group": cast(ProcessGroup, FakeGroup()),
        "num_experts": 8,
        "host_reader": HostReader(),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }
    return DispatcherNeeds(**values | changes)


def test_every_configured_name_has_an_entry():
    names = MoEConfig.model_fields["moe_token_dispatcher_type"].annotation
    assert set(DISPATCHERS) == set(cast(Any, names).__args__)


def test_one_rank_sends_nothing_whatever_the_name():
    assert all(isinstance(load_dispatcher(name, needs(group=None)), LocalDispatcher) for name in DISPATCHERS)


def test_names_give_their_dispatchers():
    dispatcher = load_dispatcher("alltoall", needs(num_chunks=4))
    assert isinstance(dispatcher, AllToAllDispatcher)
    assert dispatcher.chunk_sizes == [1] * 4
    assert isinstance(load_dispatcher("allgather", needs()), TokenDispatcher)
    assert isinstance(load_dispatcher("alltoall", needs(capacity_factor=1.5)), BoundedDispatcher)


def test_what_cannot_be_had_is_refused_with_reason_and_remedy():
    with pytest.raises(ConfigError, match=r"--moe-token-dispatcher-type.*run on CUDA.*alltoall.*allgather"):
        load_dispatcher("deepep", needs())


def test_ranks_that_cannot_share_experts_are_refused():
    with pytest.raises(ValueError, match="cannot share 7 experts"):
        load_dispatcher("allgather", needs(num_experts=7))

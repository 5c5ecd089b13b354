"""Devices, and runs that no launcher started. Process groups: tests/distributed/parallel/test_launch.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_glue.config.environment import RankEnvironment
from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.launch import choose_device, distributed_session, shutdown


def test_cpu_is_always_there() -> None:
    assert choose_device("cpu", RankEnvironment()) == torch.device("cpu")


def test_missing_cuda_is_an_error_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", RankEnvironment()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device=cuda: .*; give --device cpu or"):
        choose_device("cuda", RankEnvironment())


def test_each_rank_gets_its_own_gpu_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment = RankEnvironment(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert choose_device("auto", environment) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"--device=auto: local rank 2 has no GPU of its own .*--device cpu"):
        choose_device("auto", RankEnvironment(rank=2, local_rank=2, world_size=4, local_world_size=4))


def test_without_a_launcher_there_is_no_process_group() -> None:
    with distributed_session(RankEnvironment(), timedelta(seconds=5), torch.device("cpu")):
        assert not dist.is_initialized()
    shutdown()

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.training.telemetry import machine

HEADER = "Inter-|   Receive\n face |bytes\n"


def card(name: str, received: int, sent: int) -> str:
    return f"{name}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net").mkdir()
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path / "infiniband")
    return tmp_path


def test_network_bytes_are_those_of_real_cards_and_ports(proc: Path) -> None:
    cards = card("    lo", 10**9, 10**9) + card("  eth0", 100, 20) + card("docker0", 7, 7) + card("  ib0", 3, 4)
    (proc / "net/dev").write_text(HEADER + cards)
    assert machine.network_bytes() == 127
    counters = proc / "infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("10\n")
    (counters / "port_rcv_data").write_text("5\n")
    assert machine.network_bytes() == 127 + 4 * 15


def test_a_container_has_only_a_card_that_stands_for_another(proc: Path) -> None:
    (proc / "net/dev").write_text(HEADER + card("lo", 5, 5) + card("veth0", 1, 2))
    assert machine.network_bytes() == 3


def test_the_rate_of_the_network_is_read_once_a_second(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    (proc / "net/dev").write_text(HEADER + card("eth0", 100, 0))
    rate = machine.NetworkRate()
    (proc / "net/dev").write_text(HEADER + card("eth0", 700, 200))
    now[0] = 10.5
    assert rate.read() is None
    now[0] = 12.0
    assert rate.read() == 800 / 2
    (proc / "net/dev").unlink()
    now[0] = 20.0
    assert rate.read() is None


def test_what_the_kernel_does_not_say_is_unknown(proc: Path) -> None:
    assert machine.network_bytes() is None
    assert machine.resident_bytes() == 0


def test_this_process_is_in_memory() -> None:
    assert machine.resident_bytes() > 2**20


def test_utilization_of_a_cpu_is_its_threads_time() -> None:
    utilization = machine.Utilization(torch.device("cpu"))
    sum(range(10**6))
    value = utilization.read()
    assert value is not None
    assert value > 0


def test_a_gpu_without_nvml_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fail(device: torch.device) -> int:
        asked.append(1)
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    utilization = machine.Utilization(torch.device("cuda", 0))
    assert [utilization.read(), utilization.read()] == [None, None]
    assert len(asked) == 1
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    assert machine.Utilization(torch.device("cuda", 0)).read() == 0.87

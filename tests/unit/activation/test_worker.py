"""Jobs run in order; their errors reach whoever waits."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from megatron_glue.activation.worker import HostFence, Worker


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    worker.close()


def test_jobs_run_in_order_and_after_their_fences(worker):
    gate, ran = HostFence(), []
    first_started, first_done = worker.submit(lambda: ran.append(1), after=(gate,))
    _, second_done = worker.submit(lambda: ran.append(2))
    assert not first_started.is_reached
    assert not second_done.is_reached
    gate.reach()
    second_done.wait()
    assert ran == [1, 2]
    assert gate.time_s <= first_started.time_s <= first_done.time_s <= second_done.time_s


def test_error_is_raised_by_wait_and_does_not_end_the_worker(worker):
    def fail():
        raise OSError(28, "full")

    _, failed = worker.submit(fail)
    with pytest.raises(OSError, match="full"):
        failed.wait()
    assert isinstance(failed.settle(), OSError)
    ran = []
    _, dependent = worker.submit(lambda: ran.append(1), after=(failed,))
    with pytest.raises(OSError, match="full"):
        dependent.wait()
    assert ran == []
    worker.submit(lambda: ran.append(2))[1].wait()
    assert ran == [2]


def test_tensors_of_a_job_are_free_once_it_is_done(worker):
    x = torch.zeros(3)
    alive = weakref.ref(x)
    _, done = worker.submit(lambda x=x: None)
    del x
    done.wait()
    assert alive() is None


def test_close_runs_what_is_queued_and_ends_the_thread():
    worker, ran = Worker("test-close"), []
    for index in range(5):
        worker.submit(lambda index=index: ran.append(index))
    worker.close()
    assert ran == list(range(5))
    assert not any(thread.name == "test-close" for thread in threading.enumerate())

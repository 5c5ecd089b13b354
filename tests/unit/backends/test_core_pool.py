import threading
import time

import pytest
import torch

from megatron_glue.backends.core_pool import CorePool, share_out


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_all_pieces_run_once_and_torch_keeps_its_threads(num_threads):
    pool, counts = CorePool(), [0] * 20

    def piece(index):
        counts[index] += 1
        assert not torch.is_grad_enabled()

    for _ in range(2):
        pool.run([lambda index=index: piece(index) for index in range(20)], [1] * 20)
    assert counts == [2] * 20
    assert torch.get_num_threads() == num_threads
    pool.run([], [])


@pytest.mark.parametrize(("costs", "is_shared"), [([1, 1], True), ([2, 1], True), ([9, 1], False), ([1], False)])
def test_pieces_that_would_keep_one_core_busy_stay_with_the_caller(costs, is_shared):
    """There each piece may use all cores, as 8 experts on 64 cores should."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        CorePool().run([lambda: found.append(threading.current_thread())] * len(costs), costs)
        assert all((thread is not threading.current_thread()) is is_shared for thread in found)
        assert len(found) == len(costs)
    finally:
        torch.set_num_threads(before)


def test_each_thread_of_several_computes_on_one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        CorePool().run([lambda: found.append(torch.get_num_threads())] * 2, [1, 1])
        assert found == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_may_change():
    before = torch.get_num_threads()
    pool, done = CorePool(), []
    try:
        for num_threads in (2, 3, 1):
            torch.set_num_threads(num_threads)
            pool.run([lambda: done.append(0)] * 4, [1] * 4)
        assert len(done) == 12
    finally:
        torch.set_num_threads(before)


def test_an_error_reaches_the_caller(num_threads):
    def fail():
        raise ValueError("a piece")

    with pytest.raises(ValueError, match="a piece"):
        CorePool().run([fail, lambda: None], [1, 1])


def test_shares_cost_alike():
    costs = [7, 1, 1, 1, 4, 5, 1]
    shares = share_out(costs, 2)
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert [sum(costs[index] for index in share) for share in shares] == [10, 10]


def test_all_threads_are_there_from_the_start_and_later_ones_are_not_held_to_one_core(num_threads):
    pool, found = CorePool(), []
    pool.run([lambda: None] * 8, [1] * 8)
    if num_threads > 1:
        assert pool._pool is not None
        assert len(pool._pool._threads) == num_threads
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [num_threads]


def test_inference_mode_reaches_the_threads(num_threads):
    found = []
    with torch.inference_mode():
        out = torch.empty(4)
        CorePool().run([lambda: found.append(torch.is_inference_mode_enabled()), lambda: out.fill_(1.0)], [1, 1])
    assert found == [True]


def test_no_piece_runs_behind_an_error():
    before, ended = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def fail():
        raise ValueError("a piece")

    def take_time():
        time.sleep(0.2)
        ended.append(0)

    try:
        with pytest.raises(ValueError, match="a piece"):
            CorePool().run([fail, take_time], [1, 1])
    finally:
        torch.set_num_threads(before)
    assert ended == [0]


def test_a_forked_process_has_threads_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = CorePool()
        pool.run([lambda: None] * 2, [1, 1])
        pool._made_for = (2, -1)  # as a child of that process finds it
        old, done = pool._pool, []
        pool.run([lambda: done.append(0)] * 2, [1, 1])
        assert done == [0, 0]
        assert pool._pool is not old
        assert old is not None
        old.shutdown()
    finally:
        torch.set_num_threads(before)

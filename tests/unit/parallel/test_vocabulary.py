"""Which rows are real. The rest needs ranks: see ``tests/distributed``."""

from typing import Any

import pytest

from megatron_glue.parallel.tensor import TensorParallel
from megatron_glue.parallel.vocabulary import num_real_rows

NO_GROUP: Any = None


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(40, [10, 10, 10, 10]), (37, [10, 10, 10, 7]), (20, [10, 10, 0, 0]), (3, [3, 0, 0, 0])]
)
def test_real_rows_of_each_rank(vocab_size, expected):
    ranks = [TensorParallel(NO_GROUP, rank, 4, sequence_parallel=False) for rank in range(4)]
    assert [num_real_rows(10, vocab_size, tp) for tp in ranks] == expected

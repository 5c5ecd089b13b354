"""Without tensor parallelism everything is a plain product. The rest is in ``tests/distributed``."""

import torch
import torch.nn.functional as F

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.tensor import TensorParallel, column_linear, gather_rows, reduce_rows, row_linear


def test_one_rank_needs_no_group():
    assert TensorParallel.from_mesh(ParallelMesh()) is None
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    assert torch.equal(column_linear(x, weight, bias, None), F.linear(x, weight, bias))
    assert torch.equal(row_linear(x, weight, bias, None), F.linear(x, weight, bias))
    assert reduce_rows(x, None) is x
    assert torch.equal(gather_rows(x, None), x)

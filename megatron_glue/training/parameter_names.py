"""One name per parameter, whatever is wrapped around it.

Checkpoints and optimizer groups use these names, so what one layout and engine saved another can load.
"""

from __future__ import annotations

from torch import Tensor

from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.shard_spec import get_shard_spec


def global_name(name: str, tensor: Tensor) -> str:
    """The name of a parameter or buffer that is the same for every layout.

    Args:
        name: Its name in the module at hand.
        tensor: The parameter itself; its ``ShardSpec`` decides if it has one.

    Returns:
        The global name.
    """
    spec = get_shard_spec(tensor)
    return canonical_name(name) if spec is None else spec.global_name

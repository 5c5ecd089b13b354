"""One name per parameter, whatever is wrapped around it.

DDP, ``torch.compile`` and checkpoint wrappers put components of their own into parameter names. Checkpoints and
optimizer groups use names without them, so what one engine saved another can load.
"""

from __future__ import annotations

from torch import Tensor

from megatron_glue.parallel.shard_spec import get_shard_spec

_WRAPPER_COMPONENTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def canonical_name(name: str) -> str:
    """Drop what wrappers added to a dotted name: a leading ``module`` (DDP) and the private components of others."""
    components = [component for component in name.split(".") if component not in _WRAPPER_COMPONENTS]
    while len(components) > 1 and components[0] == "module":
        components.pop(0)
    return ".".join(components)


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

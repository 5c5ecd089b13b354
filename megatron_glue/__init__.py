"""megatron_glue: distributed training of GPT and MoE language models in PyTorch.

The rooms of the house, from the ground up (a room imports only from rooms below it)::

    training                    app, session, step, optimizer, lr_schedule, checkpoint, metrics
    models                      gpt, build, parallelize
    moe                         router, dispatcher, experts, layer
    layers  activation  data    blocks and packed metadata, recompute and offload, packing
    backends                    registry and the kernels behind each role
    parallel                    mesh, collectives, data-parallel engines
    ops  config                 pure tensor functions, configuration
    types                       frozen contracts that every room shares

Importing the package imports none of them: ``import megatron_glue`` is free of side effects.
"""

__version__ = "0.1.0"

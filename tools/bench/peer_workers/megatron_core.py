"""A worker with NVIDIA's megatron-core, its own optimizer and, on two ranks, its own expert parallelism.

megatron-core asks ``torch.cuda`` for devices, streams, events and random states. A build of torch without CUDA has
none, so before it is imported these names are put in place, with the CPU behind them; none of that is on the path of a
product. The layers are those of its local specification, because the others need Transformer Engine, which needs CUDA;
packed rows and grouped products of experts need it too.

The driver puts the folder of an unpacked source archive on the path, if it is given one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from protocol import BenchSpec, PeerAbsentError, draw_batches, serve

CPU = torch.device("cpu")


class _NoEvent:
    """Stands in for ``torch.cuda.Event`` and ``Stream``: on a CPU everything is done when it returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record

    def record_event(self, event: Any = None) -> Any:
        return event or _NoEvent()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Any) -> float:
        return 0.0

    def __enter__(self) -> _NoEvent:
        return self

    def __exit__(self, *_exception: Any) -> None:
        pass


def put_cpu_behind_cuda() -> None:
    """Give megatron-core the names that it asks ``torch.cuda`` for."""
    cuda: Any = torch.cuda
    stream = _NoEvent()
    stand_ins: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "device_count": lambda: 1,
        "Event": _NoEvent,
        "Stream": _NoEvent,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_args, **_kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args, **_kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda _seed: None,
        "get_device_capability": lambda *_: (8, 0),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, stand_in in stand_ins.items():
        setattr(cuda, name, stand_in)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.pin_memory = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda _self, *_: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_: self
    for name in ("zeros", "ones", "empty", "tensor", "arange", "full", "rand", "randn", "zeros_like", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _import_megatron() -> Any:
    put_cpu_behind_cuda()
    try:
        import megatron.core as core  # pyright: ignore[reportMissingImports]
        import megatron.core.tensor_parallel.random as random  # pyright: ignore[reportMissingImports]
        import megatron.core.transformer.moe.moe_utils as moe_utils  # pyright: ignore[reportMissingImports]
        import megatron.core.transformer.moe.token_dispatcher as dispatcher  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PeerAbsentError(f"megatron-core cannot be imported: {error}") from error
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = on_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    return core


def _configure(spec: BenchSpec) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore[reportMissingImports]

    experts = {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.top_k,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_grouped_gemm": False,
        "moe_ffn_hidden_size": spec.ffn_hidden_size,
        "expert_model_parallel_size": spec.world_size,
    }
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        ffn_hidden_size=spec.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        layernorm_epsilon=1e-5,
        params_dtype=torch.float32,
        **(experts if spec.num_experts else {}),
    )


def build(spec: BenchSpec, rank: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Build the model. See :func:`protocol.serve`."""
    if spec.document_tokens is not None:
        raise PeerAbsentError("packed rows need Transformer Engine")
    torch.set_num_threads(spec.num_threads)
    core = _import_megatron()
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel  # pyright: ignore[reportMissingImports]
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        model_parallel_cuda_manual_seed,
    )

    torch.distributed.init_process_group("gloo", rank=rank, world_size=spec.world_size)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=spec.world_size if spec.num_experts else 1)
    model_parallel_cuda_manual_seed(1234)
    config = _configure(spec)
    layers = get_gpt_layer_local_spec(
        num_experts=spec.num_experts or None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    model: Any = GPTModel(
        config,
        layers,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.row_tokens,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model)
    # Its clipping asserts a CUDA tensor type, so there is none here, and none in the others.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, clip_grad=0.0, params_dtype=torch.float32), [model]
    )
    batches = draw_batches(spec, rank)
    positions = torch.arange(spec.row_tokens).expand(spec.num_rows, -1)
    mask = torch.triu(torch.ones(1, 1, spec.row_tokens, spec.row_tokens, dtype=torch.bool), 1)

    def step() -> float:
        ids_BS, _ = next(batches)
        ids = torch.from_numpy(ids_BS)
        labels = torch.roll(ids, -1, dims=1)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, positions, mask, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        return float(loss.detach())

    return step, {"version": f"megatron-core {core.__version__}", "num_parameters": num_parameters}


if __name__ == "__main__":
    serve(build)

"""What a checkpoint holds, and under which names.

Tensors, by name: ``model.NAME`` (parameters and persistent buffers), ``optimizer.NAME.step|exp_avg|exp_avg_sq`` and
``rng.DEVICE.RANK``, where NAME does not depend on engine or layout. A parameter that is one rank's share of a larger
one appears as what it is, a part of the global tensor, so that no rank's share passes for the whole. Facts that are no
tensors are JSON. Hyperparameters are no state: they are in the configuration, and the present one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import megatron_glue
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import field_specs, flag_of, value_to_word
from megatron_glue.config.loading import as_dict
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.flat_range import get_master
from megatron_glue.parallel.gather import global_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedTensor
from megatron_glue.training.checkpoint.parts import GlobalTensor, place
from megatron_glue.training.optimizer import GuardedAdamW
from megatron_glue.training.optimizer_zero import ZeroAdamW

FORMAT = 1

_FOLLOWING = frozenset(
    {
        "ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "max_position_embeddings",
        "moe_ffn_hidden_size",
        "moe_layers",
    }
)
"""Facts of a model that follow from other settings where their own field is unset."""


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything that a checkpoint is made of, or is read into.

    Attributes:
        model: The model, wrapped or not; its weights are read and written in place.
        optimizer: ``None`` reads the weights alone, e.g. for evaluation.
        config: The resolved configuration.
        counters: The caller's own facts, JSON values with string keys. Only written; a load returns them.
        data_position: Position in the data, JSON values, the same on all ranks. Only written; a load returns it.
        provenance: Field name -> where its value came from. Only written, and only for values that are no defaults.
        decisions: What this run decided by measuring, JSON values by subject. Only written; a load returns it.
        after_load: Called on all ranks together once everything has been read (``DataParallelEngine.after_load``). It
            may contain collectives; what fails on one rank before the last of them, it raises on all.
    """

    model: nn.Module
    optimizer: GuardedAdamW | ZeroAdamW | None
    config: RunConfig
    counters: Mapping[str, Any]
    data_position: Mapping[str, Any]
    provenance: Mapping[str, str] = field(default_factory=dict)
    decisions: Mapping[str, Any] = field(default_factory=dict)
    after_load: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The facts of a checkpoint whose tensors were read.

    Attributes:
        step: Optimizer steps made when it was saved.
        counters: What the caller saved as ``TrainingState.counters``.
        data_position: What the caller saved as ``TrainingState.data_position``.
        config: The configuration it was saved with, as nested plain data.
        decisions: What the caller saved as ``TrainingState.decisions``.
    """

    step: int
    counters: dict[str, Any]
    data_position: dict[str, Any]
    config: dict[str, Any]
    decisions: dict[str, Any] = field(default_factory=dict)


def collect_tensors(state: TrainingState, mesh: ParallelMesh) -> dict[str, GlobalTensor]:
    """Name every tensor of a state. The tensors share memory with the model and the optimizer.

    Names are those of the whole model: a pipeline stage has the names of its layers, and a tied embedding has the same
    name on the first and the last stage.

    Args:
        state: The state.
        mesh: The run's mesh.

    Returns:
        What this rank holds of each tensor.
    """
    tensors: dict[str, GlobalTensor] = {}
    seen: set[int] = set()
    # keep_vars: the very parameters, which carry their specs. Tied weights appear under their first name only.
    for name, tensor in state.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            key = f"model.{global_name(name, tensor)}"
            assert key not in tensors, f"two tensors are called {key}"
            tensors[key] = place(get_master(tensor) or tensor, get_shard_spec(tensor), mesh)
    if state.optimizer is not None:
        for name, param, moments in state.optimizer.named_state():
            for key, tensor in moments.items():
                # A counter is a replicated scalar, whatever its parameter is.
                is_counter = isinstance(tensor, Tensor) and tensor.dim() == 0
                spec = None if is_counter else get_shard_spec(param)
                tensors[f"optimizer.{name}.{key}"] = place(tensor, spec, mesh)
    return tensors


def device_of(state: TrainingState) -> torch.device:
    """Where the model computes."""
    return next(state.model.parameters()).device


def rng_tensors(device: torch.device, mesh: ParallelMesh) -> dict[str, GlobalTensor]:
    """States of this rank's default generators. The model draws from derived seeds; these are for everything else."""
    states = {f"rng.cpu.{mesh.rank:05d}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.cuda.{mesh.rank:05d}"] = torch.cuda.get_rng_state(device)
    return {name: GlobalTensor.whole(state) for name, state in states.items()}


def restore_rng(states: Mapping[str, GlobalTensor], device: torch.device) -> None:
    """Set the default generators to what :func:`rng_tensors` returned."""
    for name, state in states.items():
        tensor = state.parts[0].tensor
        if name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(tensor, device)
        else:
            torch.set_rng_state(tensor)


def collect_facts(state: TrainingState, step: int, mesh: ParallelMesh) -> dict[str, Any]:
    """Everything that is no tensor, as JSON values."""
    return {
        "format": FORMAT,
        "version": megatron_glue.__version__,
        "torch": torch.__version__,
        "step": step,
        "layout": mesh.describe(),
        "num_skipped_updates": state.optimizer.num_skipped_updates if state.optimizer is not None else 0,
        "counters": dict(state.counters),
        "data_position": dict(state.data_position),
        "decisions": dict(state.decisions),
        "model": model_facts(state.config),
        "config": as_dict(state.config),
        "provenance": {name: source for name, source in state.provenance.items() if source != "default"},
    }


def model_facts(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which parameters there are and what shapes they have, with defaults worked out."""
    model, moe = config.model, config.moe
    facts: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "position_embedding_type": model.position_embedding_type,
        "normalization": model.normalization,
        "qk_layernorm": model.qk_layernorm,
        "swiglu": model.swiglu,
        "add_bias_linear": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "tokenizer_type": config.data.tokenizer_type,
        "num_experts": moe.num_experts,
    }
    if model.position_embedding_type == "learned":
        facts["max_position_embeddings"] = model.max_position_embeddings or config.data.seq_length
    if moe.num_experts:
        facts["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size or model.ffn_width
        facts["moe_layers"] = [moe.is_moe_layer(index) for index in range(model.num_layers)]
        facts["moe_shared_expert_intermediate_size"] = moe.moe_shared_expert_intermediate_size
        facts["moe_router_enable_expert_bias"] = moe.moe_router_enable_expert_bias
    return facts


def check_same_model(saved: Mapping[str, Any], config: RunConfig, path: object) -> None:
    """Refuse the checkpoint of another model.

    Args:
        saved: ``model_facts`` of the run that saved it.
        config: Configuration of this run.
        path: The checkpoint, for the message.

    Raises:
        ConfigError: Naming the flag of every setting that has to be another, with both values.
    """
    present = model_facts(config)
    names = _differing(present, saved)
    if not names:
        return
    # What follows from another setting is not what the user gave: it is named only if it would still be wrong with that
    # one set right.
    given = [name for name in names if name not in _FOLLOWING and name in present and name in saved]
    corrected = model_facts(_with_settings(config, {name: saved[name] for name in given}))
    names = given + [name for name in _differing(corrected, saved) if name not in given]
    raise ConfigError(
        ", ".join(map(_flag_of_fact, names)),
        ", ".join(_word(name, present.get(name, corrected.get(name))) for name in names),
        f"{path} holds a model with "
        + ", ".join(f"{_flag_of_fact(name)} {_word(name, saved.get(name))}" for name in names),
        "set them to the saved values, or give --save another folder to start a new run",
    )


def _differing(present: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    return [name for name in {**present, **saved} if present.get(name) != saved.get(name)]


def _with_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of some fields."""
    values = dict(values)
    freq = config.moe.moe_layer_freq
    if isinstance(freq, tuple) and freq:
        # One entry per layer: whether it fits another number of layers is not this file's question.
        num_layers = values.get("num_layers", config.model.num_layers)
        values["moe_layer_freq"] = (freq * num_layers)[:num_layers]
    sections = {
        section: getattr(config, section).model_copy(
            update={name: value for name, value in values.items() if field_specs()[name].section == section}
        )
        for section in ("model", "moe", "data")
    }
    return config.model_copy(update=sections)


def _field_of(fact: str) -> str:
    return "moe_layer_freq" if fact == "moe_layers" else fact


def _flag_of_fact(fact: str) -> str:
    return flag_of(_field_of(fact))


def _word(fact: str, value: Any) -> str:
    """A fact as a user would write it behind its flag."""
    value = tuple(int(entry) for entry in value) if isinstance(value, list) else value
    return value_to_word(field_specs()[_field_of(fact)], value)


def check_same_tensors(
    saved: Mapping[str, SavedTensor],
    wanted: Mapping[str, GlobalTensor],
    path: object,
    known: Collection[str] | None = None,
) -> None:
    """Refuse a checkpoint with other tensors than those that are to be read: none may be left over on either side.

    Args:
        saved: The checkpoint's tensors.
        wanted: This rank's model and, if asked for, optimizer tensors.
        path: The checkpoint, for the message.
        known: Those of the checkpoint's names that any rank wants; unset: this rank is alone.

    Raises:
        CheckpointError: Naming the first tensors that are missing, left over, or differ in shape or dtype.
    """
    kinds = {name.split(".", 1)[0] for name in wanted}
    offered = {name for name in saved if name.split(".", 1)[0] in kinds}
    left_over = offered - set(wanted if known is None else known)
    for names, what in ((wanted.keys() - offered, "lacks"), (left_over, "has, and this run has not,")):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise CheckpointError(f"{path}: {what} {len(names)} tensors: {shown}{', ...' if len(names) > 3 else ''}")
    for name, tensor in wanted.items():
        there = (saved[name].shape, saved[name].dtype)
        here = (tensor.shape, tensor.dtype)
        if there != here:
            raise CheckpointError(f"{path}: {name} is {there[0]} {there[1]}, this run needs {here[0]} {here[1]}")

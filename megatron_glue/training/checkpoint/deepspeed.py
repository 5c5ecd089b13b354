"""Turns a checkpoint that DeepSpeed itself wrote (``engine.save_checkpoint``) into one of ours, in one process.

Runs of this package never write DeepSpeed's format; a script around the same engine may have. Stages 0 to 3 are read,
of any number of ranks, with bf16 or fp32 weights: fp32 masters and moments, put together from the ranks' parts.

DeepSpeed need not be installed, and nothing is unpickled but tensors and containers: the few classes of its own that
such files name are replaced by stand-ins without behaviour (``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from megatron_glue.config.sections import (
    AcceleratorConfig,
    ActivationConfig,
    BackendConfig,
    ParallelConfig,
    RunConfig,
)
from megatron_glue.config.yaml_files import to_yaml
from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint import state as contents
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedTensor
from megatron_glue.training.checkpoint.inspect import Progress, no_progress
from megatron_glue.training.checkpoint.rewrite import Content, write_new
from megatron_glue.training.checkpoint.state import TrainingState
from megatron_glue.training.session import build_session

_MOMENTS = ("exp_avg", "exp_avg_sq")
_RANK_0 = "mp_rank_00"


class _FragmentAddress:
    """Stands in for ``deepspeed.utils.tensor_fragment.fragment_address``."""

    numel: int
    start: int


class _LossScaler:
    """Stands in for ``deepspeed.runtime.fp16.loss_scaler.LossScaler``."""


class _ZeroStage(IntEnum):
    """Stands in for ``deepspeed.runtime.zero.config.ZeroStageEnum``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _member(enum: type, name: str) -> _ZeroStage:
    """Stands in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of enums; looks nothing else up."""
    if enum is not _ZeroStage:
        raise ValueError(f"{name} of {enum!r} is no ZeRO stage")
    return _ZeroStage[name]


_STAND_INS = [
    (_FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
]


@dataclass(eq=False)
class NativeCheckpoint:
    """The parts of a DeepSpeed checkpoint, by global name.

    Attributes:
        path: Its folder.
        step: Optimizer steps made.
        num_skipped_updates: How many of them were skipped.
        zero_stage: Its stage, for the record.
        pieces: (name, ``master`` or a moment) -> expert-parallel rank -> flat pieces in order.
        counters: Name -> updates, as each rank counted them.
        weights: Whole tensors that were saved as such: buffers, and in stage 0 everything.
    """

    path: Path
    step: int = 0
    num_skipped_updates: int = 0
    zero_stage: int = 0
    pieces: dict[tuple[str, str], dict[int, list[Tensor]]] = field(default_factory=dict)
    counters: dict[str, set[float]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, key: str, ep_rank: int, piece: Tensor) -> None:
        """Note a flat piece of a tensor."""
        self.pieces.setdefault((name, key), {}).setdefault(ep_rank, []).append(piece)

    def add_state(self, name: str, state: Mapping[str, Any], ep_rank: int, place: slice) -> None:
        """Note the moments and the counter of a piece.

        Args:
            name: Global name.
            state: Of the flat tensor.
            ep_rank: Which of the experts' ranks.
            place: Elements of the flat tensor.
        """
        for key in _MOMENTS:
            self.add(name, key, ep_rank, state[key].flatten()[place])
        self.counters.setdefault(name, set()).add(float(state["step"]))

    def tensor(self, name: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """Put a whole tensor together.

        Args:
            name: Global name.
            key: ``master`` or a moment.
            shape: Its shape; experts are split along the first dim.

        Returns:
            fp32 tensor.

        Raises:
            CheckpointError: If the pieces are not as many elements.
        """
        by_rank = self.pieces[name, key]
        flats = [torch.cat(by_rank[rank]) for rank in sorted(by_rank)]
        found, wanted = sum(flat.numel() for flat in flats), math.prod(shape)
        if found != wanted or len({flat.numel() for flat in flats}) > 1:
            raise CheckpointError(f"{self.path}: {name} ({key}) has {found} elements, this model needs {wanted}")
        return torch.cat(flats).view(shape).float()


def build_state(config: RunConfig, num_steps: int) -> TrainingState:
    """Build the run that a DeepSpeed checkpoint belongs to, in this one process.

    Args:
        config: Its configuration; how it shares work among ranks and kernels does not matter here.
        num_steps: Optimizer steps after which its position in the data is wanted.

    Returns:
        Its model, optimizer and position in the data.

    Raises:
        ConfigError: If its data cannot be had.
    """
    training = config.training.model_copy(update={"device": "cpu", "precision": "fp32"})
    plain = {"parallel": ParallelConfig(), "activation": ActivationConfig(), "accelerator": AcceleratorConfig()}
    alone = config.model_copy(update={**plain, "backend": BackendConfig(), "training": training})
    session = build_session(alone, ParallelMesh(), torch.device("cpu"), None)
    session.data.loader.skip(num_steps)
    session.close()
    return replace(session.training_state(), config=config)


def native_step(source: str | Path) -> int:
    """Optimizer steps made when a DeepSpeed checkpoint was saved.

    Raises:
        CheckpointError: If it is none.
    """
    path = _tag_folder(Path(source))
    return _load(_shared_file(path)).get("global_steps", 0)


def convert_deepspeed(
    source: str | Path,
    destination: Path,
    state: TrainingState,
    num_shards: int = 1,
    progress: Progress = no_progress,
) -> Path:
    """Write a checkpoint of ours with the weights, moments and counters of a DeepSpeed checkpoint.

    Args:
        source: The folder that ``save_checkpoint`` was given, or the tag's folder in it.
        destination: A folder that does not exist; a run can ``--load`` it.
        state: Of the run that the checkpoint belongs to, built in this one process: its names and shapes are those that
            must be found; its configuration, counters and data position are written.
        num_shards: Number of files.
        progress: Told about bytes as they are written.

    Returns:
        The destination.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is missing, left over, or of another size.
        ConfigError: If the destination exists.
    """
    native = read_native(source, state)
    wanted = contents.collect_tensors(state, ParallelMesh())
    _check_names(native, state, set(wanted))
    assert state.optimizer is not None
    state.optimizer.num_skipped_updates = native.num_skipped_updates
    facts = contents.collect_facts(state, native.step, ParallelMesh())
    facts["origin"] = {"converted_from": str(native.path), "zero_stage": native.zero_stage}

    def read(name: str) -> Tensor:
        target = wanted[name]
        kind, rest = name.split(".", 1)
        if kind == "model":
            if (rest, "master") in native.pieces:
                return native.tensor(rest, "master", target.shape)
            return _as_wanted(native, rest, native.weights[rest], target.shape).to(target.dtype)
        rest, key = rest.rsplit(".", 1)
        if key == "step":
            return torch.tensor(_only(native, rest), dtype=target.dtype)
        return native.tensor(rest, key, target.shape)

    index = {name: SavedTensor(tensor.dtype, tensor.shape, ()) for name, tensor in wanted.items()}
    content = Content(index, facts, to_yaml(state.config).encode())
    return write_new(content, destination, read, num_shards, progress)


def read_native(source: str | Path, state: TrainingState) -> NativeCheckpoint:
    """Open a DeepSpeed checkpoint. Tensors stay on disk until they are used.

    Args:
        source: The folder that ``save_checkpoint`` was given, or the tag's folder in it.
        state: Stage 0 keeps moments in the optimizer's order, without names; this one's order is taken.

    Returns:
        Its parts.

    Raises:
        CheckpointError: If it is none, or a file is missing or damaged.
    """
    path = _tag_folder(Path(source))
    model = _load(_shared_file(path))
    native = NativeCheckpoint(path)
    try:
        native.step, native.num_skipped_updates = model["global_steps"], model["skipped_steps"]
        num_ranks = model["dp_world_size"]
        buffers = {canonical_name(name) for name in model["buffer_names"]}
        weights = {canonical_name(name): tensor for name, tensor in (model["module"] or {}).items()}
        if model["optimizer"] is not None:
            native.weights = weights
            _read_stage_0(native, model["optimizer"], state)
            return native
        aliases = {canonical_name(name) for name in model["shared_params"] or ()}
        shapes = model["param_shapes"]
        trained = {canonical_name(name) for group in shapes for name in group}
        native.weights = {n: t for n, t in weights.items() if n in buffers or n not in trained | aliases}
        for rank in range(num_ranks):
            content = _load(_optimizer_file(path, rank))["optimizer_state_dict"]
            if "fp32_flat_groups" in content:
                native.zero_stage = 3
                _read_stage_3(native, content, shapes, (rank, num_ranks))
            else:
                native.zero_stage = int(content.get("zero_stage", 1))
                _read_flat_groups(native, content, rank)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not as DeepSpeed 0.19 writes it, {error!r}") from error
    return native


def _read_stage_0(native: NativeCheckpoint, content: Mapping[str, Any], state: TrainingState) -> None:
    """Whole moments, numbered in the order of the optimizer's groups."""
    assert state.optimizer is not None
    names = {param: name for name, param, _ in state.optimizer.named_state()}
    groups = state.optimizer.torch_optimizer.param_groups
    sizes, found = [len(group["params"]) for group in groups], [len(g["params"]) for g in content["param_groups"]]
    if sizes != found:
        raise CheckpointError(f"{native.path}: the optimizer has groups of {found} tensors, this run {sizes}")
    order = [names[param] for group in groups for param in group["params"]]
    for name, number in zip(order, (n for g in content["param_groups"] for n in g["params"]), strict=True):
        if number not in content["state"]:
            raise CheckpointError(f"{native.path}: no optimizer step was made before it was saved")
        native.add_state(name, content["state"][number], 0, slice(None))


def _read_flat_groups(native: NativeCheckpoint, content: Mapping[str, Any], rank: int) -> None:
    """Stages 1 and 2: DeepSpeed has noted which parameter lies where in this rank's part of each group."""
    optimizer = content["base_optimizer_state"]
    masters = content["single_partition_of_fp32_groups"]
    for master, group, places in zip(masters, optimizer["param_groups"], content["param_slice_mappings"], strict=True):
        ep_size = int(group["name"].rsplit("_", 1)[-1]) if group.get("moe") else 1
        if group["params"][0] not in optimizer["state"]:
            raise CheckpointError(f"{native.path}: no optimizer step was made before it was saved")
        flat_state = optimizer["state"][group["params"][0]]
        for raw_name, address in places.items():
            name, place = canonical_name(raw_name), slice(address.start, address.start + address.numel)
            # Expert-parallel ranks are neighbours.
            native.add(name, "master", rank % ep_size, master.detach()[place])
            native.add_state(name, flat_state, rank % ep_size, place)


def _read_stage_3(
    native: NativeCheckpoint, content: Mapping[str, Any], shapes: list[Mapping[str, Any]], who: tuple[int, int]
) -> None:
    """Every parameter in equal shares, in the order of ``param_shapes``; the last share is filled up."""
    rank, num_ranks = who
    optimizer = content["optimizer_state_dict"]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    for master, names, number in zip(content["fp32_flat_groups"], shapes, numbers, strict=True):
        if number not in optimizer["state"]:
            raise CheckpointError(f"{native.path}: no optimizer step was made before it was saved")
        position = 0
        for raw_name, shape in names.items():
            numel = math.prod(shape)
            share = -(-numel // num_ranks)
            length = max(0, min(share, numel - rank * share))
            place = slice(position, position + length)
            native.add(canonical_name(raw_name), "master", 0, master.detach()[place])
            native.add_state(canonical_name(raw_name), optimizer["state"][number], 0, place)
            position += share


def _check_names(native: NativeCheckpoint, state: TrainingState, wanted: set[str]) -> None:
    """Refuse a checkpoint of other tensors: none may be missing, none left over."""
    trained = {name for name, key in native.pieces if key != "master"}
    offered = {f"model.{name}" for name, key in native.pieces if key == "master"}
    offered |= {f"model.{name}" for name in native.weights.keys() - set(_second_names(state))}
    offered |= {f"optimizer.{name}.{key}" for name in trained for key in (*_MOMENTS, "step")}
    for names, what in ((wanted - offered, "lacks"), (offered - wanted, "has, and this model has not,")):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise CheckpointError(
                f"{native.path}: {what} {len(names)} tensors: {shown}{', ...' if len(names) > 3 else ''}"
            )


def _second_names(state: TrainingState) -> Iterator[str]:
    """Names under which a tied weight appears once more."""
    seen: set[int] = set()
    for name, tensor in state.model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            yield canonical_name(name)
        seen.add(id(tensor))


def _as_wanted(native: NativeCheckpoint, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{native.path}: {name} is {tuple(tensor.shape)}, this model needs {shape}")
    return tensor


def _only(native: NativeCheckpoint, name: str) -> float:
    counts = native.counters[name]
    if len(counts) > 1:
        raise CheckpointError(f"{native.path}: ranks disagree how often {name} was updated: {sorted(counts)}")
    return next(iter(counts))


def _tag_folder(source: Path) -> Path:
    """The folder with the files: DeepSpeed's ``latest`` names it."""
    latest = source / "latest"
    try:
        return source / latest.read_text().strip() if latest.is_file() else source
    except OSError as error:
        raise CheckpointError(f"{latest}: {error.strerror}") from error


def _shared_file(path: Path) -> Path:
    """The file with everything but the optimizer's parts; in stage 3 every rank has one."""
    for candidate in (path / f"{_RANK_0}_model_states.pt", _rank_file(path, 0, "model")):
        if candidate.is_file():
            return candidate
    raise CheckpointError(f"{path}: no {_RANK_0}_model_states.pt in it, so it is no DeepSpeed checkpoint")


def _rank_file(path: Path, rank: int, kind: str, prefix: str = "") -> Path:
    return path / f"{prefix}zero_pp_rank_{rank}_{_RANK_0}_{kind}_states.pt"


def _optimizer_file(path: Path, rank: int) -> Path:
    with_bf16_weights = _rank_file(path, rank, "optim", "bf16_")
    return with_bf16_weights if with_bf16_weights.is_file() else _rank_file(path, rank, "optim")


def _load(path: Path) -> Any:
    """Read a file of DeepSpeed's without running anything in it."""
    try:
        with safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, PermissionError) as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # a damaged file makes torch raise one of many
        raise CheckpointError(
            f"{path}: damaged, or not as DeepSpeed writes it: {str(error).splitlines()[0]}"
        ) from error

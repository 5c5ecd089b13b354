"""Which layers each stage of a pipeline holds, and which schedule runs them: worked out from the configuration alone.

Stages are numbered along the way of a batch. With virtual stages every rank holds several, one from each round: rank r
of P holds r, r + P, r + 2P and so on. Layers are spread as evenly as they go, where it does not come out even the last
stage has none of the extra ones, since it computes the loss too. Dense and mixture-of-experts layers count alike.

Read by validation, before anything is built, and by the model builder. It knows no process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import RunConfig

ScheduleKind = Literal["1f1b", "gpipe", "interleaved", "zb"]


@dataclass(frozen=True)
class StagePlan:
    """The cut of a model into stages.

    Attributes:
        layers: The layers of each stage, by their global index.
        num_ranks: Ranks of the pipeline.
    """

    layers: tuple[range, ...]
    num_ranks: int = 1

    @classmethod
    def from_config(cls, config: RunConfig) -> StagePlan:
        """Cut the configured model.

        Args:
            config: A configuration; of the pipeline's rules only those about layers need to hold.

        Returns:
            The plan; one stage without a pipeline.

        Raises:
            ConfigError: If there are too few layers for the stages.
        """
        for error in layer_problems(config):
            raise error
        parallel, num_layers = config.parallel, config.model.num_layers
        num_ranks = parallel.pipeline_model_parallel_size
        if num_ranks == 1:
            return cls((range(num_layers),))
        counts = _spread(
            num_layers,
            num_ranks * _stages_per_rank(config),
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
        )
        starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        layers = tuple(range(start, end) for start, end in pairwise(starts))
        return cls(layers, num_ranks)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.layers)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pipeline holds, first to last."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def describe(self) -> str:
        """One line for the log."""
        counts = " + ".join(str(len(layers)) for layers in self.layers)
        return f"{self.num_stages} stages on {self.num_ranks} ranks, layers {counts}"


def schedule_kind(config: RunConfig) -> ScheduleKind:
    """The schedule that will run: 1F1B over virtual stages is the interleaved one, as Megatron-LM's flags have it."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "1f1b" and parallel.num_layers_per_virtual_pipeline_stage is not None:
        return "interleaved"
    return parallel.pipeline_schedule


def layer_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what keeps the layers from being cut into stages."""
    parallel, num_layers = config.parallel, config.model.num_layers
    num_ranks, per_virtual = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    ends = {
        field: layers
        for field in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if (layers := getattr(parallel, field)) is not None
    }
    if num_ranks == 1:
        return
    num_stages = num_ranks * _stages_per_rank(config)
    if num_layers < num_stages:
        flag = "pipeline_model_parallel_size" if per_virtual is None else "num_layers_per_virtual_pipeline_stage"
        yield ConfigError(
            flag_of(flag),
            num_ranks if per_virtual is None else per_virtual,
            f"makes {num_stages} stages out of --num-layers {num_layers}; each needs a layer",
            "use fewer pipeline ranks" + ("" if per_virtual is None else " or more layers per virtual stage"),
        )
        return
    if per_virtual is not None and num_stages == num_ranks:
        yield ConfigError(
            flag_of("num_layers_per_virtual_pipeline_stage"),
            per_virtual,
            f"leaves each of the {num_ranks} pipeline ranks with one stage of --num-layers {num_layers}",
            "use more --num-layers"
            + (" or fewer layers per virtual stage" if per_virtual > 1 else ", or leave it unset"),
        )
        return
    num_rest = num_stages - len(ends)
    if ends and (num_layers - sum(ends.values()) < num_rest or (num_rest == 0 and sum(ends.values()) != num_layers)):
        field = next(iter(ends))
        yield ConfigError(
            flag_of(field),
            ends[field],
            f"leaves {num_layers - sum(ends.values())} of --num-layers {num_layers} for the other {num_rest} stages",
            "give the first and the last stage as many layers as leave at least one to each other stage",
        )


def schedule_problems(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    """Yield what keeps the schedule from running, as torch demands it and before anything is built.

    Args:
        config: The configuration of a run.
        world_size: Number of ranks.
    """
    parallel, training = config.parallel, config.training
    num_ranks, schedule = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    if num_ranks == 1:
        return
    is_virtual = parallel.num_layers_per_virtual_pipeline_stage is not None
    if schedule == "interleaved" and not is_virtual:
        yield ConfigError(
            flag_of("pipeline_schedule"),
            schedule,
            "each rank holds one stage, so there is nothing to interleave",
            "give --num-layers-per-virtual-pipeline-stage, or use 1f1b",
        )
    if schedule == "gpipe" and is_virtual:
        yield ConfigError(
            flag_of("pipeline_schedule"), schedule, "runs one stage per rank", "use interleaved for virtual stages"
        )
    if schedule == "zb" and (config.recompute or config.recomputed_modules or config.offload):
        yield ConfigError(
            flag_of("pipeline_schedule"),
            schedule,
            "computes gradients of activations and weights in two passes; recomputed and offloaded blocks allow one",
            "turn recompute and offload off, or use 1f1b or interleaved",
        )
    split = parallel.ranks_per_replica
    packs = training.micro_batch_size * (world_size // split)
    if world_size % split or training.global_batch_size % packs:
        return
    num_micro_batches = training.global_batch_size // packs
    if schedule_kind(config) == "1f1b" and num_micro_batches < num_ranks:
        yield ConfigError(
            flag_of("global_batch_size"),
            training.global_batch_size,
            f"makes {num_micro_batches} micro-batches per step for {num_ranks} pipeline stages; 1f1b needs one each",
            f"use at least {packs * num_ranks}, or --pipeline-schedule gpipe",
        )
    num_rounds = max(1, num_micro_batches // num_ranks)
    if schedule_kind(config) in ("interleaved", "zb") and num_micro_batches % num_rounds:
        yield ConfigError(
            flag_of("global_batch_size"),
            training.global_batch_size,
            f"makes {num_micro_batches} micro-batches per step, which do not come out even in {num_rounds} rounds over "
            f"{num_ranks} pipeline ranks",
            f"use e.g. {packs * num_ranks * num_rounds}",
        )


def _stages_per_rank(config: RunConfig) -> int:
    per_virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if per_virtual is None:
        return 1
    return -(-config.model.num_layers // (config.parallel.pipeline_model_parallel_size * per_virtual))


def _spread(num_layers: int, num_stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage: given ones at the ends, the rest in equal shares with the remainder spread among them."""
    head = [] if first is None else [first]
    tail = [] if last is None else [last]
    num_rest = num_stages - len(head) - len(tail)
    rest = num_layers - sum(head) - sum(tail)
    ends = [-(-rest * stage // num_rest) for stage in range(num_rest + 1)] if num_rest else []
    return head + [end - start for start, end in pairwise(ends)] + tail

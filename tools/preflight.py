#!/usr/bin/env python3
"""Check the machines of a job before it starts: versions, clocks, links, storage, limits. Exit code 1 if one fails.

Run it as the job will run, one process alone or under torchrun on all machines. Flags of the entry points say what the
job needs (--config FILE.yaml, --save FOLDER, ...): from them follow the size of checkpoints, so the free space and the
rate at which each machine must write, and whether activations go to a disk. Nothing is trained; files that are written
to measure are removed.

    python tools/preflight.py --save /data/run
    torchrun --nnodes 4 --nproc-per-node 8 ... tools/preflight.py --config job.yaml --min-all-reduce-mb-per-s 20000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_glue.config.process import prepare_process

if __name__ == "__main__":
    # Before torch is imported: the limit of open files, among others, is raised as for a run.
    prepare_process()

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.data.tokenizer import build_tokenizer
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.proofs.preflight import Check, Needs, as_record, is_fit, preflight
from megatron_glue.training.exit_codes import EXIT_FAILED, exit_code_of
from megatron_glue.training.planning.activations import block_bytes
from megatron_glue.training.planning.memory import axis_sizes
from megatron_glue.training.planning.parameters import AxisSizes, rank_parameters
from megatron_glue.training.presets import MOE_DEFAULTS
from megatron_glue.training.summary import check_writable_file, write_json

MIB = 1 << 20
CHECKPOINT_BYTES = 12
"""Of one parameter: weight and two moments in fp32."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the tool's own flags from those of the entry points."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=120.0, help="a checkpoint must be written in (default 120)"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="expected time of a step, to judge offload to a disk by; off: 0"
    )
    parser.add_argument(
        "--max-clock-skew-ms", type=float, default=500.0, help="largest difference of two clocks (default 500)"
    )
    parser.add_argument(
        "--min-link-mb-per-s", type=float, default=0.0, help="least MiB/s between neighbouring ranks; not judged: 0"
    )
    parser.add_argument(
        "--min-all-reduce-mb-per-s", type=float, default=0.0, help="least MiB/s of an all-reduce; not judged: 0"
    )
    parser.add_argument(
        "--min-checkpoint-mb-per-s", type=float, default=0.0, help="least MiB/s of checkpoints; from the job: 0"
    )
    parser.add_argument("--min-free-mb", type=float, default=0.0, help="least free space, MiB; from the job: 0")
    parser.add_argument("--min-shm-mb", type=float, default=1024.0, help="least free /dev/shm, MiB (default 1024)")
    parser.add_argument("--message-mb", type=int, default=64, help="size of messages, MiB (default 64)")
    parser.add_argument("--file-mb", type=int, default=256, help="size of files, MiB (default 256)")
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    own, rest = parser.parse_known_args(argv)
    for flag in ("--message-mb", "--file-mb", "--checkpoint-seconds"):
        value = getattr(own, flag[2:].replace("-", "_"))
        if value <= 0:
            raise ConfigError(flag, value, "not above 0", "leave it out for the default")
    return own, rest


def needs_of(own: argparse.Namespace, config: RunConfig, environment: RankEnvironment, device_type: str) -> Needs:
    """Work out what a job needs of each machine.

    Args:
        own: The tool's own flags.
        config: The job.
        environment: Its ranks.
        device_type: ``cpu`` or ``cuda``.
    """
    alone = config.model_copy(update={"parallel": type(config.parallel)()})
    vocab_size = build_tokenizer(config.data).vocab_size
    numel = sum(tensor.numel for tensor in rank_parameters(alone, AxisSizes(), 0, vocab_size))
    checkpoint_mb = CHECKPOINT_BYTES * numel / MIB
    num_machines = max(1, environment.world_size // environment.local_world_size)
    folder = Path(config.training.save or "runs")
    offload_folder, offload_mb_per_s = None, 0.0
    if config.offload and device_type == "cpu":
        offload_folder = Path(config.activation.activation_offload_dir or folder)
        if own.step_seconds > 0:
            offload_mb_per_s = _offload_mb(config, environment) / own.step_seconds
    return Needs(
        folder=folder,
        offload_folder=offload_folder,
        checkpoint_mb_per_s=own.min_checkpoint_mb_per_s or checkpoint_mb / num_machines / own.checkpoint_seconds,
        offload_mb_per_s=offload_mb_per_s,
        # A new checkpoint is whole before the oldest goes.
        free_mb=own.min_free_mb or checkpoint_mb * (config.training.keep_last + 1),
        clock_skew_ms=own.max_clock_skew_ms,
        link_mb_per_s=own.min_link_mb_per_s,
        all_reduce_mb_per_s=own.min_all_reduce_mb_per_s,
        shm_mb=own.min_shm_mb,
        message_mb=own.message_mb,
        file_mb=own.file_mb,
    )


def _offload_mb(config: RunConfig, environment: RankEnvironment) -> float:
    """Block inputs that one machine writes, and reads, in a step."""
    sizes = axis_sizes(config, environment.world_size)
    training = config.training
    micro_batches = training.global_batch_size / (training.micro_batch_size * sizes.dp)
    of_layers = sum(block_bytes(config, sizes, layer, 4).input for layer in range(config.model.num_layers))
    return of_layers / sizes.pp * micro_batches * environment.local_world_size / MIB


def show(checks: list[Check]) -> None:
    """Print the table."""
    table = Table(title="Preflight", title_justify="left")
    for column in ("check", "state", "found", "needed"):
        table.add_column(column, overflow="fold")
    states = {True: "ok", False: "FAILED", None: "-"}
    for check in checks:
        table.add_row(check.name, states[check.is_ok], check.found, check.needed)
    Console(markup=False, highlight=False).print(table)


def run(argv: Sequence[str]) -> int:
    """Measure, show, and return the exit code."""
    own, rest = parse(argv)
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    config = resolve_config(rest, environ, MOE_DEFAULTS, "tools/preflight.py").config
    device = choose_device(config.training.device, environment)
    validate(config, environment.world_size, device.type)
    if own.json and environment.is_main:
        check_writable_file(own.json, "--json")
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device):
        group = dist.group.WORLD if dist.is_initialized() else None
        checks = preflight(needs_of(own, config, environment, device.type), environment, device, group)
    if environment.is_main:
        show(checks)
        if own.json:
            write_json(own.json, as_record(checks, environment.world_size))
        for check in checks:
            if check.is_ok is False:
                print(f"error: {check.name}: {check.found}; needed: {check.needed}", file=sys.stderr)
    return 0 if is_fit(checks) else EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(exit_code_of(lambda: run(sys.argv[1:]), RuntimeError))

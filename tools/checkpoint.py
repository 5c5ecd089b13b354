#!/usr/bin/env python3
"""Verify, describe and rewrite checkpoints, on a CPU, in one process, without building a model.

DIR is a run's folder (then its newest checkpoint is meant) or one of its step_N folders. Nothing is ever unpickled.
Exit code 1: damage, named with its file; 2: the request cannot be met as written; 130 and 143: stopped by Ctrl-C or
SIGTERM, and nothing half written is left.

    python tools/checkpoint.py verify runs/mine
    python tools/checkpoint.py info runs/mine
    python tools/checkpoint.py reshard runs/mine runs/one_file --num-shards 1
    python tools/checkpoint.py average runs/mine --last 3 --output runs/averaged
    python tools/checkpoint.py convert-deepspeed their_folder runs/converted -- pretrain_gpt.py --num-layers 2
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megatron_glue.config.environment import read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.config.validation import validate
from megatron_glue.training.checkpoint.deepspeed import build_state, convert_deepspeed, native_step
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.inspect import (
    OpenCheckpoint,
    describe_checkpoint,
    find_checkpoints,
    open_checkpoint,
    verify,
)
from megatron_glue.training.checkpoint.rewrite import average, newest_of, reshard
from megatron_glue.training.exit_codes import EXIT_FAILED, exit_code_of
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS

Report = Callable[[int, int], None]


@contextmanager
def progress_of(what: str) -> Iterator[Report]:
    """Show bytes done on standard error while it is a terminal; nothing is shown elsewhere.

    Args:
        what: What is going on.

    Yields:
        Takes (bytes done, bytes in all).
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _verified(path: Path) -> OpenCheckpoint:
    with progress_of(f"verifying {path.name}") as progress:
        return verify(path, progress)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _files(facts: dict[str, Any]) -> str:
    return _count(facts["tensor_files"], "tensor file")


def _facts(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    description = describe_checkpoint(checkpoint)
    facts: dict[str, Any] = {name: description[name] for name in ("checkpoint", "step", "bytes")}
    tensor_files = sum(name.endswith(".distcp") for name in description["files"])
    return facts | {"tensor_files": tensor_files, "tensors": len(description["tensors"])}


def run_verify(arguments: argparse.Namespace) -> dict[str, Any]:
    """Verify one checkpoint, or all of a run."""
    paths = find_checkpoints(arguments.directory)
    if not arguments.all:
        return {"verified": [_verify_one(paths[-1])]}
    good, damaged = [], []
    for path in paths:
        try:
            good.append(_verify_one(path))
        except (CheckpointError, OSError) as error:
            damaged.append({"checkpoint": str(path), "error": str(error)})
    return {"verified": good, "damaged": damaged}


def _verify_one(path: Path) -> dict[str, Any]:
    start = time.perf_counter()
    return {**_facts(_verified(path)), "seconds": round(time.perf_counter() - start, 2)}


def show_verify(result: dict[str, Any]) -> None:
    """Print a line per checkpoint, in the order of their steps."""
    lines = {found["checkpoint"]: f"damaged. {found['error']}" for found in result.get("damaged", ())}
    for found in result["verified"]:
        lines[found["checkpoint"]] = (
            f"good. Step {found['step']}, {_count(found['tensors'], 'tensor')} in "
            f"{_files(found)}, {_size(found['bytes'])}, every element once; {found['seconds']} s"
        )
    for checkpoint in sorted(lines, key=lambda name: (len(name), name)):
        print(f"{checkpoint}: {lines[checkpoint]}")


def run_info(arguments: argparse.Namespace) -> dict[str, Any]:
    """Describe a checkpoint from its facts and index; tensors are not read."""
    return describe_checkpoint(open_checkpoint(find_checkpoints(arguments.directory)[-1]))


def show_info(result: dict[str, Any]) -> None:
    """Print facts, then the model's tensors."""
    loss = "unknown" if result["last_loss"] is None else f"{result['last_loss']:.4f}"
    print(f"{result['checkpoint']}: step {result['step']}, last training loss {loss}")
    # The layout was written when the checkpoint was.
    layout = re.sub(r"^1 ranks\b", "1 rank", result["layout"])
    print(f"saved by megatron_glue {result['version']} on torch {result['torch']}, {layout}")
    if result["origin"]:
        print("origin: " + ", ".join(f"{name} {value}" for name, value in result["origin"].items()))
    print("model: " + ", ".join(f"{name} {value}" for name, value in result["model"].items()))
    print("data position: " + ", ".join(f"{name} {value}" for name, value in result["data_position"].items()))
    print("not default: " + (", ".join(result["settings"]) or "nothing") + " (values: config.yaml)")
    for kind, sizes in result["kinds"].items():
        tensors, elements = _count(sizes["tensors"], "tensor"), _count(sizes["elements"], "element")
        print(f"{kind}: {tensors}, {elements}, {_size(sizes['bytes'])}")
    print(f"{_count(len(result['files']), 'file')}, {_size(result['bytes'])}")
    table = Table("tensor", "shape", "dtype", "MiB", "slices")
    for name, tensor in result["tensors"].items():
        if name.startswith("model."):
            shape = " x ".join(map(str, tensor["shape"])) or "scalar"
            table.add_row(name, shape, tensor["dtype"], f"{tensor['bytes'] / 2**20:,.3f}", str(tensor["slices"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def run_reshard(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rewrite a checkpoint into another number of files."""
    source = _verified(find_checkpoints(arguments.directory)[-1])
    with progress_of("writing") as progress:
        reshard(source, arguments.destination, arguments.num_shards, progress)
    return {"source": str(source.path), "written": _facts(_verified(arguments.destination))}


def show_reshard(result: dict[str, Any]) -> None:
    """Print what was written."""
    written = result["written"]
    print(
        f"{written['checkpoint']}: the {_count(written['tensors'], 'tensor')} of {result['source']}, bit for bit, in "
        f"{_files(written)}, {_size(written['bytes'])}"
    )


def run_average(arguments: argparse.Namespace) -> dict[str, Any]:
    """Average the weights of several checkpoints."""
    paths = [path for folder in arguments.directories for path in _newest(folder, arguments.last)]
    sources = [_verified(path) for path in dict.fromkeys(paths)]
    with progress_of("averaging") as progress:
        average(sources, arguments.output, arguments.num_shards, progress)
    return {
        "sources": [str(source.path) for source in sources],
        "all_but_weights_from": str(newest_of(sources).path),
        "written": _facts(_verified(arguments.output)),
    }


def _newest(folder: str, last: int | None) -> list[Path]:
    """Checkpoints to average: those of a run, or a step's own folder."""
    paths = find_checkpoints(folder, last)
    if last is not None and len(paths) < last and paths != [Path(folder)]:
        raise ConfigError(
            "--last", last, f"{folder} holds {_count(len(paths), 'checkpoint')}", "ask for no more than there are"
        )
    return paths


def show_average(result: dict[str, Any]) -> None:
    """Print what was written, and where everything but the weights came from."""
    written = result["written"]
    print(f"{written['checkpoint']}: weights are the mean of {', '.join(result['sources'])}")
    print(
        f"Adam's moments, counters, the position in the data and random generators are those of "
        f"{result['all_but_weights_from']}; training goes on from step {written['step']}"
    )


def run_convert_deepspeed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rewrite a checkpoint of DeepSpeed's own format into ours."""
    program, *words = arguments.run_words or [""]
    defaults = {"pretrain_gpt.py": GPT_DEFAULTS, "pretrain_moe.py": MOE_DEFAULTS}.get(Path(program).name)
    if defaults is None:
        raise ConfigError(
            "--",
            program,
            "the run that wrote the checkpoint has to be named, its model is rebuilt",
            "end with -- pretrain_gpt.py or pretrain_moe.py and the run's flags",
        )
    config = resolve_config(words, read_environment(), defaults, program).config
    validate(config.model_copy(update={"parallel": ParallelConfig()}), 1)
    with progress_of("converting") as progress:
        state = build_state(config, native_step(arguments.directory))
        convert_deepspeed(arguments.directory, arguments.destination, state, arguments.num_shards, progress)
    return {"source": arguments.directory, "written": _facts(_verified(arguments.destination))}


def show_convert_deepspeed(result: dict[str, Any]) -> None:
    """Print what was written."""
    written = result["written"]
    print(
        f"{written['checkpoint']}: step {written['step']} of {result['source']}, "
        f"{_count(written['tensors'], 'tensor')} in {_files(written)}, {_size(written['bytes'])}; weights are the fp32 "
        "masters"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, show: Any, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, epilog=example, formatter_class=raw)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run, show=show)
        return command

    command = add(
        "verify",
        run_verify,
        show_verify,
        "compare every file with its checksum, and check that every element of every tensor is there once",
        "example: python tools/checkpoint.py verify runs/mine --all",
    )
    command.add_argument("directory", metavar="DIR", help="a run's folder or one step_N folder")
    command.add_argument("--all", action="store_true", help="all checkpoints of a run, not only the newest")
    command = add(
        "info",
        run_info,
        show_info,
        "tell step, layout, settings, sizes and tensors (--json: the optimizer's too)",
        "example: python tools/checkpoint.py info runs/mine/step_00000100 --json",
    )
    command.add_argument("directory", metavar="DIR", help="a run's folder or one step_N folder")
    command = add(
        "reshard",
        run_reshard,
        show_reshard,
        "write the same tensors, bit for bit, into another number of files",
        "example: python tools/checkpoint.py reshard runs/mine runs/one_file --num-shards 1\n"
        "then:    python pretrain_gpt.py ... --load runs/one_file --save runs/more",
    )
    command.add_argument("directory", metavar="SRC", help="a run's folder or one step_N folder")
    command.add_argument("destination", metavar="DST", type=Path, help="a folder that does not exist")
    command.add_argument(
        "--num-shards", type=_positive, default=1, help="tensor files (default 1), at most as many as tensors"
    )
    command = add(
        "average",
        run_average,
        show_average,
        "average the weights of several checkpoints of one model; moments, counters and the data position are those of "
        "the newest",
        "example: python tools/checkpoint.py average runs/mine --last 3 --output runs/averaged\n"
        "then:    python pretrain_gpt.py ... --load runs/averaged --save runs/more",
    )
    command.add_argument("directories", metavar="DIR", nargs="+", help="runs' folders or step_N folders")
    command.add_argument("--output", metavar="DST", type=Path, required=True, help="a folder that does not exist")
    command.add_argument("--last", type=_positive, help="of a run's folder, the newest N checkpoints (default: all)")
    command.add_argument(
        "--num-shards", type=_positive, default=1, help="tensor files (default 1), at most as many as tensors"
    )
    command = add(
        "convert-deepspeed",
        run_convert_deepspeed,
        show_convert_deepspeed,
        "write a checkpoint that DeepSpeed's engine.save_checkpoint made, ZeRO stage 0 to 3, as one of ours; every "
        "tensor of the run's model must be there, and none may be left over",
        "example: python tools/checkpoint.py convert-deepspeed their_folder runs/converted -- "
        "pretrain_gpt.py --num-layers 2"
        "\nthen:    python pretrain_gpt.py --num-layers 2 --load runs/converted --save runs/more",
    )
    command.add_argument("directory", metavar="SRC", help="what save_checkpoint was given, or the tag's folder in it")
    command.add_argument("destination", metavar="DST", type=Path, help="a folder that does not exist")
    command.add_argument(
        "--num-shards", type=_positive, default=1, help="tensor files (default 1), at most as many as tensors"
    )
    words = sys.argv[1:] if argv is None else argv
    own, run_words = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = parser.parse_args(own)
    arguments.run_words = run_words
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = parse(argv)

    def run() -> int:
        try:
            result = arguments.run(arguments)
        except (CheckpointError, OSError) as error:
            if arguments.json:
                print(json.dumps({"error": str(error)}))
            raise
        print(json.dumps(result, indent=1)) if arguments.json else arguments.show(result)
        return EXIT_FAILED if result.get("damaged") else 0

    return exit_code_of(run, CheckpointError)


if __name__ == "__main__":
    raise SystemExit(main())

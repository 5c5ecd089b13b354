"""Every preset: those for one process train, those for many GPUs are checked for their ranks; headers are true."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import ParallelConfig, RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.data.tokenizer import build_tokenizer
from megatron_glue.layers import initialisation
from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.planning.memory import MemoryEstimate, estimate_memory
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS
from tests.support.commands import ROOT, succeed, summary

MEMORY_TOLERANCE = 0.02
"""Share by which a header's memory may differ from what --dry-run prints."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "B": 1e9, "M": 1e6}


@dataclass(frozen=True)
class Preset:
    """A preset and what its header says.

    Attributes:
        path: The file.
        header: Its leading comment, without the marks.
    """

    path: Path
    header: str

    @classmethod
    def read(cls, path: Path) -> Preset:
        lines = path.read_text().splitlines()
        return cls(path, "\n".join(line[2:] for line in lines[: lines.index("model:")]))

    @property
    def entry_point(self) -> str:
        """The program in the header's command; a batch script is named after its program."""
        found = re.search(r"(pretrain_gpt|pretrain_moe)\.(py|sbatch)", self.header)
        assert found is not None
        return f"{found[1]}.py"

    @property
    def config(self) -> RunConfig:
        """What it resolves to."""
        return self.resolved()

    def resolved(self, *flags: str) -> RunConfig:
        """What it resolves to with flags behind it."""
        defaults = GPT_DEFAULTS if "gpt" in self.entry_point else MOE_DEFAULTS
        return resolve_config(["--config", str(self.path), *flags], {}, defaults).config

    @property
    def world_size(self) -> int:
        return int(re.findall(r"^ranks: (\d+)", self.header, re.MULTILINE)[0])

    def line(self, name: str) -> str:
        """A line of the header, without its name."""
        return re.findall(rf"^{name}: (.*)", self.header, re.MULTILINE)[0]


PRESETS = [Preset.read(path) for path in sorted((ROOT / "examples").glob("*.yaml"))]
SMALL, LARGE = ([preset for preset in PRESETS if (preset.world_size > 1) is large] for large in (False, True))


def test_there_are_presets_from_a_laptop_to_256_gpus() -> None:
    assert SMALL
    assert {preset.world_size for preset in LARGE} >= {8, 16, 32, 64, 256}


@pytest.mark.parametrize("preset", SMALL, ids=lambda preset: preset.path.stem)
def test_preset_trains(preset: Preset, tmp_path: Path) -> None:
    command = [preset.entry_point, "--config", str(preset.path), "--train-iters", "2", "--eval-iters", "1"]
    succeed([*command, "--sample-tokens", "0", "--device", "cpu", "--summary-path", "s.json"], tmp_path)
    result = summary(tmp_path / "s.json")
    assert len(result["losses"]) == 2
    assert result["metadata_builds"] == result["micro_batches"]
    assert result["host_reads"] == 0


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.path.stem)
def test_preset_fits_its_ranks(preset: Preset) -> None:
    config = preset.config
    assert validate(config, preset.world_size, config.training.device) == []
    assert config.training.name == preset.path.stem
    if preset.world_size > 1:
        ranks, nodes, per_node = map(int, re.findall(r"\d+", preset.line("ranks")))
        assert ranks == nodes * per_node
        # A group that exchanges rows or parts of layers stays inside a node, or covers whole nodes.
        for size in (config.parallel.expert_model_parallel_size, config.parallel.tensor_model_parallel_size):
            assert per_node % size == 0 or size % per_node == 0


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.path.stem)
def test_a_dry_run_on_its_ranks_says_what_the_header_says(preset: Preset, tmp_path: Path) -> None:
    """A user's first command; a machine has 8 ranks at most, as the headers of large ones have it."""
    ranks = str(preset.world_size)
    command = [preset.entry_point, "--config", str(preset.path), "--dry-run", "--world-size", ranks]
    # Headers of presets for any device count what a CPU needs.
    said = succeed([*command, *(["--device", "cpu"] if preset in SMALL else [])], tmp_path).stdout
    assert "warning: " not in said
    _, nodes, per_node = map(int, re.findall(r"\d+", preset.line("ranks"))) if preset.world_size > 1 else (1, 1, 1)
    assert f"\nranks: {ranks} on {nodes} machine(s) of {per_node}\n" in said
    assert f"would start: {nodes} x torchrun --nnodes {nodes} --nproc-per-node {per_node}" in said
    # A row for each pipeline rank: stage, layers, numbers, the parts of its memory in GiB, their sum.
    rows = re.findall(r"^ +\d+ +[\d+]+ +\S+((?: +\d+\.\d{3}){8})$", said, re.MULTILINE)
    largest = max(float(row.split()[-1]) for row in rows)
    amount, unit = re.findall(r"= ([\d.]+) (\w+)", preset.line("memory"))[0]
    claimed = float(amount) * UNITS[unit] / UNITS["GiB"]
    assert claimed == pytest.approx(largest, rel=MEMORY_TOLERANCE)
    counted = re.findall(r"^model: (\S+) parameters", said, re.MULTILINE)[0]
    assert _numbers(counted)[0] == pytest.approx(_numbers(preset.line("parameters"))[0], rel=0.005)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.path.stem)
def test_the_header_counts_the_parameters_of_the_model(preset: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model itself, built without memory; nothing to offload there."""
    monkeypatch.setattr(initialisation, "_draw", lambda shape, std, seed: torch.empty(tuple(shape)))
    config = preset.resolved("--no-accelerator").model_copy(update={"parallel": ParallelConfig()})
    meta = torch.device("meta")
    with meta:
        built = build_model(
            config, build_tokenizer(config.data).vocab_size, BuildPlace(ParallelMesh(), meta, HostReader())
        )
    total = sum(parameter.numel() for parameter in built.model.parameters())
    moe, idle = config.moe, 0
    if moe.num_experts:
        width = moe.moe_ffn_hidden_size or config.model.ffn_width
        num_layers = sum(moe.is_moe_layer(index) for index in range(config.model.num_layers))
        idle = num_layers * (moe.num_experts - moe.moe_router_topk) * 3 * config.model.hidden_size * width
    claimed = _numbers(preset.line("parameters"))
    assert claimed == pytest.approx([total, total - idle][: len(claimed)], rel=0.005)
    assert len(claimed) == 2 if moe.num_experts else 1


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.path.stem)
def test_the_header_adds_up_the_memory_of_a_rank(preset: Preset) -> None:
    config = preset.config
    device_type = "cuda" if config.training.device == "cuda" else "cpu"
    vocab_size = build_tokenizer(config.data).vocab_size
    (estimate,) = estimate_memory(config, preset.world_size, vocab_size, device_type)
    line = preset.line("memory")
    unit = UNITS[re.findall(r"= [\d.]+ (\w+)", line)[0]]
    claimed = [float(text) * unit for text in re.findall(r"\d+\.\d", line)]
    assert claimed == pytest.approx([*_parts(estimate), estimate.total], abs=0.051 * unit)
    if preset.world_size > 1:
        # Room for CUDA, NCCL, fragmentation and uneven expert load.
        assert estimate.total < 0.65 * 80e9


@pytest.mark.parametrize("preset", LARGE, ids=lambda preset: preset.path.stem)
def test_the_header_counts_the_batch(preset: Preset) -> None:
    training, data, parallel = preset.config.training, preset.config.data, preset.config.parallel
    packs, tokens, replicas, micro, steps = map(
        int, re.findall(r"(\d+) (?:pack|tok|ran|rep|mic)", preset.line("batch"))
    )
    assert (packs, tokens, micro) == (training.global_batch_size, data.seq_length, training.micro_batch_size)
    assert replicas == preset.world_size // parallel.ranks_per_replica
    assert packs == replicas * micro * steps


def _parts(estimate: MemoryEstimate) -> list[float]:
    worst = max(estimate.working, estimate.loss)
    states = [estimate.parameters, estimate.gradients, estimate.optimizer, estimate.transit]
    return [*states, estimate.activations, worst]


def _numbers(text: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([BM])", text)]

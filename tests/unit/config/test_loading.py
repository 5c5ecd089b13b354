"""Precedence, provenance, and configurations as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import field_specs
from megatron_glue.config.loading import (
    SWITCHES,
    DryRun,
    ResolvedConfig,
    as_dict,
    describe,
    from_dict,
    resolve_config,
)
from megatron_glue.config.sections import AcceleratorConfig, ModelConfig, MoEConfig, RunConfig, TrainConfig

ALL_ON = ["--use-packed-cache", "--double-buffer-ckpt", "--moe-grouping", "one-pass"]


def _resolve(*argv: str, environ: dict[str, str] | None = None, defaults: RunConfig | None = None) -> ResolvedConfig:
    return resolve_config(argv, environ or {}, defaults or RunConfig(), "pretrain.py")


def test_nothing_said_is_the_defaults() -> None:
    resolved = _resolve(defaults=RunConfig(moe=MoEConfig(num_experts=8)))
    assert resolved.config == RunConfig(moe=MoEConfig(num_experts=8))
    assert set(resolved.provenance.values()) == {"default"}
    assert set(resolved.provenance) == set(field_specs())
    assert resolved.warnings == []
    assert describe(resolved) == "all values are the defaults"


def test_precedence_and_provenance(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_layers: 1, hidden_size: 64, ffn_hidden_size: 32}\n")
    environ = {"MEGATRON_GLUE_NUM_LAYERS": "2", "MEGATRON_GLUE_HIDDEN_SIZE": "128"}
    resolved = _resolve("--num-layers", "3", "--config", str(file), environ=environ)
    model = resolved.config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (3, 128, 32)
    assert resolved.provenance["num_layers"] == "command line"
    assert resolved.provenance["hidden_size"] == "environment MEGATRON_GLUE_HIDDEN_SIZE"
    assert resolved.provenance["ffn_hidden_size"] == f"file {file}"
    assert resolved.provenance["num_attention_heads"] == "default"
    assert describe(resolved).splitlines() == [
        "--num-layers 3  (command line)",
        "--hidden-size 128  (environment MEGATRON_GLUE_HIDDEN_SIZE)",
        f"--ffn-hidden-size 32  (file {file})",
    ]


def test_a_later_file_wins(tmp_path: Path) -> None:
    for name, layers in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"model: {{num_layers: {layers}}}")
    resolved = _resolve("--config", str(tmp_path / "a"), "--config", str(tmp_path / "b"))
    assert resolved.config.model.num_layers == 2
    assert resolved.provenance["num_layers"] == f"file {tmp_path / 'b'}"


def test_disable_stands_above_the_command_line() -> None:
    accelerator = _resolve(*ALL_ON, environ={"MEGATRON_GLUE_DISABLE": "1"})
    assert not any(getattr(accelerator.config.accelerator, name) for name in SWITCHES)
    assert accelerator.provenance["enable_double_buffer"] == "environment MEGATRON_GLUE_DISABLE"
    assert not accelerator.config.recompute


def test_no_accelerator_wins_wherever_it_stands() -> None:
    resolved = _resolve("--no-accelerator", *ALL_ON)
    assert not any(getattr(resolved.config.accelerator, name) for name in SWITCHES)
    assert resolved.provenance["enable_metadata_cache"] == "command line --no-accelerator"


def test_disable_keeps_offload_that_was_asked_for() -> None:
    resolved = _resolve("--activation-offload", *ALL_ON, environ={"MEGATRON_GLUE_DISABLE": "1"})
    assert resolved.config.offload
    assert not resolved.config.accelerator.enable_double_buffer


def test_disable_turned_off_changes_nothing() -> None:
    resolved = _resolve(*ALL_ON, environ={"MEGATRON_GLUE_DISABLE": "0"})
    assert all(getattr(resolved.config.accelerator, name) for name in SWITCHES)


def test_each_switch_alone() -> None:
    for name in SWITCHES:
        environ = {f"MEGATRON_GLUE_{other.upper()}": str(int(other == name)) for other in SWITCHES}
        accelerator = _resolve(environ=environ).config.accelerator
        assert [getattr(accelerator, other) for other in SWITCHES] == [other == name for other in SWITCHES]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "0"], "--num-layers=0: not a whole number of at least 1; give one (default: 4)"),
        (["--lr", "-1"], "--lr=-1.0: not a finite number above 0; give one (default: 0.001)"),
        (
            ["--rotary-percent", "2"],
            "--rotary-percent=2.0: not a finite number above 0 and of at most 1; give one (default: 1.0)",
        ),
    ],
)
def test_bounds_are_one_line_with_flag_value_reason_and_remedy(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(*argv)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", ["0", "2.5", "'4'", "true", "[1, 2]", "{a: 1}"])
def test_yaml_values_are_not_converted(tmp_path: Path, value: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model:\n  num_layers: {value}\n")
    with pytest.raises(ConfigError, match="not a whole number of at least 1") as caught:
        _resolve("--config", str(file))
    assert caught.value.field == f"{file}:2: model.num_layers"


def test_a_wrong_value_is_an_error_even_if_a_better_one_replaces_it() -> None:
    with pytest.raises(ConfigError, match="NUM_LAYERS=0"):
        _resolve("--num-layers", "3", environ={"MEGATRON_GLUE_NUM_LAYERS": "0"})


def test_yaml_whole_numbers_are_fine_for_fractions(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optimizer: {lr: 1, min_lr: 0}")
    assert _resolve("--config", str(tmp_path / "run.yaml")).config.optimizer.lr == 1.0


def test_unused_megatron_flags_are_one_warning() -> None:
    resolved = _resolve("--use-flash-attn", "--tensorboard-log-interval", "1", "--use-distributed-optimizer")
    assert resolved.warnings == [
        "--use-distributed-optimizer is taken as --data-parallel-engine fsdp2",
        "--use-distributed-optimizer is taken as --zero-stage 2",
        "accepted for Megatron-LM scripts and not used: --use-flash-attn, --tensorboard-log-interval",
    ]


def test_print_config_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--num-layers", "3", "--moe-layer-freq", "0", "1", "1", "--lr", "1e-7", *ALL_ON]
    with pytest.raises(SystemExit) as caught:
        _resolve(*argv, "--print-config")
    assert caught.value.code == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert _resolve("--config", str(file)).config == _resolve(*argv).config


def test_print_config_names_the_source_of_what_is_no_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("model: {hidden_size: 64}\n")
    environ = {"MEGATRON_GLUE_CONFIG": str(site), "MEGATRON_GLUE_SEED": "7", "MEGATRON_GLUE_DISABLE": "1"}
    with pytest.raises(SystemExit):
        _resolve("--num-layers", "3", "--print-config", environ=environ)
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if "#" in line] == [
        "num_layers: 3  # command line",
        f"hidden_size: 64  # file {site}",
        *(f"{name}: false  # environment MEGATRON_GLUE_DISABLE" for name in SWITCHES),
        "seed: 7  # environment MEGATRON_GLUE_SEED",
    ]


def test_a_site_file_stands_below_the_files_of_a_job(tmp_path: Path) -> None:
    for name, text in (
        ("site", "model: {num_layers: 1, hidden_size: 64}\ntraining: {accelerator: {enable_double_buffer: true}}"),
        ("team", "model: {ffn_hidden_size: 32}"),
        ("job", "model: {num_layers: 2}\ntraining: {accelerator: {enable_double_buffer: false}}"),
    ):
        (tmp_path / name).write_text(text)
    environ = {"MEGATRON_GLUE_CONFIG": f"{tmp_path / 'site'}:{tmp_path / 'team'}"}
    resolved = _resolve("--config", str(tmp_path / "job"), environ=environ)
    model = resolved.config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 64, 32)
    assert not resolved.config.accelerator.enable_double_buffer
    assert resolved.provenance["hidden_size"] == f"file {tmp_path / 'site'}"
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        _resolve(environ={"MEGATRON_GLUE_CONFIG": str(tmp_path / "nowhere")})
    assert caught.value.field == "MEGATRON_GLUE_CONFIG"


@pytest.mark.parametrize("source", ["file", "environment"])
def test_every_field_of_the_accelerator_block_has_a_key_and_a_variable(tmp_path: Path, source: str) -> None:
    block = {
        "enable_metadata_cache": True,
        "cache_scope": "micro-batch",
        "enable_double_buffer": True,
        "buffer_size_mb": 48,
        "enable_grouped_index": False,
        "log_level": "warning",
        "metrics_interval": 3,
    }
    assert set(block) == set(AcceleratorConfig.model_fields)
    if source == "file":
        (tmp_path / "run.yaml").write_text(json.dumps({"training": {"accelerator": block}}))
        resolved = _resolve("--config", str(tmp_path / "run.yaml"))
    else:
        words = {True: "1", False: "0"}
        environ = {f"MEGATRON_GLUE_{name.upper()}": words.get(value, str(value)) for name, value in block.items()}
        resolved = _resolve(environ=environ)
    assert resolved.config.accelerator == AcceleratorConfig(**block)
    assert all(resolved.provenance[name].startswith(source) for name in block)


def test_a_dry_run_plans_for_the_ranks_that_are_named_or_launched() -> None:
    def plan(*argv: str, **environ: str) -> DryRun | None:
        return resolve_config(argv, environ, RunConfig(), "pretrain.py", may_dry_run=True).dry_run

    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert plan() is None
    assert plan("--dry-run") == DryRun(1, 1)
    assert plan("--dry-run", "--world-size", "256") == DryRun(256, 8)
    assert plan("--dry-run", "--world-size", "256", "--ranks-per-node", "4") == DryRun(256, 4)
    assert plan("--dry-run", **launched) == DryRun(6, 3)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--world-size", "4"], "--world-size=4: is for --dry-run"),
        (["--ranks-per-node", "4"], "--ranks-per-node=4: is for --dry-run"),
        (["--dry-run", "--world-size", "0"], "--world-size=0: not a whole number from 1"),
        (["--dry-run", "--world-size", "many"], "--world-size=many: not a whole number from 1"),
        (["--dry-run"], "--dry-run: exists for the entry points only"),
    ],
)
def test_a_dry_run_that_cannot_be(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        _resolve(*argv)


def test_one_rank_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(SystemExit):
        _resolve("--print-config", environ={**environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert capsys.readouterr().out == ""


def test_plain_data_round_trips_through_json() -> None:
    config = RunConfig(
        model=ModelConfig(window_size=4, window_attn_skip_freq=(0, 1, 1, 0)),
        training=TrainConfig(accelerator=AcceleratorConfig(enable_metadata_cache=True)),
    )
    assert from_dict(json.loads(json.dumps(as_dict(config)))) == config


def test_plain_data_of_an_older_version_takes_defaults() -> None:
    assert from_dict({"model": {"num_layers": 2}}) == RunConfig(model=ModelConfig(num_layers=2))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"model": {"num_layer": 2}}, "did you mean model.num_layers"),
        ({"model": 3}, "not a mapping"),
        ({"model": {"num_layers": "2"}}, "not a whole number"),
        ({"modell": {}}, "did you mean model"),
    ],
)
def test_plain_data_that_does_not_fit(data: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        from_dict(data)

"""Flags, Megatron-LM's other flags, help and flag errors."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_glue import __version__
from megatron_glue.config.command_line import CommandLine, known_flags, parse_command_line
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import field_specs
from megatron_glue.config.megatron_flags import FIELD_WORDS, IGNORED, REFUSED, SATISFIED, TRANSLATED
from megatron_glue.config.sections import MoEConfig, RunConfig


def _parse(*argv: str) -> CommandLine:
    return parse_command_line(argv, RunConfig(), "pretrain.py")


def _values(*argv: str) -> dict[str, Any]:
    return {override.spec.name: override.value for override in _parse(*argv).overrides}


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--num-layers", "3"], {"num_layers": 3}),
        (["--num-layers=3", "--num-layers", "4"], {"num_layers": 4}),
        (["--lr", "1e-3"], {"lr": 1e-3}),
        (["--use-packed-cache"], {"enable_metadata_cache": True}),
        (["--no-use-packed-cache"], {"enable_metadata_cache": False}),
        (["--swiglu", "--no-swiglu"], {"swiglu": False}),
        (["--disable-bias-linear"], {"add_bias_linear": False}),
        (["--moe-grouping", "loop"], {"enable_grouped_index": False}),
        (["--moe-layer-freq", "0", "1", "--seed", "1"], {"moe_layer_freq": (0, 1), "seed": 1}),
        (["--moe-layer-freq", "[0,1]"], {"moe_layer_freq": (0, 1)}),
        (["--data-path", "a", "b"], {"data_path": ("a", "b")}),
        (["--data-path"], {"data_path": ()}),
        (["--ffn-hidden-size", "none"], {"ffn_hidden_size": None}),
        (["--bf16"], {"precision": "bf16"}),
        (["--use-torch-fsdp2"], {"data_parallel_engine": "fsdp2"}),
        (["--moe-router-pre-softmax"], {"moe_router_norm_topk_prob": False}),
        (["--moe-router-load-balancing-type", "seq_aux_loss"], {"moe_aux_loss_scope": "sequence"}),
        (["--position-embedding-type", "learned_absolute"], {"position_embedding_type": "learned"}),
        (["--optimizer", "adam"], {}),
        (["--group-query-attention", "--moe-grouped-gemm"], {}),
    ],
)
def test_flags_set_fields(argv: list[str], values: dict[str, Any]) -> None:
    assert _values(*argv) == values


def test_later_words_win_between_a_flag_and_its_translation() -> None:
    assert _values("--bf16", "--precision", "fp32") == {"precision": "fp32"}
    assert _values("--precision", "fp32", "--bf16") == {"precision": "bf16"}


def test_the_flag_is_remembered_as_written() -> None:
    assert _parse("--disable-bias-linear").overrides[0].written == "--disable-bias-linear"


@pytest.mark.parametrize(
    ("argv", "field", "part"),
    [
        (["--num-layer", "3"], "--num-layer", "did you mean --num-layers"),
        (["--num_layers", "3"], "--num_layers", "did you mean --num-layers"),
        (["--enable-metadata-cache"], "--enable-metadata-cache", "did you mean --use-packed-cache"),
        (["--zzzzzzzz"], "--zzzzzzzz", "see --help"),
        (["-n", "3"], "-n", "unknown flag"),
        (["stray"], "command line", "behind no flag"),
        (["--num-layers", "3", "4"], "command line", "behind no flag"),
        (["--num-layers"], "--num-layers", "expected one argument"),
        (["--moe-layer-freq"], "--moe-layer-freq", "expected at least one"),
        (["--swiglu=yes"], "--swiglu/--no-swiglu", "ignored explicit argument"),
        (["--num-layers", "x"], "--num-layers", "not a whole number of at least 1"),
        (["--moe-grouping", "fast"], "--moe-grouping", "not one of one-pass, loop"),
        (["--fp16"], "--fp16", "use --bf16"),
        (["--optimizer", "sgd"], "--optimizer", "use one of adam"),
        (["--train-samples", "5"], "--train-samples", "use --train-iters"),
    ],
)
def test_wrong_words_are_named(argv: list[str], field: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        _parse(*argv)
    assert caught.value.field == field


def test_abbreviations_are_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown flag"):
        _parse("--num-lay", "3")


def test_ignored_flags_are_listed_once() -> None:
    parsed = _parse("--use-flash-attn", "--split", "949,50,1", "--use-flash-attn", "--distributed-backend", "nccl")
    assert parsed.ignored == ["--use-flash-attn", "--split", "--distributed-backend"]
    assert parsed.overrides == []


def test_approximate_translations_are_told() -> None:
    parsed = _parse("--use-distributed-optimizer", "--attention-backend", "flash", "--recompute-activations")
    assert parsed.notes == [
        "--use-distributed-optimizer is taken as --data-parallel-engine fsdp2",
        "--use-distributed-optimizer is taken as --zero-stage 2",
        "--attention-backend flash is taken as --attention-backend auto",
    ]
    assert _parse("--bf16", "--attention-backend", "segments").notes == []


def test_megatron_tables_are_consistent() -> None:
    own = {flag for spec in field_specs().values() for flag in (spec.flag, *spec.off_flags)}
    tables = [own, set(TRANSLATED), set(SATISFIED), set(IGNORED), set(REFUSED)]
    assert sum(map(len, tables)) == len(set().union(*tables)), "a flag stands in two tables"
    assert len(known_flags()) == len(set(known_flags()))
    for translation in TRANSLATED.values():
        for values in translation.words.values():
            assert set(values) <= set(field_specs())
    for name, words in FIELD_WORDS.items():
        assert set(words.values()) <= set(field_specs()[name].words)
        assert not set(words) & set(field_specs()[name].words), "this word has a meaning of its own by now"


def test_every_megatron_flag_takes_its_number_of_values() -> None:
    for flag, num_values in {**SATISFIED, **IGNORED}.items():
        assert _values(flag, *["1"] * num_values, "--seed", "7") == {"seed": 7}


def test_help_shows_sections_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--help"], RunConfig(moe=MoEConfig(num_experts=8)), "pretrain_moe.py")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for spec in field_specs().values():
        assert spec.flag in text
        assert f"{spec.section} (YAML section" in text
    assert "Experts per MoE layer; off (dense model): 0. (default: 8)" in " ".join(text.split())
    assert "--moe-grouping {one-pass,loop}" in text
    assert text.rstrip().splitlines()[-2].strip().startswith("torchrun --nproc-per-node 2 pretrain_moe.py")
    assert "--swiglu, --no-swiglu" in text
    assert "--use-flash-attn" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron_glue {__version__}\n"


def test_the_other_words_of_the_command_line() -> None:
    parsed = _parse("--config", "a.yaml", "--config", "b.yaml", "--no-accelerator", "--print-config")
    assert parsed.config_files == ["a.yaml", "b.yaml"]
    assert parsed.is_accelerator_off
    assert parsed.is_print_config

"""What DeepSpeed is told: derived from our flags, merged with a file, never in contradiction to either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.parallel.engines import deepspeed_config
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun, build_config
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from tests.support.source_tree import ROOT

RUN = {"zero_stage": 2, "dp_size": 4, "micro_batch_size": 3, "num_micro_batches": 5, "clip_grad": 0.7}


def build(tmp_path: Path, given: Any, **changes: Any) -> dict[str, Any]:
    path = tmp_path / "deepspeed.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return build_config(DeepSpeedRun(**{**RUN, **changes}, config_path=str(path)))


def test_numbers_of_the_run_are_derived() -> None:
    config = build_config(DeepSpeedRun(**RUN))
    assert config["train_batch_size"] == 60
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["gradient_clipping"] == 0.7
    assert config["zero_optimization"] == {"stage": 2}
    assert "bf16" not in config


def test_gradients_are_summed_and_kept_in_fp32() -> None:
    for stage in (0, 1, 2):
        assert build_config(DeepSpeedRun(zero_stage=stage))["gradient_allreduce_op"] == "sum"
    # DeepSpeed refuses the key there; the engine multiplies the loss instead.
    assert "gradient_allreduce_op" not in build_config(DeepSpeedRun(zero_stage=3))
    for stage in (1, 2, 3):
        config = build_config(DeepSpeedRun(zero_stage=stage, is_bf16=True))
        assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["communication_data_type"] == "fp32"


def test_stage_0_leaves_precision_and_clipping_to_us() -> None:
    config = build_config(DeepSpeedRun(zero_stage=0, is_bf16=True, clip_grad=1.0))
    assert "bf16" not in config
    assert config["gradient_clipping"] == 0.0


def test_a_run_is_described_by_its_configuration() -> None:
    config = from_dict(
        {
            "parallel": {"data_parallel_engine": "deepspeed", "zero_stage": 3},
            "training": {"micro_batch_size": 2, "global_batch_size": 8},
            "optimizer": {"clip_grad": 0.5},
        }
    )
    run = DeepSpeedRun.from_config(config, ParallelMesh(sizes={"dp": 2}), Precision.from_name("bf16", "cpu"))
    assert run == DeepSpeedRun(3, 2, 2, 2, 0.5, True, None)
    unset = from_dict({"parallel": {"data_parallel_engine": "deepspeed"}})
    assert DeepSpeedRun.from_config(unset, ParallelMesh(), Precision.from_name("fp32", "cpu")).zero_stage == 1


@pytest.mark.parametrize("word", ["auto", "same"])
def test_a_file_may_say_the_same_or_leave_it_to_us(tmp_path: Path, word: str) -> None:
    same = {
        "train_batch_size": 60,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 5,
        "gradient_clipping": 0.7,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    if word == "auto":
        same = {key: "auto" for key in same if key not in ("zero_optimization", "bf16", "fp16")} | {
            "zero_optimization": {"stage": "auto", "overlap_comm": False},
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
        }
    config = build(tmp_path, same, is_bf16=True)
    expected = build_config(DeepSpeedRun(**RUN, is_bf16=True))
    expected["zero_optimization"]["overlap_comm"] = False
    assert config == {**expected, "fp16": {}}
    # In stage 0 masters are our business: saying the same must not switch DeepSpeed's on.
    zero = {**same, "zero_optimization": {"stage": 0}}
    assert build(tmp_path, zero, is_bf16=True, zero_stage=0)["bf16"] == {}


def test_unknown_sections_pass_through_and_ours_stay(tmp_path: Path) -> None:
    given = {
        "zero_optimization": {"reduce_bucket_size": 17, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 3,
        "future_section": {"a": [1, {"b": None}]},
        "communication_data_type": "bf16",
        "prescale_gradients": False,
    }
    config = build(tmp_path, given)
    assert config["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 17,
        "offload_optimizer": {"device": "cpu"},
    }
    assert config["steps_per_print"] == 3
    assert config["future_section"] == {"a": [1, {"b": None}]}
    assert config["communication_data_type"] == "bf16"
    assert config["gradient_allreduce_op"] == "sum"


@pytest.mark.parametrize(
    ("given", "key", "flag"),
    [
        ({"train_batch_size": 61}, "train_batch_size is 61", "--global-batch-size makes it 60"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu is 1", "--micro-batch-size makes it 3"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1", "--global-batch-size makes it 5"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0", "--clip-grad makes it 0.7"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3", "--zero-stage makes it 2"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true", "--precision makes it false"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true", "--precision makes it false"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is true", "--precision"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1}}}, "optimizer: ", "--lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: ", "--lr-decay-style"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor: ", "leave it out"),
        ({"prescale_gradients": True}, "prescale_gradients: ", "leave it out"),
        ({"gradient_allreduce_op": "mean"}, "gradient_allreduce_op: ", "leave it out"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: ", "--data-parallel-engine"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients: ", "leave it out"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow: ", "leave it out"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device=nvme", '"cpu"'),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow: ", "leave it out"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype: ", "leave it out"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing: ",
            "--activation-offload",
        ),
        ({"elasticity": {"enabled": True}}, "elasticity: ", "--global-batch-size"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp: ", "--precision"),
    ],
)
def test_a_contradiction_names_the_key_and_our_flag(tmp_path: Path, given: Any, key: str, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(tmp_path, given)
    line = str(error.value)
    assert line.startswith(f"--deepspeed-config={tmp_path / 'deepspeed.json'}: ")
    assert key in line
    assert flag in line


def test_what_is_turned_off_is_no_contradiction(tmp_path: Path) -> None:
    off = {
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "amp": {"enabled": False, "opt_level": "O1"},
        "prescale_gradients": False,
    }
    assert build(tmp_path, off).items() >= off.items()
    with pytest.raises(ConfigError, match=r"bf16\.enabled is false"):
        build(tmp_path, {"bf16": {"enabled": False}}, is_bf16=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[1]", "holds no JSON object"), ("\x00", "is not JSON")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(tmp_path, text)


def keys_of_the_page(heading: str) -> list[str]:
    """The keys in the first column of a table in docs/from_deepspeed.md."""
    page = (ROOT / "docs/from_deepspeed.md").read_text(encoding="utf-8")
    rows = page.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0].splitlines()
    return [key for row in rows if row.startswith("| `") for key in re.findall(r"`([\w.]+)`", row.split("|")[1])]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_the_page_says_what_becomes_of_each_key(tmp_path: Path) -> None:
    decided, refused = keys_of_the_page("Decided by flags"), keys_of_the_page("Refused")
    assert set(decided) == set(deepspeed_config._OWNED)
    assert set(refused) == {*deepspeed_config._REFUSED, "bf16.check_grad_overflow"}
    for key in decided:
        assert build(tmp_path, nested(key, "auto")), key
        with pytest.raises(ConfigError, match=re.escape(key)):
            build(tmp_path, nested(key, 17))
    for key in refused:
        value = 0 if key == "bf16.check_grad_overflow" else 17
        with pytest.raises(ConfigError, match=re.escape(f"{key}: ")):
            build(tmp_path, nested(key, value))
    for key in keys_of_the_page("Handed on"):
        assert build(tmp_path, nested(key, {"enabled": True}))[key.split(".")[0]], key


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        build_config(DeepSpeedRun(config_path=str(tmp_path / "nowhere.json")))

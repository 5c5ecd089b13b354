"""What ranks must agree on, and how a difference is said."""

from __future__ import annotations

from megatron_glue.config.sections import DataConfig, LoggingConfig, ModelConfig, RunConfig
from megatron_glue.training.start_check import check_same_start, digest, first_difference, start_facts

VERSIONS = {"torch": "2.13.0"}


def test_settings_and_versions_count_and_places_of_a_machine_do_not() -> None:
    plain = digest(start_facts(RunConfig(), VERSIONS))
    assert digest(start_facts(RunConfig(model=ModelConfig(num_layers=5)), VERSIONS)) != plain
    assert digest(start_facts(RunConfig(), {"torch": "2.12.0"})) != plain
    own = RunConfig(data=DataConfig(data_path=("local.jsonl",)), logging=LoggingConfig(summary_path="a.json"))
    assert digest(start_facts(own, VERSIONS)) == plain
    assert digest(start_facts(RunConfig(), {**VERSIONS, "git revision": "none"})) == plain


def test_the_first_rank_that_differs_is_named_with_the_difference() -> None:
    tables = [{"host": "a", "torch": "2.13.0", "--lr": "1"}] * 2
    tables += [{"host": "b", "torch": "2.12.0", "--lr": "1"}, {"host": "c", "torch": "2.12.0", "--lr": "2"}]
    assert first_difference(tables) == (
        "rank 2 on b differs from rank 0 on a: torch 2.12.0 instead of 2.13.0; start all ranks from one installation "
        "with the same settings"
    )
    many = [{"host": "a"}, {"host": "b", "v": "1", "w": "1", "x": "1", "y": "1"}]
    assert "v 1 instead of missing, w 1 instead of missing, x 1 instead of missing and 1 more" in first_difference(many)


def test_one_process_agrees_with_itself() -> None:
    check_same_start(RunConfig(), VERSIONS)

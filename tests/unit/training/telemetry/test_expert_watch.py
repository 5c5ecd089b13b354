from __future__ import annotations

from megatron_glue.training.telemetry.expert_watch import ExpertWatch


def test_load_is_a_multiple_of_an_even_share() -> None:
    figures = ExpertWatch([1, 3], imbalance=0, dead_after=0).look([[1, 3], [2, 2]])
    assert figures.load == {1: [0.5, 1.5], 3: [1.0, 1.0]}
    assert figures.num_dead == {1: 0, 3: 0}
    assert figures.alarms == ()


def test_imbalance_alarms_when_it_begins_and_when_it_ends() -> None:
    watch = ExpertWatch([2], imbalance=1.8, dead_after=0)
    assert watch.look([[5, 5]]).alarms == ()
    (line,) = watch.look([[19, 1]]).alarms
    assert line == (
        "alarm: experts are out of balance in 1 layer(s) (--expert-imbalance-alarm 1.8 x an even share): "
        "layer 2: expert 0 1.9x"
    )
    again = watch.look([[19, 1]])
    assert again.is_imbalanced
    assert again.alarms == ()
    over = watch.look([[5, 5]])
    assert not over.is_imbalanced
    assert over.alarms[0].startswith("over: ")


def test_an_expert_without_tokens_for_long_enough_is_dead() -> None:
    watch = ExpertWatch([0], imbalance=0, dead_after=2)
    assert watch.look([[4, 0]]).num_dead == {0: 0}
    figures = watch.look([[4, 0]])
    assert figures.num_dead == {0: 1}
    assert figures.alarms == ("alarm: no token for 2 records (--dead-expert-alarm): layer 0 expert 1",)
    assert watch.look([[4, 0]]).alarms == (), "told once"
    figures = watch.look([[4, 1]])
    assert figures.num_dead == {0: 0}
    assert figures.alarms == ("over: every expert gets tokens again (--dead-expert-alarm)",)
    assert watch.look([[4, 0]]).num_dead == {0: 0}, "counted anew"


def test_long_lists_are_cut() -> None:
    watch = ExpertWatch([0], imbalance=0, dead_after=1)
    (line,) = watch.look([[9, 0, 0, 0, 0, 0]]).alarms
    assert line.endswith("layer 0 expert 1, layer 0 expert 2, layer 0 expert 3 and 2 more")


def test_an_interval_without_tokens_divides_by_nothing() -> None:
    assert ExpertWatch([0], 2.0, 0).look([[0, 0]]).load == {0: [0.0, 0.0]}

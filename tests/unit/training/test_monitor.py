from __future__ import annotations

import io

from megatron_glue.training.monitor import Monitor, format_duration, progress_line

VALUES = {"loss": 3.25, "lr": 0.001, "grad_norm": 0.5, "tokens_per_second": 12345.6}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_names_everything_a_user_follows() -> None:
    line = progress_line(VALUES, iteration=7, total=100, eta_seconds=3725)
    assert line == ("iteration   7/100 | loss 3.2500 | lr 1.000e-03 | grad norm 0.500 | 12,346 tokens/s | ETA 1:02:05")


def test_progress_line_with_offload_shows_what_was_hidden() -> None:
    values = {**VALUES, "reload_wait_ms": 1.25, "overlap_efficiency": 0.935}
    assert "| 12,346 tokens/s | reload wait 1.2 ms, overlap 94% | ETA" in progress_line(values, 7, 100, 1)


def test_durations_never_go_negative() -> None:
    assert format_duration(-3) == "0:00:00"
    assert format_duration(59.6) == "0:01:00"


def test_plain_lines_in_a_file() -> None:
    stream = io.StringIO()
    monitor = Monitor("auto", enabled=True, total=10, stream=stream)
    monitor.step(1)
    monitor.log(1, VALUES)
    monitor.close()
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_live_bar_on_a_terminal() -> None:
    stream = Terminal()
    monitor = Monitor("auto", enabled=True, total=10, stream=stream)
    monitor.step(3)
    monitor.log(3, VALUES)
    monitor.say("saved [checkpoint]")
    monitor.close()
    monitor.close()
    assert "3/10" in stream.getvalue().replace(" ", "")
    assert "loss 3.250 lr 1.0e-03 norm 0.50 12,346 tok/s ETA" in stream.getvalue(), "fits into 80 columns"
    assert "saved [checkpoint]" in stream.getvalue()


def test_eta_counts_only_the_iterations_of_this_process() -> None:
    stream = io.StringIO()
    monitor = Monitor("plain", enabled=True, total=100, start=90, stream=stream)
    monitor._start_time -= 10.0  # ten seconds have passed
    monitor.log(95, VALUES)
    assert "ETA 0:00:10" in stream.getvalue()


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    monitor = Monitor("plain", enabled=False, total=10, stream=stream)
    monitor.log(1, VALUES)
    monitor.say("hello")
    assert stream.getvalue() == ""


def test_style_none_silences_progress_but_not_messages() -> None:
    stream = io.StringIO()
    monitor = Monitor("none", enabled=True, total=10, stream=stream)
    monitor.log(1, VALUES)
    monitor.say("hello")
    assert stream.getvalue() == "hello\n"

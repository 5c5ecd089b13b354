"""What two profiles say beside each other."""

from __future__ import annotations

from typing import Any

from megatron_glue.proofs.profile_report import comparison_markdown, to_markdown
from megatron_glue.proofs.step_profile import Span, analyse, explain
from megatron_glue.proofs.switch_model import LayerCosts, StepShape, expectations


def result(step_ms: float, *, is_on: bool) -> dict[str, Any]:
    """A result as the tool saves it: three quarters compute, the rest glue."""
    profile = analyse([Span("step", "step", 0, 100), Span("aten::mm", "product", 0, 75)], 50.0)
    costs, shape = LayerCosts(build_ms=2.0), StepShape(6, 0, 1, is_recomputed=False)
    expected = expectations(costs, shape, step_ms, has_cache=is_on, has_double_buffer=False, has_one_pass=True)
    return {
        "title": "a model",
        "switches": f"cache {'on' if is_on else 'off'}",
        "explanation": explain(profile),
        "step_ms": step_ms,
        "num_timed_steps": 1,
        "num_profiled_steps": 1,
        "profile": profile.as_json(),
        "phases_ms": {"forward": 1.0},
        "host_reads_per_step": 3.0,
        "copy_ms": 0.0,
        "expectations": [each.as_json() for each in expected],
    }


def test_a_comparison_puts_the_model_beside_the_measurement() -> None:
    text = comparison_markdown(result(100.0, is_on=False), result(80.0, is_on=True))
    assert "| step, ms | 100.0 | 80.0 | 1.25x |" in text
    assert "| glue, ms | 25.0 | 20.0 | -5.0 |" in text
    assert "The model expects 10.0 ms from the switches turned on; measured: 20.0 ms." in text


def test_a_report_says_what_is_on_and_what_was_not_measured() -> None:
    text = to_markdown(result(80.0, is_on=True))
    assert "| `--use-packed-cache` | on | saves 10.0 ms | 1.12x | 1 micro-batches x (6 - 1) x s = 2.0000 ms |" in text
    assert "| `--double-buffer-ckpt` | off | - | - | nothing was offloaded, so there is no copy to hide |" in text
    assert "at most 1.33x as fast" in text
    assert "| waits of the host for device values | 3 |" in text

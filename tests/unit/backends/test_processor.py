"""Facts about the processor are read as Linux writes them."""

from __future__ import annotations

from pathlib import Path

from megatron_glue.backends.processor import processor_facts


def test_facts_of_the_last_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: GenuineIntel\nmodel name\t: A: B\nflags\t\t:\n\nvendor_id\t: AuthenticAMD\n\n")
    facts = processor_facts(file)
    assert (facts["vendor_id"], facts["model name"], facts["flags"]) == ("AuthenticAMD", "A: B", "")


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert processor_facts(tmp_path / "none") == {}

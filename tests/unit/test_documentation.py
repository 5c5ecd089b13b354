"""Pages are true to the repository: their links lead somewhere, and what they name exists."""

from __future__ import annotations

import pytest
import yaml

from megatron_glue.config.command_line import known_flags
from megatron_glue.config.fields import field_specs
from tests.support.documentation import (
    VARIABLE,
    Page,
    broken_links,
    flags_in,
    is_flag_in_source,
    missing_files,
    pages,
    programs,
    slug_of,
    wrong_flags,
)
from tests.support.house_rules import FLOORS
from tests.support.source_tree import ROOT

PAGES = pages()
PICTURE = ROOT / "docs/images/architecture.svg"
OF_OTHER_PROGRAMS = {
    "torchrun": {
        *("--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--standalone", "--no-python"),
        *("--signals-to-handle",),
    },
    "sbatch": {"--signal", "--job-name", "--nodes", "--gpus-per-node", "--gpus-per-task", "--batch"},
    "pip": {"--no-build-isolation", "--no-binary", "--no-cache-dir", "--no-deps", "--extra-index-url"},
    "ruff": {"--check"},
    "pre-commit": {"--hook-type"},
    "nsys": {
        *("--trace", "--sample", "--cpuctxsw", "--delay", "--duration", "--force-overwrite", "--output", "--report"),
    },
    "py-spy": {"--pid", "--native", "--duration", "--output"},
    "dcgmi": {"--pause", "--resume"},
    "docker, podman": {
        *("--shm-size", "--gpus", "--rm", "--ulimit", "--stop-timeout", "--cap-add", "--user", "--ipc", "--network"),
        *("--target", "--build-arg", "--ignorefile"),
    },
    "apptainer": {"--bind", "--pwd", "--cleanenv"},
    "pyxis": {"--container-mounts"},
}
"""Flags of programs that are not this project's."""
OTHER_VARIABLES = {"MEGATRON_GLUE_CONFIG", "MEGATRON_GLUE_DISABLE"}
"""Variables of the environment that stand for no field."""
MEGATRON_PAGES = ("docs/from_megatron.md", "CHANGELOG.md")


def megatron_flags() -> set[str]:
    """Names of Megatron-LM, which pages about it may name without their being known here."""
    return set(yaml.safe_load((ROOT / "tools/megatron_lm_flags.yaml").read_text(encoding="utf-8")))


def named_page(text: str) -> Page:
    return Page(ROOT / "docs/x.md", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Page) -> None:
    assert missing_files(page, set(FLOORS)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Page) -> None:
    """A flag is one of a run, of a program in tools/ or scripts/, or of another program that is named above."""
    sources = [*ROOT.glob("tools/**/*.py"), *ROOT.glob("tools/**/*.sh"), *ROOT.glob("scripts/**/*.*")]
    ours = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    others = set().union(*OF_OTHER_PROGRAMS.values()) | (megatron_flags() if page.name in MEGATRON_PAGES else set())
    unknown = flags_in(page.text) - set(known_flags()) - others
    if page.name == "docs/configuration.md":
        unknown -= {"--x", "--no-x"}
    assert [flag for flag in sorted(unknown) if not is_flag_in_source(flag, ours)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_flags_of_their_program(page: Page) -> None:
    assert wrong_flags(page, set(known_flags()), OF_OTHER_PROGRAMS["torchrun"] | OF_OTHER_PROGRAMS["sbatch"]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_environment_variables_exist(page: Page) -> None:
    known = {spec.environment_name for spec in field_specs().values()} | OTHER_VARIABLES
    assert set(VARIABLE.findall(page.text)) <= known


def test_every_page_is_found_from_the_readme() -> None:
    readme = next(page for page in PAGES if page.name == "README.md")
    linked = {target.partition("#")[0] for _, target in readme.links()}
    assert {page.name for page in PAGES if page.name.startswith("docs/")} <= linked


def test_flags_of_other_programs_are_named_somewhere() -> None:
    text = "\n".join(page.text for page in PAGES)
    named = flags_in(text)
    assert {flag for flags in OF_OTHER_PROGRAMS.values() for flag in flags} <= named, "remove what no page names"


def test_the_picture_of_the_house_shows_every_room() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert all(f">{room}<" in text for room in FLOORS)
    assert "<script" not in text


def test_headings_become_anchors() -> None:
    page = named_page("# A `--flag`, and b!\n## Twice\n## Twice\n```\n# no heading\n```\n")
    assert page.anchors() == {"a---flag-and-b", "twice", "twice-1"}
    assert slug_of("The [link](x.md) of `tools/x.py`") == "the-link-of-toolsxpy"


def test_a_broken_link_is_found() -> None:
    assert broken_links(named_page("[a](nowhere.md)"))
    assert broken_links(named_page("[a](performance.md#no-such-part)"))
    assert broken_links(named_page("[`code`](nowhere.py)"))
    assert not broken_links(named_page("[a](performance.md#on-a-gpu) `[x](nowhere.md)` [b](https://x.invalid/y)"))
    assert not broken_links(named_page("```\n[a](nowhere.md)\n```"))


def test_a_missing_file_is_found() -> None:
    assert missing_files(named_page("`tools/nowhere.py`"), set(FLOORS))
    assert missing_files(named_page("`layers/nowhere.py`"), set(FLOORS))
    assert not missing_files(named_page("`layers/cache.py` job.yaml scripts/slurm/*.sbatch"), set(FLOORS))


def test_commands_are_read_whole() -> None:
    page = named_page("```bash\npython tools/a.py --x \\\n    --y  # --z\n```\n`python tools/b.py --w`\n")
    assert [command for _, command in page.commands()] == ["python tools/a.py --x  --y"]
    assert programs("python tools/ablate.py --steps 1") == ["tools/ablate.py"]


def test_a_flag_of_another_program_is_found() -> None:
    page = named_page(
        "```\npython tools/plot_losses.py --steps 1\npython tools/ablate.py --steps 1 --lr 1 --gate-loss 1\n```"
    )
    assert wrong_flags(page, {"--lr"}, set()) == ["docs/x.md:2: tools/plot_losses.py --steps"]
    assert wrong_flags(named_page("```\npython pretrain_gpt.py --zero 1\n```"), {"--lr"}, set())
    assert not wrong_flags(named_page("`python pretrain_gpt.py --zero 1`"), {"--lr"}, set())


def test_names_of_flags_are_found() -> None:
    assert flags_in("`--a-b C`, --no-x; |---|---| a--b --d_e (--f)") == {"--a-b", "--no-x", "--f"}
    assert is_flag_in_source("--gate-loss", 'add(f"--gate-{name}")')
    assert not is_flag_in_source("--gate-loss", 'add("--gate")')

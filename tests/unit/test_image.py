"""The Dockerfile says what setup.py says, and copies what there is. Building it is no test: docs/containers.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from megatron_glue.config.loading import resolve_config
from megatron_glue.training.presets import MOE_DEFAULTS
from tests.support.packaging import DOCKERFILE, dockerfile_steps, setup_requirements
from tests.support.source_tree import ROOT

STEPS = dockerfile_steps(DOCKERFILE.read_text())
TARGETS = ("cpu", "cuda")
ALLOWED = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()


def _of(stage: str, name: str) -> list[str]:
    return [step.text for step in STEPS if (step.stage, step.name) == (stage, name)]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed: pip install -e '.[lint]'")
def test_hadolint_finds_nothing() -> None:
    outcome = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout


def test_both_targets_are_stages_and_run_alike() -> None:
    runtime = [[(step.name, step.text) for step in STEPS if step.stage == target][1:] for target in TARGETS]
    assert len(runtime[0]) > 5
    assert [(name, text.replace("cpu-", "cuda-")) for name, text in runtime[0]] == runtime[1]


def test_what_is_copied_exists_and_may_leave_the_machine() -> None:
    copied = {
        source
        for step in STEPS
        if step.name == "COPY" and not step.text.startswith("--from")
        for source in step.words[:-1]
    }
    assert copied >= {"setup.py", "megatron_glue", "pretrain_gpt.py", "pretrain_moe.py", "scripts"}
    for source in copied:
        assert (ROOT / source).exists(), source
    assert ALLOWED[1] == "*", "nothing goes to the builder unless it is named"
    assert {line.removeprefix("!") for line in ALLOWED if line.startswith("!")} == copied
    assert not [step for step in STEPS if step.name == "ADD"]


def test_stages_are_copied_from_that_exist() -> None:
    stages = {step.stage for step in STEPS}
    for step in STEPS:
        for source in re.findall(r"--from=(\S+)", step.text):
            assert source in stages
            assert source == f"{step.stage}-build"


@pytest.mark.parametrize("target", TARGETS)
def test_torch_and_extras_are_those_of_setup(target: str) -> None:
    required, extras = setup_requirements()
    arguments = dict(text.partition("=")[::2] for text in _of(f"{target}-build", "ARG"))
    assert arguments["TORCH"].strip('"') in required
    for extra in arguments["EXTRAS"].split(","):
        assert extra in extras


@pytest.mark.parametrize("target", TARGETS)
def test_it_ends_as_nobody_in_particular_under_tini(target: str) -> None:
    assert _of(target, "USER") == ["10001"]
    (entrypoint,) = map(json.loads, _of(target, "ENTRYPOINT"))
    assert entrypoint[:2] == ["/usr/bin/tini", "--"], "exec form, or TERM would end at a shell"
    script = ROOT / entrypoint[2].removeprefix("/opt/megatron_glue/")
    assert script.is_file()
    (command,) = map(json.loads, _of(target, "CMD"))
    program = command.index("pretrain_moe.py")
    assert command[0] == "torchrun"
    resolve_config(command[program + 1 :], {}, MOE_DEFAULTS, "pretrain_moe.py")


def test_no_secret_is_asked_for() -> None:
    for step in STEPS:
        if step.name in ("ARG", "ENV"):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY", step.text), step.text


def test_lines_that_go_on_are_one_step() -> None:
    text = "ARG A=1\nFROM x AS y\n# said\nRUN a \\\n    && b\nCOPY --from=z c d ./\n"
    steps = dockerfile_steps(text)
    assert [(step.stage, step.name, step.text) for step in steps] == [
        ("", "ARG", "A=1"),
        ("y", "FROM", "x AS y"),
        ("y", "RUN", "a && b"),
        ("y", "COPY", "--from=z c d ./"),
    ]
    assert steps[3].words == ["c", "d", "./"]

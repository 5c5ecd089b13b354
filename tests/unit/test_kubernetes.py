"""The Kubernetes manifests agree with themselves, with the image, with the launcher they start and with its flags."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.training.presets import MOE_DEFAULTS
from tests.support.packaging import DOCKERFILE, dockerfile_steps
from tests.support.source_tree import ROOT

FOLDER = ROOT / "scripts/kubernetes"
STOPPED_EARLY = 75
SERVICE, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
PYTORCH_JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
PODS = {
    "Job": (JOB["spec"]["template"], JOB["spec"]["completions"]),
    "PyTorchJob": (
        PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"],
        PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"],
    ),
}


def _container(kind: str) -> dict[str, Any]:
    (container,) = PODS[kind][0]["spec"]["containers"]
    return container


def _environment(kind: str) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in _container(kind)["env"]}


def _config(kind: str) -> RunConfig:
    words = _container(kind)["args"]
    flags = words[words.index("pretrain_moe.py") + 1 :]
    return resolve_config([word.replace("=examples/", f"={ROOT}/examples/") for word in flags], {}, MOE_DEFAULTS).config


def _gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def test_the_schema_of_kubernetes_takes_the_job() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[lint]'")
    for document in (SERVICE, JOB):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_pods_find_the_first_one_by_its_name() -> None:
    name, spec = JOB["metadata"]["name"], JOB["spec"]
    assert spec["completionMode"] == "Indexed", "gives pods a host name with their index"
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == SERVICE["metadata"]["name"]
    environ = _environment("Job")
    assert environ["HEAD_NODE"] == f"{name}-0.{SERVICE['metadata']['name']}"
    ports = {port["name"]: port["port"] for port in SERVICE["spec"]["ports"]}
    assert ports == {port["name"]: port["containerPort"] for port in _container("Job")["ports"]}
    assert ports["rendezvous"] == int(environ["HEAD_PORT"])
    assert int(environ["HEAD_WAIT_S"]) > 0, "pods start in any order"


def test_the_job_starts_a_torchrun_per_node_with_what_it_reads() -> None:
    script, *_ = _container("Job")["args"]
    read = set(re.findall(r"^#   ([A-Z_]+) ", (ROOT / script).read_text(), re.MULTILINE))
    environ, spec = _environment("Job"), JOB["spec"]
    assert read >= set(environ) - {"DONE_FILE"}
    assert spec["completions"] == spec["parallelism"] == int(environ["NNODES"])
    assert int(environ["NPROC"]) == _container("Job")["resources"]["limits"]["nvidia.com/gpu"]


def test_failures_that_count_are_those_of_the_program() -> None:
    spec = JOB["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    on_exit = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    by_code = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in on_exit}
    assert by_code == {2: "FailJob", STOPPED_EARLY: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in on_exit} == {_container("Job")["name"]}
    assert f"STOPPED_EARLY={STOPPED_EARLY} " in (ROOT / "scripts/docker/entrypoint.sh").read_text()
    assert spec["backoffLimit"] >= spec["completions"], "one rank that fails ends all pods"


def test_the_operator_is_told_the_same_rendezvous() -> None:
    policy, container = PYTORCH_JOB["spec"]["elasticPolicy"], _container("PyTorchJob")
    assert set(PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]) == {"Worker"}, "with a Master it sets RANK and WORLD_SIZE"
    assert container["name"] == "pytorch"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["pytorchjob-port"] == policy["rdzvPort"]
    assert policy["rdzvBackend"] == "c10d"
    assert "minReplicas" not in policy, "a range of nodes would make the world elastic"
    nproc = int(container["args"][1].removeprefix("--nproc-per-node="))
    assert nproc == container["resources"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("kind", PODS)
def test_the_program_takes_its_flags_on_that_many_ranks(kind: str) -> None:
    config, (_, num_nodes) = _config(kind), PODS[kind]
    validate(config, num_nodes * _container(kind)["resources"]["limits"]["nvidia.com/gpu"], "cuda")
    assert config.logging.summary_path == _environment(kind)["DONE_FILE"]
    annotations = PODS[kind][0]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.logging.metrics_port)
    assert annotations["prometheus.io/path"] == "/metrics"
    assert config.logging.metrics_port in {port["containerPort"] for port in _container(kind)["ports"]}
    assert config.logging.metrics_host == "0.0.0.0", "loopback would be the pod's own"
    mounted = {mount["mountPath"] for mount in _container(kind)["volumeMounts"]}
    assert config.training.save is not None
    for path in (config.training.save, config.logging.summary_path, *config.data.data_path):
        assert f"/{path.split('/')[1]}" in mounted, path


@pytest.mark.parametrize("kind", PODS)
def test_pods_have_shared_memory_time_to_save_and_the_user_of_the_image(kind: str) -> None:
    spec, container = PODS[kind][0]["spec"], _container(kind)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    (shm,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert volumes[shm]["emptyDir"]["medium"] == "Memory"
    limit = _gibibytes(container["resources"]["limits"]["memory"])
    assert _gibibytes(volumes[shm]["emptyDir"]["sizeLimit"]) < limit
    assert spec["terminationGracePeriodSeconds"] >= 300
    (user,) = {int(step.text) for step in dockerfile_steps(DOCKERFILE.read_text()) if step.name == "USER"}
    assert spec["securityContext"]["runAsUser"] == user
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert "command" not in container, "it would stand in for the image's entrypoint"


def test_both_forms_start_the_same_training() -> None:
    flags = {kind: [word for word in _container(kind)["args"] if word.startswith("--")] for kind in PODS}
    assert flags["Job"] == [word for word in flags["PyTorchJob"] if not word.startswith("--nproc")]
    assert _container("Job")["resources"]["limits"] == _container("PyTorchJob")["resources"]["limits"]
    assert PODS["Job"][0]["spec"]["volumes"] == PODS["PyTorchJob"][0]["spec"]["volumes"]

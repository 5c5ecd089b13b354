"""Saved under one layout, read under another: every weight, moment, counter and bias, bit for bit (F103, F104).

Layouts of one world size share a process group, so that a matrix of ordered pairs costs few starts: first every layout
trains and saves, then every layout reads what others have written. What was saved and what was read is compared as
whole tensors, gathered without the code under test.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.gather import gather_full_parameters, gather_full_tensors
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.index import read_index
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed

CPU = torch.device("cpu")
# Two KV heads: split by tp first, what is left of them does not divide by fsdp, so that ranks hold unequal parts.
MODEL = {"qk_layernorm": True, "num_layers": 2, "num_query_groups": 2}
MOE = {"moe_layer_freq": (0, 1), "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 24}
TP, FSDP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"data_parallel_engine": "fsdp2"}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP, ETP = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, EP),
    "fsdp2": (2, FSDP2),
    "tp2": (2, TP),
    "pp2": (2, PP),
    "cp2": (2, CP),
    "fsdp2 dp3": (3, FSDP2),
    "fsdp2 dp2 ep2 edp2": (4, FSDP2 | EP),
    "fsdp2 dp2 tp2": (4, FSDP2 | TP),
    "fsdp2 2 x 2": (4, FSDP2 | {"num_distributed_optimizer_instances": 2}),
    "tp4, two KV heads": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True} | EP),
    "tp2 pp2 ep2": (4, TP | PP | EP),
    "tp2 dp2 ep2 etp2": (4, TP | EP | ETP),
    "pp2 cp2": (4, PP | CP),
}
PAIRS = {
    "one": ("tp2 pp2 ep2", "fsdp2 dp3", "tp4, two KV heads"),
    "dp2": ("tp2 dp2 ep2 etp2", "ep2"),
    "ep2": ("fsdp2 dp2 ep2 edp2", "fsdp2", "tp2"),
    "fsdp2": ("pp2 cp2", "one"),
    "tp2": ("pp2", "fsdp2 dp2 tp2"),
    "pp2": ("tp2", "fsdp2 dp3"),
    "cp2": ("fsdp2 2 x 2",),
    "fsdp2 dp3": ("fsdp2 dp2 tp2", "dp2"),
    "fsdp2 dp2 ep2 edp2": ("tp2 dp2 ep2 etp2", "one"),
    "fsdp2 dp2 tp2": ("tp2 pp2 ep2", "fsdp2 dp3"),
    "fsdp2 2 x 2": ("cp2",),
    "tp4, two KV heads": ("pp2", "fsdp2 dp2 tp2"),
    "tp2 pp2 ep2": ("tp4, two KV heads", "fsdp2 dp3", "one"),
    "tp2 dp2 ep2 etp2": ("ep2", "tp2 pp2 ep2"),
    "pp2 cp2": ("fsdp2 dp2 ep2 edp2",),
}
"""Layout that reads -> layouts that wrote."""

if importlib.util.find_spec("deepspeed"):
    ZERO = {"data_parallel_engine": "deepspeed"}
    LAYOUTS["zero1 dp2"] = (2, ZERO | {"zero_stage": 1})
    LAYOUTS["zero2 dp4 ep2"] = (4, ZERO | EP | {"zero_stage": 2})
    PAIRS["zero1 dp2"] = ("zero2 dp4 ep2", "fsdp2 dp3")
    PAIRS["zero2 dp4 ep2"] = ("zero1 dp2", "tp2 pp2 ep2")
    PAIRS["fsdp2 dp2 tp2"] += ("zero2 dp4 ep2", "zero1 dp2")
    # At stage 3 DeepSpeed cannot split a model with experts.
    LAYOUTS["dense zero3 dp2"] = (2, ZERO | {"zero_stage": 3})
    LAYOUTS["dense fsdp2 dp2 tp2"] = (4, FSDP2 | TP)
    PAIRS["dense zero3 dp2"] = ("dense fsdp2 dp2 tp2",)
    PAIRS["dense fsdp2 dp2 tp2"] = ("dense zero3 dp2",)

WORLD_SIZES = sorted({world_size for world_size, _ in LAYOUTS.values()})


def start(layout: str, corpus: str, **training: Any) -> Session:
    config = small_config(
        corpus,
        model=MODEL,
        moe={"num_experts": 0} if layout.startswith("dense") else MOE,
        parallel=LAYOUTS[layout][1],
        data={"segment_alignment": 4, "seq_length": 64},
        training={"global_batch_size": 12, **training},
    )
    mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    return build_session(config, mesh, CPU, None)


def store_of(root: str, layout: str, session: Session) -> CheckpointStore:
    return CheckpointStore(Path(root) / layout.replace(" ", "-"), 1, session.mesh)


def whole_state(session: Session) -> dict[str, torch.Tensor]:
    """Weights, moments and counters of the whole run, and this rank's buffers; gathered, on every rank."""
    mesh = session.mesh
    found = {f"weight {n}": t for n, t in gather_full_parameters(session.engine.module, mesh).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = [(name, param, _whole(state[key], param, mesh)) for name, param, state in _states(session)]
        found |= {f"{key} {name}": tensor for name, tensor in gather_full_tensors(moments, mesh).items()}
    steps = [(name, torch.zeros(()), state["step"].reshape(1)) for name, _, state in _states(session)]
    found |= {f"step {name}": tensor for name, tensor in gather_full_tensors(steps, mesh).items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def _states(session: Session) -> list[Any]:
    return list(session.optimizer.named_state())


def _whole(tensor: torch.Tensor | FlatRange, param: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    if not isinstance(tensor, FlatRange):
        return tensor
    spec = param.shard_spec
    return tensor.whole(spec.local_shape(mesh.axis_sizes), mesh.edp_group if spec.is_expert else mesh.dp_group)


def buffers(session: Session) -> dict[str, torch.Tensor]:
    """Balancing biases of the layers that this rank holds."""
    return {name: buffer for name, buffer in session.engine.model.state_dict().items() if "expert_bias" in name}


def scramble(session: Session) -> None:
    """Make sure that what is right afterwards was read."""
    with torch.no_grad():
        for tensor in session.engine.module.state_dict().values():
            tensor.fill_(-3.0)
        for _, _, state in _states(session):
            for tensor in state.values():
                (tensor.values if isinstance(tensor, FlatRange) else tensor).fill_(-3.0)


def save_all(rank: int, world_size: int, corpus: str, root: str) -> None:
    """Train and save under every layout of a world size."""
    torch.set_num_threads(1)
    for layout, (size, _) in LAYOUTS.items():
        if size != world_size:
            continue
        session = start(layout, corpus)
        session.metrics.add(train_step(session), 0.0)
        session.metrics.flush(session.host_reader, session.mesh.world_group)
        store = store_of(root, layout, session)
        store.save(session.iteration, session.training_state())
        state = whole_state(session)
        biases = gather_biases(session)
        if rank == 0:
            torch.save({"state": state, "biases": biases, "losses": session.metrics.losses}, store.root / "expected.pt")
        session.close()


def gather_biases(session: Session) -> dict[str, torch.Tensor]:
    named = [(name, torch.zeros(()), tensor) for name, tensor in buffers(session).items()]
    return {name.split("managed.")[-1]: t.clone() for name, t in gather_full_tensors(named, session.mesh).items()}


def load_all(rank: int, world_size: int, corpus: str, root: str) -> list[str]:
    """Read what other layouts saved, under every layout of a world size; returns the pairs that were compared."""
    torch.set_num_threads(1)
    done = []
    for layout, (size, _) in LAYOUTS.items():
        if size != world_size:
            continue
        session = start(layout, corpus)
        for source in PAIRS[layout]:
            store = store_of(root, source, session)
            expected = torch.load(store.root / "expected.pt", weights_only=True)
            scramble(session)
            loaded = store.load(store.find_latest(), session.training_state())
            session.adopt(loaded)
            assert session.iteration == 1
            assert session.metrics.losses == expected["losses"]
            state = whole_state(session)
            assert state.keys() == expected["state"].keys(), f"{source} -> {layout}"
            for name, tensor in expected["state"].items():
                assert torch.equal(state[name], tensor), f"{source} -> {layout}: {name}"
            biases = gather_biases(session)
            assert biases.keys() == expected["biases"].keys()
            for name, tensor in expected["biases"].items():
                assert biases[name].dtype == torch.float32
                assert torch.equal(biases[name], tensor), f"{source} -> {layout}: {name}"
            done.append(f"{source} -> {layout}")
        session.close()
    return done


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("reshard") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("checkpoints"))
    for world_size in WORLD_SIZES:
        run_distributed(save_all, world_size, corpus, root, timeout_s=240)
    return root


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_f103_f104_any_layout_reads_any_other(world_size: int, corpus: str, saved: str) -> None:
    (first, *others) = run_distributed(load_all, world_size, corpus, saved, timeout_s=240)
    expected = [f"{s} -> {name}" for name, (size, _) in LAYOUTS.items() if size == world_size for s in PAIRS[name]]
    assert first == expected
    assert all(other == first for other in others)


def test_what_several_ranks_or_stages_hold_is_written_once(saved: str) -> None:
    """A tied embedding on two stages, replicas of data parallelism, copies of a KV head."""
    names: dict[str, set[str]] = {}
    for layout in LAYOUTS:
        folder = Path(saved) / layout.replace(" ", "-") / "step_00000001"
        index = read_index(folder)
        names[layout] = {name for name in index if not name.startswith("rng.")}
        written = [part.relative_path for tensor in index.values() for part in tensor.slices]
        assert {name for name in index if name.startswith("rng.")} == {
            f"rng.cpu.{rank:05d}" for rank in range(LAYOUTS[layout][0])
        }
        assert set(written) == {f"__{rank}_0.distcp" for rank in range(LAYOUTS[layout][0])}, "every rank writes"
        if layout in ("dp2", "pp2", "cp2", "ep2"):
            assert len(index["model.embedding.weight"].slices) == 1
            assert len(index["optimizer.embedding.weight.exp_avg"].slices) == 1
        if layout == "tp4, two KV heads":
            assert [part.sizes[0] for part in index["model.blocks.0.attention.qkv_weight"].slices] == [1, 1]
    dense = [layout for layout in LAYOUTS if layout.startswith("dense")]
    for layout in LAYOUTS:
        assert names[layout] == names[dense[0] if layout in dense else "one"], "no layout changes names"

"""What a run does after its last step: continue a prompt, gather the summary's numbers, show and write them."""

from __future__ import annotations

from typing import Any

from megatron_glue.parallel.collectives import max_over_ranks
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.generation import SamplingPlan, sample_continuation
from megatron_glue.training.session import Session
from megatron_glue.training.summary import expert_load, peak_memory_bytes


def sample(session: Session) -> str:
    """Continue the configured prompt; every rank must call this.

    Args:
        session: A trained session.

    Returns:
        The continuation without the prompt; empty when it is switched off.
    """
    logging = session.config.logging
    if not logging.sample_prompt or not logging.sample_tokens:
        return ""
    tokenizer, model = session.data.tokenizer, session.built.model
    plan = SamplingPlan(
        num_tokens=logging.sample_tokens,
        max_context_tokens=session.config.data.seq_length,
        seed=session.config.training.seed,
        end_token=tokenizer.eod_id,
    )
    prompt_ids = tokenizer.encode(logging.sample_prompt).tolist()
    model.eval()
    try:
        with session.uncounted():
            new_ids = sample_continuation(session.executor.next_logits, prompt_ids, plan, session.device, session.mesh)
    finally:
        model.train()
    return tokenizer.decode(new_ids)


def collect_summary(session: Session, heldout_loss: float, saver: RunSaver) -> dict[str, Any]:
    """Gather the numbers of ``--summary-path``; every rank must call this.

    Counters of metadata, host reads and reloads are those of this rank and this process; losses are those of the whole
    run, also of what ran before a resume.

    Args:
        session: A trained session, its metrics flushed.
        heldout_loss: Nats per token.
        saver: The run's checkpoints, none in flight.

    Returns:
        JSON values by name.
    """
    newest = saver.newest()
    cache, metrics, stats = session.built.metadata_cache, session.metrics, session.built.activation.stats()
    return {
        "name": session.config.training.name,
        "iterations": session.iteration,
        "iterations_of_this_process": len(metrics.step_times_s),
        "ranks": session.mesh.world_size,
        "device": str(session.device),
        "losses": metrics.losses,
        "grad_norms": metrics.grad_norms,
        "heldout_loss": heldout_loss,
        "unigram_entropy": session.data.unigram_entropy(),
        "tokens_per_second": metrics.tokens_per_second(),
        "tokens": metrics.num_tokens,
        "step_times_s": metrics.step_times_s,
        "step_tokens": metrics.step_tokens,
        "packing_efficiency": session.data.loader.packing_efficiency,
        "micro_batches": session.num_micro_batches,
        "metadata_builds": cache.builds,
        "metadata_reuses": cache.reuses,
        "metadata_built_ahead": cache.built_ahead,
        "cache": cache.manager.statistics.as_dict(),
        "host_reads": session.num_step_host_reads,
        "offloaded_bytes": stats.offloaded_bytes,
        "reloads": stats.num_reloads,
        "reload_copy_ms": stats.copy_ms,
        "reload_wait_ms": stats.reload_wait_ms,
        "overlap_efficiency": stats.overlap_efficiency if stats.num_reloads else None,
        "reload_steps": reload_steps(session),
        "offload_decision": session.built.activation.state_dict().get("decision"),
        "expert_load": expert_load(metrics.expert_counts),
        "expert_counts": metrics.expert_counts,
        "aux_loss": metrics.aux_losses[0] if metrics.expert_counts else None,
        "z_loss": metrics.aux_losses[1] if metrics.expert_counts else None,
        "dropped_tokens": metrics.num_dropped,
        "skipped_updates": session.optimizer.num_skipped_updates,
        "loss_spikes": metrics.num_loss_spikes,
        "rerun_iterations": [rerun.iteration for rerun in session.reruns],
        "peak_memory_bytes": max_over_ranks(peak_memory_bytes(session.device), session.mesh.world_group),
        "checkpoint": None if newest is None else str(newest),
        "saves": saver.num_saved,
        "failed_saves": saver.num_failed,
        "save_stall_s": saver.stall_seconds,
        "save_staging_bytes": saver.staged_bytes,
    }


def reload_steps(session: Session) -> list[dict[str, float]]:
    """Copies of offloaded inputs and what was hidden of them, for each of this process' steps beside its wall time.

    Args:
        session: A trained session. The host waits for the device.

    Returns:
        Per step ``copy_ms``, ``reload_wait_ms``, ``overlap_efficiency`` and ``step_ms``; empty without offload.
    """
    times = session.built.activation.step_times()
    if not times:
        return []
    return [
        {
            "copy_ms": step.copy_ms,
            "reload_wait_ms": step.reload_wait_ms,
            "overlap_efficiency": step.overlap_efficiency,
            "step_ms": 1e3 * seconds,
        }
        for step, seconds in zip(times, session.metrics.step_times_s, strict=True)
    ]

"""The training loop: step, log, evaluate, save, until the run's last iteration.

All ranks take the same turns at the same iterations, since evaluation, saving and reading metrics are collective. What
a step does stands in ``step.py``; what is shown stands in ``monitor.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_glue.config.fields import flag_of
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.faults import FaultWatch
from megatron_glue.training.metrics import StepResult, StepTimer
from megatron_glue.training.monitor import Monitor
from megatron_glue.training.rank_check import check_weights
from megatron_glue.training.session import Session
from megatron_glue.training.step import settle_step, train_step
from megatron_glue.training.stopping import StopRequest, StopVote
from megatron_glue.training.summary import describe_cache
from megatron_glue.training.telemetry.observer import RunObserver
from megatron_glue.training.telemetry.sinks.console import ConsoleSink

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A session and where it reports and saves to.

    Attributes:
        session: The parts of the run.
        saver: Its checkpoints.
        monitor: What the user sees.
        observer: Makes records of figures; unset: the monitor alone shows them.
        stop_vote: Whether a rank was asked to stop; unset: nobody can ask.
        faults: What becomes of steps that are not finite and of losses that jump; unset: nothing.
    """

    session: Session
    saver: RunSaver
    monitor: Monitor
    observer: RunObserver | None = None
    stop_vote: StopVote | None = None
    faults: FaultWatch | None = None

    def save(self) -> None:
        """Save this iteration; nothing happens if it is on disk already. What fails is told, and training goes on."""
        session = self.session
        self.flush()
        session.beat("checkpoint")
        self.saver.save(session.iteration, session.training_state)

    def flush(self) -> None:
        """Read the numbers that wait, and judge them."""
        session = self.session
        session.beat("metrics")
        session.metrics.flush(session.host_reader, session.mesh.world_group)
        if self.faults is not None:
            self.faults.after_flush()

    def evaluate(self) -> float:
        """Loss on the held-out documents, nats per token."""
        session = self.session
        session.beat("evaluation")
        with session.uncounted():
            loss = evaluate(
                session.built.model,
                session.executor,
                session.data.eval_batches(session.device),
                session.mesh,
                seed=session.config.training.seed,
            )
            value = session.host_reader.read(loss)
        self.monitor.say(f"iteration {session.iteration}: held-out loss {value:.4f}")
        if self.observer is not None:
            self.observer.log_evaluation(value)
        return value


def train(run: Run) -> float | None:
    """Train to the last iteration (or to the next multiple of ``exit_interval``), then save and evaluate.

    Asked to stop (a signal, or its time is up), the run saves at the end of the step and evaluates nothing more.

    Args:
        run: A session at any iteration.

    Returns:
        The last held-out loss; ``None`` if it was asked to stop.

    Raises:
        TrainingFaultError: If ``--max-nonfinite-steps`` or ``--loss-spike-action stop`` say so.
        RanksDifferError: Under ``--check-ranks``, if ranks that must hold the same values do not.
    """
    session, config = run.session, run.session.config
    training = config.training
    observer = run.observer or RunObserver(session, run.saver, [ConsoleSink(run.monitor)], run.monitor.say)
    timer = StepTimer(session.device)
    heldout_loss: float | None = None
    stop: StopRequest | None = None
    first, num_checks, num_told = session.iteration + 1, 0, len(session.reruns)
    if training.check_ranks:
        check_weights(session)
        num_checks += 1
    while session.iteration < training.train_iters:
        iteration, start = session.iteration + 1, session.start
        is_logging = iteration % config.logging.log_interval == 0 or iteration in (first, training.train_iters)
        timer.start()
        observer.begin_step(is_logging=is_logging)
        stop, result = _vote_and_step(run)
        is_pausing = (
            is_logging
            or stop is not None
            or any(
                _is_due(iteration, interval)
                for interval in (training.eval_interval, training.save_interval, training.exit_interval)
            )
        )
        if is_pausing:
            result = settle_step(session) or result
        # What the device still owes belongs to the steps, not to the evaluation or the save that would wait for it.
        session.metrics.add(result, timer.stop(wait_for_device=is_pausing))
        observer.end_step()
        run.monitor.step(iteration)
        if is_pausing:
            num_told = _tell_reruns(run, num_told)
        if run.faults is not None:
            run.faults.after_step(start)
        run.saver.look()
        if _is_due(iteration, config.accelerator.metrics_interval):
            _log_counters(session)
        if is_logging:
            run.flush()
            observer.log(result.lr)
            if training.check_ranks:
                check_weights(session)
                num_checks += 1
        if stop is not None:
            run.monitor.say(f"stopping at iteration {iteration}: {stop.describe()}")
            break
        heldout_loss = None
        if _is_due(iteration, training.eval_interval):
            heldout_loss = run.evaluate()
        if _is_due(iteration, training.exit_interval):
            run.monitor.say(f"stopping at iteration {iteration} (--exit-interval {training.exit_interval})")
            break
        if _is_due(iteration, training.save_interval):
            run.save()
    if training.check_ranks:
        num_steps = session.iteration - first + 1
        run.monitor.say(f"--check-ranks: agreed {num_checks} times on weights, in {num_steps} steps on micro-batches")
    run.save()
    if heldout_loss is None and stop is None:
        heldout_loss = run.evaluate()
    run.saver.finish()
    return heldout_loss


def _vote_and_step(run: Run) -> tuple[StopRequest | None, StepResult]:
    """The next step, and whether all ranks are to stop behind it."""
    if run.stop_vote is None:
        return None, train_step(run.session)
    run.stop_vote.begin()
    result = train_step(run.session)
    run.session.beat("vote")
    return run.stop_vote.end(), result


def _tell_reruns(run: Run, num_told: int) -> int:
    """Say how many steps were run again since the last call; returns how many have been told in all."""
    reruns = run.session.reruns
    if new := reruns[num_told:]:
        factor = run.session.config.moe.moe_static_capacity_factor
        steps = f"iteration {new[0].iteration} was" if len(new) == 1 else f"{len(new)} iterations were"
        run.monitor.say(
            f"{steps} run again with exchanges of any size: up to {max(rerun.num_rows for rerun in new):,} rows of "
            f"experts found no room ({flag_of('moe_static_capacity_factor')} {factor:g})"
        )
    return len(reruns)


def _is_due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _log_counters(session: Session) -> None:
    """Tell what the three optimisations did so far, for --log-level debug: reading it waits for the device."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    cache, stats = session.built.metadata_cache, session.built.activation.stats()
    logger.debug(
        "iteration %d: cache hits / misses / evictions, peak: %s; %d host reads; %.1f MiB offloaded, "
        "%.1f ms waited for reloads",
        session.iteration,
        describe_cache(cache.manager.statistics.as_dict()),
        session.num_step_host_reads,
        stats.offloaded_bytes / 2**20,
        stats.reload_wait_ms,
    )

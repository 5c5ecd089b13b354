"""All ranks of a run are started alike: the same versions, the same configuration. A mix is refused before any work.

Ranks of another version, or with another flag, train something else without an error, or wait for each other for ever.
Compared are digests, in one small collective; only if they differ do the facts themselves travel, so that the message
can name the rank and the difference.

What may lie at another place on each machine is not compared: paths of data (whose content is, when it is read), of
offloaded activations and of the summary.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping

import torch.distributed as dist

from megatron_glue.config.command_line import field_values
from megatron_glue.config.fields import value_to_word
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.agreement import gather_texts
from megatron_glue.parallel.collectives import is_same_on_all_ranks
from megatron_glue.training.rank_check import RanksDifferError

OWN_TO_A_MACHINE = frozenset({"data_path", "activation_offload_dir", "summary_path"})


def check_same_start(config: RunConfig, versions: Mapping[str, str]) -> None:
    """Compare how the ranks of the running process group were started; collective, every rank calls it first.

    Args:
        config: This rank's configuration.
        versions: See :func:`megatron_glue.training.run_environment.software`.

    Raises:
        RanksDifferError: On all ranks, with the first rank that differs from rank 0 and in what.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    facts = start_facts(config, versions)
    if is_same_on_all_ranks(int(digest(facts)[:15], 16), group):
        return
    tables = gather_texts(json.dumps({**facts, _HOST: socket.gethostname()}), group)
    raise RanksDifferError(first_difference([json.loads(table) for table in tables]))


def start_facts(config: RunConfig, versions: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks must agree on: versions by name, settings by flag.

    Args:
        config: A configuration.
        versions: Of software, by name.
    """
    settings = {
        spec.flag: value_to_word(spec, value)
        for spec, value in field_values(config)
        if spec.name not in OWN_TO_A_MACHINE
    }
    return {**comparable(versions), **settings}


def comparable(versions: Mapping[str, str]) -> dict[str, str]:
    """Leave the git revision out: a machine may lack git, or differ in files that nothing runs; the digest decides."""
    return {name: version for name, version in versions.items() if name != "git revision"}


def digest(facts: Mapping[str, str]) -> str:
    """Hash facts, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def first_difference(tables: list[dict[str, str]]) -> str:
    """Say in one line which rank differs from the first, and in what.

    Args:
        tables: Each rank's facts, with its host.
    """
    first = tables[0]
    for rank, table in enumerate(tables):
        names = [name for name in {**first, **table} if name != _HOST and first.get(name) != table.get(name)]
        if names:
            differences = ", ".join(
                f"{name} {table.get(name, 'missing')} instead of {first.get(name, 'missing')}" for name in names[:3]
            )
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return (
                f"rank {rank} on {table.get(_HOST, '?')} differs from rank 0 on {first.get(_HOST, '?')}: "
                f"{differences}{more}; start all ranks from one installation with the same settings"
            )
    raise AssertionError("somebody's digest differed")


_HOST = "host"

"""The packages of an environment as a requirements file, so that pip can make the environment again, and two compared.

Read from the packages' own metadata, as ``pip freeze`` does, and without needing pip. A package that was installed from
an address keeps it, without a name and password in it; what is installed from a folder in place (``pip install -e``)
becomes a comment, since its version says nothing. So does this project, of which a record names the revision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit, urlunsplit

PROJECT, ABSENT = "megatron-glue", "absent"
_EDITABLE = re.compile(r"^# (\S+) (\S+), installed in place$")


def installed_packages(distributions: Iterable[metadata.Distribution] | None = None) -> dict[str, str]:
    """List what is installed.

    Args:
        distributions: Where to look; ``None``: in this process' environment.

    Returns:
        Normalised name -> its line of a requirements file, in order of names.
    """
    found: dict[str, str] = {}
    for each in metadata.distributions() if distributions is None else distributions:
        name = each.metadata["Name"]
        if name and _normalised(name) != PROJECT:
            # The first on the path is the one that Python imports.
            found.setdefault(_normalised(name), _requirement(name, each))
    return dict(sorted(found.items()))


def to_requirements(packages: Mapping[str, str], heading: str) -> str:
    """Write the packages as a requirements file.

    Args:
        packages: As :func:`installed_packages` returns them.
        heading: For people, one line.
    """
    return "".join(f"{line}\n" for line in (f"# {heading}", *packages.values()))


def read_requirements(text: str) -> dict[str, str]:
    """Read what :func:`to_requirements` wrote."""
    found = {}
    for line in text.splitlines():
        match = _EDITABLE.match(line) or re.match(r"^([A-Za-z0-9._-]+)(?:==| @ )", line)
        if match:
            found[_normalised(match[1])] = line
    return found


def changed_packages(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what changed between two environments, a line each, in order of names; a package may be :data:`ABSENT`."""
    return [
        f"{name} {_version(then.get(name))} -> {_version(now.get(name))}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirement(name: str, distribution: metadata.Distribution) -> str:
    origin = _origin(distribution)
    if origin.get("dir_info", {}).get("editable"):
        return f"# {name} {distribution.version}, installed in place"
    url = str(origin.get("url", ""))
    if not url or "dir_info" in origin:
        return f"{name}=={distribution.version}"
    parts = urlsplit(url)
    url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    source = origin.get("vcs_info")
    if source:
        url = f"{source['vcs']}+{url}@{source['commit_id']}"
    return f"{name} @ {url}"


def _origin(distribution: metadata.Distribution) -> dict[str, Any]:
    try:
        return json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}


def _version(line: str | None) -> str:
    """The part of a requirement behind its name."""
    if line is None:
        return ABSENT
    in_place = _EDITABLE.match(line)
    return f"{in_place[2]} (in place)" if in_place else re.split(r"==| @ ", line, maxsplit=1)[1]

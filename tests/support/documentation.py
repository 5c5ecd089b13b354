"""What the project's pages claim, as data: links, anchors, flags, commands, files and environment variables.

A page is read line by line. Fenced blocks are code; everything else is prose, in which links stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.source_tree import ROOT

FENCE = re.compile(r"^\s*```")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
INLINE_CODE = re.compile(r"`[^`]*`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
FLAG_FAMILY = re.compile(r"(--[a-z][a-z0-9-]*-)\{")
VARIABLE = re.compile(r"\bMEGATRON_GLUE_[A-Z][A-Z_]*[A-Z]\b")
FILE = re.compile(r"(?<![\w./-])((?:[\w.*-]+/)*[\w.*-]+\.(?:py|yaml|sh|sbatch|pbs|lsf|svg))\b(?![\w/])")
PROGRAM = re.compile(r"(?:^|\s)((?:tools|scripts)/[\w/]+\.(?:py|sh|sbatch)|pretrain_(?:gpt|moe)\.py)(?=\s|$)")


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        path: Below the repository root.
        text: Its text.
    """

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Its path, with slashes."""
        return self.path.relative_to(ROOT).as_posix()

    def lines(self) -> Iterator[tuple[int, str, bool]]:
        """Yield number, text and whether it is code, for each line but the fences."""
        is_code = False
        for number, line in enumerate(self.text.splitlines(), start=1):
            if FENCE.match(line):
                is_code = not is_code
            else:
                yield number, line, is_code

    def links(self) -> Iterator[tuple[int, str]]:
        """Yield line and target of each link in prose."""
        for number, line, is_code in self.lines():
            if not is_code:
                for target in LINK.findall(INLINE_CODE.sub("", line.replace("[`", "[").replace("`]", "]"))):
                    yield number, target

    def anchors(self) -> set[str]:
        """Names that a link may point to, as GitHub makes them out of headings."""
        seen: Counter[str] = Counter()
        found = set()
        for _, line, is_code in self.lines():
            match = None if is_code else HEADING.match(line)
            if match:
                slug = slug_of(match.group(1))
                found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return found

    def commands(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of each command in a fenced block; continued lines are joined, comments cut off."""
        joined, start = "", 0
        for number, line, is_code in self.lines():
            text = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ") if is_code else ""
            start = start if joined else number
            if text.endswith("\\"):
                joined += text[:-1] + " "
                continue
            if joined + text:
                yield start, joined + text
            joined = ""


def slug_of(heading: str) -> str:
    """Turn a heading into the anchor that GitHub gives it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def pages() -> list[Page]:
    """Return README and what else people read."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
    return [Page(file, file.read_text(encoding="utf-8")) for file in files]


def broken_links(page: Page) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    found = []
    for number, target in page.links():
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.path if not path else (page.path.parent / path).resolve()
        if not file.exists():
            found.append(f"{page.name}:{number}: {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in Page(file, file.read_text(encoding="utf-8")).anchors():
            found.append(f"{page.name}:{number}: {target}: no such heading")
    return found


def flags_in(text: str) -> set[str]:
    """Return every long flag that a text names."""
    return set(FLAG.findall(text))


def is_flag_in_source(flag: str, text: str) -> bool:
    """Whether a program's text names a flag, whole or as a family like ``--gate-{name}``."""
    return flag in flags_in(text) or any(flag.startswith(family) for family in FLAG_FAMILY.findall(text))


def wrong_flags(page: Page, run_flags: set[str], launcher_flags: set[str]) -> list[str]:
    """Return flags in a page's commands that the program behind which they stand does not have.

    Args:
        page: The page.
        run_flags: Flags of a run; a program that resolves a configuration has them too.
        launcher_flags: Flags that launching scripts hand on.
    """
    found = []
    for number, command in page.commands():
        for program in programs(command)[:1]:
            text = (ROOT / program).read_text(encoding="utf-8")
            behind = command.split(program, 1)[1]
            others = run_flags if program.startswith("pretrain_") or "resolve_config" in text else set()
            if program.startswith("scripts/"):
                others = run_flags | launcher_flags
            if " -- " in behind:  # the command of another run follows
                others = run_flags
            wrong = [flag for flag in flags_in(behind) if flag not in others and not is_flag_in_source(flag, text)]
            found += [f"{page.name}:{number}: {program} {flag}" for flag in sorted(wrong)]
    return found


def programs(command: str) -> list[str]:
    """Return the project's programs that a command starts."""
    return PROGRAM.findall(command)


def missing_files(page: Page, rooms: set[str]) -> list[str]:
    """Return files of the repository that a page names and that are not there.

    Args:
        page: The page.
        rooms: Packages below ``megatron_glue``; a path may start with one.
    """
    found = []
    for number, line, _ in page.lines():
        for path in FILE.findall(line):
            top = path.split("/")[0]
            base = ROOT / "megatron_glue" if top in rooms and "/" in path else ROOT
            is_ours = "/" in path and top in {"tools", "examples", "scripts", "tests", "docs", "megatron_glue", *rooms}
            if (is_ours or path.startswith("pretrain_")) and not any(base.glob(path)):
                found.append(f"{page.name}:{number}: {path}")
    return found

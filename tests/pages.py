"""Reads the Markdown pages for tests: headings and their anchors, links, sections, code blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "README.md"])
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def prose(path: Path) -> str:
    """A page without its fenced code blocks."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> list[str]:
    """Of every heading, in order, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]


def links(path: Path) -> list[str]:
    """Targets of the links that lead to no other site."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [each for each in found if "://" not in each]


def sections(path: Path) -> dict[str, str]:
    """The text under each heading of the second level, by anchor."""
    _, *parts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)
    names = [part.partition("\n")[0].lower().replace(" ", "-") for part in parts]
    return dict(zip(names, parts, strict=True))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    text = path.read_text(encoding="utf-8")
    return [body for kind, body in _FENCED.findall(text) if kind == language]


def commands(path: Path) -> list[str]:
    """Shell lines of a page, and commands in its text; no comments, continued lines joined."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = "\n".join(body for kind, body in _FENCED.findall(text) if kind in {"", "sh"})
    indented = re.findall(r"^    (\S.*)$", text, re.M)
    inline = re.findall(r"`((?:sudo )?(?:python -m|kvring) [^`\n]+)`", text)
    lines = [*fenced.splitlines(), *indented, *inline]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]

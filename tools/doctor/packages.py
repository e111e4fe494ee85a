"""Owns which versions kvring asks for, and whether they are installed. Imports none of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from tools.doctor.checks import Check, See, fail, ok

SOURCE = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")
_CLAUSE = re.compile(r"(~=|==|!=|>=|<=|>|<)\s*([0-9][0-9.]*)")


def requirements() -> list[str]:
    """What kvring depends on, as pyproject.toml writes it; the installed package's before."""
    try:
        found = requires("kvring") or []
    except PackageNotFoundError:
        found = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [each for each in found if "extra ==" not in each]


def package_checks() -> Iterator[Check]:
    """A line for each package that is missing or of a wrong version, or one that says all is well.

    torch is among them; whether it works is another check.
    """
    wrong, wanted = 0, requirements()
    for requirement in wanted:
        match = _REQUIREMENT.fullmatch(requirement.strip())
        assert match is not None, requirement
        name, clauses = match[1], match[2].strip()
        see = See.TORCH if name in {"torch", "transformers"} else None
        todo = f'pip install "{name}{clauses}"'
        try:
            found = version(name)
        except PackageNotFoundError:
            yield fail(f"package {name}", "is not installed", todo, see)
            wrong += 1
            continue
        if not satisfies(found, clauses):
            yield fail(f"package {name}", f"{found} is installed, not {clauses}", todo, see)
            wrong += 1
    if not wrong:
        yield ok("packages", f"{len(wanted)} installed, of the versions that kvring needs")


def satisfies(found: str, clauses: str) -> bool:
    """Whether a version like 2.13.0+cpu is within clauses like >=2.6,<3; release numbers only."""
    have = numbers(found)
    return all(_holds(have, sign, bound) for sign, bound in _CLAUSE.findall(clauses))


def _holds(have: tuple[int, ...], sign: str, bound: str) -> bool:
    want = numbers(bound)
    if sign == "~=":
        return have >= want and have[: len(want) - 1] == want[:-1]
    length = max(len(have), len(want))
    left, right = (each + (0,) * (length - len(each)) for each in (have, want))
    return {
        "==": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
    }[sign]


def numbers(text: str) -> tuple[int, ...]:
    """The release numbers at a version's start."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple([int(each) for each in found[0].split(".")]) if found else ()

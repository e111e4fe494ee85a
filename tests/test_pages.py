"""The pages keep up with what they are about: links, API reference, help for errors, figures."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import socket
from pathlib import Path

import pytest
import typer

from coord.actions import TurnError
from coord.help import BY_CODE, BY_WORDS, PAGE, anchor, pointed, pointer
from coord.http.errors import body_of
from coord.http.openapi import document
from pipeline.weights import open_model
from tests.modelfile import default_model
from tests.pages import PAGES, ROOT, anchors, commands, links, sections
from tests.test_bad_input import refused
from tests.test_deploy import understood
from tests.test_layering import sources
from tools import cli
from tools.reference import page

HELP = ROOT / PAGE
# Others link to these.
FIXED = (
    "port-in-use", "stage-not-heard-of", "not-enough-memory", "keys", "clock", "slow-link",
    "model-not-supported", "torch", "different-weights", "file-limit",
)  # fmt: skip
# Words that are the system's, not ours.
SYSTEM = {
    os.strerror(errno.EADDRINUSE),
    os.strerror(errno.EMFILE),
    f"killed by {signal.Signals.SIGKILL.name}",
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in links(path):
        name, _, at = target.partition("#")
        where = (path.parent / name).resolve() if name else path
        assert where.exists(), target
        if at:
            assert at in anchors(where), target
    assert len(set(anchors(path))) == len(anchors(path)) or path.name == "CHANGELOG.md"


def test_every_page_is_found_from_the_readme() -> None:
    seen, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        path = ahead.pop()
        if path not in seen and path.suffix == ".md":
            seen.add(path)
            ahead += [(path.parent / each.partition("#")[0]).resolve() for each in links(path)]
    assert {each for each in PAGES if each not in seen} == set()


# ---- the API's reference -------------------------------------------------------------------------


def test_the_reference_is_what_its_script_makes() -> None:
    made = page()
    kept = (ROOT / "docs" / "api-reference.md").read_text(encoding="utf-8")
    assert kept == made, "python -m tools.reference > docs/api-reference.md"


def test_every_field_and_parameter_is_described() -> None:
    described = document()
    for name, schema in described["components"]["schemas"].items():
        for field, each in schema["properties"].items():
            assert each.get("description"), f"{name}.{field}"
    for path, ways in described["paths"].items():
        for operation in ways.values():
            assert operation["summary"]
            for each in operation.get("parameters", ()):
                assert each["description"], (path, each["name"])
            (answer, *_) = operation["responses"]["200"]["content"].values()
            for field, each in answer["schema"].get("properties", {}).items():
                assert each["description"], (path, field)


# ---- help for errors -----------------------------------------------------------------------------


def test_every_anchor_that_an_error_names_is_there() -> None:
    there = anchors(HELP)
    assert set(FIXED) <= set(there)
    assert {*BY_CODE.values(), *BY_WORDS.values()} <= set(there)


def test_every_section_is_reached() -> None:
    contents = {each.removeprefix("#") for each in links(HELP) if each.startswith("#")}
    assert set(sections(HELP)) <= contents | set(BY_CODE.values()) | set(BY_WORDS.values())


def test_a_section_shows_what_leads_to_it() -> None:
    """The literal code or words, so that they are found by searching the page."""
    found = sections(HELP)
    signs = [*BY_CODE.items(), *BY_WORDS.items()]
    assert [(sign, at) for sign, at in signs if sign not in found[at]] == []


def test_what_leads_to_a_section_is_said_somewhere() -> None:
    constants = " | ".join(
        node.value
        for path, tree in sources("coord", "pipeline", "transport", "tools").items()
        if path != "coord/help.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for words in BY_WORDS:
        assert words in SYSTEM or words in constants, words
    for code in BY_CODE:
        assert f"| {code} |" in constants, code


def test_a_terminal_says_where_to_read_on(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        up = ["up", "--model", "toy", "--http", address]
        refused(capfd, 1, up, f"HOST:PORT ({PAGE}#port-in-use)")
    refused(capfd, 1, ["status", "--url", address], f"kvring up ({PAGE}#no-server)")
    refused(capfd, 2, ["stage", "--ring", "no.toml", "--name", "s"], "no.toml: no such file")


def test_an_error_of_the_api_says_where_to_read_on() -> None:
    full = body_of(TurnError(429, "queue_full", "256 turns are waiting already"))["error"]
    assert isinstance(full, dict)
    assert full["doc"] == f"{PAGE}#queue-full"
    plain = body_of(TurnError(400, "invalid_value", "no"))["error"]
    assert isinstance(plain, dict)
    assert "doc" not in plain


def test_a_ring_that_is_not_ready_is_explained_by_what_is_missing() -> None:
    for words, at in (
        ("r: stage s1 (tcp://h:1) has not been heard of", "stage-not-heard-of"),
        ("stages s0 and s1 have different weights or precision (3", "different-weights"),
        ("stage s1 is loading: layer 3", "not-ready"),
    ):
        assert anchor(words, "not_ready") == at
    assert anchor("has not been heard of", "invalid_value") is None, "a client's own words"
    assert pointer("no server at http://h") == f"{PAGE}#no-server"


def test_a_message_is_pointed_once() -> None:
    once = pointed("s0 ended: Address already in use")
    assert pointed(once) == once
    assert once.count(PAGE) == 1
    assert pointed("nothing that is known") == "nothing that is known"


# ---- figures -------------------------------------------------------------------------------------


def test_every_bench_is_named_with_what_it_said() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "bench").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        if "__main__" in path.read_text() and module != "bench.fuzz.guided":
            assert f"python -m {module}" in text or f"{module}`" in text, module


def test_every_command_of_the_pages_exists() -> None:
    """Modules are there, and so are kvring's commands; plain lines are parsed as kvring would."""
    top = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    seen = 0
    for path in PAGES:
        for line in commands(path):
            for module in re.findall(r"python -m ((?:bench|tools|tests)[\w.]*)", line):
                file = ROOT.joinpath(*module.split("."))
                assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), line
                seen += 1
            found = re.match(r"(?:\$ )?(?:\.venv/bin/)?kvring ([a-z]+)(?: ([a-z]+)\b)?", line)
            if found is not None and line[found.end() :][:1] in {"", " "}:
                assert found[1] in top, line
                group = getattr(top.get(found[1]), "commands", None)
                assert group is None or found[2] is None or found[2] in group, line
                seen += 1
            if re.fullmatch(r"\.venv/bin/kvring [\w\s./:-]*", line):
                understood(line.split("kvring ", 1)[1].split())
    assert seen > 100


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "stages-and-slots.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| ([\w.\-]+B?-?[\w.\-]*) \| (\d+ \|.*) \|$", text, re.M)
    return [[name, *(cell.replace(",", "") for cell in rest.split(" | "))] for name, rest in lines]


def test_the_memory_table_adds_up() -> None:
    found = rows()
    assert len(found) == 12
    for name, layers, layer, table, row, whole, weights in found:
        assert int(layers) * int(row) == int(whole), name
        sums = [(int(layers) * int(layer) + tables * int(table)) / 1000 for tables in (1, 2)]
        assert min(abs(each - float(weights)) for each in sums) <= 0.06 + 0.01 * float(weights)


@pytest.mark.model
def test_the_memory_table_is_right_about_the_default_model() -> None:
    source = open_model(default_model())
    config = source.config
    size = config.hidden_size // config.num_attention_heads
    (mine,) = [row for row in rows() if row[0] == "SmolLM2-135M"]
    layer = sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in
                source.layer_shapes(0).values())  # fmt: skip
    assert mine[1:6] == [
        str(source.layers_total),
        str(round(layer / 1e6)),
        str(round(2 * source.vocabulary * config.hidden_size / 1e6)),
        str(2 * config.num_key_value_heads * size * 2),
        str(2 * config.num_key_value_heads * size * 2 * source.layers_total),
    ]

"""ring.toml against whoever mistypes, merges badly or pastes the wrong file: one ConfigError."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.config import ConfigError, loads

VALID = """\
[model]
path = "toy"
name = "m"
dtype = "float32"

[coordinator]
http = "127.0.0.1:8000"
drafter = "lookup"
draft_depth = 3

[limits]
slots = 4
heartbeat_s = 0.5
lost_after_s = 5
max_model_len = 4096

[emulate]
delay_ms = 1.5

[[ring]]
name = "r"
verdicts = "tcp://127.0.0.1:7000"

[[ring.stage]]
name = "s0"
address = "tcp://127.0.0.1:7001"
layers = [0, 3]
device = "cpu"

[[ring.stage]]
name = "s1"
address = "ipc://s1"
layers = [3, 6]
"""
PIECES = [
    "[model]", "[[ring]]", "[[ring.stage]]", "[limits]", "[x]", "=", '"', "'''", '"""', "[", "]",
    "{", "}", ".", "#", "\\", "\\u0000", "\n", "\r\n", "\0", "\t", "nan", "inf", "-inf", "1e999",
    "9" * 5000, "0x" + "f" * 5000, "-1", "true", "1979-05-27T07:32:00Z", "slots = 9", "[" * 600,
    "a." * 200, "é", "\ud7ff", "~nobody/x", "ipc://" + "x" * 300, "tcp://*:1", "'\\ud800'",
    '"tcp://127.0.0.1:99999"', "{" + "a = {" * 300,
]  # fmt: skip


def refused_or_read(text: str) -> None:
    """Either a Config, or one line that names the file, a line that exists, and what is wrong."""
    began = time.thread_time()
    try:
        loads(text)
    except ConfigError as error:
        said = str(error)
        found = re.match(r"ring\.toml:(\d+): ", said)
        assert found is not None, said
        assert 1 <= int(found[1]) <= text.count("\n") + 1, said
        assert len(said) < 1200, len(said)
        assert "\n" not in said, said
    assert time.thread_time() - began < 2.0


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_spoiled_file_is_refused_with_its_line(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        match data.draw(st.sampled_from(["insert", "cut", "move", "value"])):
            case "insert":
                text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[at:]
            case "cut":
                text = text[:at] + text[data.draw(st.integers(at, len(text))) :]
            case "move":
                lines = text.split("\n")
                line = lines.pop(data.draw(st.integers(0, len(lines) - 1)))
                lines.insert(data.draw(st.integers(0, len(lines))), line)
                text = "\n".join(lines)
            case "value":
                places = [found.end() for found in re.finditer(r" = ", text)]
                if places:
                    start = data.draw(st.sampled_from(places))
                    end = text.find("\n", start)
                    text = text[:start] + data.draw(st.sampled_from(PIECES)) + text[end:]
    refused_or_read(text)


HOSTILE: dict[str, tuple[str, str]] = {
    "an integer past the floats": ("heartbeat_s = 0.5", "heartbeat_s = 1" + "0" * 400),
    "a decimal number too long": ("slots = 4", "slots = " + "9" * 5000),
    "a hexadecimal number too long": ("slots = 4", "slots = 0x" + "f" * 5000),
    "another one for a string": ('dtype = "float32"', "dtype = 0x" + "f" * 5000),
    "nobody's home": ('path = "toy"', 'path = "~nobody-has-this-name/m"'),
    "arrays in arrays": ("layers = [0, 3]", "layers = " + "[" * 400 + "]" * 400),
    "arrays without end": ("layers = [0, 3]", "layers = " + "[" * 100_000),
    "a key of many parts": ("slots = 4", "slots." + "a." * 100_000 + "a = 1"),
    "a table of many parts": ("[limits]", "[limits." + "a." * 100_000 + "a]"),
    "a long key": ("slots = 4", "a" * 500_000 + " = 4"),
    "a key of two lines": ("slots = 4", r'"a\nb" = 4'),
    "a long address": ('"ipc://s1"', '"ipc://' + "x" * 500_000 + '"'),
    "a long string": ('dtype = "float32"', 'dtype = "' + "x" * 500_000 + '"'),
    "half a million quotes": ('dtype = "float32"', "dtype = " + '"' * 500_000),
    "many tables": ("[limits]", "[[ring]]\n" * 50_000 + "[limits]"),
    "many keys": ("slots = 4", "\n".join(f"k{i} = {i}" for i in range(30_000))),
}


@pytest.mark.parametrize(("old", "new"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_value_is_refused_at_once(old: str, new: str) -> None:
    assert VALID.count(old) == 1
    text = VALID.replace(old, new)
    with pytest.raises(ConfigError):
        loads(text)
    refused_or_read(text)


_values: Any = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.text("ab.\\/~:[]", max_size=9).map(repr),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from([line for line in VALID.split("\n") if " = " in line]), _values)
@settings(max_examples=300, deadline=None)
def test_any_value_for_any_key(line: str, value: object) -> None:
    key = line.partition(" = ")[0]
    written = str(value).replace("True", "true").replace("False", "false")
    refused_or_read(VALID.replace(line, f"{key} = {written}", 1))

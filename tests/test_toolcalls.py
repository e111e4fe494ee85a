"""Calls found in text: every style, every cut of the text, and everything that is no call."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coord.template import Template
from coord.toolcalls import Begin, Calling, CallParser, More, Part, Style, spell_calls, style_of

NAMES = ("f", "get_weather")
Found = tuple[str, list[tuple[str, str]]]  # the content; the calls with their arguments


def parser(style: Style, *, single: bool = False) -> CallParser:
    ids = count()
    return CallParser(Calling(style, NAMES, single), lambda: f"id{next(ids)}")


def read(style: Style, pieces: list[str], *, single: bool = False) -> Found:
    found = parser(style, single=single)
    parts: list[Part] = []
    for piece in pieces:
        parts += found.feed(piece)
    return joined([*parts, *found.flush()])


def joined(parts: list[Part]) -> Found:
    """As a client puts deltas together; a call's id and name come before its arguments."""
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        if isinstance(part, str):
            content += part
        elif isinstance(part, Begin):
            assert (part.index, part.id) == (len(calls), f"id{len(calls)}")
            calls.append((part.name, ""))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.text)
    return content, calls


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


ARGS = '{"b":1.0,  "a": "x\\u00e9 } \\"]", "n": [{"q": null}]}'
CALL = f'{{"name": "f", "arguments": {ARGS}}}'
LLAMA = f'{{"name": "f", "parameters": {ARGS}}}'
SWAPPED = f'{{"arguments": {ARGS}, "name": "f"}}'


@pytest.mark.parametrize(
    ("style", "text", "found"),
    [
        ("hermes", hermes(CALL), ("", [("f", ARGS)])),
        ("hermes", hermes(CALL, CALL), ("", [("f", ARGS), ("f", ARGS)])),
        ("hermes", "I look.\n" + hermes(CALL), ("I look.", [("f", ARGS)])),
        ("hermes", hermes(CALL) + "\nDone.", ("\nDone.", [("f", ARGS)])),
        ("hermes", hermes(SWAPPED), ("", [("f", ARGS)])),
        ("hermes", hermes('{"name": "f"}'), ("", [("f", "{}")])),
        ("hermes", f"<tool_call>{CALL}", ("", [("f", ARGS)])),
        ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", ("", [("f", ARGS)] * 2)),
        ("hermes", f"<tool_call>{CALL}\n</tool", ("", [("f", ARGS)])),
        ("hermes", hermes(CALL[:-1] + ', "why": [1, "}"], "x": true}'), ("", [("f", ARGS)])),
        ("hermes", hermes(CALL[:-1]), ("", [("f", ARGS)])),  # a brace too few
        ("hermes", hermes(CALL + "}"), ("}\n</tool_call>", [("f", ARGS)])),
        ("hermes", "a < b <tool_cal> <<tool_call>" + CALL, ("a < b <tool_cal> <", [("f", ARGS)])),
        ("hermes", "  \n", ("  \n", [])),
        ("llama3", LLAMA, ("", [("f", ARGS)])),
        ("llama3", f"\n{LLAMA}; {LLAMA}\n", ("", [("f", ARGS)] * 2)),
        ("llama3", f"<|python_tag|>{LLAMA}", ("", [("f", ARGS)])),
        ("llama3", f"So: <|python_tag|>{LLAMA}", ("So:", [("f", ARGS)])),
        ("llama3", f"So: {LLAMA}", (f"So: {LLAMA}", [])),  # only as the whole answer
        ("llama3", LLAMA + " Done.", (" Done.", [("f", ARGS)])),
        ("mistral", f"[TOOL_CALLS] [{CALL}]", ("", [("f", ARGS)])),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", ("", [("f", ARGS)] * 2)),
        ("mistral", f"Hm [1] [TOOL_CALLS] [{CALL}] ok", ("Hm [1] ok", [("f", ARGS)])),
    ],
)  # fmt: skip
def test_calls_are_found_with_their_bytes(style: str, text: str, found: Found) -> None:
    for single in range(1, 8):
        pieces = [text[at : at + single] for at in range(0, len(text), single)]
        assert read(Style(style), pieces) == found
    assert read(Style(style), [text]) == found


@pytest.mark.parametrize(
    "text",
    [
        hermes("f(1)"),
        hermes('{"name": 1, "arguments": {}}'),
        hermes('{"name": "", "arguments": {}}'),
        hermes('{"name": "f", "arguments": "{}"}'),
        hermes('{"name": "f", "arguments": null}'),
        hermes('{"name": "f" "arguments": {}}'),
        hermes('{"name": "f\\q", "arguments": {}}'),
        hermes('{"nome": "f", "arguments": {}}'),
        hermes('{"name": "f", , "arguments": {}}'),
        hermes("{}"),
        hermes("[]"),
        "<tool_call>",
        "<tool_call>\n{",
        '<tool_call>\n{"name": "f", "arg',
        '<tool_call>\n{"arguments": {"a": 1}',
        "<tool",
        "</tool_call>",
        "1 < 2\n",
        '{"name": "f", "parameters": 3}',
        '{"name": "other", "parameters": {"a": 1}}',
        '{"a": {"name": "f", "parameters": {}}}',
        '<|python_tag|>brave.call(query="x")',
        "<|python_tag|>",
        "{",
        "[TOOL_CALLS] f",
        "[TOOL_CALLS] [ 1]",
        "[TOOL_CALLS] [",
        "[TOOL",
        "",
    ],
)
def test_what_is_no_call_is_content_to_the_character(text: str) -> None:
    for style in Style:
        assert read(style, [text]) == (text, [])
        assert read(style, list(text)) == (text, [])
        around = f"Well, {text} so"
        assert read(style, [around]) == (around, [])


def test_a_bare_object_is_a_call_only_of_a_known_function() -> None:
    marked = '<|python_tag|>{"name": "other", "parameters": {"a": 1}}'
    assert read(Style.LLAMA3, [marked]) == ("", [("other", '{"a": 1}')])


def test_arguments_come_as_they_are_generated() -> None:
    found = parser(Style.HERMES)
    assert found.feed('<tool_call>\n{"name": "f", "arguments":') == []
    assert found.feed(' {"a') == [Begin(0, "id0", "f"), More(0, '{"a')]
    assert found.feed('": ') == [More(0, '": ')]
    assert found.unfinished
    assert found.feed("1}") == [More(0, "1}")]
    assert not found.unfinished
    assert found.feed("}\n</tool_call>\n") == []
    assert found.flush() == []


def test_a_call_that_breaks_off_is_unfinished() -> None:
    found = parser(Style.HERMES)
    parts = found.feed('<tool_call>{"name": "f", "arguments": {"a": "b')
    assert joined([*parts, *found.flush()]) == ("", [("f", '{"a": "b')])
    assert found.unfinished


@pytest.mark.parametrize(
    ("style", "text", "ends"),
    [
        ("hermes", hermes(CALL, CALL), hermes(CALL)),
        ("hermes", f"<tool_call>{CALL}<tool_call>", f"<tool_call>{CALL}<t"),
        ("hermes", hermes(CALL) + " and", hermes(CALL)),
        ("llama3", f"{LLAMA}; {LLAMA}", LLAMA),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", f"[TOOL_CALLS] [{CALL},"),
        ("mistral", f"[TOOL_CALLS] [{CALL}] and", f"[TOOL_CALLS] [{CALL}]"),
    ],
)
def test_a_single_call_is_done_with_its_end(style: str, text: str, ends: str) -> None:
    found = parser(Style(style), single=True)
    for number, character in enumerate(text, 1):
        found.feed(character)
        assert found.done == (number >= len(ends)), text[:number]
    assert read(Style(style), [text], single=True) == ("", [("f", ARGS)])


# ---- any text, any cut --------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
FRAGMENT = st.sampled_from(
    [*(mark for style in Style for mark in style.marks), *'{}[],:;"<\\ \n', '"name"', '"f"',
     '"arguments"', '"parameters"', CALL, LLAMA, "words", "{}", "[TOOL", "<tool_", "é"]
)  # fmt: skip


@st.composite
def spelled(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """Calls of random arguments, in a random spacing of their JSON."""
    calls = []
    for value in draw(st.lists(OBJECT, min_size=1, max_size=3)):
        comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :  ")]))
        ascii_ = draw(st.booleans())
        calls.append(("f", json.dumps(value, separators=(comma, colon), ensure_ascii=ascii_)))
    return draw(st.sampled_from(["", "Let me see.", "1 < 2 {"])), calls


@settings(max_examples=150, deadline=None)
@given(spelled(), st.data())
def test_what_was_called_is_found_however_it_is_cut(
    wanted: tuple[str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    content, calls = wanted
    text = "\n".join(part for part in (content, spell_calls(calls)) if part)
    assert read(Style.HERMES, cut(text, data)) == (content, calls)
    bodies = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    text = f"{content}[TOOL_CALLS] [{', '.join(bodies)}]"
    assert read(Style.MISTRAL, cut(text, data)) == (content, calls)
    bodies = [body.replace('"arguments"', '"parameters"', 1) for body in bodies]
    text = ("<|python_tag|>" if content else "").join([content, ";".join(bodies)])
    assert read(Style.LLAMA3, cut(text, data)) == (content, calls)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAGMENT, max_size=14), st.sampled_from(Style), st.booleans())
@example(["<tool_call>", "{", '"name"', ":", '"f"', "}", "<tool_"], Style.HERMES, False)
def test_the_cuts_never_matter_and_no_word_is_lost(
    fragments: list[str], style: Style, single: bool
) -> None:
    text = "".join(fragments)
    whole = read(style, [text], single=single)
    assert read(style, list(text), single=single) == whole
    assert read(style, fragments, single=single) == whole
    content, calls = whole
    if not calls:
        assert content == text
    elif not single:
        shown = content + "".join(arguments for _, arguments in calls)
        assert shown.count("é") == text.count("é")
        assert shown.count("words") == text.count("words")


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", None),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", None),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("""{{ 'ipython' }} {{ '"parameters": ' }}""", "llama3"),
        ("{{ tools }}", None),
    ],
)
def test_the_style_is_the_templates(template: str, style: str | None) -> None:
    assert style_of(template) == style


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", "hermes"),
        ("{% if custom is defined %}{% set tools = custom %}{% endif %}{{ tools }}", "hermes"),
        ("{% for m in messages %}{{ m.tools }}{{ m['tools'] }}{{ 'tools' }}{% endfor %}", None),
        ("{% set tools = [] %}{{ tools }}", None),
        ("", None),
    ],
)
def test_a_template_takes_tools_where_it_reads_them(template: str, style: str | None) -> None:
    assert Template(template + "{{ '<tool_call>' }}").style == style

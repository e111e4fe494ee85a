"""Owns docs/api-reference.md: the API's description (GET /openapi.json) as a page.

    python -m tools.reference > docs/api-reference.md

Made of the classes that check requests; what is said of a field is said there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coord.http.openapi import document

HEADER = """# API reference

Made by `python -m tools.reference` from what `GET /openapi.json` says: change the words there.
[api.md](api.md) explains; this page lists. `null` means unset for every parameter; a name that is
not listed is a 400. With API keys every path but `/health`, `/ready` and the page wants
`Authorization: Bearer KEY`.
"""
Schema = dict[str, Any]
_BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "over {}",
    "maximum": "to {}",
    "exclusiveMaximum": "below {}",
    "maxLength": "of at most {} characters",
    "minItems": "of {} or more",
    "maxItems": "of at most {}",
    "maxProperties": "of at most {}",
}
BOTH = ("ChatRequest", "CompletionRequest")


def page() -> str:
    """The whole page, with a newline at its end."""
    described = document()
    schemas: dict[str, Schema] = described["components"]["schemas"]
    lines = [HEADER, "## Endpoints\n"]
    for path, ways in described["paths"].items():
        for method, operation in ways.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    chat, text = (schemas[name]["properties"] for name in BOTH)
    both = {name: each for name, each in chat.items() if text.get(name) == each}
    lines.append("## Parameters of both completions\n")
    lines += _table({"properties": both})
    lines.append("## Objects\n")
    for name, schema in sorted(schemas.items()):
        lines += _object(name, schema, both if name in BOTH else {})
    return "\n".join(lines)


def _operation(title: str, operation: Schema) -> Iterator[str]:
    yield f"### {title}\n"
    body = operation.get("requestBody")
    asks = "" if body is None else f" Body: {_type(_content(body))}."
    yield f"{operation['summary'].capitalize()}.{asks}\n"
    for each in operation.get("parameters", ()):
        kind = _type(each["schema"])
        yield f"- `{each['name']}` ({each['in']}, {kind}): {each['description']}"
    if "parameters" in operation:
        yield ""
    answer = operation["responses"]["200"]["content"]
    (kind, first), *others = answer.items()
    or_else = "".join(f", or `{other}`" for other, _ in others)
    yield f"Answer: `{kind}`{or_else}.\n"
    fields = first["schema"].get("properties", {})
    yield from (f"- `{name}`: {each['description']}" for name, each in fields.items())
    if fields:
        yield ""
    errors = [status for status in operation["responses"] if status != "200"]
    if errors:
        yield f"Else an [Error](#error): {', '.join(errors)}.\n"


def _content(body: Schema) -> Schema:
    (found,) = body["content"].values()
    schema: Schema = found["schema"]
    return schema


def _object(name: str, schema: Schema, known: Schema) -> Iterator[str]:
    yield f"### {name}\n"
    if "description" in schema:
        yield f"{' '.join(schema['description'].split())}\n"
    if known:
        yield "The parameters of both completions, and:\n"
    own = {field: each for field, each in schema["properties"].items() if field not in known}
    yield from _table({**schema, "properties": own})


def _table(schema: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    for field, each in _fields(schema):
        default = "required" if field in required else _default(each)
        text = " ".join(each["description"].split())
        yield f"| `{field}` | {_type(each)} | {default} | {text} |".replace("|  |", "| |")
    yield ""


def _fields(schema: Schema, before: str = "") -> Iterator[tuple[str, Schema]]:
    """Every field, those of an object inside it behind it."""
    for name, each in schema["properties"].items():
        yield before + name, each
        if "properties" in each:
            yield from _fields(each, f"{before}{name}.")


def _default(each: Schema) -> str:
    if each.get("default") is None:
        return ""
    return f"`{json.dumps(each['default'])}`"


def _type(schema: Schema) -> str:
    """In words, with its bounds; null is not said: it means unset everywhere."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        kind = f"array of ({_type(schema['items'])})"
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        kind = f"object of {_type(more)}"
    if "minLength" in schema and "maxLength" in schema:
        return f"{kind} of {schema['minLength']} to {schema['maxLength']} characters"
    said = [words.format(_short(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    return " ".join([kind, *said])


def _short(bound: float) -> str:
    """A power of two as such, so that 2^63 can be read."""
    size = abs(int(bound))
    sign = "-" if bound < 0 else ""
    if size >= 1 << 31 and size & (size - 1) == 0:
        return f"{sign}2^{size.bit_length() - 1}"
    return f"{bound:g}" if bound < 1e6 else str(bound)


if __name__ == "__main__":
    print(page(), end="")

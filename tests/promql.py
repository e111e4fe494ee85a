"""As much of PromQL as the dashboard uses: all of an expression is read, or an AssertionError.

Instant and range vectors are told apart, as Prometheus does: rate() wants a range, sum() none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RANGED = {"rate", "increase"}
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
_TOKEN = re.compile(
    r"\s*(?:(?P<duration>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<number>\d+(?:\.\d+)?)"
    r'|(?P<text>"(?:[^"\\]|\\.)*")|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<sign>=~|!=|!~|[-+*/(){},=]))'
)


@dataclass
class Used:
    """A metric of an expression, the labels it is matched by, and those it is grouped by."""

    metric: str
    labels: dict[str, str] = field(default_factory=dict)  # label: value, or pattern
    grouped: set[str] = field(default_factory=set)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.used = text, list[Used]()
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            assert match is not None, f"{text!r}: what is {text[at:]!r}?"
            assert match.lastgroup is not None
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self._tokens.append(("end", ""))

    def peek(self) -> str:
        return self._tokens[0][1]

    def take(self, *wanted: str) -> str:
        kind, value = self._tokens.pop(0)
        assert kind in wanted or value in wanted, f"{self.text!r}: {value!r}, not {wanted}"
        return value

    def sums(self) -> bool:
        """Terms joined by operators; True for a range vector."""
        ranged = self.term()
        while self.peek() in {"+", "-", "*", "/"}:
            assert not ranged, f"{self.text!r}: a range in arithmetic"
            self.take("sign")
            assert not self.term(), f"{self.text!r}: a range in arithmetic"
        return ranged

    def term(self) -> bool:
        if self.peek() == "(":
            self.take("(")
            ranged = self.sums()
            self.take(")")
            return ranged
        if self._tokens[0][0] == "number":
            self.take("number")
            return False
        name = self.take("name")
        if name in AGGREGATIONS:
            return self.aggregation()
        if name in RANGED:
            self.take("(")
            assert self.sums(), f"{self.text!r}: {name} wants a range"
            self.take(")")
            return False
        if name == "histogram_quantile":
            self.take("(")
            self.take("number")
            self.take(",")
            first = len(self.used)
            assert not self.sums()
            for each in self.used[first:]:
                assert "le" in each.grouped, f"{self.text!r}: the buckets are gone"
            self.take(")")
            return False
        return self.selector(name)

    def aggregation(self) -> bool:
        grouped: set[str] = set()
        if self.peek() == "by":
            self.take("by")
            self.take("(")
            grouped.add(self.take("name"))
            while self.peek() == ",":
                self.take(",")
                grouped.add(self.take("name"))
            self.take(")")
        self.take("(")
        first = len(self.used)
        assert not self.sums(), f"{self.text!r}: a range is not summed"
        self.take(")")
        for each in self.used[first:]:
            each.grouped |= grouped
        return False

    def selector(self, name: str) -> bool:
        used = Used(name)
        self.used.append(used)
        if self.peek() == "{":
            self.take("{")
            while self.peek() != "}":
                label = self.take("name")
                self.take("=", "=~", "!=", "!~")
                used.labels[label] = self.take("text").strip('"')
                if self.peek() != "}":
                    self.take(",")
            self.take("}")
        if self._tokens[0][0] == "duration":
            self.take("duration")
            return True
        return False


def read(text: str) -> list[Used]:
    """The metrics of an expression. AssertionError where it is none."""
    reader = _Reader(text)
    assert not reader.sums(), f"{text!r}: a range can't be drawn"
    reader.take("end")
    return reader.used

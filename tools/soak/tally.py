"""Owns what a soak has seen so far: outcomes, mismatches, bad ends, latencies. Any thread adds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tools.soak.judge import Window, bad_end, mismatch, unexplained
from tools.soak.record import Outcome, Reading, Record
from tools.soak.truth import Toy, prompts

FAILED = {Outcome.CUT, Outcome.UNREACHABLE, Outcome.ERROR, Outcome.REFUSED}


@dataclass(slots=True)
class Tally:
    """toy: what replies are compared with at once; None: complete ones are kept for later."""

    toy: Toy | None
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    mismatches: list[str] = field(default_factory=list)
    bad_ends: list[str] = field(default_factory=list)
    failed: list[Record] = field(default_factory=list)
    kept: list[Record] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    texts: list[tuple[float, int]] = field(default_factory=list)  # (when it ended, its tokens)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: Record) -> None:
        """One request that is over."""
        found = self._differs(record)
        with self._lock:
            assert record.outcome is not None, record
            self.outcomes[record.outcome.value] += 1
            self.kinds[record.wanted.kind] += 1
            if record.outcome in FAILED:
                self.codes[f"{record.outcome.value}: {record.code.partition('(')[0]}"] += 1
                self.failed.append(record)
            if found is not None:
                self.mismatches.append(f"{record.wanted.kind}: {found}; {record.wanted.body}")
            ended = bad_end(record)
            if ended is not None:
                self.bad_ends.append(f"{record.wanted.kind}: {ended}; {record.wanted.body}")
            self._time(record)
            if self.toy is None and record.outcome is Outcome.COMPLETE:
                self.kept.append(record)

    def _differs(self, record: Record) -> str | None:
        if self.toy is None:
            return None
        toy, body = self.toy, record.wanted.body
        length = record.usage.get("prompt_tokens")
        found = mismatch(
            record,
            prompts(record.wanted, length if isinstance(length, int) else None),
            lambda prompt, index: toy.expect(body, prompt, index),
        )
        with self._lock:
            self.compared += any(choice.began for choice in record.choices)
        return found

    def _time(self, record: Record) -> None:
        if record.outcome is not Outcome.COMPLETE:
            return
        self.texts.append((record.ended, record.tokens))
        if record.wanted.reading is Reading.WHOLE:
            self.total_s.append(record.ended - record.sent)
            if record.streamed and record.pieces:
                self.first_s.append(record.pieces[0] - record.sent)
                self.gaps_s.extend(after - before for before, after in pairwise(record.pieces))

    def unexplained(self, faults: Sequence[Window], deaths: Sequence[Window]) -> list[str]:
        """Requests that failed although nothing was broken."""
        found = []
        for record in self.failed:
            why = unexplained(record, faults, deaths)
            if why is not None:
                found.append(f"{record.wanted.kind}: {why}")
        return found


def quantile(values: Sequence[float], share: float) -> float | None:
    """Of the sorted values, the one at this share; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

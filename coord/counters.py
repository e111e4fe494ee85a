"""Owns what the scheduler counts: totals of all turns, and each ring's own figures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Counters since the process began; the names are those of GET /metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefilled_tokens: int = 0  # rows sent as prefill, a turn's own resume included
    copied_rows: int = 0
    drafts_accepted: int = 0
    drafts_rejected: int = 0
    drafts_wasted: int = 0  # rows of frames behind a wrong draft
    resumed: int = 0


@dataclass(slots=True)
class Stats:
    """What one ring did since the process began; exported as counters."""

    formed: int = 0
    lost: int = 0
    stale: int = 0  # answers to frames that nobody waits for any more
    refused: int = 0  # segments and copies that a stage refused
    hop_s: float | None = None  # last ping's round trip, seconds
    verdicts: int = 0
    wait_us: dict[str, int] = field(default_factory=dict)
    forward_us: dict[str, int] = field(default_factory=dict)

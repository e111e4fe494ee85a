"""Owns the serve measurement: a mixed load on one server, and what a long prompt does to a turn.

Closed loop: so many clients, each asks again when it has its reply. Open loop: requests arrive at a
rate, at random but the same in every run, whether or not the server keeps up.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tools.client import Client, Json
from tools.decode import Progress, bodies, prompts
from tools.errors import ToolError
from tools.load import Timeline, Watch, Watcher, ask, ask_at, ask_in_turn
from tools.multiturn import Prose, tokens_per_word

WARM_PIECES = 12  # of the neighbour's replies before the long prompt comes
MAX_REPLIES = 200  # of the neighbour: a toy's are short
MAX_SHARE = 0.95  # quantile that is reported beside the median


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. rate_per_s: of arrivals; None for a closed loop of `clients`."""

    clients: int
    requests: int
    rate_per_s: float | None
    max_tokens: int
    long_tokens: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """The mixed load's result. Times in ms; gaps are between two pieces of one reply."""

    tokens_per_s: float
    ttft_ms: float
    ttft_95_ms: float
    gap_ms: float
    gap_95_ms: float
    frames_in_flight: float | None
    busy: dict[str, float]
    replies: int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A turn's gaps, in s, before, while and after a long prompt prefills beside it."""

    before: list[float]
    during: list[float]
    prompt_tokens: int | None
    prefill_s: float

    @property
    def usual_ms(self) -> float:
        """The median gap at that load."""
        return median(self.during) * 1e3

    @property
    def longest_ms(self) -> float:
        """The longest gap at that load."""
        return max(self.during) * 1e3

    @property
    def ratio(self) -> float:
        """The longest gap at that load against the usual one."""
        return self.longest_ms / self.usual_ms


def mixed(client: Client, plan: Plan, progress: Progress) -> Mixed:
    """Run the mixed load."""
    texts = [text for several in zip(*prompts().values(), strict=False) for text in several]
    model = client.first_model()
    wanted = bodies(texts, plan.requests, model, plan.max_tokens, "serve")
    watcher = Watcher(client)
    progress(f"{plan.requests} requests, {_kind(plan)}")
    started = time.monotonic()
    with watcher.look():
        if plan.rate_per_s is None:
            lines = ask_in_turn(client, iter(wanted), plan.clients)
        else:
            arrivals = random.Random("kvring")
            pauses = [arrivals.expovariate(plan.rate_per_s) for _ in wanted]
            lines = ask_at(client, wanted, pauses)
    return _mixed(lines, time.monotonic() - started, watcher.seen)


def neighbour(client: Client, plan: Plan, progress: Progress) -> Neighbour:
    """Let one turn decode, then send a long prompt that nobody has seen. Raises ToolError."""
    model = client.first_model()
    prose = Prose(tokens_per_word(client, model))
    prose.restart(1)
    texts = [text for several in prompts().values() for text in several]
    talk = bodies(texts, MAX_REPLIES, model, max(200, plan.long_tokens // 8), "neighbour")
    long: Json = {
        **bodies(["x"], 1, model, 1, "long prompt")[0],
        "messages": [{"role": "user", "content": prose.message(1, 1, plan.long_tokens)}],
    }
    warm, over = threading.Event(), threading.Event()
    lines: list[Timeline] = []
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(_decode, client, talk, lines, warm, over)
        try:
            warm.wait()
            progress(f"a prompt of {plan.long_tokens} tokens beside a reply")
            start = time.monotonic()
            prefilled = ask(client, long)
            end = prefilled.sent + prefilled.reply.total_s
        finally:
            over.set()
        decoding.result()
    pairs = [pair for line in lines for pair in pairwise(at for at, _ in line.pieces)]
    during = [b - a for a, b in pairs if b > start and a < end]
    before = [b - a for a, b in pairs if b <= start]
    if not during or not before:
        raise ToolError("no reply was decoded beside the long prompt: nothing to compare")
    return Neighbour(before, during, prefilled.reply.prompt_tokens, end - start)


def _decode(
    client: Client,
    talk: list[Json],
    lines: list[Timeline],
    warm: threading.Event,
    over: threading.Event,
) -> None:
    """One reply after another until `over`; `warm` once the first have had WARM_PIECES."""
    pieces = 0

    def note() -> None:
        nonlocal pieces
        pieces += 1
        if pieces >= WARM_PIECES:
            warm.set()

    try:
        for body in talk:
            lines.append(ask(client, body, note))
            if over.is_set():
                return
    finally:
        warm.set()


def _kind(plan: Plan) -> str:
    if plan.rate_per_s is None:
        return f"{plan.clients} clients in a closed loop"
    return f"{plan.rate_per_s:g} a second"


def _mixed(lines: list[Timeline], took_s: float, seen: Watch) -> Mixed:
    firsts = sorted((line.first - line.sent) * 1e3 for line in lines)
    gaps = sorted(gap * 1e3 for line in lines for gap in line.gaps) or [0.0]
    return Mixed(
        tokens_per_s=sum(line.reply.tokens for line in lines) / took_s,
        ttft_ms=median(firsts),
        ttft_95_ms=firsts[int(MAX_SHARE * (len(firsts) - 1))],
        gap_ms=median(gaps),
        gap_95_ms=gaps[int(MAX_SHARE * (len(gaps) - 1))],
        frames_in_flight=seen.frames_in_flight,
        busy={name: round(share, 3) for name, share in seen.busy.items()},
        replies=len(lines),
    )

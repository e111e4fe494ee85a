"""Owns the multi-turn measurement: the same conversation cold and cached, turn by turn.

Each round is one conversation: a long first turn, then short follow-ups. Every turn is sent twice
with the same messages, once with reuse off (cold) and once with it on (cached), in alternating
order, so that both arms see the same machine. Greedy; both must give the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tools.client import Client, Json, Reply, ServerError, number
from tools.errors import ToolError

COLD, CACHED = "cold", "cached"
TOKENS_PER_WORD = 1.35  # English, where the server has no /tokenize
ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "bench" / "conversation.txt"
QUESTIONS = (
    "Which of these lines would you keep, and why?",
    "What do they have in common?",
    "Answer in one short paragraph: what has changed?",
    "Who is speaking, do you think?",
    "Give the new lines a title and defend it.",
    "Which line contradicts an earlier one?",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Token counts are what the text is cut to, by the server's tokenizer."""

    turns: int = 6
    first_tokens: int = 1500
    suffix_tokens: int = 80
    max_tokens: int = 48
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request. ttft_ms by the client's clock; what the server did not say is None."""

    round: int
    turn: int
    arm: str
    ttft_ms: float | None
    server_ttft_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    prefilled_tokens: int | None
    tokens: int
    tokens_per_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One turn over all rounds: medians, and (lowest, highest) of the times."""

    turn: int
    prompt_tokens: float | None
    cold_prefilled: float | None
    cold_ms: float
    cold_range_ms: tuple[float, float]
    cached_prefilled: float | None
    cached_ms: float
    cached_range_ms: tuple[float, float]
    ratio: float
    cold_server_ms: float | None
    cached_server_ms: float | None
    tokens_per_s: float | None
    same_text: bool


def measure(client: Client, plan: Plan, progress: Callable[[str], None]) -> list[Measurement]:
    """Run the whole plan; raises ToolError where the server fails."""
    model = client.first_model()
    prose = Prose(tokens_per_word(client, model))
    base: Json = {"model": model, "temperature": 0, "max_tokens": plan.max_tokens}
    progress("warming up")
    _ask(client, {**base, "messages": [{"role": "user", "content": "Hello."}]})
    results: list[Measurement] = []
    for round_ in range(1, plan.rounds + 1):
        prose.restart(round_)
        messages: list[Json] = []
        for turn in range(1, plan.turns + 1):
            wanted = plan.first_tokens if turn == 1 else plan.suffix_tokens
            messages.append({"role": "user", "content": prose.message(round_, turn, wanted)})
            arms = (COLD, CACHED) if (round_ + turn) % 2 else (CACHED, COLD)
            for arm in arms:
                progress(f"round {round_}/{plan.rounds}, turn {turn}/{plan.turns}, {arm}")
                reply = _ask(client, {**base, **_reuse(arm), "messages": messages})
                results.append(_measurement(round_, turn, arm, reply))
            cached = next(r for r in results[-2:] if r.arm == CACHED)
            messages.append({"role": "assistant", "content": cached.text})
    return results


def rows(results: list[Measurement]) -> list[Row]:
    """The table: one row per turn, medians over the rounds."""
    return [_row(turn, results) for turn in sorted({result.turn for result in results})]


def mismatches(results: list[Measurement]) -> list[tuple[int, int]]:
    """(round, turn) of every pair whose texts differ."""
    texts: dict[tuple[int, int], list[str]] = {}
    for result in results:
        texts.setdefault((result.round, result.turn), []).append(result.text)
    return [key for key, pair in texts.items() if any(text != pair[0] for text in pair)]


def as_json(result: Measurement | Row | Plan) -> Json:
    """A plain object for the JSON report."""
    return asdict(result)


class Prose:
    """Varied English of a wanted length: the sentences of bench/conversation.txt, reordered.

    The order depends on the round alone, so every run sends the same text, and no two rounds share
    a prefix that the cached arm could profit from.
    """

    def __init__(self, tokens_per_word: float) -> None:
        if not TEXT.is_file():
            raise ToolError(f"the bench needs {TEXT}: run it from a checkout of kvring")
        self._sentences = TEXT.read_text(encoding="utf-8").splitlines()
        self._tokens_per_word = tokens_per_word
        self.restart(0)

    def restart(self, round_: int) -> None:
        """Begin the conversation of another round."""
        self._random = random.Random(f"kvring {round_}")
        self._waiting: list[str] = []

    def message(self, round_: int, turn: int, tokens: int) -> str:
        """About `tokens` tokens: whole sentences, the last one cut, and a question."""
        question = QUESTIONS[(round_ + turn) % len(QUESTIONS)]
        opening = f"Notebook {round_}, page {turn}."
        budget = int(tokens / self._tokens_per_word)
        words: list[str] = []
        budget -= len(question.split()) + len(opening.split())
        while len(words) < budget:
            if not self._waiting:
                self._waiting = self._random.sample(self._sentences, len(self._sentences))
            words += self._waiting.pop().split()
        return " ".join([opening, *words[: max(0, budget)], question])


def tokens_per_word(client: Client, model: str) -> float:
    """How many tokens the server's tokenizer makes of a word of our text."""
    text = " ".join(TEXT.read_text(encoding="utf-8").split()) if TEXT.is_file() else "a word"
    try:
        answer = client.post("/tokenize", {"model": model, "prompt": text})
    except ServerError:
        return TOKENS_PER_WORD
    count = answer.get("count")
    if not isinstance(count, int):
        tokens = answer.get("tokens")
        count = len(tokens) if isinstance(tokens, list) else 0
    return count / len(text.split()) if count > 0 else TOKENS_PER_WORD


def _reuse(arm: str) -> Json:
    """Cold: match nothing, and leave nothing that the cached arm could match."""
    if arm == CACHED:
        return {}
    return {"kvring": {"reuse": False}, "cache_salt": "bench-cold"}


def _ask(client: Client, body: Json) -> Reply:
    reply = Reply()
    reply.read(client.chat(body), lambda _: None)
    return reply


def _measurement(round_: int, turn: int, arm: str, reply: Reply) -> Measurement:
    return Measurement(
        round=round_,
        turn=turn,
        arm=arm,
        ttft_ms=None if reply.ttft_s is None else reply.ttft_s * 1e3,
        server_ttft_ms=number(reply.kvring.get("ttft_ms")),
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached,
        prefilled_tokens=reply.prefilled,
        tokens=reply.tokens,
        tokens_per_s=reply.tokens_per_s,
        text=reply.text,
    )


def _row(turn: int, results: list[Measurement]) -> Row:
    cold = [r for r in results if r.turn == turn and r.arm == COLD]
    cached = [r for r in results if r.turn == turn and r.arm == CACHED]
    cold_ms = _times(cold)
    cached_ms = _times(cached)
    different = {at for _, at in mismatches(results)}
    return Row(
        turn=turn,
        prompt_tokens=_median([r.prompt_tokens for r in cached]),
        cold_prefilled=_median([r.prefilled_tokens for r in cold]),
        cold_ms=median(cold_ms),
        cold_range_ms=(min(cold_ms), max(cold_ms)),
        cached_prefilled=_median([r.prefilled_tokens for r in cached]),
        cached_ms=median(cached_ms),
        cached_range_ms=(min(cached_ms), max(cached_ms)),
        ratio=median(cold_ms) / max(1e-6, median(cached_ms)),
        cold_server_ms=_median([r.server_ttft_ms for r in cold]),
        cached_server_ms=_median([r.server_ttft_ms for r in cached]),
        tokens_per_s=_median([r.tokens_per_s for r in cached + cold]),
        same_text=turn not in different,
    )


def _times(results: list[Measurement]) -> list[float]:
    times = [result.ttft_ms for result in results if result.ttft_ms is not None]
    if not times:
        raise ToolError("the server sent no text: nothing to time (is --max-tokens too small?)")
    return times


def _median(values: list[int | None] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None

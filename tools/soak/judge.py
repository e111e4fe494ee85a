"""Owns the verdict on one request: is its text the truth, and did its answer end as it must.

Pure: records and truths in, words out. What cannot be decided yet (was there a fault?) is a
separate question, asked at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tools.soak.record import Choice, Outcome, Record
from tools.soak.truth import Expected

HALF = "\ufffd"  # half a character at the end of a reply that was cut short
GRACE_S = 3.0  # behind a fault: clients' connections are still being refused or cut
Window = tuple[float, float]


def differs(choice: Choice, expected: Expected, *, over: bool) -> str | None:
    """How a reply differs from the truth; None where it doesn't. over: it came to its end."""
    if not over:
        got, want = choice.text.rstrip(HALF), expected.text
        if not want.startswith(got):
            return f"text {got!r} is no beginning of {want!r}"
        if choice.ids is not None and not _starts(expected.tokens, choice.ids):
            return f"tokens {choice.ids} are no beginning of {list(expected.tokens)}"
        return None
    if choice.text != expected.text:
        return f"text {choice.text!r}, not {expected.text!r}"
    if choice.ids is not None:
        # a stop token is no part of the text; where a stop string cut, the last one is its own
        whole = expected.tokens[: expected.count and expected.count - expected.stopped]
        cut = expected.count is None and _starts(whole, choice.ids)
        if not cut and choice.ids != list(whole):
            return f"tokens {choice.ids}, not {list(whole)}"
    if choice.finishes != [expected.finish]:
        return f"finish {choice.finishes}, not {expected.finish}"
    return None


def mismatch(
    record: Record, prompts: Iterable[bytes], expect: Callable[[bytes, int], Expected]
) -> str | None:
    """How a request's replies differ from serial decoding of every prompt that it can have had."""
    if not any(choice.began for choice in record.choices):
        return None
    over = record.outcome is Outcome.COMPLETE
    first: str | None = None
    for prompt in prompts:
        found, counts = None, 0
        for index, choice in enumerate(record.choices):
            expected = expect(prompt, index)
            found = found or differs(choice, expected, over=over)
            counts += expected.count if expected.count is not None else record.tokens
        if found is None and over and record.wanted.choices == 1 and counts != record.tokens:
            found = f"completion_tokens {record.tokens}, not {counts}"
        if found is None:
            return None
        first = first or found
    return first or f"no prompt of {record.usage.get('prompt_tokens')} tokens was asked for"


def bad_end(record: Record) -> str | None:
    """What is wrong with the end of an answer; None where it is one finish or one error."""
    if record.outcome is Outcome.ENDLESS:
        return "it never ended"
    if record.outcome is Outcome.LEFT or record.status != 200:
        return None
    finishes = [len(choice.finishes) for choice in record.choices]
    if record.outcome in (Outcome.COMPLETE, Outcome.CANCELLED):
        if any(count != 1 for count in finishes):
            return f"finishes of its choices: {finishes}"
        if record.errors:
            return "a finish and an error"
    if any(count > 1 for count in finishes):
        return f"finishes of its choices: {finishes}"
    if not record.streamed or record.outcome is Outcome.CUT:
        return None
    if record.outcome is Outcome.ERROR and record.errors != 1:
        return f"{record.errors} error events"
    if record.dones != 1:
        return f"{record.dones} times [DONE]"
    return f"{record.behind} events behind [DONE]" if record.behind else None


def overlaps(record: Record, windows: Sequence[Window]) -> bool:
    """A fault was there while the request was, or shortly before."""
    return any(start <= record.ended and record.sent <= end + GRACE_S for start, end in windows)


def unexplained(record: Record, faults: Sequence[Window], deaths: Sequence[Window]) -> str | None:
    """A request that failed although nothing was broken. deaths: of the coordinator."""
    if record.outcome in (Outcome.CUT, Outcome.UNREACHABLE) and not overlaps(record, deaths):
        return f"{record.outcome} while the coordinator lived: {record.code}"
    failed = record.outcome in (Outcome.ERROR, Outcome.REFUSED) and record.status != 429
    if failed and not overlaps(record, faults):
        return f"{record.outcome} without a fault: {record.status} {record.code}"
    return None


def _starts(whole: Sequence[int], part: Sequence[int]) -> bool:
    return list(whole[: len(part)]) == list(part)

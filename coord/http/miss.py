"""Owns the words of a miss: where a prompt stopped being resident, and why. Knows no ring."""

from __future__ import annotations

from collections.abc import Sequence

from coord.actions import Admitted
from coord.ledger import Miss
from coord.tokenizer import Tokenizer

QUOTED_TOKENS = 8  # of the prompt and of what is resident; enough to recognise a timestamp


def explain(
    admitted: Admitted,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    reuse: bool,
    corrected: bool,
    other_salt: bool,
) -> dict[str, object] | None:
    """The `miss` of a response; None when all but the last token was resident.

    reuse: the request allowed it. corrected: the stages refused what was matched at first.
    other_salt: the session's last request had another cache_salt.
    """
    if admitted.matched >= len(prompt) - 1:
        return None
    miss = admitted.miss or Miss(admitted.matched, "refused" if corrected else "new")
    here = prompt[miss.position : miss.position + QUOTED_TOKENS]
    reason = miss.reason
    if not reuse:
        reason = "reuse off"
    elif reason == "edited" and _same_text(tokenizer, here, miss.resident):
        reason = "template"
    elif reason == "new" and miss.position == 0 and other_salt:
        reason = "salt"
    resident = tokenizer.decode(miss.resident, special=True) if miss.resident else None
    return {
        "position": miss.position,
        "reason": reason,
        "text": tokenizer.decode(here, special=True),
        "resident_text": resident,
    }


def _same_text(tokenizer: Tokenizer, here: Sequence[int], there: Sequence[int]) -> bool:
    """True if both ids spell the same text, as far as the shorter one goes."""
    one, other = (
        b"".join(tokenizer.token_bytes(token, special=True) for token in tokens)
        for tokens in (here, there)
    )
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]

"""Owns the ids of a conversation in which the model's own words keep the ids they were said with.

Knows no request and no ring. The chat template makes one text; the parts of it that are recalled
replies are replaced by their ids, and what lies between is tokenised by itself, as it was when the
replies were generated: a part of the text is cut out only where a control token follows it, so that
no token would have reached across the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from coord.actions import TurnError
from coord.history import Spoken
from coord.tokenizer import Message, Tokenizer
from transport.chain import pack_tokens

Recalled = Mapping[int, Sequence[Spoken]]  # by message, newest spelling first


def splice(tokenizer: Tokenizer, messages: Sequence[Message], recalled: Recalled) -> list[int]:
    """Ids of a conversation, as Tokenizer.render, with the recalled messages' own ids.

    Where a text was said in several spellings, the one that continues this very conversation is
    taken, else the newest. A message that the template altered is tokenised like any other.
    """
    text = tokenizer.spell(messages)
    ids: list[int] = []
    state = hashlib.blake2b(digest_size=16)  # of ids; as coord.history.digest
    at = 0
    for index, start, end in _spans(tokenizer, messages, text, recalled):
        if not tokenizer.token_starts(text, end):
            continue
        pieces: dict[str, list[int]] = {}
        usable: list[Spoken] = []
        for spoken in recalled[index]:
            cut = start - len(spoken.lead)
            if cut >= at and text[cut:start] == spoken.lead:
                usable.append(spoken)
                if spoken.lead not in pieces:
                    pieces[spoken.lead] = tokenizer.encode(text[at:cut], special=False)
        if not usable:
            continue
        befores = {lead: _digest_with(state, piece) for lead, piece in pieces.items()}
        continues = (spoken for spoken in usable if befores[spoken.lead] in spoken.prompts)
        chosen = next(continues, usable[0])
        for part in (pieces[chosen.lead], chosen.ids):
            ids.extend(part)
            state.update(pack_tokens(part))
        at = end
    ids.extend(tokenizer.encode(text[at:], special=False))
    return ids


def _digest_with(state: hashlib.blake2b, piece: Sequence[int]) -> bytes:
    whole = state.copy()
    whole.update(pack_tokens(piece))
    return whole.digest()


def _spans(
    tokenizer: Tokenizer, messages: Sequence[Message], text: str, recalled: Recalled
) -> list[tuple[int, int, int]]:
    """(message, start, end) of recalled contents in the rendered text, ascending.

    Found by rendering once more with a mark in place of each. A content that the template changed
    (trimmed, its reasoning taken out) is not in the text as it is, and is passed over. That a span
    holds the very text of its message is all that correctness needs.
    """
    if not recalled:
        return []
    name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    marks = {index: f"\ue000{name}.{index}\ue001" for index in sorted(recalled)}
    try:
        marked = tokenizer.spell(
            [
                {**message, "content": marks[index]} if index in marks else message
                for index, message in enumerate(messages)
            ]
        )
    except TurnError:  # the template looks into a reply and does not like the mark
        return []
    spans: list[tuple[int, int, int]] = []
    read = at = 0  # how far marked and text agree
    order = [(marked.find(mark), index) for index, mark in marks.items()]
    found = sorted((position, index) for position, index in order if position >= 0)
    for number, (position, index) in enumerate(found):
        if not text.startswith(marked[read:position], at):
            break  # something else depends on the contents
        at += position - read
        read = position + len(marks[index])
        content = messages[index]["content"]
        following = found[number + 1][0] if number + 1 < len(found) else len(marked)
        glue = marked[read:following]
        if text.startswith(content + glue, at):
            spans.append((index, at, at + len(content)))
            at += len(content)
        else:
            at = text.find(glue, at) if glue else -1
            if at < 0:
                break
    return spans

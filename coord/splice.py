"""Owns the ids of a conversation in which the model's own words keep the ids they were said with.

Knows no request and no ring. The chat template makes one text; the parts of it that are recalled
replies are replaced by their ids, and what lies between is tokenised by itself, as it was when the
replies were generated: a part of the text is cut out only where a control token follows it, so that
no token would have reached across the cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from coord.actions import TurnError
from coord.history import Spoken
from coord.template import Message, Tools
from coord.tokenizer import Tokenizer
from coord.toolcalls import Style
from transport.chain import pack_tokens

Recalled = Mapping[int, Sequence[Spoken]]  # by message, newest spelling first


def splice(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    recalled: Recalled,
    tools: Tools | None = None,
    replies: Mapping[int, str] | None = None,
) -> list[int]:
    """Ids of a conversation, as Tokenizer.render, with the recalled messages' own ids.

    Where a text was said in several spellings, the one that continues this very conversation is
    taken, else the newest. A message that the template altered is tokenised like any other.
    replies: what the model wrote where a recalled message has tool calls.
    """
    text, spans = _spelled(tokenizer, messages, recalled, tools, replies or {})
    ids: list[int] = []
    state = hashlib.blake2b(digest_size=16)  # of ids; as coord.history.digest
    at = 0
    for index, start, end in spans:
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


def _spelled(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    recalled: Recalled,
    tools: Tools | None,
    replies: Mapping[int, str],
) -> tuple[str, list[tuple[int, int, int]]]:
    """The conversation's text, and (message, start, end) of the recalled parts in it, ascending.

    A reply with calls is given to the template as if it had been plain text: that stands between
    the same header and end, and the template need not spell the calls as the model did. Mistral's
    templates count plain replies and refuse one more; there a call's text is found by its mark.
    """
    if tokenizer.style is not Style.MISTRAL:
        plain = [
            {"role": "assistant", "content": replies[index]} if index in replies else message
            for index, message in enumerate(messages)
        ]
        text = tokenizer.spell(plain, tools)
        return text, _spans(tokenizer, plain, text, recalled, tools)
    text = tokenizer.spell(messages, tools)
    others = {index: spoken for index, spoken in recalled.items() if index not in replies}
    spans = _spans(tokenizer, messages, text, others, tools)
    calls = _call_spans(tokenizer, messages, text, replies, Style.MISTRAL.opening)
    return text, sorted([*spans, *(span for span in calls if span[0] in recalled)])


def _call_spans(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    text: str,
    replies: Mapping[int, str],
    opening: str,
) -> list[tuple[int, int, int]]:
    """(message, start, end) of replies that are nothing but calls, each from its mark on.

    None where there are more marks than messages with calls (a user wrote one).
    """
    callers = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    starts = [match.start() for match in re.finditer(re.escape(opening), text)]
    if len(starts) != len(callers):
        return []
    spans = []
    for index, start in zip(callers, starts, strict=True):
        end = start + len(opening)
        while end < len(text) and not tokenizer.token_starts(text, end):
            end += 1
        if replies.get(index, "").startswith(opening):
            spans.append((index, start, end))
    return spans


def _digest_with(state: hashlib.blake2b, piece: Sequence[int]) -> bytes:
    whole = state.copy()
    whole.update(pack_tokens(piece))
    return whole.digest()


def _spans(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    text: str,
    recalled: Recalled,
    tools: Tools | None,
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
            ],
            tools,
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

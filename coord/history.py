"""Owns what the model said: the ids of emitted texts, so that history need not be re-tokenised.

Knows no request, no template and no ring. Text -> ids is not the inverse of ids -> text: a sampled
reply often spells a word in pieces that the tokenizer would never choose, and a resident prefix
would end at the first of them. Texts are looked up by a hash of the chain's salt and the text, so
that nothing crosses from one tenant or salt to another.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import msgpack

from coord.tokenizer import Tokenizer
from transport.chain import pack_tokens, unpack_tokens

MAX_BYTES = 64 << 20  # about 10 M generated tokens
MAX_VARIANTS = 8  # ids of one text: "Yes." is said often, but in few spellings
MAX_PROMPTS = 16  # conversations in which one spelling is remembered to have been said
_KEY_BYTES = 32
_SENT = "\0sent"  # tells what clients send back from texts
_OVERHEAD_BYTES = 400  # of one entry's Python objects
_PROMPT_BYTES = 64  # of one conversation's digest


@dataclass(frozen=True, slots=True)
class Spoken:
    """One spelling of a text. packed: its ids. prompts: digests of what stood before it.

    lead: what the ids decode to before the text; " " where a sentencepiece word mark begins them,
    which is no part of a reply's text.
    """

    packed: bytes
    prompts: tuple[bytes, ...]
    lead: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids."""
        return unpack_tokens(self.packed)

    @property
    def cost(self) -> int:
        """Bytes, about."""
        return len(self.packed) + _PROMPT_BYTES * len(self.prompts) + _OVERHEAD_BYTES


class History:
    """Emitted texts, least recently used out first. Not thread-safe; what it returns is."""

    def __init__(
        self,
        limit_bytes: int = MAX_BYTES,
        write: Callable[[bytes, bytes], None] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """write: takes each text's key and what `restore` needs of it, whenever that changes.

        decode: of the tokenizer in use; needed to restore.
        """
        self._limit = limit_bytes
        self._write = write
        self._decode = decode
        # restored and not yet recalled: a successor may serve another vocabulary
        self._unchecked: dict[bytes, None] = {}
        self._texts: OrderedDict[bytes, tuple[Spoken, ...]] = OrderedDict()  # newest spelling first
        self._meanings: OrderedDict[bytes, str] = OrderedDict()  # at most a quarter of the limit
        self._meant = 0  # bytes of them, about
        self.size = 0  # bytes, about

    def __len__(self) -> int:
        return len(self._texts)

    def add(
        self, salt: bytes, text: str, prompt: Sequence[int], ids: Sequence[int], lead: str = ""
    ) -> None:
        """The model said `text` after `prompt`, as `ids` (see `spelling`)."""
        key, before, packed = _key(salt, text), digest(pack_tokens(prompt)), pack_tokens(ids)
        self._check(key, text)
        known = self._texts.pop(key, ())
        prompts = next((each.prompts for each in known if each.packed == packed), ())
        kept = tuple(each for each in prompts if each != before)[: MAX_PROMPTS - 1]
        others = tuple(each for each in known if each.packed != packed)[: MAX_VARIANTS - 1]
        entry = (Spoken(packed, (before, *kept), lead), *others)
        self._put(key, entry, known)
        if self._write is not None:
            self._write(key, msgpack.packb([astuple(each) for each in entry]))

    def mean(self, salt: bytes, sent: str, text: str) -> None:
        """What a client sends back as `sent` (coord.toolcalls.sent_back) is the reply `text`."""
        key = _key(salt, _SENT + sent)
        self._note(key, text)
        if self._write is not None:
            self._write(key, msgpack.packb({_SENT: text}))

    def meaning(self, salt: bytes, sent: str) -> str | None:
        """The reply that `sent` is; None where it is none."""
        key = _key(salt, _SENT + sent)
        text = self._meanings.get(key)
        if text is not None:
            self._meanings.move_to_end(key)
        return text

    def _note(self, key: bytes, text: str) -> None:
        self._forget(key)
        self._meanings[key] = text
        self._meant += len(text) + _OVERHEAD_BYTES
        while self._meant > self._limit // 4:
            self._forget(next(iter(self._meanings)))

    def _forget(self, key: bytes) -> None:
        text = self._meanings.pop(key, None)
        if text is not None:
            self._meant -= len(text) + _OVERHEAD_BYTES

    def restore(self, key: bytes, body: bytes) -> bool:
        """Take an entry back that `write` was given, as the newest; False where it is none."""
        if len(key) == _KEY_BYTES and (text := _text(body)) is not None:
            self._note(key, text)
            return True
        entry = _unpacked(body) if len(key) == _KEY_BYTES else ()
        if entry:
            self._put(key, entry, self._texts.pop(key, ()))
            self._unchecked[key] = None
        return bool(entry)

    def _check(self, key: bytes, text: str) -> None:
        """Of a restored entry, believe what gives its text under this vocabulary, too."""
        if key in self._unchecked:
            assert self._decode is not None
            del self._unchecked[key]
            known = self._texts.pop(key)
            right = tuple(s for s in known if self._decode(s.ids) == s.lead + text)
            self.size -= _cost(known)
            if right:
                self._put(key, right, ())

    def _put(self, key: bytes, entry: tuple[Spoken, ...], known: tuple[Spoken, ...]) -> None:
        self._texts[key] = entry
        self.size += _cost(entry) - _cost(known)
        while self.size > self._limit:
            oldest, gone = self._texts.popitem(last=False)
            self._unchecked.pop(oldest, None)
            self.size -= _cost(gone)

    def recall(self, salt: bytes, text: str) -> tuple[Spoken, ...]:
        """The spellings of a text that was emitted, newest first; () where it never was."""
        key = _key(salt, text)
        self._check(key, text)
        found = self._texts.get(key, ())
        if found:
            self._texts.move_to_end(key)
        return found


def digest(packed: bytes) -> bytes:
    """Names the ids before a reply; equal to blake2b of 16 bytes fed in pieces."""
    return hashlib.blake2b(packed, digest_size=16).digest()


def _text(body: bytes) -> str | None:
    """What `mean` wrote; None for anything else."""
    try:
        plain = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    text = plain.get(_SENT) if isinstance(plain, dict) else None
    return text if isinstance(text, str) else None


def _unpacked(body: bytes) -> tuple[Spoken, ...]:
    """An entry from its bytes; () for what `History.add` did not write."""
    try:
        plain = msgpack.unpackb(body)
        entry = tuple(Spoken(packed, tuple(prompts), lead) for packed, prompts, lead in plain)
        for each in entry:
            unpack_tokens(each.packed)
        texts = all(each.lead in ("", " ") for each in entry)
        known = all(type(prompt) is bytes for each in entry for prompt in each.prompts)
    except (ValueError, TypeError, struct.error, msgpack.UnpackException):
        return ()
    return entry if texts and known and len(entry) <= MAX_VARIANTS else ()


def _key(salt: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")  # JSON can hold half a surrogate pair
    state = hashlib.blake2b(len(salt).to_bytes(8, "little"), digest_size=_KEY_BYTES)
    state.update(salt)
    state.update(data)
    return state.digest()


def _cost(entry: tuple[Spoken, ...]) -> int:
    return sum(each.cost for each in entry)


def spelling(
    tokenizer: Tokenizer, tokens: Sequence[int], text: str, *, strip: bool
) -> tuple[list[int], str] | None:
    """The ids that stand for a reply's text, and their lead (see Spoken).

    tokens: what was generated. text: what the client saw of it, all of it or cut by a stop string:
    the ids up to the last token boundary within the text, then the rest of the text re-tokenised.
    None where no ids give the text back.
    """
    decoder = tokenizer.decoder(strip=strip)
    length = kept = kept_length = 0
    for count, token in enumerate(tokens, 1):
        length += len(decoder.feed(tokenizer.token_bytes(token)))
        if length > len(text):
            half = tokens[: count - 1]  # cut by a stop string where it ended in half a character
            if len(half) > kept and tokenizer.decode(half).endswith(text):
                kept, kept_length = len(half), len(text)
            break
        if decoder.whole:
            kept, kept_length = count, length
    else:
        if length + len(decoder.flush()) == len(text):
            kept, kept_length = len(tokens), len(text)  # it ends in half a character
    rest = text[kept_length:]
    ids = [*tokens[:kept], *(tokenizer.encode(rest, special=False) if rest else ())]
    raw = tokenizer.decode(ids)
    lead = raw.removesuffix(text) if ids and raw.endswith(text) else None
    return None if lead not in ("", " ") else (ids, lead)

"""Owns text <-> token ids of one model: vocabulary, chat template, stop ids, bytes of each token.

Reads tokenizer files, never weights. Text that spells a special token (a user's "<|im_end|>")
becomes that token, as it does in the model's own training format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from coord.actions import TurnError
from coord.template import Message, Template, Tools
from coord.text import CharacterDecoder
from coord.toolcalls import Style, spell_calls
from coord.vocabulary import build_tokenizer, read_metadata

# Control tokens that end a turn in the families served, whether or not a file lists them as such.
_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)


class Tokenizer(Protocol):
    """What the gateway needs of a model's text side. Immutable, so any thread may call it."""

    @property
    def vocabulary(self) -> int:
        """Ids are in [0, vocabulary)."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Every id that ends a turn (end of sequence, of turn, of message), ascending."""

    @property
    def style(self) -> Style | None:
        """How the model spells tool calls; None where its template takes no tools."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; special: with the BOS that the model expects before a text."""

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Ids of a conversation by the chat template, ready for the assistant's answer.

        TurnError 400 where the template refuses it. Equal to encode(spell(...), special=False).
        """

    def spell(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """The text that `render` tokenises."""

    def token_starts(self, text: str, at: int) -> bool:
        """True where a token starts in any tokenisation of the text: a control token stands there.

        Always where tokens are bytes.
        """

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """UTF-8 bytes of one token, b"" for a control token (special: its name) or unknown id.

        The marks of a tool call are text.
        """

    def decoder(self, *, strip: bool = False) -> CharacterDecoder:
        """For text that begins here; strip: a word mark before the first word is no space."""

    def decode(self, tokens: Sequence[int], *, strip: bool = False, special: bool = False) -> str:
        """The whole text of ids; equal to what decoder() gives piece by piece."""


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of "toy", a GGUF file or a Hugging Face directory; ValueError names it."""
    if source == "toy":
        return ByteTokenizer()
    path = Path(source)
    try:
        return _from_directory(path) if path.is_dir() else _from_gguf(path)
    except Exception as error:  # what `tokenizers` raises for a damaged file is Exception itself
        what = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ValueError(what) from error


class ByteTokenizer:
    """The toy model's: a token is a byte. It has no control tokens, so it ends only by `stops`."""

    vocabulary = 256
    style = Style.HERMES

    def __init__(self, stops: Sequence[int] = ()) -> None:
        self.stops = tuple(sorted(set(stops)))

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # noqa: ARG002
        """See Tokenizer."""
        return list(text.encode("utf-8"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> list[int]:
        """See Tokenizer."""
        return self.encode(self.spell(messages, tools))

    def spell(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """See Tokenizer: one line per message."""
        lines = [f"{message['role']}: {_toy_body(message)}\n" for message in messages]
        if tools:
            lines.insert(0, f"tools: {json.dumps(list(tools), ensure_ascii=False)}\n")
        return "".join(lines) + "assistant: "

    def token_starts(self, text: str, at: int) -> bool:  # noqa: ARG002
        """See Tokenizer."""
        return True

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:  # noqa: ARG002
        """See Tokenizer."""
        return bytes((token,)) if 0 <= token < self.vocabulary else b""

    def decoder(self, *, strip: bool = False) -> CharacterDecoder:  # noqa: ARG002
        """See Tokenizer."""
        return CharacterDecoder()

    def decode(
        self,
        tokens: Sequence[int],
        *,
        strip: bool = False,  # noqa: ARG002
        special: bool = False,  # noqa: ARG002
    ) -> str:
        """See Tokenizer."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


def _toy_body(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    spelled = spell_calls([(call["name"], str(call["arguments"])) for call in calls])
    return "\n".join(part for part in (message["content"] or "", spelled) if part)


@dataclass(frozen=True, slots=True)
class Parts:
    """What files say beside the vocabulary. names: bos_token, eos_token, ... for the template."""

    template: str | None
    tool_template: str | None
    names: Mapping[str, str]
    stops: Sequence[int]


class TextTokenizer:
    """A real model's tokenizer: byte-level BPE, or sentencepiece with byte fallback."""

    def __init__(self, backend: tokenizers.Tokenizer, parts: Parts) -> None:
        self._backend = backend
        self._byte_level = _is_byte_level(backend)
        self._added = backend.get_added_tokens_decoder()
        self._control = tuple(added.content for added in self._added.values() if added.special)
        self._template = Template(parts.template) if parts.template else None
        self._tool_template = Template(parts.tool_template) if parts.tool_template else None
        self.style = template.style if (template := self._tool_template or self._template) else None
        marks = self.style.marks if self.style else ()
        self._names = dict(parts.names)
        self.vocabulary = backend.get_vocab_size(with_added_tokens=True)
        named = [
            token
            for token, added in self._added.items()
            if added.special and added.content in _END_NAMES
        ]
        self.stops = tuple(sorted({*parts.stops, *named}))
        self._marks = {token for token, each in self._added.items() if each.content in marks}
        self._bytes: dict[int, bytes] = {}  # filled as needed; at most one entry per id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """See Tokenizer."""
        # The batch call lets other threads run (encode holds the lock for 1.3 s per MB) and is
        # twice as fast, as it keeps no character offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """See Tokenizer."""
        return self.encode(self.spell(messages, tools), special=False)

    def spell(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """See Tokenizer."""
        template = (self._tool_template if tools else None) or self._template
        if not template:
            raise TurnError(
                400, "no_chat_template", "the model has no chat template; use /v1/completions"
            )
        return template.render(messages, tools, self._names)

    def token_starts(self, text: str, at: int) -> bool:
        """See Tokenizer."""
        return text.startswith(self._control, at)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """See Tokenizer."""
        added = self._added.get(token)
        if added is not None:
            hidden = added.special and not special and token not in self._marks
            return b"" if hidden else added.content.encode("utf-8")
        known = self._bytes.get(token)
        if known is None:
            text = self._backend.id_to_token(token) if 0 <= token < self.vocabulary else None
            known = b"" if text is None else self._spelled(text)
            self._bytes[token] = known
        return known

    def decoder(self, *, strip: bool = False) -> CharacterDecoder:
        """See Tokenizer."""
        return CharacterDecoder(strip=strip and not self._byte_level)

    def decode(self, tokens: Sequence[int], *, strip: bool = False, special: bool = False) -> str:
        """See Tokenizer."""
        data = b"".join(self.token_bytes(token, special=special) for token in tokens)
        decoder = self.decoder(strip=strip)
        return decoder.feed(data) + decoder.flush()

    def _spelled(self, text: str) -> bytes:
        if self._byte_level:
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode("utf-8")


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable character for each byte, inverted (its encoder.py, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes((byte,)) for byte in printable} | {
        chr(256 + index): bytes((byte,)) for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    state = backend.decoder.__getstate__().decode() if backend.decoder else "null"
    if '"ByteLevel"' in state:
        return True
    if "▁" in state or '"Metaspace"' in state or '"ByteFallback"' in state:
        return False
    raise ValueError(f"a tokenizer with the decoder {state[:80]} is not supported")


# ---- where the parts come from -------------------------------------------------------------------


def _from_gguf(path: Path) -> Tokenizer:
    fields = read_metadata(path)
    try:
        backend = build_tokenizer(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names: dict[str, str] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        text = None if token is None else backend.id_to_token(token)
        if text is not None:
            names[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = (
                text
            )
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    parts = Parts(
        template=fields.get("tokenizer.chat_template"),
        tool_template=fields.get("tokenizer.chat_template.tool_use"),
        names=names,
        stops=[end for end in ends if end is not None],
    )
    return TextTokenizer(backend, parts)


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        backend = tokenizers.Tokenizer.from_file(str(file))
    else:
        # Converting a sentencepiece model is the library's business; its import takes 3 s.
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: no usable tokenizer ({error})") from error
    backend.no_truncation()
    backend.no_padding()
    settings = _json(path / "tokenizer_config.json")
    names = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(settings.get(key))) is not None
    }
    ends: list[int] = []
    for source in (_json(path / "generation_config.json"), _json(path / "config.json")):
        value = source.get("eos_token_id")
        ends += value if isinstance(value, list) else [] if value is None else [value]
    eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    templates = _templates(path, settings)
    parts = Parts(
        template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        names=names,
        stops=ends if eos is None else [*ends, eos],
    )
    return TextTokenizer(backend, parts)


def _templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text("utf-8")}
    found = settings.get("chat_template") or _json(path / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {}


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value

"""Text <-> token ids: the real model's vocabulary, a small sentencepiece one, and the toy's."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from coord.actions import TurnError
from coord.tokenizer import ByteTokenizer, Parts, TextTokenizer, Tokenizer, load_tokenizer
from coord.vocabulary import build_tokenizer, read_metadata
from tests.modelfile import default_model

relaxed = settings(deadline=None)  # a shared machine stalls now and then
HELLO = [{"role": "user", "content": "hi"}]
# The model's vocabulary has no token for these bytes: it drops them (so do its own files).
MISSING = frozenset((4, 6, 19, 20, 22, 29, 0xF1, 0xF2))
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: MISSING.isdisjoint(text.encode())
)


@cache
def real() -> Tokenizer:
    return load_tokenizer(default_model())


@cache
def backend() -> tokenizers.Tokenizer:
    return build_tokenizer(read_metadata(default_model()))


def pieces(tokenizer: Tokenizer, tokens: list[int], *, strip: bool = False) -> list[str]:
    decoder = tokenizer.decoder(strip=strip)
    fed = [decoder.feed(tokenizer.token_bytes(token)) for token in tokens]
    return [*fed, decoder.flush()]


# ---- the real model -----------------------------------------------------------------------------


@pytest.mark.model
def test_loading_is_quick_and_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, time; from coord.tokenizer import load_tokenizer; t = time.monotonic();"
        "load_tokenizer(sys.argv[1]); assert time.monotonic() - t < 5;"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", script, str(default_model())], check=True, cwd=root)


@pytest.mark.model
def test_ids_are_the_models_own() -> None:
    tokenizer = real()
    assert tokenizer.vocabulary == 49152
    assert tokenizer.stops == (0, 2)  # <|endoftext|> and <|im_end|>
    assert tokenizer.encode("hello x 12345") == [28120, 1792, 216, 33, 34, 35, 36, 37]
    # Digits are split off first, so that the spaces before one are one token.
    assert tokenizer.encode("a  5") == [81, 256, 37]


@pytest.mark.model
def test_the_chat_template_is_rendered_ready_for_the_answer() -> None:
    tokenizer = real()
    messages = [{"role": "system", "content": "S"}, *HELLO]
    text = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(messages) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.render(messages), special=True) == text


@pytest.mark.model
@relaxed
@given(ANY_TEXT)
def test_encoded_text_comes_back_piece_by_piece_without_half_characters(text: str) -> None:
    tokenizer = real()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    parts = pieces(tokenizer, tokens)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_pieces_of_random_ids_joined_equal_decode_of_all(tokens: list[int]) -> None:
    tokenizer = real()
    whole = tokenizer.decode(tokens)
    assert "".join(pieces(tokenizer, tokens)) == whole
    assert whole == backend().decode(tokens, skip_special_tokens=True)


@pytest.mark.model
@relaxed
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "{{ 1/0 }}", "x"])))
def test_special_text_in_a_message_does_no_harm(parts: list[str]) -> None:
    tokenizer = real()
    tokens = tokenizer.render([{"role": "user", "content": "".join(parts)}])
    assert "".join(parts) in tokenizer.decode(tokens, special=True)


@pytest.mark.model
def test_control_tokens_and_unknown_ids_have_no_text() -> None:
    tokenizer = real()
    assert tokenizer.decode([2, 28120, 0, 49152, 1 << 40]) == "hello"
    assert tokenizer.token_bytes(2, special=True) == b"<|im_end|>"


@pytest.mark.model
def test_a_directory_gives_the_same_ids_and_every_stop_id(tmp_path: Path) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    template = read_metadata(default_model())["tokenizer.chat_template"]
    config = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.render(HELLO) == real().render(HELLO)
    assert loaded.stops == (0, 2, 7)


# ---- a small sentencepiece vocabulary -----------------------------------------------------------


def sentencepiece() -> TextTokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "h", "e", "y", "▁h", "ey", "▁hey"]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return _text_tokenizer(build_tokenizer(fields))


def _text_tokenizer(built: tokenizers.Tokenizer, template: str | None = None) -> TextTokenizer:
    return TextTokenizer(built, Parts(template, None, {"bos_token": "<s>"}, [2]))


def test_sentencepiece_marks_are_spaces_and_bytes_fall_back() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("hey hey é")
    assert tokens == [1, 265, 265, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokens, strip=True) == "hey hey é"
    assert tokenizer.decode(tokens) == " hey hey é"
    assert pieces(tokenizer, tokens, strip=True) == ["", "hey", " hey", " ", "", "é", ""]
    assert tokenizer.stops == (2,)


@relaxed
@given(st.lists(st.integers(0, 265), max_size=30), st.booleans())
def test_sentencepiece_pieces_joined_equal_decode_of_all(tokens: list[int], strip: bool) -> None:
    tokenizer = sentencepiece_once()
    assert "".join(pieces(tokenizer, tokens, strip=strip)) == tokenizer.decode(tokens, strip=strip)


@cache
def sentencepiece_once() -> TextTokenizer:
    return sentencepiece()


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(template: str) -> None:
    tokenizer = _text_tokenizer(sentencepiece()._backend, template)
    with pytest.raises(TurnError) as caught:
        tokenizer.render(HELLO)
    assert (caught.value.status, caught.value.code) == (400, "template_error")


def test_templates_know_the_usual_helpers() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% else %}{% continue %}{% endif %}"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = _text_tokenizer(sentencepiece()._backend, source)
    text = tokenizer.decode(tokenizer.render(HELLO), special=True)
    assert text.endswith('{"role": "user", "content": "hi"}4')


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(TurnError) as caught:
        sentencepiece().render(HELLO)
    assert caught.value.code == "no_chat_template"


# ---- damaged and foreign files ------------------------------------------------------------------


def gguf(*fields: bytes, version: int = 3, count: int | None = None) -> bytes:
    count = len(fields) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, 0, count) + b"".join(fields)


def text_field(name: str, value: str) -> bytes:
    raw = [part.encode() for part in (name, value)]
    return struct.pack("<Q", len(raw[0])) + raw[0] + struct.pack("<IQ", 8, len(raw[1])) + raw[1]


FOREIGN = text_field("tokenizer.ggml.model", "bert")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (gguf(version=9), "version 9"),
        (gguf(FOREIGN)[:-2], "damaged"),
        (gguf(FOREIGN, count=2), "damaged"),
        (gguf(count=1 << 60), "damaged"),
        (gguf(FOREIGN), "tokenizer.ggml.tokens"),
        (gguf(struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 4, 1 << 50)), "damaged"),
        (gguf(struct.pack("<Q", 1) + b"x" + struct.pack("<I", 99)), "damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"broken\.gguf.*{says}"):
        load_tokenizer(path)


def test_an_unknown_splitting_rule_is_named() -> None:
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "martian",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ValueError, match="martian"):
        build_tokenizer(fields)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "smollm", "default"])
def test_known_splitting_rules_compile(pre: str) -> None:
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "ab", "1", "<s>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
    }
    built = build_tokenizer(fields)
    assert built.encode("ab11").ids == [4, 2, 3, 3]


# ---- the toy's ----------------------------------------------------------------------------------


@relaxed
@given(ANY_TEXT)
def test_a_toy_token_is_a_byte(text: str) -> None:
    tokenizer = load_tokenizer("toy")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


def test_the_toy_renders_lines_and_ends_only_where_told() -> None:
    assert bytes(ByteTokenizer().render(HELLO)) == b"user: hi\nassistant: "
    assert ByteTokenizer().stops == ()
    assert ByteTokenizer([10, 0]).stops == (0, 10)

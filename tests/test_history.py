"""Own output always hits (case 12): ids that were generated come back as they were."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from coord.history import History, Spoken, spelling
from coord.splice import splice
from coord.tokenizer import ByteTokenizer, Parts, TextTokenizer, Tokenizer, load_tokenizer
from coord.vocabulary import build_tokenizer, read_metadata
from pipeline.load import load_model
from pipeline.model import StageModel
from tests.localring import Call, LocalRing, play
from tests.modelfile import default_model
from tests.test_tokenizer import sentencepiece
from transport.chain import pack_tokens
from transport.config import Config, Limits, Model
from transport.config import Coordinator as CoordinatorSpec
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec

Chat = list[dict[str, str]]
FIRST_TEXT_ID = 17  # of the default model; control tokens come before
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + CONTENT + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINK = "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"


@cache
def real() -> Tokenizer:
    return load_tokenizer(default_model())


@cache
def backend() -> tokenizers.Tokenizer:
    return build_tokenizer(read_metadata(default_model()))


def templated(content: str) -> TextTokenizer:
    parts = Parts(CHATML.replace("CONTENT", content), None, {}, [2])
    return TextTokenizer(backend(), parts)


def recall(
    tokenizer: Tokenizer, said: dict[int, list[int]], *, strip: bool = True
) -> tuple[dict[int, str], dict[int, list[Spoken]]]:
    """The text of each reply as its client saw it, and what is remembered of it."""
    texts, spoken = {}, {}
    for index, ids in said.items():
        texts[index] = tokenizer.decode(ids, strip=strip)
        found = spelling(tokenizer, ids, texts[index], strip=strip)
        if found is not None and texts[index]:
            spoken[index] = [Spoken(pack_tokens(found[0]), (), found[1])]
    return texts, spoken


def holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


# ---- what is remembered -------------------------------------------------------------------------


def test_texts_are_kept_apart_by_salt() -> None:
    history = History()
    history.add(b"one", "text", [1, 2], [7, 8])
    assert [each.ids for each in history.recall(b"one", "text")] == [(7, 8)]
    assert history.recall(b"", "text") == ()
    assert history.recall(b"onet", "ext") == ()


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    history = History(limit_bytes=20_000)
    for number in range(1000):
        history.add(b"", "first", [1], [1] * 10)
        history.add(b"", f"text {number}", [1], [number] * 10)
        assert history.size <= 20_000
    assert history.recall(b"", "first")
    assert not history.recall(b"", "text 900")
    assert 20 < len(history) < 45
    history.add(b"", "huge", [1], [1] * 10_000)
    assert (len(history), history.size) == (0, 0)


def test_one_text_keeps_few_spellings_and_few_conversations() -> None:
    history = History()
    for number in range(100):
        history.add(b"", "Yes.", [number], [number % 20, 5])
    found = history.recall(b"", "Yes.")
    assert [each.ids[0] for each in found] == [19, 18, 17, 16, 15, 14, 13, 12]
    for number in range(100):
        history.add(b"", "Yes.", [number], [1, 5])
    assert len(history.recall(b"", "Yes.")[0].prompts) == 16


def test_what_was_written_is_recalled_by_the_next_one() -> None:
    """Newest last, as it was written; all spellings and conversations of it."""
    written: dict[bytes, bytes] = {}
    history = History(write=written.__setitem__)
    history.add(b"one", "ab", [1, 2], [97, 98])
    history.add(b"one", "ab", [3], [97, 98])
    history.add(b"", "c", [3], [32, 99], " ")
    after = History(decode=lambda ids: bytes(ids).decode())
    assert all(after.restore(key, body) for key, body in written.items())
    for salt, text in ((b"one", "ab"), (b"", "c"), (b"", "ab"), (b"one", "never")):
        assert after.recall(salt, text) == history.recall(salt, text)
    assert after.size == history.size


def test_ids_of_another_vocabulary_are_not_believed() -> None:
    """The model was changed meanwhile: the text is the same, its ids are not."""
    written: dict[bytes, bytes] = {}
    History(write=written.__setitem__).add(b"", "ab", [1, 2], [97, 98])
    after = History(write=written.__setitem__, decode=lambda ids: bytes(ids).decode().upper())
    for key, body in list(written.items()):
        assert after.restore(key, body)
    assert after.recall(b"", "ab") == ()
    assert (len(after), after.size) == (0, 0)
    after.restore(*next(iter(written.items())))
    after.add(b"", "ab", [1], [65, 66])
    assert [each.ids for each in after.recall(b"", "ab")] == [(65, 66)]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x90", b"\x01", b"\xa3abc", b"\x91\x93\xc4\x03abc\x90\xa0", b"\x91" * 2000],
)
def test_a_damaged_entry_is_no_entry(body: bytes) -> None:
    history = History(decode=str)
    assert not history.restore(b"k" * 32, body)
    assert (len(history), history.size) == (0, 0)


# ---- which ids stand for a text -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "text", "ids"),
    [
        (b"abc", "abc", b"abc"),
        (b"abcSTOP", "abc", b"abc"),
        (b"ab\xe2\x82", "ab\ufffd", b"ab\xe2\x82"),  # cut by max_tokens within a character
        (b"ab\xe2\x82\xacS", "ab\u20ac", b"ab\xe2\x82\xac"),
        (b"a\xffbS", "a\ufffdb", b"a\xffb"),
    ],
)
def test_ids_are_kept_up_to_the_end_of_the_visible_text(
    tokens: bytes, text: str, ids: bytes
) -> None:
    assert spelling(ByteTokenizer(), list(tokens), text, strip=True) == (list(ids), "")


@pytest.mark.model
def test_a_token_that_a_stop_string_cuts_is_tokenised_again() -> None:
    tokenizer = real()
    tokens = [*tokenizer.encode("The"), *tokenizer.encode(" answer")]
    assert spelling(tokenizer, tokens, "The ans", strip=True) == (
        [*tokenizer.encode("The"), *tokenizer.encode(" ans")],
        "",
    )


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 49151), min_size=1, max_size=20), st.data())
def test_any_cut_of_any_ids_has_ids_that_give_it_back(tokens: list[int], data: Any) -> None:
    tokenizer = real()
    whole = tokenizer.decode(tokens)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    found = spelling(tokenizer, tokens, text, strip=True)
    if found is not None:
        assert tokenizer.decode(found[0]) == text
    else:
        assert not text or "\ufffd" in text or tokenizer.decode(tokenizer.encode(text)) != text


def test_a_word_mark_is_remembered_as_the_lead() -> None:
    tokenizer = sentencepiece()
    assert spelling(tokenizer, [265, 265], "hey hey", strip=True) == ([265, 265], " ")
    assert spelling(tokenizer, [264], "ey", strip=True) == ([264], "")


# ---- splicing -----------------------------------------------------------------------------------

ASSISTANT = st.lists(st.integers(FIRST_TEXT_ID, 49151), min_size=1, max_size=12)
USER = st.text(st.sampled_from("ab \n.0é<|"), max_size=8)


@pytest.mark.model
@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(USER, ASSISTANT), min_size=1, max_size=4), USER)
def test_splicing_changes_the_assistants_ids_and_nothing_else(
    turns: list[tuple[str, list[int]]], last: str
) -> None:
    tokenizer = real()
    texts, spoken = recall(tokenizer, {2 * i + 1: ids for i, (_, ids) in enumerate(turns)})
    messages: Chat = []
    for number, (question, _) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": texts[2 * number + 1]})
    messages.append({"role": "user", "content": last})
    spliced = splice(tokenizer, messages, spoken)
    assert tokenizer.decode(spliced, special=True) == tokenizer.spell(messages)
    # Around the replies stands what stands around any other reply, token for token.
    plain = [{**m, "content": "x"} if index in spoken else m for index, m in enumerate(messages)]
    expected: list[int] = []
    parts = split_at_replies(tokenizer, plain, spoken)
    for part, index in zip(parts, [*sorted(spoken), None], strict=True):
        expected += part
        expected += [] if index is None else spoken[index][0].ids
    assert spliced == expected


def split_at_replies(
    tokenizer: Tokenizer, plain: Chat, spoken: dict[int, list[Spoken]]
) -> list[list[int]]:
    """Ids of the plain conversation, cut at the replies "x" that stand for recalled ones."""
    [x] = tokenizer.encode("x")
    header = tokenizer.encode("<|im_start|>assistant\n")
    ids = tokenizer.render(plain)
    parts: list[list[int]] = [[]]
    left = len(spoken)
    for index, token in enumerate(ids):
        if left and token == x and ids[max(0, index - len(header)) : index] == header:
            parts.append([])
            left -= 1
        else:
            parts[-1].append(token)
    return parts


@pytest.mark.model
@pytest.mark.parametrize(
    ("content", "reply", "spliced"),
    [
        ("m.content", " odd reply", True),
        ("m.content | trim", "odd reply", True),
        ("m.content | trim", " odd reply", False),
        (THINK, "odd reply", True),
        (THINK, "<think>hm</think>odd", False),
        ("m.content + m.content", "odd reply", False),
        ("(m.content | tojson)", "odd", True),  # the quotes are not part of the content
        ("(m.content | tojson)", 'o"dd', False),
        ("m.content | upper", "odd", False),
        ("m.content | length | string", "odd", False),
        ("('' if m.role == 'assistant' else m.content)", "odd", False),
    ],
)
def test_a_template_that_alters_a_reply_is_left_alone(
    content: str, reply: str, spliced: bool
) -> None:
    tokenizer = templated(content)
    ids = [token for letter in reply for token in tokenizer.encode(letter)]
    spoken = {1: [Spoken(pack_tokens(ids), ())]}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "go on"},
    ]
    found = splice(tokenizer, messages, spoken)
    assert tokenizer.decode(found, special=True) == tokenizer.spell(messages)
    clean = spliced and "tojson" not in content  # a quote follows there, no control token
    assert holds(found, ids) is clean
    assert clean or found == tokenizer.render(messages)


@pytest.mark.model
def test_a_control_token_within_a_reply_comes_back_too() -> None:
    tokenizer = real()
    ids = [*tokenizer.encode("so"), 5, *tokenizer.encode(" on")]
    texts, spoken = recall(tokenizer, {0: ids})
    assert texts == {0: "so on"}
    assert holds(splice(tokenizer, [{"role": "assistant", "content": "so on"}], spoken), ids)


@pytest.mark.model
def test_one_altered_reply_leaves_the_others_spliced() -> None:
    tokenizer = templated(THINK)
    odd = [token for letter in "fine" for token in tokenizer.encode(letter)]
    messages = [
        {"role": "assistant", "content": "fine"},
        {"role": "assistant", "content": "<think>fine</think>no"},
        {"role": "assistant", "content": "fine"},
    ]
    spoken = {index: [Spoken(pack_tokens(odd), ())] for index in range(3)}
    found = splice(tokenizer, messages, spoken)
    assert tokenizer.decode(found, special=True) == tokenizer.spell(messages)
    assert sum(found[i : i + len(odd)] == odd for i in range(len(found))) == 2


@pytest.mark.model
def test_the_spelling_that_continues_the_conversation_is_taken() -> None:
    tokenizer, history = real(), History()
    whole, letters = tokenizer.encode("maybe"), [tokenizer.encode(c)[0] for c in "maybe"]
    first: Chat = [{"role": "user", "content": "A?"}]
    second: Chat = [{"role": "user", "content": "B?"}]
    history.add(b"", "maybe", tokenizer.render(first), letters)
    history.add(b"", "maybe", tokenizer.render(second), whole)
    for start, ids in ((first, letters), (second, whole), ([*second, *first], whole)):
        messages = [*start, {"role": "assistant", "content": "maybe"}, *first]
        found = splice(tokenizer, messages, {len(start): history.recall(b"", "maybe")})
        assert found[: len(tokenizer.render(start)) + len(ids)] == tokenizer.render(start) + ids


def test_a_sentencepiece_reply_takes_its_mark_from_the_templates_space() -> None:
    source = (
        "{% for m in messages %}{{ '</s> ' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '</s>' }}{% endif %}"
    )
    tokenizer = TextTokenizer(sentencepiece()._backend, Parts(source, None, {}, [2]))
    _, spoken = recall(tokenizer, {0: [260, 261, 262]})  # "hey", in letters and without a mark
    messages = [{"role": "assistant", "content": "hey"}]
    assert tokenizer.decode(splice(tokenizer, messages, spoken), special=True).count("hey") == 1
    _, marked = recall(tokenizer, {0: [263, 264]})
    assert splice(tokenizer, messages, marked) == [2, 263, 264, 2, 2]


# ---- through the API, on a toy ring -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "#"])
def test_case_12_the_next_turn_hits_all_that_was_said(stream: bool, stop: str | None) -> None:
    """The toy answers with any bytes: their text does not give them back, so that splicing is
    what makes the next turn hit."""

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: Chat = [{"role": "user", "content": "Tell me."}]
        resident = 0
        for turn in range(4):
            body = {"messages": messages, "max_tokens": 40, "stream": stream}
            text, usage = await reply_of(call, body | ({"stop": stop} if stop else {}))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == resident, turn
            said = ring.last_tokens
            visible = spelling(ByteTokenizer(), said, text, strip=True)
            assert (visible is None) == (not text)
            # The last generated token was never an input; a stop string's are cut away.
            kept = 0 if visible is None else min(len(said) - 1, len(visible[0]))
            resident = usage["prompt_tokens"] + kept
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"And {turn}?"},
            ]

    play(scene)


@pytest.fixture(scope="module")
def block() -> StageModel:
    """The default model, whole."""
    model = Model(str(default_model()), "m", "bfloat16")
    stage = StageSpec("s0", "tcp://s0:1", (0, 30), threads=1)
    ring = RingSpec("r0", "tcp://c:1", (stage,))
    bounds = Limits(slots=3, max_model_len=512)
    config = Config(model, (ring,), CoordinatorSpec("127.0.0.1:0"), bounds)
    return load_model(config, ring, stage, "cpu", lambda share, what: None)


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_case_12_on_the_default_model(block: StageModel, stream: bool) -> None:
    """Turn 2 finds P + G - 1 rows, and says what it says cold.

    With a seed by which the model spells something as the tokenizer would not: 10 of 16 seeds do
    in 32 tokens at temperature 2 (4 at 1, and of 8 greedy replies 1 does).
    """
    tokenizer = real()
    first: Chat = [{"role": "user", "content": "Invent odd words."}]
    body = {"messages": first, "max_tokens": 16, "temperature": 2, "stream": stream}

    async def follow(ring: LocalRing, call: Call, text: str, usage: dict[str, Any]) -> None:
        said = ring.last_tokens
        found = spelling(tokenizer, said, text, strip=True)
        assert found is not None
        reply = {"role": "assistant", "content": text}
        answers = []
        for reuse in (True, False):
            more = {"messages": [*first, reply, *first], "temperature": 0, "max_tokens": 2}
            more |= {"stream": stream, "kvring": {"reuse": reuse}}
            answers.append(await reply_of(call, more))
        cached = answers[0][1]["prompt_tokens_details"]["cached_tokens"]
        assert cached == usage["prompt_tokens"] + min(common(found[0], said), len(said) - 1)
        assert answers[0][0] == answers[1][0]

    async def scene(ring: LocalRing, call: Call) -> None:
        for seed in range(6, 20):
            body["seed"] = seed
            whole, usage = await reply_of(call, body)
            if tokenizer.encode(whole) != ring.last_tokens:
                break
        else:
            pytest.fail("the test would pass without splicing")
        await follow(ring, call, whole, usage)
        stop = whole[len(whole) // 2 :][:2]
        cut, usage = await reply_of(call, body | {"stop": stop})
        assert whole.startswith(cut + stop)
        await follow(ring, call, cut, usage)

    play(scene, tokenizer=tokenizer, models=[block])


def common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


async def reply_of(call: Call, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if not body["stream"]:
        answer = (await call("POST", "/v1/chat/completions", body)).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]
    body = body | {"stream_options": {"include_usage": True}}
    lines = (await call("POST", "/v1/chat/completions", body)).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])
    return text, chunks[-1]["usage"]


def test_a_stop_string_behind_half_a_character_leaves_the_ids_as_they_are() -> None:
    """The half is one token; its replacement character would be three."""
    tokenizer = ByteTokenizer()
    half = [*b"so ", 0xF0, 0x9F]
    for behind in ([], [*b"#"], [*b"#", 0x98, *b"more"]):
        assert spelling(tokenizer, [*half, *behind], "so \ufffd", strip=False) == (half, "")

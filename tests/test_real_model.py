"""The default model on real rings: a warm turn is the cold one, log probabilities to the bit.

JSON carries a double to its last bit, so equal numbers here are equal floats there. CASES 1, 2, 4,
23; DESIGN 6. In bfloat16 a ring of `kvring up`, and small ones of other chunk sizes; in float32 a
ring of two stages that compute differently, as two kinds of machine do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.modelfile import default_model
from tests.processes import QUICK, Fleet, get, post, write_ring

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LAYERS = 30
READY_S = 200.0
REPLY_S = 200.0  # cores that are shared with a build answer 10 times later
REPLY = 12  # tokens of each reply
SYSTEM = " ".join(
    f"Rule {number}: when asked about {topic}, answer in one short sentence and name the {topic}."
    for number, topic in enumerate(("rivers", "bread", "clocks", "tides", "maps", "stone"), 1)
)
FIRST = "Which of your rules is about bread?"
SECOND = "And which one is about the sea? Explain it to a child of five years, slowly."

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Said:
    """What must not depend on warmth, chunks or neighbours, and what it took."""

    text: str
    scores: tuple[tuple[tuple[int, ...], float], ...]
    prompt: int
    completion: int
    cached: int
    kvring: dict[str, Any]

    @property
    def what(self) -> tuple[object, ...]:
        """Text, token bytes and their log probabilities."""
        return self.text, self.scores


def chat(url: str, messages: Messages, *, reuse: bool = True, **options: Any) -> Said:
    """One greedy turn, unless the options say otherwise."""
    body = {
        "messages": messages,
        "max_tokens": REPLY,
        "temperature": 0,
        "logprobs": True,
        "kvring": {"reuse": reuse},
        **options,
    }
    answer = post(f"{url}/v1/chat/completions", json=body, timeout_s=REPLY_S)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choice, usage = found["choices"][0], found["usage"]
    said = Said(
        choice["message"]["content"],
        tuple((tuple(each["bytes"]), each["logprob"]) for each in choice["logprobs"]["content"]),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        found["kvring"],
    )
    assert said.kvring["matched"] == said.cached
    assert said.kvring["prefilled"] == said.prompt - said.cached
    return said


def opening(topic: str = "") -> Messages:
    return [{"role": "system", "content": SYSTEM + topic}, {"role": "user", "content": FIRST}]


def follow_up(messages: Messages, said: Said) -> Messages:
    reply = {"role": "assistant", "content": said.text}
    return [*messages, reply, {"role": "user", "content": SECOND}]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    default_model()
    folder = tmp_path_factory.mktemp(request.param)
    with processes.fleet(folder) as made:
        url = _up(made) if request.param == "bfloat16" else _unequal(made, folder)
        made.ready(url, READY_S)
        described = get(f"{url}/ring").json()["rings"][0]
        assert described["reuse"] is True
        assert described["exact"] is True, described["kernel"]
        yield url


def _up(fleet: Fleet) -> str:
    # two stages of one thread: one of two threads spins, and starves on cores that others use
    return fleet.up("--dtype", "bfloat16", "--stages", "2", "--max-model-len", "1024")[1]


def _unequal(fleet: Fleet, folder: Path) -> str:
    """A ring whose second stage has no compiler and may use no instructions beyond AVX2."""
    file = write_ring(
        folder / "ring.toml",
        model=str(default_model()),
        layers=LAYERS,
        stages=2,
        limits=replace(QUICK, max_model_len=1024, chunk_tokens=64, lost_after_s=20.0),
    )
    fleet.coord(file)
    fleet.stage(file, "s0")
    less = {"PATH": "", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    fleet.stage(file, "s1", variables=less)
    return file.url


def test_a_warm_turn_is_the_cold_one(ring: str) -> None:
    first = chat(ring, opening())
    assert first.cached == 0
    assert chat(ring, opening()).what == first.what  # case 4
    messages = follow_up(opening(), first)
    warm = chat(ring, messages)
    # the last token of a reply was never an input; the rest of turn 1 is not prefilled again
    assert warm.cached == first.prompt + first.completion - 1
    assert 0 < warm.kvring["prefilled"] < warm.prompt / 4
    cold = chat(ring, messages, reuse=False)
    assert cold.cached == 0
    assert warm.what == cold.what
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
    hot = chat(ring, messages, **sampled)
    assert hot.cached == hot.prompt - 1
    assert hot.what == chat(ring, messages, reuse=False, **sampled).what
    assert hot.text != warm.text


def test_neighbours_change_no_bit(ring: str) -> None:
    """Beside three other turns that prefill and decode at the same time, warm and cold."""
    first = chat(ring, opening())
    messages = follow_up(opening(), first)
    alone = chat(ring, messages, reuse=False)
    others = [opening(f" Rule {number}: be brief about {number}.") for number in (8, 9, 10)]
    with ThreadPoolExecutor(4) as pool:
        for reuse in (True, False):
            noise = [pool.submit(chat, ring, other) for other in others]
            beside = chat(ring, messages, reuse=reuse)
            assert beside.what == alone.what
            assert (beside.cached > 0) is reuse
            crowded = [each.result() for each in noise]
            if reuse:
                cold = crowded
            else:
                assert [each.what for each in crowded] == [each.what for each in cold]


def two_turns(url: str) -> list[Said]:
    """A first turn, and a second one warm and cold."""
    first = chat(url, opening(), reuse=False)
    messages = follow_up(opening(), first)
    warm = chat(url, messages)
    assert warm.cached == first.prompt + first.completion - 1
    return [first, warm, chat(url, messages, reuse=False)]


@pytest.mark.parametrize("ring", ["bfloat16"], indirect=True)
def test_chunks_change_no_bit(ring: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rings that differ in their chunks and stages; `kvring up` has two stages and 256."""
    expected = two_turns(ring)
    for chunk in (16, 512):
        folder = tmp_path_factory.mktemp(f"chunk{chunk}")
        limits = replace(QUICK, max_model_len=1024, chunk_tokens=chunk, lost_after_s=20.0)
        file = write_ring(
            folder / "ring.toml",
            model=str(default_model()),
            layers=LAYERS,
            stages=1,
            limits=limits,
            dtype="bfloat16",
        )
        with processes.fleet(folder / "processes") as made:
            made.whole(file, READY_S)
            found = two_turns(file.url)
        assert [each.what for each in found] == [each.what for each in expected]
    assert expected[1].what == expected[2].what

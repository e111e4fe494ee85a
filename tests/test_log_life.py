"""What a log tells of turns and rings is what the scheduler did: tokens, drafts, rows, ends.

Random interleavings with forks, cancels, restarts, lost frames and forgetful stages; the scheduler
that was recorded is the truth.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from coord.ring import Phase
from tests.memoryring import VOCABULARY, limits
from tests.memoryworld import HalfRight
from tests.recordedring import RecordedRing, played, prompt
from tools import cli
from tools.framelogs.events import Answered, Ended, Event, Lost, Placed, Refused, Sent, Submitted
from tools.framelogs.life import Life
from tools.framelogs.read import entries, processes
from tools.sim.oracle import Oracle
from transport.frame import Kind
from transport.framelog import Payloads

SEEDS = 80
ORACLE = Oracle(2, VOCABULARY)


def random_ring(folder: Path, draw: Random) -> RecordedRing:
    """A ring at rest behind a random life."""
    ring = RecordedRing(
        folder,
        payloads=Payloads.NONE,
        stages=draw.randrange(1, 3),
        layers=2,
        slots=draw.randrange(1, 4),
        drafter=draw.choice((None, partial(HalfRight, ORACLE))),
        bounds=limits(max_model_len=128, chunk_tokens=draw.choice((4, 16, 64)), lost_after_s=1e5),
    )
    ring.form()
    history: list[tuple[int, ...]] = [prompt(9, 40)]
    for _ in range(draw.randrange(20, 200)):
        what = draw.random()
        if what < 0.06 and len(ring.replies) < 12:
            before = draw.choice(history)
            text = (*before[: draw.randrange(len(before) + 1)], *prompt(draw.randrange(50), 9))
            stops = (draw.randrange(64),) if draw.random() < 0.3 else ()
            history.append(text)
            ring.submit(text[:100], draw.randrange(1, 25), stops, salt=draw.choice((b"", b"a")))
        elif what < 0.08 and ring.replies:
            ring.cancel(draw.choice(list(ring.replies)))
        elif what < 0.09:
            ring.restart(draw.randrange(len(ring.stages)))
        elif what < 0.10:
            ring.lose(len(ring.stages), 1)
        elif what < 0.11 and all(forward is None for forward in ring.forwards):
            slots = draw.choice(ring.stages).slots
            slots._chains[draw.randrange(len(slots))].truncate(draw.randrange(20))
        elif ring.choices():
            ring.happen(draw.choice(ring.choices()))
    for _ in range(8):
        ring.pump()
        ring.wait(2.0)
    ring.pump()
    ring.close()
    assert ring.scheduler.rings["r"].phase is Phase.READY
    assert all(reply.over for reply in ring.replies.values())
    return ring


def told(folder: Path) -> tuple[Life, list[Event]]:
    (coordinator,) = (each for each in processes([folder]) if each.header.role == "coordinator")
    life = Life(coordinator.header.config)
    return life, [event for entry in entries(coordinator) for event in life.take(entry)]


def test_a_log_tells_what_the_scheduler_did() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        with TemporaryDirectory() as folder:
            ring = random_ring(Path(folder), Random(seed))
            life, events = told(Path(folder))
        tokens: dict[int, list[int]] = {turn: [] for turn in ring.replies}
        ends: dict[int, str] = {}
        prefilled = accepted = 0
        for event in events:
            seen[type(event).__name__] += 1
            match event:
                case Answered():
                    tokens[event.turn] += event.tokens
                    accepted += event.accepted
                    seen["void"] += event.void
                case Sent() if event.segment.kind is Kind.PREFILL:
                    prefilled += len(event.segment.tokens)
                case Ended():
                    ends[event.turn] = event.reason
        totals, truth = ring.scheduler.totals, ring.scheduler.rings["r"]
        assert tokens == {turn: reply.tokens for turn, reply in ring.replies.items()}, seed
        finished = {t: reply.finished for t, reply in ring.replies.items() if reply.finished}
        assert {t: ends[t] for t in finished} == finished, seed
        assert prefilled == totals.prefilled_tokens, seed
        # a draft that came true before it was sent is in no frame
        assert accepted <= totals.drafts_accepted, seed
        seen["unsent"] += totals.drafts_accepted - accepted
        resident = [slot.resident for slot in truth.ledger.slots]
        mine = life.rings["r"]
        assert [mine.rows[slot] for slot in range(len(resident))] == resident, seed
        assert list(mine.flying) == list(truth.in_flight), seed
        assert mine.formed, seed
        assert not life.turns or set(life.turns) <= {t for t in tokens if t not in finished}, seed
        seen["accepted"] += accepted
    for each in (Submitted, Placed, Refused, Lost, Ended):
        assert seen[each.__name__] > 10, seen
    assert seen["unsent"] < 0.05 * seen["accepted"], seen
    assert min(seen["Forked"], seen["Copied"], seen["void"], seen["accepted"]) > 10, seen


# ---- the story ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    played(folder, drafter=partial(HalfRight, Oracle(6, VOCABULARY)))
    return folder


def story(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    code = cli.run(["log", "story", *map(str, arguments)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    return said.out


def in_order(text: str, *words: str) -> None:
    """Each of the words stands behind the one before it."""
    at = 0
    for word in words:
        found = text.find(word, at)
        assert found >= 0, (word, text[at:])
        at = found + len(word)


def test_a_follow_up(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = story(2, logs, capsys=capsys)
    in_order(
        text,
        "turn 2 of coord",
        "0.000 ms  submitted: a prompt of 61 tokens, at most 8 to generate, greedy\n",
        "admitted on ring r, slot 0: rows [0, 51) are resident, 10 tokens to prefill\n",
        "takes prefill [51, 61)\n",
        "accepted, ",
        "ms: s0 took it at 0.10, ",
        "sent it at ",
        "ends: as long as it may be",
        "8 tokens of at most 8; prompt of 61: 51 reused at first, 10 prefilled in all",
        "first token after ",
        " tokens/s",
        "frames: 1 with prefill",
    )


def test_a_fork(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_order(
        story(4, logs, capsys=capsys),
        "copies rows [0, 50) of slot 1 into slot 2\n",
        "admitted on ring r, slot 2: rows [0, 50) are resident, 2 tokens to prefill\n",
        "copied by s0, s1, s2\n",
    )


def test_a_loss(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_order(
        story(5, logs, capsys=capsys),
        "admitted on ring r, slot 1: nothing is resident, 30 tokens to prefill\n",
        "ring r is lost: stage s1 was restarted; ",
        "ring r: the roll is called, epoch 2\n",
        "ring r has formed: s0, s1, s2; 0 of 3 claims confirmed\n",
        "resumed on ring r, slot 0: nothing is resident, ",
        "ends: as long as it may be",
        "20 tokens of at most 20",
    )


def test_a_cancel(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_order(story(6, logs, capsys=capsys), "ends: cancelled\n", " written\n", "of at most 20")


def test_a_secret_stays_one_and_tokens_wait_to_be_asked(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = story(7, logs, capsys=capsys)
    assert "salted" in text
    ids = " ".join(map(str, prompt(6, 20)))
    assert ids not in text
    with_tokens = story(7, logs, "--tokens", capsys=capsys)
    assert f"prompt: {ids}\n" in with_tokens
    for said in (text, with_tokens):
        assert "secret" not in said
        assert b"tenant".hex() not in said


def test_the_coordinators_log_is_enough(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = logs.glob("coord.*")
    text = story(2, path, capsys=capsys)
    assert "took it" not in text
    in_order(text, "admitted on ring r", "ms: s0 computed 0.", "ends:")


def test_unknown_turns_are_answered_with_the_known_ones(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["log", "story", "99", str(logs)]) == 1
    assert capsys.readouterr().err == "kvring: no turn 99 in these logs; there are 1 to 7\n"
    stages = [str(path) for path in logs.glob("s0.*")]
    assert cli.run(["log", "story", "1", *stages]) == 1
    assert capsys.readouterr().err.startswith("kvring: no coordinator's log among them (of s0)")

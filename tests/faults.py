"""The fault matrix: a stage x a phase x a fault, on rings of real processes that are kept.

A stage is held exactly where a phase is (tests.heldstage), so that every fault strikes there. Two
streams are then under way: the one that is held, and one behind it. Times are those of events in
the coordinator's log. All cases: `python -m tests.faults`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx

from coord.ring import RETRY_S
from tests import processes
from tests.faultcases import COORDINATOR, RETURNS, STAGES, STAYS, Case, Outcome, matrix, table
from tests.processes import NO_TLS, Fleet, Process, RingFile, get, post, until, write_ring
from tests.toyclient import complete, ids, request, truth
from transport.config import Limits

SLOTS = 3
PROMPT, SHARED, REPLY, SHORT = 100, 60, 30, 6  # tokens
RING = Limits(
    slots=SLOTS,
    max_model_len=512,
    chunk_tokens=32,
    shared_chunk_tokens=32,
    heartbeat_s=0.1,
    lost_after_s=1.5,
    frame_timeout_s=10.0,
    park_bytes=1 << 16,
)
BLINK_S = 0.4  # of a stop that is shorter than lost_after_s by more than a busy machine's delays
RESUME_S = 1.5  # where nobody comes back
READ_S = 60.0
WRITTEN_S = 0.5  # coord.saving looks 0.05 s behind a turn's end, and writes behind that


class Watched(threading.Thread):
    """A streamed completion, read in a thread to its end, whatever that is."""

    def __init__(self, url: str, prompt: Sequence[int], count: int) -> None:
        super().__init__(daemon=True)
        self._url, self.prompt, self.count = url, list(prompt), count
        self.tokens: list[int] = []
        self.errors: list[dict[str, Any]] = []
        self.finishes: list[str] = []
        self.done = 0
        self.cut = ""  # how the connection broke
        self.ended_at = 0.0  # wall clock
        self.start()

    def run(self) -> None:
        body = request(self.prompt, self.count, {"stream": True})
        try:
            with (
                httpx.Client(timeout=READ_S, verify=NO_TLS) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
            ):
                if answer.status_code != 200:
                    self.errors.append(json.loads(answer.read())["error"])
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.cut = repr(error)
        self.ended_at = time.time()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            self.tokens += ids(choice["logprobs"])
            if choice["finish_reason"] is not None:
                self.finishes.append(choice["finish_reason"])

    def verdict(self) -> str:
        """Wait for the end: "equal", "error" or "cut"; AssertionError for anything else."""
        self.join(2 * READ_S)
        assert not self.is_alive(), "the stream has no end"
        said = (self.tokens, self.errors, self.finishes, self.done, self.cut)
        right = truth(self.prompt, self.count)
        assert self.tokens == right[: len(self.tokens)], ("wrong tokens", said, right)
        if self.cut:
            assert (self.errors, self.done, self.finishes) == ([], 0, []), said
            return "cut"
        assert self.done <= 1, said
        if self.errors:
            assert (len(self.errors), self.finishes) == (1, []), said
            return "error"
        assert (self.tokens, self.finishes, self.done) == (right, ["length"], 1), said
        return "equal"


def events(process: Process, event: str, since: float) -> list[dict[str, Any]]:
    """Lines of a process's log since then (wall clock), each with its time as `at`."""
    found = []
    for line in process.errors.splitlines():
        if f'"event": "{event}"' in line and line.endswith("}"):
            said = json.loads(line)
            said["at"] = datetime.fromisoformat(said["timestamp"]).timestamp()
            if said["at"] >= since:
                found.append(said)
    return found


def ring_events(coordinator: Process, since: float) -> list[tuple[float, str]]:
    """When its ring came to be in which state."""
    return [(each["at"], each["state"]) for each in events(coordinator, "ring", since)]


@dataclass(slots=True)
class Scene:
    """What is under way when the fault strikes."""

    streams: list[Watched] = field(default_factory=list)
    warm: list[int] = field(default_factory=list)  # a session that nobody else's turn gives up
    known: int = 0  # its rows
    shared: int = 0  # of them, those that a stream computes again when they are lost


class Stand:
    """One ring whose processes are kept from case to case; each case leaves it whole."""

    def __init__(self, fleet: Fleet, folder: Path, *, returns: bool) -> None:
        """returns: lost stages come back, and turns wait for them; else they soon give up."""
        folder.mkdir(parents=True, exist_ok=True)
        limits = RING if returns else replace(RING, resume_s=RESUME_S)
        self.limits = limits
        self.fleet = fleet
        self.ring: RingFile = write_ring(folder / "ring.toml", limits=limits)
        self.hold = folder / "hold"
        self.hold.mkdir()
        self.broken = False  # a case has failed and left it as it was
        self._random = Random(0)
        self._prompts = 0
        self._spoiled = False  # routing has learned what a held copy took
        self.running = {COORDINATOR: fleet.coord(self.ring)}
        self.running |= {name: self.start(name) for name in STAGES}
        fleet.ready(self.ring.url)

    def start(self, name: str, weights: str = "right") -> Process:
        """Start a stage, or the coordinator."""
        if name == COORDINATOR:
            return self.fleet.coord(self.ring)
        return self.fleet.start(
            *("--hold", self.hold, "--weights", weights, "--ring", self.ring.path, "--name", name),
            name=name,
            module="tests.heldstage",
        )

    # ---- scenes ----

    def prompt(self, length: int = PROMPT) -> list[int]:
        """A prompt that begins like no other."""
        self._prompts += 1
        first = [self._prompts % 256, self._prompts // 256]
        return [*first, *(self._random.randrange(256) for _ in range(length - 2))]

    def ask(self, prompt: list[int]) -> list[int]:
        """A whole turn; the session so far."""
        answer = complete(self.ring.url, prompt, SHORT)
        assert answer.tokens == truth(prompt, SHORT)
        return [*prompt, *answer.tokens]

    def clear(self) -> None:
        """Nothing is resident."""
        processes.idle(self.ring.url)
        described = get(f"{self.ring.url}/ring").json()["rings"][0]
        for each in (*described["slots"], *described["parked"]):
            if each["resident"]:
                freed = httpx.delete(f"{self.ring.url}/ring/slots/{each['slot']}", verify=NO_TLS)
                assert freed.status_code == 200, freed.text

    def scene(self, case: Case) -> Scene:
        """Sessions that the phase needs, and streams that have come to it."""
        if case.phase in ("park", "restore") and self._spoiled:
            self._forget_rates()
        self.clear()
        sessions = [self.ask(self.prompt())]
        scene = Scene()
        row = 0
        match case.phase:
            case "idle":
                wanted = None
            case "prefill":
                wanted, row = self.prompt(), RING.chunk_tokens
            case "decode":
                wanted = self.prompt()
                row = len(wanted) + 5
            case "copy":
                wanted = [*sessions[0][:SHARED], *self.prompt(PROMPT - SHARED)]
                scene.shared = SHARED
            case "park":
                sessions += [self.ask(self.prompt()) for _ in range(SLOTS - 1)]
                wanted = self.prompt()
            case _:
                sessions += [self.ask(self.prompt()) for _ in range(SLOTS)]
                parked = get(f"{self.ring.url}/ring").json()["rings"][0]["parked"]
                assert [each["resident"] for each in parked] == [len(sessions[0]) - 1], parked
                wanted = [*sessions[0], 1, 2, 3]
        scene.warm, scene.known = sessions[-1], len(sessions[-1]) - 1
        if case.victim == COORDINATOR:
            processes.idle(self.ring.url)
            time.sleep(WRITTEN_S)
        if wanted is not None:
            self._hold(case, wanted, row, scene)
        return scene

    def _forget_rates(self) -> None:
        self.running[COORDINATOR].kill()
        self.running[COORDINATOR] = self.start(COORDINATOR)
        self.fleet.ready(self.ring.url)
        self._spoiled = False

    def _hold(self, case: Case, wanted: list[int], row: int, scene: Scene) -> None:
        where = case.victim if case.victim in STAGES else "s1"
        order, held = self.hold / where, self.hold / f"{where}.held"
        held.unlink(missing_ok=True)
        order.write_text(f"{case.phase} {row}")
        scene.streams.append(Watched(self.ring.url, wanted, REPLY))
        until(f"{case}: the phase is hit", held.exists)
        scene.streams.append(Watched(self.ring.url, self.prompt(), REPLY))
        until("the second turn has come", lambda: self.turns() == 2)

    def release(self) -> None:
        """Whoever is held goes on."""
        for name in STAGES:
            (self.hold / name).unlink(missing_ok=True)

    def turns(self) -> int:
        """Turns that run or wait."""
        found: dict[str, int] = get(f"{self.ring.url}/ring").json()["turns"]
        return sum(found.values())

    # ---- events ----

    def lost(self, since: float) -> float:
        """When the ring was given up, first since then; waits for it."""
        return self._ring(lambda state: state != "ready", "lost", since)

    def ready(self, since: float) -> float:
        """When the ring was ready again."""
        return self._ring(lambda state: state == "ready", "ready", since)

    def _ring(self, fits: Callable[[str], bool], what: str, since: float) -> float:
        def look() -> float | None:
            said = ring_events(self.running[COORDINATOR], since)
            return next((at for at, state in said if fits(state)), None)

        at = until(f"the ring is {what}", look)
        assert at is not None
        return at

    def loaded(self, name: str, since: float) -> float:
        """When a stage that was started again was loaded."""
        said = until(f"{name} is loaded", lambda: events(self.running[name], "loaded", since))
        return float(said[0]["at"])

    # ---- faults ----

    def play(self, case: Case) -> Outcome:
        """One case, and what must hold; AssertionError where it does not."""
        outcome = Outcome(case)
        self.broken = True
        scene = self.scene(case)
        if case.fault in STAYS:
            self._stay_away(case, scene, outcome)
        elif case.victim == COORDINATOR:
            self._disturb_coordinator(case, scene, outcome)
        else:
            self._come_back(case, scene, outcome)
        self._after(case, scene)
        self._bounds(outcome)
        self._spoiled = self._spoiled or case.phase in ("park", "restore")
        self.broken = False
        return outcome

    def _come_back(self, case: Case, scene: Scene, outcome: Outcome) -> None:
        victim = self.running[case.victim]
        epoch = self.epoch()
        struck = time.time()
        if case.fault == "restart":
            victim.kill()
            self.release()
            self.running[case.victim] = self.start(case.victim)
            outcome.detected_s = self.lost(struck) - struck
            back = self.loaded(case.victim, struck)
            outcome.back_s = self.ready(back) - back
        else:
            victim.send(signal.SIGSTOP)
            self.release()
            if case.fault == "pause":
                outcome.detected_s = self.lost(struck) - struck
            else:
                time.sleep(BLINK_S)
            back = time.time()
            victim.send(signal.SIGCONT)
            if case.fault == "pause":
                outcome.back_s = self.ready(back) - back
        self._count(scene, outcome)
        assert outcome.equal == len(scene.streams), outcome
        if case.fault == "blink":
            assert self.epoch() == epoch, "nobody noticed"

    def _disturb_coordinator(self, case: Case, scene: Scene, outcome: Outcome) -> None:
        victim = self.running[COORDINATOR]
        struck = time.time()
        if case.fault == "restart":
            victim.kill()
            self.release()
            self.running[COORDINATOR] = self.start(COORDINATOR)
            outcome.back_s = self.ready(struck) - struck
        else:
            victim.send(signal.SIGSTOP)
            self.release()
            time.sleep(BLINK_S if case.fault == "blink" else 1.2 * RING.lost_after_s)
            victim.send(signal.SIGCONT)
        self._count(scene, outcome)
        ended = outcome.cut if case.fault == "restart" else outcome.equal
        assert ended == len(scene.streams), outcome

    def _stay_away(self, case: Case, scene: Scene, outcome: Outcome) -> None:
        struck = time.time()
        self.running[case.victim].kill()
        self.release()
        said = [case.victim]
        if case.fault == "other":
            self.running[case.victim] = self.start(case.victim, "other")
            said.append("different weights")
        outcome.detected_s = self.lost(struck) - struck
        self._count(scene, outcome)
        assert outcome.errors == len(scene.streams), outcome
        assert {each.errors[0]["code"] for each in scene.streams} <= {"ring_lost"}, scene.streams
        if scene.streams:
            outcome.ended_s = max(each.ended_at for each in scene.streams) - struck

        def refused() -> bool:
            answer = post(f"{self.ring.url}/v1/completions", json={"prompt": [1, 2]})
            assert answer.status_code == 503, answer.text
            return all(word in answer.json()["error"]["message"] for word in said)

        until(f"503 says {said}", refused)
        if case.fault == "other":
            self.running[case.victim].kill()
        self.running[case.victim] = self.start(case.victim)
        since = time.time()
        back = self.loaded(case.victim, since)
        outcome.back_s = self.ready(back) - back

    def _count(self, scene: Scene, outcome: Outcome) -> None:
        ends = [each.verdict() for each in scene.streams]
        outcome.equal, outcome.errors = ends.count("equal"), ends.count("error")
        outcome.cut = ends.count("cut")

    def _after(self, case: Case, scene: Scene) -> None:
        """The next request works, and what no stage has lost is still warm."""
        self.fleet.ready(self.ring.url)
        again = [*scene.warm, 7]
        answer = complete(self.ring.url, again, SHORT)
        assert answer.tokens == truth(again, SHORT), "wrong tokens after the fault"
        lost = case.victim != COORDINATOR and case.fault not in ("pause", "blink")
        warm = (scene.shared if case.fault == "restart" else 0) if lost else scene.known
        assert answer.cached == warm, (answer.usage, answer.kvring)
        processes.idle(self.ring.url)

    def _bounds(self, outcome: Outcome) -> None:
        """Within twice what docs/reliability.md states."""
        limits = self.limits
        if outcome.detected_s is not None:
            assert outcome.detected_s <= 2 * limits.lost_after_s, outcome
        if outcome.ended_s is not None:
            assert outcome.ended_s <= 2 * (limits.lost_after_s + limits.resume_s), outcome
        if outcome.back_s is not None and outcome.case.victim != COORDINATOR:
            assert outcome.back_s <= 2 * (limits.heartbeat_s + RETRY_S + 0.5), outcome

    def epoch(self) -> int:
        """The ring's."""
        found: int = get(f"{self.ring.url}/ring").json()["rings"][0]["epoch"]
        return found


class Stands:
    """The two rings of a run, made when they are needed and again after a failure."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet, self._folder = fleet, folder
        self._made = 0
        self._stands: dict[bool, Stand] = {}

    def play(self, case: Case) -> Outcome:
        """See Stand.play."""
        return self.stand(returns=case.fault in RETURNS).play(case)

    def stand(self, *, returns: bool) -> Stand:
        """A whole ring."""
        stand = self._stands.get(returns)
        if stand is None or stand.broken:
            for process in stand.running.values() if stand is not None else ():
                process.kill()
            self._made += 1
            stand = Stand(self._fleet, self._folder / f"{self._made}", returns=returns)
            self._stands[returns] = stand
        return stand


def main() -> int:
    """Play the matrix; the exit code is 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    wanted = parser.parse_args()
    outcomes, failed = [], 0
    with tempfile.TemporaryDirectory() as name, processes.fleet(Path(name) / "log") as fleet:
        stands = Stands(fleet, Path(name))
        for case in [each for each in matrix() if wanted.only in str(each)]:
            try:
                outcomes.append(stands.play(case))
                _say(str(outcomes[-1]))
            except AssertionError as error:
                failed += 1
                _say(f"{case} failed: {error}")
    _say(f"\n{table(outcomes)}\n\n{len(outcomes) + failed} cases, {failed} failed")
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Owns one soak from start to end: the ring's files, load, faults, rest and findings."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from coord.http.keys import new_key
from tools.client import Json
from tools.errors import USAGE, ToolError
from tools.pull import resolve_model
from tools.server import free_port
from tools.soak.asking import Asker
from tools.soak.customers import MODEL_SHAPE, TENANTS, TOY_SHAPE, Customer
from tools.soak.faults import Breaker, Fault, Planned, draw
from tools.soak.fleet import COORDINATOR, Fleet, wait_until
from tools.soak.record import COMPLETIONS, Outcome, Record, Wanted
from tools.soak.rest import at_rest, beyond_bounds, claims, refuted
from tools.soak.tally import Tally
from tools.soak.truth import Toy
from tools.soak.watch import Sample, Trend, Watcher, grown_at_rest, look, trends
from transport.config import TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps

OPERATOR = "ops"
READY_S = 300.0
LAST_S = 200.0  # for replies that run when the load ends: longer than any may take
REST_S = 30.0
WRITTEN_S = 1.0  # the state file is written a moment behind a turn's end
BUSY_S = 3.0  # that a fault waits for two open requests
PROBE_S = 10.0
RECHECK_SHARE = 1.0  # of the load's time that comparing a real model's replies may take
COUNTERS = ("resumed_total", "rings_lost_total", "rejects_total", "stale_verdicts_total")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    minutes: float
    model: str
    stages: int
    rings: int
    clients: int
    kill_every_s: float
    seed: int


@dataclass(slots=True)
class Result:
    """What was found. start and end: of the load, by time.monotonic().

    claimed, proven: rows of the ledgers at rest, and of those the ones that every stage confirmed.
    rechecked, incomparable: replies of a real model that were asked for again.
    """

    plan: Plan
    start: float
    end: float
    tally: Tally
    faults: list[Fault]
    samples: list[Sample]
    trends: list[Trend]
    counters: dict[str, float]
    claimed: int = 0
    proven: int = 0
    rechecked: int = 0
    incomparable: int = 0
    findings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many findings."""
        return sum(map(len, self.findings.values()))


def soak(plan: Plan, out: Path, progress: Progress) -> Result:
    """Run it. Raises ToolError where it cannot even begin."""
    out.mkdir(parents=True, exist_ok=True)
    return _Soak(plan, out, progress).run()


class _Soak:
    def __init__(self, plan: Plan, out: Path, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        toy = Toy() if plan.model == TOY else None
        self._config = _config(plan, toy is not None)
        ring = out / "ring.toml"
        ring.write_text(dumps(self._config))
        state = out / ".kvring"
        for old in state.glob("ring.sqlite*"):  # of a run before
            old.unlink()
        keys = {name: new_key(name, admin=name == OPERATOR) for name in (*TENANTS, OPERATOR)}
        file = out / "api-keys"
        file.write_text("".join(f"{key.line()}\n" for _, key in keys.values()))
        self._stages = [stage.name for ring in self._config.rings for stage in ring.stages]
        self._fleet = Fleet(ring, self._stages, file, out / "logs")
        url = f"http://{self._config.coordinator.http}"
        self._asker = Asker(url, {name: text for name, (text, _) in keys.items()})
        self.tally = Tally(toy)
        self._stop = threading.Event()
        self._busy = threading.Lock()
        self._open = 0  # requests that are being answered
        self._counts: dict[int, dict[str, float]] = {}  # by the coordinator's pid
        nothing: Json = {"rings": []}
        self._claims = (nothing, nothing)  # before and after the coordinator started anew
        self._watcher = Watcher(self._fleet.pids, self._read_counters)

    def run(self) -> Result:
        """See soak."""
        plan = self._plan
        with self._running():
            self._wait_whole("starting the ring", READY_S)
            assert self._answers()
            before = self._look()
            self._watcher.start()
            start, end, breaker, stuck = self._load()
            findings = {"customers that never came back": stuck}
            findings["left at rest"] = self._rest()
            self._watcher.stop()
            findings["grown at rest"] = grown_at_rest(before, self._look())
            findings["claims that no stage confirms"] = self._prove()
            rechecked, incomparable = self._recheck()
        tally, faults = self.tally, breaker.faults
        windows = [(fault.at, fault.end) for fault in faults]
        deaths = [(fault.at, fault.end) for fault in faults if fault.ends_coordinator]
        grown = trends(self._watcher.samples, start, end)
        findings |= {
            "mismatches": tally.mismatches,
            "streams without one end": tally.bad_ends,
            "failures without a fault": tally.unexplained(windows, deaths),
            "leaks": [trend.leak for trend in grown if trend.leak is not None],
            "rings that stayed lost": [
                f"{fault.planned}" for fault in faults if fault.whole is None
            ],
            "processes": self._fleet.problems,
        }
        counters = {
            name: sum(counts.get(name, 0.0) for counts in self._counts.values())
            for name in COUNTERS
        }
        return Result(
            plan,
            start,
            end,
            tally,
            faults,
            self._watcher.samples,
            grown,
            counters,
            sum(claims(self._claims[0]).values()),
            sum(claims(self._claims[1]).values()),
            rechecked,
            incomparable,
            {name: found for name, found in findings.items() if found},
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        # a SIGTERM ends this process as Ctrl-C does
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        self._fleet.start()
        try:
            yield
        finally:
            self._stop.set()
            self._asker.close()
            self._progress("ending the ring")
            self._fleet.end()
            signal.signal(signal.SIGTERM, previous)

    # ---- the load ------------------------------------------------------------------------------

    def _load(self) -> tuple[float, float, Breaker, list[str]]:
        plan, stop = self._plan, self._stop
        shape = TOY_SHAPE if self.tally.toy is not None else MODEL_SHAPE
        customers = [
            Customer(self._ask, f"{plan.seed}/{number}", shape, self.tally.toy, stop)
            for number in range(plan.clients)
        ]
        breaker = Breaker(
            self._fleet,
            draw(plan.seed, plan.minutes, plan.kill_every_s, self._stages),
            answers=self._answers,
            whole=self._whole,
            hitting=self._before_fault,
        )
        start = time.monotonic()
        end = start + plan.minutes * 60
        pool = ThreadPoolExecutor(plan.clients + 1, thread_name_prefix="soak")
        asking = [pool.submit(customer.run) for customer in customers]
        breaking = pool.submit(breaker.run, start, end, stop)
        while not wait_until(min(end, time.monotonic() + 1.0), stop):
            self._tell(start, breaker)
            for future in asking:
                if future.done():
                    future.result()  # it ended by an error of ours
            if time.monotonic() >= end:
                break
        breaking.result()  # the last fault's recovery
        end = time.monotonic()
        stop.set()
        self._progress("waiting for the last replies")
        done, left = wait(asking, LAST_S)
        for future in done:
            future.result()
        pool.shutdown(wait=False)
        stuck = [f"{len(left)} of {plan.clients}"] if left else []
        return start, end, breaker, stuck

    def _ask(self, wanted: Wanted) -> Record:
        with self._busy:
            self._open += 1
        record = self._asker.ask(wanted)
        with self._busy:
            self._open -= 1
        self.tally.add(record)
        return record

    def _tell(self, start: float, breaker: Breaker) -> None:
        tally, passed = self.tally, int(time.monotonic() - start)
        wrong = len(tally.mismatches) + len(tally.bad_ends)
        whole = int(self._plan.minutes * 60)
        self._progress(
            f"{passed // 60}:{passed % 60:02d} of {whole // 60}:{whole % 60:02d}, "
            f"{tally.outcomes.total()} requests, {len(breaker.faults)} faults, {wrong} wrong"
        )

    # ---- what the ring says --------------------------------------------------------------------

    def _answers(self) -> bool:
        """A small request is answered."""
        body = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
        try:
            answer = self._asker.post(COMPLETIONS, OPERATOR, body, PROBE_S)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def _ring(self) -> Json | None:
        """GET /ring; None while nobody answers."""
        try:
            answer = self._asker.get("/ring", OPERATOR)
        except httpx.HTTPError:
            return None
        found: Json | None = answer.json() if answer.status_code == 200 else None
        return found

    def _whole(self) -> bool:
        """Every ring is ready, with the very processes that run now."""
        ring, pids = self._ring(), self._fleet.pids()
        if ring is None or len(pids) != len(self._fleet.members):
            return False
        return all(each["state"] == "ready" for each in ring["rings"]) and all(
            stage["pid"] == pids[stage["name"]]
            for each in ring["rings"]
            for stage in each["stages"]
        )

    def _wait_whole(self, what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._whole():
            self._progress(what)
            if self._fleet.problems or time.monotonic() > deadline:
                reason = "; ".join(self._fleet.problems) or f"not ready within {limit_s:g} s"
                raise ToolError(f"{what}: {reason}")
            time.sleep(0.2)

    def _look(self) -> list[Sample]:
        looks = [look(name, pid) for name, pid in self._fleet.pids().items()]
        return [sample for sample in looks if sample is not None]

    def _before_fault(self, planned: Planned) -> None:
        """Wait for a moment at which there is something to lose."""
        if COORDINATOR in planned.targets:
            self._read_counters()  # they end with it
        deadline = time.monotonic() + BUSY_S
        while self._open < min(2, self._plan.clients) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _read_counters(self) -> None:
        pid = self._fleet.pids().get(COORDINATOR)
        try:
            text = self._asker.get("/metrics", OPERATOR, 2.0).text
        except (httpx.HTTPError, RuntimeError):
            return
        if pid is not None and pid == self._fleet.pids().get(COORDINATOR):
            pairs = (line.removeprefix("kvring:").split() for line in text.splitlines())
            found = {pair[0]: float(pair[1]) for pair in pairs if pair and pair[0] in COUNTERS}
            self._counts[pid] = found

    # ---- behind the load -----------------------------------------------------------------------

    def _rest(self) -> list[str]:
        """What is still going on although everybody has gone."""
        self._progress("waiting for rest")
        deadline, left = time.monotonic() + REST_S, ["nobody answers GET /ring"]
        while left and time.monotonic() < deadline:
            ring = self._ring()
            if ring is not None:
                left = at_rest(ring)
            time.sleep(0.1)
        return left

    def _prove(self) -> list[str]:
        """Kill the coordinator at rest; what it claimed, the stages must confirm to the next."""
        self._progress("proving the ledgers' claims")
        time.sleep(WRITTEN_S)
        before = self._ring()
        self._fleet.down(COORDINATOR, signal.SIGKILL)
        self._fleet.up(COORDINATOR)
        try:
            self._wait_whole("a new coordinator", READY_S)
        except ToolError as error:
            return [error.message]
        after = self._ring()
        if before is None or after is None:
            return ["nobody answers GET /ring"]
        self._claims = (before, after)
        return beyond_bounds(before) + refuted(before, after)

    def _recheck(self) -> tuple[int, int]:
        """A real model's truth: ask again, cold, without faults. (compared, not comparable)."""
        kept, done, incomparable = self.tally.kept, 0, 0
        deadline = time.monotonic() + self._plan.minutes * 60 * RECHECK_SHARE
        step = max(1, len(kept) // 400)
        for record in kept[::step]:
            if time.monotonic() > deadline:
                break
            self._progress(f"asking again without reuse: {done} of {len(kept[::step])}")
            body = {**record.wanted.body, "kvring": {"reuse": False}}
            again = self._asker.ask(replace(record.wanted, body=body))
            if again.outcome is not Outcome.COMPLETE:
                self.tally.bad_ends.append(f"asked again at rest: {again.outcome} {again.code}")
            elif again.usage["prompt_tokens"] != record.usage["prompt_tokens"]:
                incomparable += 1  # a coordinator was killed before it wrote the reply's ids down
            else:
                done += 1
                was, now = ([(c.text, c.finishes) for c in r.choices] for r in (record, again))
                if was != now:
                    self.tally.mismatches.append(f"{was} was {now} when asked again; {body}")
        return done, incomparable


def _config(plan: Plan, toy: bool) -> Config:
    """Rings on this machine, links over TCP on free ports."""
    from pipeline.load import describe_model
    from pipeline.model import ModelError

    path = TOY if toy else str(resolve_model(plan.model, Path("models")).resolve())
    try:
        layers, _ = describe_model(path)
    except ModelError as error:
        raise ToolError(str(error), code=USAGE) from None
    if plan.stages > layers:
        raise ToolError(f"--stages {plan.stages}: the model has only {layers} layers", code=USAGE)
    cuts = [layers * index // plan.stages for index in range(plan.stages + 1)]
    threads = max(1, (os.cpu_count() or 1) // (plan.stages * plan.rings))
    rings = tuple(
        Ring(
            f"r{ring}",
            f"tcp://127.0.0.1:{free_port()}",
            tuple(
                Stage(
                    f"r{ring}s{index}",
                    f"tcp://127.0.0.1:{free_port()}",
                    (cuts[index], cuts[index + 1]),
                    threads=threads,
                )
                for index in range(plan.stages)
            ),
        )
        for ring in range(plan.rings)
    )
    limits = Limits(
        max_model_len=2560 if toy else 1280,
        slots=4,
        park_bytes=64_000 if toy else 64 << 20,
        heartbeat_s=0.25,
        lost_after_s=3.0 if toy else 6.0,
        drain_s=2.0,
        deadline_s=120.0,
    )
    http = f"127.0.0.1:{free_port()}"
    return Config(Model(path, plan.model, "bfloat16"), rings, Coordinator(http), limits)

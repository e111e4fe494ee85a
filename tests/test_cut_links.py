"""Links that are cut for seconds and mended, and machines that vanish: no token is lost or wrong.

Over a cable that this process holds, and, where root is, between network namespaces. CASES 28 to
32: the same promise as for a stage's loss.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.netns import SkippedError
from coord.ring import PING_S
from tests import processes
from tests.cables import Cable, Machines, address, inside
from tests.faults import Watched, ring_events
from tests.processes import TOY_LAYERS, Fleet, Process, RingFile, until, write_ring
from tests.toyclient import complete, truth
from transport.config import TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps

CUT_S = 5.0
GONE_S = 15.0  # by then TCP, left alone, tries again once in 13 s and more
PROMPT = list(range(40))
REPLY = 200  # tokens of 4 ms and more
LIMITS = Limits(
    slots=3,
    max_model_len=512,
    chunk_tokens=32,
    heartbeat_s=0.1,
    lost_after_s=1.5,
    frame_timeout_s=2.0,
    resume_s=30.0,
)
MENDED_S = 5.0  # a link's own return: TCP tries again at 6.2 s, and so much of a busy machine


class Place:
    """A ring whose links can be cut."""

    def __init__(self, ring: RingFile, coordinator: Process) -> None:
        self.ring, self.coordinator = ring, coordinator

    def lost_at(self, since: float) -> float | None:
        said = ring_events(self.coordinator, since)
        return next((at for at, state in said if state != "ready"), None)

    def ready_at(self, since: float) -> float | None:
        said = ring_events(self.coordinator, since)
        return next((at for at, state in said if state == "ready"), None)

    def stream(self) -> Watched:
        """A reply that has begun. A ring that just missed heartbeats would refuse it."""
        until("the ring is whole", lambda: processes.readiness(self.ring.url)["ready"])
        watched = Watched(self.ring.url, PROMPT, REPLY)
        until("tokens come", lambda: len(watched.tokens) > 5)
        return watched

    def survives(
        self, watched: Watched, cut_at: float, mend: Callable[[], None], bound_s: float
    ) -> None:
        """The cut is noticed within twice the bound; once mended, the stream ends as it should."""
        assert not watched.finishes, "it was cut while frames were in flight"
        lost = until("the ring is lost", lambda: self.lost_at(cut_at))
        assert lost - cut_at <= 2 * bound_s, lost - cut_at
        time.sleep(max(0.0, cut_at + CUT_S - time.time()))
        mend()
        mended = time.time()
        back = until("the ring is back", lambda: self.ready_at(mended))
        assert back - mended <= MENDED_S, back - mended
        assert watched.verdict() == "equal"
        self.serves()

    def serves(self) -> None:
        """The next request works."""
        prompt = [9, *PROMPT]
        until("a ring is ready", lambda: processes.readiness(self.ring.url)["status"] == 200)
        assert complete(self.ring.url, prompt, 5).tokens == truth(prompt, 5)
        processes.idle(self.ring.url)


def _held_stage(fleet: Fleet, ring: Path, name: str, *more: object) -> Process:
    """A slow toy; nobody holds it."""
    where = ("--hold", ring.parent, "--ring", ring, "--name", name, *more)
    return fleet.start(*where, name=name, module="tests.heldstage")


# ---- a cable for each link -----------------------------------------------------------------------

LINKS = {  # link: the process that sends there, and the bound of what its stall does
    "coordinator to head": ("coord", LIMITS.frame_timeout_s),
    "head to middle": ("s0", LIMITS.frame_timeout_s),
    "middle to tail": ("s1", LIMITS.frame_timeout_s),
    "tail to coordinator": ("s2", LIMITS.lost_after_s),
    "heartbeats": ("s1", LIMITS.lost_after_s),
}


class Cabled(Place):
    """Processes on this machine; each has a ring.toml of its own, whose addresses are cables."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        plain = write_ring(folder / "ring.toml", limits=LIMITS)
        (ring,) = plain.config.rings
        ports = [int(stage.address.rsplit(":", 1)[1]) for stage in ring.stages]
        verdicts = int(ring.verdicts.rsplit(":", 1)[1])
        names = list(LINKS)
        targets = [*ports, verdicts, verdicts]
        self.cables = {name: Cable(port) for name, port in zip(names, targets, strict=True)}
        at = [f"tcp://127.0.0.1:{self.cables[name].port}" for name in names]
        stages = tuple(
            replace(stage, address=at[index], bind=stage.address)
            for index, stage in enumerate(ring.stages)
        )
        for who, said in (("coord", ring.verdicts), ("s0", ring.verdicts), ("s1", at[4]),
                          ("s2", at[3])):  # fmt: skip
            own = replace(ring, stages=stages, verdicts=said, bind=ring.verdicts)
            file = folder / f"{who}.toml"
            file.write_text(dumps(replace(plain.config, rings=(own,))))
        coordinator = fleet.start("coord", "--ring", folder / "coord.toml", name="coord")
        for name in plain.names:
            _held_stage(fleet, folder / f"{name}.toml", name)
        fleet.ready(plain.url)
        super().__init__(plain, coordinator)


@pytest.fixture(scope="module")
def cabled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cabled]:
    folder = tmp_path_factory.mktemp("cabled")
    with processes.fleet(folder / "processes") as fleet:
        made = Cabled(fleet, folder)
        try:
            yield made
        finally:
            for cable in made.cables.values():
                cable.close()


@pytest.mark.parametrize("link", LINKS)
def test_a_link_that_stalls_and_goes_on(link: str, cabled: Cabled) -> None:
    """No connection ends: what was sent meanwhile arrives late, and is not believed."""
    cable = cabled.cables[link]
    watched = cabled.stream()
    cut_at = time.time()
    cable.stall()
    cabled.survives(watched, cut_at, cable.mend, LINKS[link][1])


@pytest.mark.parametrize("link", [name for name in LINKS if name != "middle to tail"])
def test_a_link_that_is_reset_with_frames_under_way(link: str, cabled: Cabled) -> None:
    """What was on the wire is lost for certain, and nobody can connect for a while."""
    cable = cabled.cables[link]
    watched = cabled.stream()
    cut_at = time.time()
    cable.stall()
    until("frames are on the wire", lambda: cable.held)
    cable.reset()
    cabled.survives(watched, cut_at, cable.mend, LINKS[link][1])


def test_an_idle_ring_misses_its_head(cabled: Cabled) -> None:
    """A ping tells: within PING_S + frame_timeout_s."""
    processes.idle(cabled.ring.url)
    cable = cabled.cables["coordinator to head"]
    cut_at = time.time()
    cable.stall()
    lost = until("the ring is lost", lambda: cabled.lost_at(cut_at))
    cable.mend()
    assert lost - cut_at <= 2 * (PING_S + LIMITS.frame_timeout_s)
    cabled.serves()


# ---- network namespaces --------------------------------------------------------------------------


class Apart(Place):
    """Every process on a machine of its own, as far as the network goes."""

    def __init__(self, fleet: Fleet, folder: Path, machines: Machines, limits: Limits) -> None:
        self.machines, self.fleet = machines, fleet
        cuts = [TOY_LAYERS * index // 3 for index in range(4)]
        stages = tuple(
            Stage(f"s{i}", f"tcp://{address(1 + i)}:7100", (cuts[i], cuts[i + 1])) for i in range(3)
        )
        ring = Ring("r", f"tcp://{address(0)}:7100", stages)
        model, http = Model(TOY, "m", "float32"), Coordinator("127.0.0.1:8000")
        config = Config(model, (ring,), http, limits)
        file = RingFile(folder / "ring.toml", config)
        file.path.write_text(dumps(config))
        super().__init__(file, fleet.coord(file, "--insecure"))
        self.stages = [self.start(index) for index in range(3)]
        fleet.ready(file.url)

    def start(self, index: int) -> Process:
        """Stage `index`, on its machine."""
        with inside(self.machines.names[1 + index]):
            return _held_stage(self.fleet, self.ring.path, f"s{index}", "--insecure")


@contextlib.contextmanager
def apart(folder: Path, limits: Limits) -> Iterator[Apart]:
    """This thread is on the coordinator's machine."""
    machines = Machines(4)
    try:
        try:
            machines.make()
        except SkippedError as reason:
            pytest.skip(str(reason))
        with (
            inside(machines.names[0]),
            processes.fleet(folder / "processes") as fleet,
        ):
            yield Apart(fleet, folder, machines, limits)
    finally:
        machines.remove()


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with apart(tmp_path_factory.mktemp("apart"), LIMITS) as made:
        yield made


@pytest.mark.parametrize("machine", [0, 1, 2, 3], ids=["coordinator", "head", "middle", "tail"])
def test_a_machine_is_unplugged_for_seconds(machine: int, lan: Apart) -> None:
    watched = lan.stream()
    cut_at = time.time()
    lan.machines.unplug(machine)
    lan.survives(
        watched, cut_at, lambda: lan.machines.unplug(machine, back=True), LIMITS.lost_after_s
    )


@pytest.mark.parametrize(
    ("one", "other", "bound_s"),
    [(1, 2, LIMITS.frame_timeout_s), (2, 3, LIMITS.frame_timeout_s), (0, 2, LIMITS.lost_after_s)],
    ids=["head and middle", "middle and tail", "coordinator and middle"],
)
def test_two_machines_are_parted_for_seconds(
    one: int, other: int, bound_s: float, lan: Apart
) -> None:
    """Every packet between them is dropped; nobody is told."""
    watched = lan.stream()
    cut_at = time.time()
    lan.machines.part(one, other)
    lan.survives(watched, cut_at, lambda: lan.machines.part(one, other, back=True), bound_s)


def test_a_machine_vanishes_and_another_takes_its_place(tmp_path: Path) -> None:
    """No FIN, no RST: half-open connections. Who comes back finds everybody ready to connect."""
    limits = replace(LIMITS, resume_s=2.0)
    with apart(tmp_path, limits) as lan:
        watched = lan.stream()
        cut_at = time.time()
        lan.machines.swallow(2)
        lan.stages[1].kill()  # nobody hears of it
        lost = until("the ring is lost", lambda: lan.lost_at(cut_at))
        assert lost - cut_at <= 2 * limits.lost_after_s
        assert watched.verdict() == "error"
        assert watched.ended_at - cut_at <= 2 * (limits.lost_after_s + limits.resume_s)
        lan.stages[1] = lan.start(1)
        until("it is loaded", lambda: '"event": "loaded"' in lan.stages[1].errors)
        time.sleep(max(0.0, cut_at + GONE_S - time.time()))
        lan.machines.swallow(2, back=True)
        mended = time.time()
        back = until("the ring is back", lambda: lan.ready_at(mended))
        assert back - mended <= MENDED_S, back - mended
        lan.serves()

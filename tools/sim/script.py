"""Owns the script of one simulated world: its shape, and what its clients and its faults do when.

A script is all that a world is made of: it can be cut down entry by entry and played again. Knows
no core and plays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from transport.config import Config, Coordinator, Limits, Model, Ring, Stage
from transport.frame import GREEDY, Sampling

FAULTS = (
    "stall",  # a stage's process stands still, or only its compute thread does
    "crash",  # a stage dies with all it held and what was on its way to it, and comes back
    "gap",  # one run of frames is lost on a link
    "stale",  # an old reply comes again, or from an earlier life
    "pause",  # the coordinator's process stands still: its clock jumps
    "restart",  # of the coordinator, with a wall clock that may have gone back
    "damage",  # some stages lose rows, or hold others: they must refuse
    "lie",  # all stages do: the ledger claims what is nowhere
    "slow",  # clients read late
    "storm",  # many clients cancel at once
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The installation. stages: of each ring. Times in microseconds.

    link_us: one way, and up to jitter_us more; frame_us and row_us: what a forward takes in each
    stage; draft_us: the draft model's answer, right with chance draft_right a token. codec: frames
    are encoded and decoded on every link. eager: frames reach a stage's core while a forward runs.
    spares: so many rings, the last ones, serve only while another is lost. memory: the coordinator
    has a state file.
    """

    seed: int
    stages: tuple[int, ...]
    limits: Limits
    drafter: str = "off"
    depth: int | None = None
    tokens: int | None = None
    link_us: int = 1000
    jitter_us: int = 0
    frame_us: int = 1000
    row_us: int = 20
    draft_us: int = 500
    draft_right: float = 0.8
    codec: bool = False
    eager: bool = False
    spares: int = 0
    memory: bool = False

    @property
    def layers(self) -> int:
        """Of the model."""
        return max(self.stages)

    def config(self) -> Config:
        """The ring.toml of it. Nobody listens at its addresses."""
        draft = "toy" if self.drafter == "model" else None
        return Config(
            Model("toy", "toy"),
            tuple(self._ring(number, count) for number, count in enumerate(self.stages)),
            Coordinator("127.0.0.1:0", self.drafter, self.depth, self.tokens, draft_model=draft),
            self.limits,
        )

    def _ring(self, number: int, count: int) -> Ring:
        name, layers = f"r{number}", self.layers
        cuts = [layers * i // count for i in range(count + 1)]
        stages = tuple(
            Stage(f"{name}s{i}", f"tcp://{name}s{i}:1", (cuts[i], cuts[i + 1]))
            for i in range(count)
        )
        spare = number >= len(self.stages) - self.spares
        return Ring(name, f"tcp://{name}:1", stages, spare=spare)

    def words(self) -> str:
        """One line for people: what differs from the defaults."""
        said = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("seed", "limits") and value != each.default:
                said.append(f"{each.name} {value}")
        base = Limits()
        for each in fields(Limits):
            value = getattr(self.limits, each.name)
            if value != getattr(base, each.name):
                said.append(f"{each.name} {value:g}" if value is not None else f"{each.name} none")
        return ", ".join(said)


@dataclass(frozen=True, slots=True)
class Say:
    """A client goes on with its conversation, as soon as its last turn is over.

    base: whose conversation it goes on from. keep: how many of its tokens, None for all. edit:
    (position, token) that is changed in it. more: tokens that are added. leave: cancels after so
    many tokens. read_us: takes so long to read an event.
    """

    at_us: int
    client: int
    base: int
    keep: int | None
    edit: tuple[int, int] | None
    more: tuple[int, ...]
    budget: int
    stops: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    salt: bytes = b""
    reuse: bool = True
    hint: str = ""
    keep_s: float = 0.0
    leave: int | None = None
    read_us: int = 0

    def words(self) -> str:
        """For people."""
        whose = "its" if self.base == self.client else f"client {self.base}'s"
        kept = "conversation" if self.keep is None else f"first {self.keep} tokens"
        said = f"client {self.client} takes {whose} {kept}"
        if self.edit is not None:
            said += f", changes token {self.edit[0]} to {self.edit[1]}"
        said += f", adds {list(self.more)}, wants {self.budget}"
        plain = Say(0, 0, 0, None, None, (), 0)
        for name in ("stops", "sampling", "salt", "reuse", "hint", "keep_s", "leave", "read_us"):
            if getattr(self, name) != getattr(plain, name):
                said += f", {name} {getattr(self, name)}"
        return said


@dataclass(frozen=True, slots=True)
class Leave:
    """A client cancels the turn it waits for, if any."""

    at_us: int
    client: int

    def words(self) -> str:
        """For people."""
        return f"client {self.client} cancels"


@dataclass(frozen=True, slots=True)
class Operate:
    """An operator frees a slot, or keeps it for keep_s seconds. pick: which of those there are."""

    at_us: int
    ring: int
    pick: int
    keep_s: float | None

    def words(self) -> str:
        """For people."""
        what = "frees" if self.keep_s is None else f"keeps (for {self.keep_s:g} s)"
        return f"an operator {what} slot or parked prefix #{self.pick} of ring r{self.ring}"


@dataclass(frozen=True, slots=True)
class Ask:
    """An operator measures a ring. busy_us: what a stage's trial takes; rounds: of all stages."""

    at_us: int
    ring: int
    wide: bool
    busy_us: int
    rounds: int

    def words(self) -> str:
        """For people."""
        return (
            f"an operator measures ring r{self.ring} {self.rounds} times, "
            f"{self.busy_us} us in each stage"
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A stage stands still. whole: the process, so that its heartbeats stop too."""

    at_us: int
    ring: int
    stage: int
    for_us: int
    whole: bool

    def words(self) -> str:
        """For people."""
        what = "process" if self.whole else "compute thread"
        return f"the {what} of r{self.ring}s{self.stage} stalls for {self.for_us / 1e6:g} s"


@dataclass(frozen=True, slots=True)
class Crash:
    """A stage dies, and is back after down_us, loading for load_us. lost: frames in the air."""

    at_us: int
    ring: int
    stage: int
    down_us: int
    load_us: int
    lost: int

    def words(self) -> str:
        """For people."""
        return (
            f"r{self.ring}s{self.stage} dies with {self.lost} frames on their way to it, "
            f"is started after {self.down_us / 1e6:g} s and loads for {self.load_us / 1e6:g} s"
        )


@dataclass(frozen=True, slots=True)
class Gap:
    """The next `count` frames on the link behind `link` stages of a ring are lost.

    copies: not before a Copy comes; it is the first that is lost.
    """

    at_us: int
    ring: int
    link: int
    count: int
    copies: bool

    def words(self) -> str:
        """For people."""
        what = "from the next copy on, " if self.copies else "the next "
        return f"{what}{self.count} frames on link {self.link} of r{self.ring} are lost"


@dataclass(frozen=True, slots=True)
class Stale:
    """An old reply comes again. back: counted from the latest; ghost: from an unknown sender."""

    at_us: int
    ring: int
    back: int
    ghost: bool

    def words(self) -> str:
        """For people."""
        who = "an unknown sender repeats" if self.ghost else "there comes again"
        return f"{who} the {self.back + 1}. last reply of r{self.ring}"


@dataclass(frozen=True, slots=True)
class Confuse:
    """As soon as a frame has the number of one of an earlier coordinator's, that one's reply comes.

    From an unknown sender.
    """

    at_us: int
    ring: int

    def words(self) -> str:
        """For people."""
        return f"r{self.ring} hears an old reply with the number of a frame in flight"


@dataclass(frozen=True, slots=True)
class Pause:
    """The coordinator's process stands still. timer_first: then its timer is first to be served."""

    at_us: int
    for_us: int
    timer_first: bool

    def words(self) -> str:
        """For people."""
        return f"the coordinator stands still for {self.for_us / 1e6:g} s"


@dataclass(frozen=True, slots=True)
class Restart:
    """The coordinator dies and is back after down_us. jump_s: of its wall clock, either way."""

    at_us: int
    down_us: int
    jump_s: float

    def words(self) -> str:
        """For people."""
        return (
            f"the coordinator dies and is started after {self.down_us / 1e6:g} s; "
            f"its wall clock has jumped by {self.jump_s:g} s"
        )


@dataclass(frozen=True, slots=True)
class Damage:
    """From `stage` on the stages of a ring lose a slot's rows; copied: or get those of another.

    stage 0: the ledger claims what is nowhere. pick, other: which of those that hold something.
    """

    at_us: int
    ring: int
    stage: int
    pick: int
    other: int
    copied: bool

    def words(self) -> str:
        """For people."""
        what = f"get the rows of #{self.other} in" if self.copied else "lose the rows of"
        return f"the stages from r{self.ring}s{self.stage} on {what} slot #{self.pick}"


Fault: TypeAlias = Stall | Crash | Gap | Stale | Confuse | Pause | Restart | Damage
Entry: TypeAlias = Say | Leave | Operate | Ask | Fault


@dataclass(frozen=True, slots=True)
class Script:
    """A world's shape and its entries in order of time."""

    shape: Shape
    entries: tuple[Entry, ...] = ()
    faults: tuple[str, ...] = field(default=())  # what could be drawn: judges what is fair

    def lines(self) -> Iterator[str]:
        """For people: the shape, then one line per entry."""
        yield self.shape.words()
        for entry in self.entries:
            yield f"{entry.at_us / 1e6:9.6f} s  {entry.words()}"

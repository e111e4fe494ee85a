"""Owns the frames: what travels on a link or into a core. transport.codec turns them into bytes.

Knows no socket, no model and no policy. Local inputs of a core (Submit, Tick, ...) are frames too,
so that a frame log can hold everything a core was told. See docs/frames.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from transport.machine import Look as Look
from transport.machine import Machine as Machine
from transport.quick import quick

Buffer: TypeAlias = bytes | bytearray | memoryview


class FrameError(ValueError):
    """The peer (or the file) sent something that is not a frame. Count it, drop it, carry on."""


class Kind(StrEnum):
    """What a segment is for; the stages treat both alike."""

    PREFILL = "prefill"
    VERIFY = "verify"


@quick
@dataclass(frozen=True, slots=True)
class Tensor:
    """An opaque activation buffer: dtype name, shape, and its bytes (row-major).

    len(data) == product(shape) * itemsize(dtype); checked when decoded.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is done to a row of logits before a token is picked. See docs/sampling.md.

    repetition divides or multiplies the logits of tokens that came before, prompt included;
    presence and frequency are taken off those that were generated; bias is added. None of the
    first min_tokens generated tokens is one of `ends`. prompt and ends are the turn's: how many
    tokens of the sequence are its prompt, and its stop tokens; the scheduler fills them in.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    prompt: int = 0
    ends: tuple[int, ...] = ()

    @property
    def since(self) -> int | None:
        """The first position whose token changes later logits; None where none does."""
        if self.repetition != 1.0:
            return 0
        return self.prompt if self.presence or self.frequency else None

    @property
    def largest(self) -> int:
        """The largest token id named."""
        return max((*self.ends, *(token for token, _ in self.bias)), default=0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail picks a token from one row of logits.

    A function of (logits, seed, position), and with `shaping` of the sequence so far. temperature 0
    is greedy (ties to the lowest id). logprobs: None for none, n for the chosen token's log
    probability and the n most likely ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    shaping: Shaping | None = None


GREEDY = Sampling()


@quick
@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one turn, written to rows [start, start + len(tokens)) of one slot.

    parent_hash is h[start - 1] of the slot's chain (transport.chain); at start 0 it is the root of
    the model's fingerprint and `salt`. want: how many trailing positions need a verdict.
    """

    turn: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    kind: Kind
    parent_hash: bytes
    want: int
    sampling: Sampling = GREEDY
    salt: bytes = b""

    @property
    def end(self) -> int:
        """First row after the segment."""
        return self.start + len(self.tokens)


@quick
@dataclass(frozen=True, slots=True)
class Timing:
    """One stage's share of one Run, in microseconds: waiting in the core, then computing."""

    stage: str
    wait_us: int
    forward_us: int


@quick
@dataclass(frozen=True, slots=True)
class Run:
    """The compute frame: segments in order, and the activations of all their tokens.

    payload is None on the first link (the head embeds), else [tokens, hidden] in segment order.
    """

    ring: str
    epoch: int
    seq: int
    segments: tuple[Segment, ...]
    payload: Tensor | None = None
    timings: tuple[Timing, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Result:
    """The tail's answer for one segment: the next token after each wanted position.

    start: the first wanted position (a Segment's start + len(tokens) - want). logprobs: the chosen
    tokens' natural-log probabilities, as long as tokens, or empty. top: per position the most
    likely (token, logprob), best first, or empty.
    """

    turn: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Verdict:
    """tail -> coordinator: exactly one for each Run; a Result for each segment not refused."""

    ring: str
    epoch: int
    seq: int
    results: tuple[Result, ...]
    timings: tuple[Timing, ...]


class Refusal(StrEnum):
    """Why a stage refused: codes of a Reject."""

    EPOCH = "epoch"  # the stage is in another epoch (it restarted, or missed the roll call)
    GAP = "gap"  # start is past the rows this stage holds
    CONTENT = "content"  # h[start - 1] is not the frame's parent_hash
    RANGE = "range"  # slot, row or token id outside this stage's tables
    LINK = "link"  # frames were lost on the stage's incoming link


@dataclass(frozen=True, slots=True)
class Reject:
    """stage -> ring -> coordinator: a segment (or, with turn None, a whole frame) was refused."""

    ring: str
    epoch: int
    seq: int
    stage: str
    code: Refusal
    detail: str
    turn: int | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class StageEntry:
    """What a stage says of itself in a roll call.

    layers is [first, last) of layers_total. row_bytes: of one KV row of the block; park_bytes: host
    memory for parked rows.
    """

    name: str
    incarnation: int
    layers: tuple[int, int]
    layers_total: int
    fingerprint: bytes
    slots: int
    capacity: int
    vocabulary: int
    kernel: str
    row_bytes: int = 0
    park_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """The coordinator believes that a slot or parked prefix begins with `length` rows of a chain.

    digest is h[length - 1]: a stage whose own chain has it there holds exactly those rows.
    """

    number: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class RollCall:
    """Goes round the ring; every stage adopts the epoch and adds itself.

    claims: what the coordinator believes to be resident. A stage strikes out what it does not
    hold, and drops every parked prefix that is not claimed: what comes back holds on all stages.
    """

    ring: str
    epoch: int
    claims: tuple[Claim, ...] = ()
    entries: tuple[StageEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Fork rows [0, length) of slot `source` into slot `target` on every stage.

    Numbers from the stage's slot count on are parked prefixes in host memory: as a target one is
    made, as a source it is restored; turn 0 stands for no turn.

    parent_hash is h[length - 1]. A stage that does not hold it refuses; the frame itself comes back
    to the coordinator as the acknowledgement, with `done` naming the stages that copied.
    """

    ring: str
    epoch: int
    seq: int
    turn: int
    source: int
    target: int
    length: int
    parent_hash: bytes
    done: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a slot's (or a parked prefix's) rows on every stage; comes back as acknowledgement."""

    ring: str
    epoch: int
    seq: int
    slot: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Goes round the ring unchanged; measures the hops without compute."""

    ring: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Goes round the ring in any epoch, and changes nothing that a turn could see.

    wide: every stage connects to all others, not only to the one behind it. gaps_ns: between the
    mark and the end of the bulk, as each stage received them.
    """

    ring: str
    number: int
    look: Look
    wide: bool = False
    machines: tuple[Machine, ...] = ()
    gaps_ns: tuple[int, ...] = ()
    payload: Tensor | None = None


class StageState(StrEnum):
    """Life of a stage daemon."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@quick
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """stage -> coordinator, beside the ring: alive, and how far loading is (0..1)."""

    ring: str
    stage: str
    incarnation: int
    state: StageState
    progress: float
    detail: str
    pid: int
    rss_bytes: int


# ---- local inputs: they never cross a link, but a frame log records them -------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """The gateway -> scheduler: start a turn. Token ids in, so that the core knows no text.

    budget: at most this many tokens are generated. stops: token ids that end the turn. salt: of the
    chain's root; prompts under different salts never share. hint: names the session, so that its
    own old branch may be overwritten. keep_s: the slot should not be given up for so long after.
    """

    turn: int
    prompt: tuple[int, ...]
    budget: int
    stops: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    salt: bytes = b""
    reuse: bool = True
    hint: str = ""
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone, or has all it wants (a stop string): end the turn."""

    turn: int
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that deadline() asked for has come."""


@quick
@dataclass(frozen=True, slots=True)
class Forwarded:
    """The compute thread -> stage core: the Forward of (epoch, seq) is done.

    payload: the block's output, None at the tail; results: the tail's, empty elsewhere.
    """

    epoch: int
    seq: int
    payload: Tensor | None
    results: tuple[Result, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The compute thread -> stage core: that Measure's machines, and the stage's own."""

    number: int
    wide: bool
    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True)
class LinkGap:
    """Frames of one sender (`link` is its name) were lost: `got` came, not `expected`."""

    link: str
    expected: int
    got: int


@dataclass(frozen=True, slots=True)
class StageLost:
    """The shell saw a stage go (its process or its connection ended)."""

    ring: str
    stage: str
    detail: str


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """An operator asks to drop what is resident in one slot or parked prefix."""

    ring: str
    slot: int


@dataclass(frozen=True, slots=True)
class KeepSlot:
    """An operator asks not to give a slot up for `keep_s` seconds (0: as any other)."""

    ring: str
    slot: int
    keep_s: float


@dataclass(frozen=True, slots=True)
class Remembered:
    """An earlier coordinator's ledger said that a slot or parked prefix holds these tokens' rows.

    A hint that the next roll call proves or strikes out; it comes before the ring's first one.
    idle_s: since its last use; keep_s: of KeepSlot, what is left of it.
    """

    ring: str
    number: int
    fingerprint: bytes
    salt: bytes
    tokens: tuple[int, ...]
    hint: str = ""
    proven: bool = False
    idle_s: float = 0.0
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drafted:
    """The draft model -> scheduler: guessed tokens from position `start` on, perhaps none.

    start is also how many tokens of the turn were known when they were asked for, so that a late
    answer is told from one that still holds.
    """

    turn: int
    start: int
    tokens: tuple[int, ...]


Wire: TypeAlias = Run | Verdict | Reject | RollCall | Copy | Free | Ping | Measure | Heartbeat
Local: TypeAlias = (
    Submit
    | Cancel
    | Tick
    | Forwarded
    | Measured
    | LinkGap
    | StageLost
    | FreeSlot
    | KeepSlot
    | Remembered
    | Drafted
)
Frame: TypeAlias = Wire | Local


@quick
@dataclass(frozen=True, slots=True)
class Envelope:
    """Who sent a frame on a link, and the how-manieth of that sender's life it is (from 0)."""

    sender: str
    incarnation: int
    number: int

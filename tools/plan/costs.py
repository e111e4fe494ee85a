"""Owns what a measured ring would cost with other blocks in another order: time, memory, links.

Measured is every stage with the block that it has; another block's time and memory are in
proportion to its layers. The LM head is measured where it is, and elsewhere would take as much more
or less as a layer does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.errors import ToolError
from tools.measuring import Machine, Measured
from tools.plan.split import orders, quickest, split
from transport.config import Limits

SPARE_SHARE = 0.05  # of a device's memory that a plan leaves alone
WORTH = 0.02  # of two orders the later must be so much better
NOISE = 0.03  # and a plan than what runs: two measurements of one ring differ by as much
FRAME_BYTES = 300  # of a decode frame, beside its row
PROMPT_TOKENS = 1024  # whose time to the first token is predicted
ROW_STEP = 8  # rows that cost what one costs: docs/exactness.md


@dataclass(frozen=True, slots=True)
class Block:
    """A stage with some layers: seconds of a decode frame and of a prefill's row, and bytes."""

    machine: Machine
    layers: tuple[int, int]
    decode_s: float
    row_s: float
    bytes: int
    room: int

    @property
    def count(self) -> int:
        """Its layers."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A ring as it would run. rates: tokens per second of one turn, and of `turns` together."""

    blocks: tuple[Block, ...]
    link_s: float  # a frame's way round without compute
    transfer_s: float  # a decode frame on the narrowest link
    chunk_transfer_s: float  # and a prefill chunk
    turns: int
    one_rate: float
    many_rate: float
    ttft_s: float

    @property
    def bottleneck_s(self) -> float:
        """Seconds that the slowest part is taken up by a decode frame."""
        return max(self.transfer_s, *(block.decode_s for block in self.blocks))

    @property
    def fits(self) -> bool:
        """True where every block has room on its device."""
        return all(block.bytes <= block.room for block in self.blocks)


class Costs:
    """One measured ring. turns: that decode at once, of the prediction.

    alone: one turn at a time is what counts, so the least sum and not the least bottleneck.
    """

    def __init__(self, found: Measured, limits: Limits, turns: int, *, alone: bool = False) -> None:
        self.found, self.limits, self.turns, self.alone = found, limits, turns, alone
        machines = found.machines
        for each in machines:
            if not each.decode_s or not each.prefill_rows:
                raise ToolError(
                    f"stage {each.name} could not try its block: every slot is full; free one "
                    "(kvring status --evict SLOT), or start the stages again"
                )
        self.layers = machines[0].layers_total
        # of the largest: a stage's share is rounded up, and a plan must not be short
        self._layer_bytes = max(
            _share(each.weight_bytes - each.end_bytes, each) for each in machines
        )
        self._row_bytes = max(_share(each.row_bytes, each) for each in machines)
        self._rooms = _rooms(machines)
        tail = machines[-1]
        self._end_layers = tail.end_s / _layer_s(tail)  # what the LM head costs, in layers
        ends = [machines[0].end_bytes, tail.end_bytes]
        if len(machines) == 1:
            ends = [tail.end_bytes // 2, tail.end_bytes - tail.end_bytes // 2]
        self._embedding, self._lm_head = ends

    def block(self, at: int, layers: tuple[int, int]) -> Block:
        """The measured stage number `at` with layers [first, last)."""
        machine, count = self.found.machines[at], layers[1] - layers[0]
        decode_s, size = self._cost(at, count, head=layers[0] == 0, tail=layers[1] == self.layers)
        return Block(machine, layers, decode_s, count * _row_s(machine), size, self._rooms[at])

    def _cost(self, at: int, count: int, *, head: bool, tail: bool) -> tuple[float, int]:
        """Seconds of a decode frame and bytes of a stage with so many layers."""
        machine = self.found.machines[at]
        rows = self.limits.slots * machine.capacity * self._row_bytes
        size = count * (self._layer_bytes + rows)
        size += (self._embedding if head else 0) + (self._lm_head if tail else 0)
        layers = count + (self._end_layers if tail else 0.0)
        return layers * _layer_s(machine), size

    def predict(self, order: Sequence[int], counts: Sequence[int]) -> Prediction | None:
        """The ring with these stages in this order; None where one can't reach the next."""
        reached = self._links(order)
        if reached is None:
            return None
        cuts = [sum(counts[:at]) for at in range(len(counts) + 1)]
        blocks = tuple(
            [self.block(each, (cuts[at], cuts[at + 1])) for at, each in enumerate(order)]
        )
        link_s, slowest = reached
        width = self.found.machines[0].wire_bytes
        transfer_s = (FRAME_BYTES + width) * slowest
        chunk_transfer_s = (FRAME_BYTES + width * self.limits.chunk_tokens) * slowest
        return self._timed(blocks, link_s, transfer_s, chunk_transfer_s)

    def _timed(
        self, blocks: tuple[Block, ...], link_s: float, transfer_s: float, chunk_transfer_s: float
    ) -> Prediction:
        times = [block.decode_s for block in blocks]
        cycle_s = sum(times) + link_s
        # as coord.batch fills frames: turns share one while it has rows that cost nothing more
        pipe = len(blocks) + int(link_s / max(times))
        frames = max(1, min(math.ceil(self.turns / ROW_STEP), self.limits.window_frames or pipe))
        more = max(0, math.ceil(self.turns / frames) - ROW_STEP)
        full = [block.decode_s + more * block.row_s for block in blocks]
        many_s = max(sum(full) + link_s, frames * max(*full, transfer_s))
        chunks = math.ceil(
            min(PROMPT_TOKENS, self.limits.max_model_len - 1) / self.limits.chunk_tokens
        )
        chunk_times = [self.limits.chunk_tokens * block.row_s for block in blocks]
        end_s = blocks[-1].decode_s - blocks[-1].count * _layer_s(blocks[-1].machine)
        ttft_s = sum(chunk_times) + len(blocks) * chunk_transfer_s + link_s + end_s
        ttft_s += (chunks - 1) * max(*chunk_times, chunk_transfer_s)
        return Prediction(
            blocks,
            link_s,
            transfer_s,
            chunk_transfer_s,
            self.turns,
            1 / cycle_s,
            self.turns / many_s,
            ttft_s,
        )

    def _links(self, order: Sequence[int]) -> tuple[float, float] | None:
        """Seconds of a frame's way round, and seconds per byte of the narrowest link in between."""
        machines = self.found.machines
        names = ["", *(machines[at].name for at in order), ""]
        trips = [self._trip(names[at], names[at + 1]) for at in range(len(names) - 1)]
        if list(order) == list(range(len(machines))):
            link_s = self.found.round_trip_s
        elif any(trip is None for trip in trips):
            return None
        else:
            link_s = sum(trip / 2 for trip in trips if trip is not None) + self._hops_s()
        rates = [self._mbit(names[at], names[at + 1]) for at in range(1, len(names) - 2)]
        known = [rate for rate in rates if rate]
        return link_s, 8 / (min(known) * 1e6) if known else 0.0

    def _hops_s(self) -> float:
        """What a way round takes beyond the networks' own: in the processes, or a made-up delay."""
        names = ["", *(each.name for each in self.found.machines), ""]
        trips = [self._trip(names[at], names[at + 1]) or 0.0 for at in range(len(names) - 1)]
        return max(0.0, self.found.round_trip_s - sum(trips) / 2)

    def _trip(self, source: str, target: str) -> float | None:
        """Seconds there and back, measured from either end."""
        found = self.found
        trips = {each.name: each.trips for each in found.machines} | {"": found.trips}
        here = trips[source].get(target)
        return trips[target].get(source) if here is None else here

    def _mbit(self, source: str, target: str) -> float | None:
        """As measured, or for no neighbours the less of what each has with its own."""
        out = {link.source: link for link in self.found.links}
        into = {link.target: link for link in self.found.links}
        if out[source].target == target:
            return out[source].mbit
        rates = [rate for rate in (out[source].mbit, into[target].mbit) if rate]
        return min(rates) if rates else None

    # ---- the best of all ----

    def best(self) -> Prediction:
        """Over all splits, and all orders of few stages. Raises ToolError where nothing fits.

        Where it would gain less than NOISE: the ring as it is, which is not worth a restart.
        """
        count = len(self.found.machines)
        found: Prediction | None = None
        known: dict[tuple[int, int], tuple[int, ...] | None] = {}
        for order in orders(count):
            counts = self._split(order, known)
            made = self.predict(order, counts) if counts is not None else None
            if made is not None and (found is None or self._better(made, found)):
                found = made
        if found is None:
            need = self.layers * (self._layer_bytes + self._kv()) + self._embedding + self._lm_head
            raise ToolError(
                f"the model does not fit: {need / 1e9:.2f} GB of weights and rows, and all stages "
                f"have room for {sum(self._rooms) / 1e9:.2f} GB: lower limits.slots or "
                "limits.max_model_len"
            )
        now = self.now()
        return now if now.fits and not self._better(found, now, NOISE) else found

    def now(self) -> Prediction:
        """The ring as it was measured."""
        machines = self.found.machines
        made = self.predict(range(len(machines)), [each.count for each in machines])
        assert made is not None, "the ring that was measured is connected"
        return made

    def _kv(self) -> int:
        return (
            self.limits.slots * max(each.capacity for each in self.found.machines) * self._row_bytes
        )

    def _split(
        self, order: Sequence[int], known: dict[tuple[int, int], tuple[int, ...] | None]
    ) -> tuple[int, ...] | None:
        """Layers of each stage in this order: they follow from who is first and who is last."""
        ends = order[0], order[-1]
        if ends not in known:
            inner = [at for at in sorted(order) if at not in ends]
            line = [order[0], *inner, order[-1]] if len(order) > 1 else [order[0]]
            rows = [self._row(at, ends) for at in line]
            counts = quickest(rows, self.layers) if self.alone else split(rows, self.layers)
            known[ends] = (
                None if counts is None else tuple(counts[line.index(at)] for at in sorted(line))
            )
        found = known[ends]
        return None if found is None else tuple(found[at] for at in order)

    def _row(self, at: int, ends: tuple[int, int]) -> list[float | None]:
        """A stage's seconds by its layers; None for what its device has no room for."""
        row: list[float | None] = [None]
        for count in range(1, self.layers + 1):
            cost_s, size = self._cost(at, count, head=at == ends[0], tail=at == ends[1])
            row.append(cost_s if size <= self._rooms[at] else None)
        return row

    def _better(self, made: Prediction, found: Prediction, least: float = WORTH) -> bool:
        """A smaller bottleneck, or the same and a shorter way; by more than that share."""
        shorter = made.one_rate > found.one_rate * (1 + least)
        if self.alone:
            return shorter
        if made.bottleneck_s < found.bottleneck_s * (1 - least):
            return True
        return shorter and made.bottleneck_s <= found.bottleneck_s * (1 + WORTH / 10)


def _rooms(machines: Sequence[Machine]) -> list[int]:
    """Bytes that each stage may take: what it has, and its part of what its device has left."""
    rooms = []
    for each in machines:
        beside = [m for m in machines if (m.machine, m.device) == (each.machine, each.device)]
        left = each.free_bytes - SPARE_SHARE * each.total_bytes
        own = each.weight_bytes
        if each.device != "cpu":  # where rows take memory only when they are written
            own += each.slots * each.capacity * each.row_bytes
        rooms.append(own + max(0, int(left / len(beside))))
    return rooms


def _share(count: int, machine: Machine) -> int:
    return math.ceil(count / machine.count)


def _layer_s(machine: Machine) -> float:
    """Seconds of a layer for a decode frame."""
    return machine.decode_s / machine.count


def _row_s(machine: Machine) -> float:
    """Seconds of a layer for a row of a prefill chunk."""
    return machine.prefill_s / machine.prefill_rows / machine.count

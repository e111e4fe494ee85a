"""Owns the StageModel protocol, and the ToyModel whose answer is a hash of the KV it really holds.

Knows frames and bytes only; the torch block is pipeline.torch_model. The ToyModel is what the tests
and the simulator run: a stale, missing or foreign row anywhere in [0, position] changes its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from typing import Protocol

from pipeline.rule import Tally, pick, result
from transport.frame import GREEDY, Result, Segment, Tensor
from transport.quick import quick


class ModelError(ValueError):
    """The model at a path cannot be used; the message names the path and what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a stage says of its block in a roll call.

    layers: [first, last) of layers_total. fingerprint: of the whole model and its precision (equal
    on every stage of a ring). capacity: rows per slot. kernel: what computes here and how exact
    mode is kept, in words ("exact off" where it is not); each stage may have another.
    row_bytes: host memory of one parked KV row. activations: dtype and length of a row that comes
    from the stage before; None: not checked.
    weight_bytes: on the device; end_bytes of them are the embedding and the LM head.
    """

    layers: tuple[int, int]
    layers_total: int
    fingerprint: bytes
    slots: int
    capacity: int
    vocabulary: int
    kernel: str
    row_bytes: int = 0
    activations: tuple[str, int] | None = None
    weight_bytes: int = 0
    end_bytes: int = 0

    @property
    def head(self) -> bool:
        """True for the stage that embeds token ids."""
        return self.layers[0] == 0

    @property
    def tail(self) -> bool:
        """True for the stage that picks tokens."""
        return self.layers[1] == self.layers_total


@quick
@dataclass(frozen=True, slots=True)
class Output:
    """What a forward made: the block's activations, or at the tail one Result per segment."""

    payload: Tensor | None
    results: tuple[Result, ...] = ()


class StageModel(Protocol):
    """One contiguous block of layers with a static KV buffer for each slot."""

    @property
    def info(self) -> ModelInfo:
        """What this block is; constant after construction."""

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """Run all segments' tokens through the block and write their KV rows.

        payload: None at the head, else [tokens, hidden] for the segments' tokens in order. The
        caller has checked slots, ranges and prefixes. Segments of one frame touch different slots.
        histories: at the tail, for each segment the tokens right before it that its sampling needs
        (from shaping.since on), or () where no segment's sampling needs any.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy KV rows [0, length) of `source` to `target`.

        Numbers from info.slots on are parked rows in host memory: made when first a target.
        """

    def drop(self, parked: int) -> None:
        """Give parked rows' memory back."""


ROW_BYTES = 8  # of the toy's activations and of its KV rows
TOY_FINGERPRINT = b"kvring-toy-1"
_LOGITS = [(byte - 64) / 32 for byte in range(256)]


class ToyModel:
    """Hash-chained toy block: answers depend on every KV row that is physically in the slot.

    A layer writes row p := H(layer, x[p]) and outputs y[p] := H(row 0, ..., row p), all read back
    from the slot's buffer. The tail's likeliest token is y[p] mod vocabulary, so that one wrong row
    gives another token with probability 1 - 1/vocabulary; the other logits are a hash of y[p] too.
    Activations are uint8 [tokens, 8].
    """

    def __init__(
        self,
        layers: tuple[int, int],
        layers_total: int,
        *,
        slots: int = 4,
        capacity: int = 512,
        vocabulary: int = 256,
        fingerprint: bytes = TOY_FINGERPRINT,
    ) -> None:
        self._info = ModelInfo(
            layers,
            layers_total,
            fingerprint,
            slots,
            capacity,
            vocabulary,
            "toy",
            ROW_BYTES * (layers[1] - layers[0]),
            ("uint8", ROW_BYTES),
        )
        self._rows = [
            {slot: bytearray(capacity * ROW_BYTES) for slot in range(slots)} for _ in range(*layers)
        ]

    @property
    def info(self) -> ModelInfo:
        """See StageModel."""
        return self._info

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """See StageModel. Cost: one hash over all earlier rows per token and layer."""
        outputs: list[bytes] = []
        results: list[Result] = []
        at = 0
        for index, segment in enumerate(segments):
            count = len(segment.tokens)
            if payload is None:
                rows = [token.to_bytes(ROW_BYTES, "little") for token in segment.tokens]
            else:
                data = memoryview(payload.data)[at * ROW_BYTES : (at + count) * ROW_BYTES]
                rows = [bytes(data[i : i + ROW_BYTES]) for i in range(0, len(data), ROW_BYTES)]
            at += count
            for offset, buffers in enumerate(self._rows):
                rows = self._layer(
                    self._info.layers[0] + offset, buffers[segment.slot], segment, rows
                )
            outputs.extend(rows)
            if self._info.tail:
                history = histories[index] if histories else ()
                wanted = rows[count - segment.want :]
                results.append(toy_result(segment, wanted, history, self._info.vocabulary))
        if self._info.tail:
            return Output(None, tuple(results))
        return Output(Tensor("uint8", (len(outputs), ROW_BYTES), b"".join(outputs)))

    def copy(self, source: int, target: int, length: int) -> None:
        """See StageModel."""
        for buffers in self._rows:
            if target >= self._info.slots:
                buffers[target] = bytearray(length * ROW_BYTES)
            buffers[target][: length * ROW_BYTES] = buffers[source][: length * ROW_BYTES]

    def drop(self, parked: int) -> None:
        """See StageModel."""
        for buffers in self._rows:
            buffers.pop(parked, None)

    def rows(self, layer: int, slot: int, length: int) -> bytes:
        """KV rows [0, length) as they are in the buffer; layer: counted from the block's first."""
        return bytes(self._rows[layer][slot][: length * ROW_BYTES])

    def _layer(
        self, layer: int, buffer: bytearray, segment: Segment, rows: Sequence[bytes]
    ) -> list[bytes]:
        out: list[bytes] = []
        tag = layer.to_bytes(4, "little")
        for position, row in enumerate(rows, segment.start):
            end = (position + 1) * ROW_BYTES
            buffer[end - ROW_BYTES : end] = _digest(tag + row)
            out.append(_digest(memoryview(buffer)[:end]))
        return out


def toy_result(
    segment: Segment, rows: Sequence[bytes], history: Sequence[int], vocabulary: int
) -> Result:
    """The toy's answer for the wanted positions' output rows, in order."""
    sampling, start = segment.sampling, segment.end - segment.want
    if sampling == GREEDY:
        tokens = tuple([likeliest(row, vocabulary) for row in rows])
        return Result(segment.turn, segment.slot, start, tokens)
    tally = Tally(segment, history) if rows and sampling.shaping is not None else None
    choices = []
    for position, row in enumerate(rows, start + 1):
        counts = tally.before(position) if tally is not None else {}
        choices.append(pick(toy_logits(row, vocabulary), sampling, position, counts))
    return result(segment, choices)


def likeliest(row: bytes, vocabulary: int) -> int:
    """The token with the largest of toy_logits."""
    return int.from_bytes(row, "little") % vocabulary


def toy_logits(row: bytes, vocabulary: int) -> list[float]:
    """The toy's logits for an output row: multiples of 1/32 in [-2, 6), and 6.5 for the likeliest.

    Coarse, so that ties are common.
    """
    logits = [_LOGITS[byte] for byte in shake_128(row).digest(vocabulary)]
    logits[likeliest(row, vocabulary)] = 6.5
    return logits


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=ROW_BYTES).digest()

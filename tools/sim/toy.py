"""Owns the toy model as the simulator runs it: ToyModel's answers, each prefix computed once.

A Tree remembers what a layer makes of every sequence of rows that it has seen; all stages of a
world share it, and so does the oracle. What is read is what a slot's buffer really holds: a stale,
missing or foreign row leads to another branch of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pipeline.model import ROW_BYTES, TOY_FINGERPRINT, ModelInfo, Output, toy_result
from transport.frame import Result, Segment, Tensor

UNWRITTEN = b""  # stands for a row of zeros
VOCABULARY = 256  # as pipeline.load gives the toy: a simulated log replays on it


class Prefix:
    """Rows [0, p] of one layer: its output for row p, and the prefixes one row longer.

    A row is named by the input that it was computed from.
    """

    __slots__ = ("after", "out", "state")

    def __init__(self, state: blake2b, out: bytes) -> None:
        self.state = state
        self.out = out
        self.after: dict[bytes, Prefix] = {}


class Layer:
    """What one layer of the toy makes of its inputs."""

    def __init__(self, number: int) -> None:
        self.root = Prefix(blake2b(digest_size=ROW_BYTES), b"")
        self._row = blake2b(number.to_bytes(4, "little"), digest_size=ROW_BYTES)

    def row(self, value: bytes) -> bytes:
        """The KV row of an input."""
        if value == UNWRITTEN:
            return bytes(ROW_BYTES)
        row = self._row.copy()  # cheaper than a new one
        row.update(value)
        return row.digest()

    def grow(self, prefix: Prefix, value: bytes) -> Prefix:
        """The prefix one row longer, where it is not there yet."""
        state = prefix.state.copy()
        if value:
            row = self._row.copy()  # as in `row`: this is where a world's time goes
            row.update(value)
            state.update(row.digest())
        else:
            state.update(self.row(value))
        made = prefix.after[value] = Prefix(state, state.digest())
        return made


class Tree:
    """All layers of one model."""

    def __init__(self, layers: int) -> None:
        self.layers = [Layer(number) for number in range(layers)]


class Buffer:
    """One layer's KV rows of one slot, as they were last written; each by its input."""

    __slots__ = ("_prefixes", "layer", "rows")

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.rows: list[bytes] = []  # what is behind the last one was never written
        self._prefixes: list[Prefix] = []  # of the first rows, as far as they were read

    def read(self, length: int) -> Prefix:
        """The prefix that rows [0, length) are."""
        prefixes = self._prefixes
        if len(prefixes) < length:
            prefix = prefixes[-1] if prefixes else self.layer.root
            if len(self.rows) < length:
                self.rows += [UNWRITTEN] * (length - len(self.rows))
            for value in self.rows[len(prefixes) : length]:
                prefix = prefix.after.get(value) or self.layer.grow(prefix, value)
                prefixes.append(prefix)
        return prefixes[length - 1] if length else self.layer.root

    def write(self, start: int, values: Sequence[bytes]) -> list[bytes]:
        """Rows for these inputs from `start` on; the layer's outputs."""
        prefix, prefixes = self.read(start), self._prefixes
        del prefixes[start:]
        for value in values:
            prefix = prefix.after.get(value) or self.layer.grow(prefix, value)
            prefixes.append(prefix)
        self.rows[start : start + len(values)] = values
        return [prefix.out for prefix in prefixes[start:]]

    def copy(self, source: Buffer, length: int) -> None:
        """Rows [0, length) become those of `source`."""
        source.read(length)
        self.rows[:length] = source.rows[:length]
        self._prefixes = source._prefixes[:length]


class TreeToy:
    """A StageModel that answers as pipeline.model.ToyModel does, byte for byte."""

    def __init__(self, layers: tuple[int, int], tree: Tree, slots: int, capacity: int) -> None:
        row_bytes = ROW_BYTES * (layers[1] - layers[0])
        self._info = ModelInfo(
            layers,
            len(tree.layers),
            TOY_FINGERPRINT,
            slots,
            capacity,
            VOCABULARY,
            "toy",
            row_bytes,
        )
        self._layers = tree.layers[layers[0] : layers[1]]
        self.buffers = {slot: self._buffers() for slot in range(slots)}

    @property
    def info(self) -> ModelInfo:
        """See StageModel."""
        return self._info

    def _buffers(self) -> list[Buffer]:
        return [Buffer(layer) for layer in self._layers]

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """See StageModel."""
        outputs: list[bytes] = []
        results: list[Result] = []
        data = b"" if payload is None else bytes(payload.data)
        at = 0
        tail = self._info.tail
        for index, segment in enumerate(segments):
            if payload is None:
                values = [token.to_bytes(ROW_BYTES, "little") for token in segment.tokens]
            else:
                end = at + ROW_BYTES * len(segment.tokens)
                values = [data[i : i + ROW_BYTES] for i in range(at, end, ROW_BYTES)]
                at = end
            for buffer in self.buffers[segment.slot]:
                values = buffer.write(segment.start, values)
            if tail:
                history = histories[index] if histories else ()
                wanted = values[len(values) - segment.want :]
                results.append(toy_result(segment, wanted, history, VOCABULARY))
            else:
                outputs += values
        if tail:
            return Output(None, tuple(results))
        return Output(Tensor("uint8", (len(outputs), ROW_BYTES), b"".join(outputs)))

    def copy(self, source: int, target: int, length: int) -> None:
        """See StageModel."""
        if target >= self._info.slots:
            self.buffers[target] = self._buffers()
        pairs = zip(self.buffers[source], self.buffers[target], strict=True)
        for origin, buffer in pairs:
            buffer.copy(origin, length)

    def drop(self, parked: int) -> None:
        """See StageModel."""
        self.buffers.pop(parked, None)

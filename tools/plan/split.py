"""Owns the split of layers by dynamic programming: the least bottleneck, or the least sum.

Pure numbers. A stage's cost is a table by how many layers it holds, so that whatever else it holds
(the embedding, the LM head) is the caller's, and so is what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

Costs = Sequence[Sequence[float | None]]  # [stage][layers]: seconds, None where they do not fit
MOST_ORDERED = 7  # stages of which every order is tried: 5,040


def split(costs: Costs, layers: int) -> tuple[int, ...] | None:
    """How many layers each stage holds, at least one; None where they do not fit.

    costs[i] has layers + 1 entries. Of all splits the slowest stage is least slow, and of those the
    stages together are quickest. Two passes of O(stages x layers^2): the second knows the bound, so
    that its sum can be built up from partial sums.
    """
    bound = _best(costs, layers, max)
    if bound is None:
        return None
    slowest = max(row[count] or 0.0 for row, count in zip(costs, bound, strict=True))
    kept = [
        [cost if cost is not None and cost <= slowest else None for cost in row] for row in costs
    ]
    return quickest(kept, layers)


def quickest(costs: Costs, layers: int) -> tuple[int, ...] | None:
    """The same where only the sum counts: one frame at a time goes round the ring."""
    return _best(costs, layers, lambda one, other: one + other)


def _best(
    costs: Costs, layers: int, join: Callable[[float, float], float]
) -> tuple[int, ...] | None:
    """The split whose costs, joined from the first stage on, are least."""
    table: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for at, row in enumerate(costs):
        left = len(costs) - at - 1  # stages behind this one, with a layer each
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for held, (cost, counts) in table.items():
            for count in range(1, layers - held - left + 1):
                more = row[count]
                if more is None:
                    continue
                total = join(cost, more)
                known = after.get(held + count)
                if known is None or total < known[0]:
                    after[held + count] = total, (*counts, count)
        table = after
    return table[layers][1] if layers in table else None


def orders(count: int) -> list[tuple[int, ...]]:
    """The orders of stages to try, the present one first."""
    if count > MOST_ORDERED:
        return [tuple(range(count))]
    return list(permutations(range(count)))

"""Owns the decode measurement: tokens per second against delay, drafter, depth and concurrency.

An arm is one server with its options; a cell is a class of text and a number of turns at once. All
arms run the same cells in one run, in alternating order, so that they see the same machine. Greedy;
every arm must give the first arm's texts.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median

from tools.chat import wait_ready
from tools.client import Client, Json
from tools.errors import USAGE, ToolError
from tools.load import Timeline, Watch, Watcher, ask_all, steady_rate, ttft_ms
from tools.server import own_server

PROMPTS = Path(__file__).resolve().parent.parent / "bench" / "prompts.toml"
MAX_ARMS = 16  # each is a ring of processes of its own
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One server. delay_ms: one way, of every link; depth, tokens: bounds of drafts, None for none.

    The first arm of a run is the reference: no delay, no drafts.
    """

    delay_ms: float = 0.0
    drafter: str = "off"
    depth: int | None = None
    tokens: int | None = None
    draft_model: str | None = None

    @property
    def name(self) -> str:
        """As it is shown."""
        parts = [f"{self.delay_ms:g} ms", self.drafter]
        parts += [] if self.depth is None else [f"depth {self.depth}"]
        parts += [] if self.tokens is None else [f"{self.tokens} drafts"]
        return " ".join(parts)

    def options(self) -> list[str]:
        """Its options for `kvring up`."""
        found = ["--delay-ms", f"{self.delay_ms:g}", "--drafter", self.drafter]
        found += [] if self.draft_model is None else ["--draft-model", self.draft_model]
        found += [] if self.depth is None else ["--draft-depth", str(self.depth)]
        return found + ([] if self.tokens is None else ["--draft-tokens", str(self.tokens)])


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    model: str
    stages: int
    delays_ms: tuple[float, ...]
    drafters: tuple[str, ...]
    depths: tuple[int | None, ...]
    draft_tokens: tuple[int | None, ...]
    classes: tuple[str, ...]
    concurrency: tuple[int, ...]
    max_tokens: int
    rounds: int
    draft_model: str | None = None

    def arms(self) -> list[Arm]:
        """The reference and then every combination; bounds of drafts only where there are any."""
        found = [Arm()]
        for delay_ms, drafter in product(self.delays_ms, self.drafters):
            bounds = product(self.depths, self.draft_tokens) if drafter != "off" else [(None, None)]
            small = self.draft_model if drafter == "model" else None
            found += [Arm(delay_ms, drafter, depth, tokens, small) for depth, tokens in bounds]
        found = list(dict.fromkeys(found))
        if len(found) > MAX_ARMS:
            raise ToolError(f"{len(found)} arms are over {MAX_ARMS}: measure less", code=USAGE)
        return found


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm's result in one round. tokens_per_s: all turns together while all of them decode."""

    round: int
    arm: str
    text_class: str
    turns: int
    tokens: int
    tokens_per_s: float
    ttft_ms: float
    per_verify: float | None
    frames_in_flight: float | None
    most_in_flight: int | None
    busy: dict[str, float]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians over the rounds; ratio: to the reference of this cell."""

    text_class: str
    turns: int
    arm: str
    tokens_per_s: float
    ratio: float
    ttft_ms: float
    per_verify: float | None
    frames_in_flight: float | None
    idle_share: float | None


def prompts(classes: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    """bench/prompts.toml: class -> texts. Raises ToolError for a class that is not there."""
    if not PROMPTS.is_file():
        raise ToolError(f"the bench needs {PROMPTS}: run it from a checkout of kvring")
    data = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))
    found = {name: [str(item["text"]).strip() for item in items] for name, items in data.items()}
    for name in classes or ():
        if name not in found:
            raise ToolError(f"--classes {name}: there are {', '.join(found)}", code=USAGE)
    return {name: found[name] for name in classes or found}


def bodies(texts: list[str], count: int, model: str, max_tokens: int, salt: str) -> list[Json]:
    """`count` greedy requests that share no rows with those of another salt."""
    base: Json = {
        "model": model,
        "temperature": 0,
        "max_tokens": max_tokens,
        "cache_salt": salt,
    }
    return [
        {**base, "messages": [{"role": "user", "content": texts[index % len(texts)]}]}
        for index in range(count)
    ]


def measure(plan: Plan, log: Path, progress: Progress) -> list[Cell]:
    """Start every arm's server, run all cells, end the servers. Raises ToolError."""
    texts = prompts(plan.classes)
    arms = plan.arms()
    most = max(plan.concurrency)
    base = ["--model", plan.model, "--stages", str(plan.stages), "--slots", str(most)]
    base += ["--max-model-len", "1536"]
    cells: list[Cell] = []
    with contextlib.ExitStack() as stack:
        clients = []
        for index, arm in enumerate(arms):
            url = stack.enter_context(own_server([*base, *arm.options()], log / f"arm{index}.log"))
            client = stack.enter_context(Client(url))
            wait_ready(client)
            clients.append(client)
            ask_all(client, bodies(["Hello."], 1, client.first_model(), 8, "warm-up"))
        for round_, name, turns in _cells(plan):
            order = list(zip(arms, clients, strict=True))
            for arm, client in order if (round_ + turns) % 2 else reversed(order):
                progress(f"round {round_}/{plan.rounds}: {turns} x {name}, {arm.name}")
                model = client.first_model()
                wanted = bodies(texts[name], turns, model, plan.max_tokens, f"{round_} {turns}")
                watcher = Watcher(client)
                with watcher.look():
                    lines = ask_all(client, wanted)
                cells.append(_cell(round_, arm, name, lines, watcher.seen))
                progress(f"{turns} x {name}, {arm.name}: {cells[-1].tokens_per_s:.1f} tokens/s")
    return cells


def rows(cells: list[Cell]) -> list[Row]:
    """The table, cell by cell, the reference first."""
    found = []
    groups = dict.fromkeys((cell.text_class, cell.turns) for cell in cells)
    for name, turns in groups:
        here = [c for c in cells if (c.text_class, c.turns) == (name, turns)]
        rates: dict[str, list[float]] = {}
        for arm in _in_order(here):
            rates[arm] = [c.tokens_per_s for c in here if c.arm == arm]
        reference = median(rates[Arm().name])
        for arm, each in rates.items():
            mine = [c for c in here if c.arm == arm]
            busy = [share for c in mine for share in c.busy.values()]
            found.append(
                Row(
                    name,
                    turns,
                    arm,
                    median(each),
                    median(each) / max(1e-6, reference),
                    median(c.ttft_ms for c in mine),
                    _median([c.per_verify for c in mine]),
                    _median([c.frames_in_flight for c in mine]),
                    1 - mean(busy) if busy else None,
                )
            )
    return found


def mismatches(cells: list[Cell]) -> list[str]:
    """Where a text is not the reference's: "round 1, 4 x chat, 20 ms lookup"."""
    truth = {(c.round, c.text_class, c.turns): c.texts for c in cells if c.arm == Arm().name}
    return [
        f"round {c.round}, {c.turns} x {c.text_class}, {c.arm}"
        for c in cells
        if c.texts != truth[c.round, c.text_class, c.turns]
    ]


def as_json(part: Cell | Row | Plan) -> Json:
    """A plain object for the JSON report."""
    return asdict(part)


def _cells(plan: Plan) -> Iterator[tuple[int, str, int]]:
    return product(range(1, plan.rounds + 1), plan.classes, plan.concurrency)


def _cell(round_: int, arm: Arm, name: str, lines: list[Timeline], seen: Watch) -> Cell:
    return Cell(
        round=round_,
        arm=arm.name,
        text_class=name,
        turns=len(lines),
        tokens=sum(line.reply.tokens for line in lines),
        tokens_per_s=steady_rate(lines),
        ttft_ms=ttft_ms(lines),
        per_verify=seen.per_verify,
        frames_in_flight=seen.frames_in_flight,
        most_in_flight=seen.most_in_flight,
        busy={stage: round(share, 3) for stage, share in seen.busy.items()},
        texts=[line.reply.text for line in lines],
    )


def _in_order(cells: list[Cell]) -> list[str]:
    """Names of the arms, the reference first, whatever order they ran in."""
    return sorted({cell.arm for cell in cells}, key=lambda name: (name != Arm().name, name))


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

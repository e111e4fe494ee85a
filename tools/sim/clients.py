"""Owns the simulated clients: each says what its script says, one turn after another, and reads."""

from __future__ import annotations

from collections import deque

from coord.actions import Tokens
from tools.sim.check import Told, violated
from tools.sim.coordinator import CoordinatorProcess, Event
from tools.sim.heap import MICROSECOND, Heap
from tools.sim.script import Say
from transport.frame import Submit

AGAIN_NS = 20_000_000  # until a client that found no coordinator tries again
LEAST_ROOM = 8  # tokens that a prompt leaves for its reply


class Client:
    """One conversation."""

    def __init__(self) -> None:
        self.history: list[int] = []
        self.says: deque[Say] = deque()  # due, or waiting for the turn before them
        self.saying: Say | None = None
        self.turn = 0
        self.told: Told | None = None
        self.unread: deque[Event] = deque()
        self.read = 0  # tokens of this turn

    @property
    def idle(self) -> bool:
        """It waits for nothing."""
        return self.told is None and not self.says


class Clients:
    """All clients of a world."""

    def __init__(self, heap: Heap, count: int, coordinator: CoordinatorProcess) -> None:
        self.heap = heap
        self.all = [Client() for _ in range(count)]
        self.ended: list[Told] = []
        self._coordinator = coordinator
        self._of: dict[int, Client] = {}
        coordinator.hear = self._hear

    def say(self, say: Say) -> None:
        """Its time has come."""
        client = self.all[say.client]
        client.says.append(say)
        self._next(client)

    def leave(self, number: int) -> None:
        """A client cancels what it waits for."""
        client = self.all[number]
        if client.told is None or client.told.over:
            return
        if self._coordinator.awake:
            self._coordinator.cancel(client.turn)
        else:
            self.heap.at(self.heap.now + AGAIN_NS, self.leave, number)

    def restarted(self) -> None:
        """The coordinator died: every turn is cut."""
        for client in self.all:
            if client.told is not None:
                client.unread.clear()
                self._over(client)
        self._of.clear()

    def quiet(self) -> bool:
        """No client waits for anything."""
        return all(client.idle for client in self.all)

    def prompt(self, say: Say) -> tuple[int, ...]:
        """What a client asks, given what was said so far."""
        history = list(self.all[say.base].history)
        if say.keep is not None:
            del history[say.keep :]
        if say.edit is not None and history:
            history[say.edit[0] % len(history)] = say.edit[1]
        limit = self._coordinator.shape.limits.max_model_len - LEAST_ROOM
        prompt = (*history, *say.more)
        return (prompt if len(prompt) <= limit else prompt[: limit // 4]) or (1,)

    def _next(self, client: Client) -> None:
        if client.told is not None or not client.says:
            return
        if not self._coordinator.awake:
            self.heap.at(self.heap.now + AGAIN_NS, self._next, client)
            return
        say = client.saying = client.says.popleft()
        submit = Submit(
            0,
            self.prompt(say),
            say.budget,
            say.stops,
            say.sampling,
            say.salt,
            say.reuse,
            say.hint,
            say.keep_s,
        )
        told = client.told = self._coordinator.prepare(submit)
        client.turn, client.read = told.submit.turn, 0
        self._of[client.turn] = client
        self._coordinator.take(told.submit)

    def _hear(self, event: Event) -> None:
        client = self._of[event.turn]
        assert client.saying is not None
        client.unread.append(event)
        if len(client.unread) > client.saying.budget + 4:
            violated("bounded memory", f"{len(client.unread)} events wait for turn {event.turn}")
        if len(client.unread) == 1:
            self._later(client)

    def _later(self, client: Client) -> None:
        """Read at once where that takes no time; but not within the core's own step."""
        assert client.saying is not None
        due = self.heap.now + client.saying.read_us * MICROSECOND
        self.heap.at(due, self._read, client, client.turn, client.told)

    def _read(self, client: Client, turn: int, told: Told) -> None:
        if client.told is not told or not client.unread:
            return
        event = client.unread.popleft()
        if isinstance(event, Tokens):
            client.read += len(event.tokens)
            assert client.saying is not None
            leave = client.saying.leave
            if leave is not None and client.read >= leave and not told.cancelled:
                self.leave(self.all.index(client))
        if client.unread:
            self._later(client)
        elif told.over:
            del self._of[turn]
            self._over(client)

    def _over(self, client: Client) -> None:
        assert client.told is not None
        client.history = [*client.told.submit.prompt, *client.told.got]
        self.ended.append(client.told)
        client.told = client.saying = None
        self._next(client)

"""Owns the simulated links and what receives from them: delay, order, loss, and a process's pauses.

A link is one sending socket: first in, first out, its frames numbered. What a number says is
transport.numbering's, as in production.
"""

from __future__ import annotations

from collections import deque
from random import Random

from tools.sim.heap import Heap
from transport.codec import encode
from transport.frame import Copy, Envelope, Frame
from transport.numbering import Inbox


class Receiver:
    """A process with one receiving socket; subclasses say what it does with a frame.

    Down: frames wait with their senders. Paused or busy: they wait in the socket, and die with it.
    """

    def __init__(self, heap: Heap, name: str, *, codec: bool) -> None:
        self.heap = heap
        self.name = name
        self.up = True
        self.paused_until = 0
        self.inbox = Inbox(name, None)
        self.queue: deque[tuple[Frame, Envelope]] = deque()
        self.links: list[Link] = []
        self._codec = codec
        self._serving = False

    def busy(self) -> bool:
        """True while no frame is taken off the socket."""
        return self.heap.now < self.paused_until

    def deliver(self, frame: Frame, envelope: Envelope) -> None:
        """The core takes a frame."""
        raise NotImplementedError

    def arrive(self, frame: Frame, envelope: Envelope) -> None:
        """A message has reached the socket."""
        self.queue.append((frame, envelope))
        if not self._serving:
            self.serve()

    def serve(self) -> None:
        """Take what waits in the socket."""
        self._serving = True
        queue, inbox = self.queue, self.inbox
        while queue and self.up and not self.busy():
            frame, envelope = queue.popleft()
            if self._codec:
                found = inbox.take(encode(frame, envelope))
            else:
                found = inbox.arrived(frame, envelope)
            for each, sent in found:
                self.deliver(each, sent)
        self._serving = False

    def pause(self, for_ns: int) -> None:
        """Stand still for so long from now on."""
        self.paused_until = max(self.paused_until, self.heap.now + for_ns)
        self.heap.at(self.paused_until, self.wake)

    def wake(self) -> None:
        """A pause may be over."""
        if self.up and not self.busy():
            self.serve()

    def die(self) -> None:
        """The socket is gone with all that waits in it."""
        self.up = False
        self.queue.clear()
        self.paused_until = 0

    def rise(self) -> None:
        """A new process listens; what was kept for it comes, link by link in order."""
        self.up = True
        self.inbox = Inbox(self.name, None)
        for link in self.links:
            while link.held:
                self.arrive(*link.held.popleft())


class Link:
    """From one process's sending socket to a receiver."""

    def __init__(
        self,
        heap: Heap,
        receiver: Receiver,
        sender: str,
        incarnation: int,
        delay_ns: int,
        jitter_ns: int,
        random: Random,
    ) -> None:
        self.receiver = receiver
        self.held: deque[tuple[Frame, Envelope]] = deque()
        self._heap = heap
        self._sender, self._incarnation = sender, incarnation
        self._delay, self._jitter = delay_ns, jitter_ns
        self._random = random.random
        self._sent = 0  # numbers given
        self._arrived = 0  # numbers that have reached the receiver's machine, or were lost
        self._lost = 0  # numbers below this are lost on the way
        self._losing = 0  # so many are lost from the next Copy on
        self._last = 0  # when the latest one arrives
        receiver.links.append(self)

    def send(self, frame: Frame) -> Envelope:
        """Number a frame and let it travel."""
        envelope = Envelope(self._sender, self._incarnation, self._sent)
        self._sent += 1
        due = self._heap.now + self._delay
        if self._jitter:
            due += int(self._jitter * self._random())
        self._last = due = max(due, self._last)
        self._heap.at(due, self._arrive, frame, envelope)
        return envelope

    def lose(self, count: int, *, from_copy: bool = False) -> None:
        """The next `count` frames to arrive are lost; from_copy: a Copy is the first of them."""
        if from_copy:
            self._losing = count
        else:
            self._lost = max(self._lost, self._arrived + count)

    def heal(self) -> None:
        """No further frame is lost."""
        self._lost = self._arrived
        self._losing = 0

    def in_air(self) -> int:
        """Frames on their way."""
        return self._sent - self._arrived

    def _arrive(self, frame: Frame, envelope: Envelope) -> None:
        if self._losing and isinstance(frame, Copy):
            self.lose(self._losing)
            self._losing = 0
        self._arrived = envelope.number + 1
        if envelope.number < self._lost:
            return
        if self.receiver.up:
            self.receiver.arrive(frame, envelope)
        else:
            self.held.append((frame, envelope))

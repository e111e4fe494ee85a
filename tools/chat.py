"""Owns `kvring chat`: the conversation in a terminal, its commands, and how a reply is stopped.

In a pipe stdout gets the replies and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from tools.client import Client, Json, Readiness, Reply, ServerError
from tools.conversation import Conversation, turn_number
from tools.errors import RUNTIME, ToolError
from tools.prompt import History, Pipe, Typist, history_file, is_command
from tools.terminal import (
    SEPARATOR,
    Flow,
    ProgressLine,
    console,
    in_place,
    paint,
    printable,
    width,
    wrapped,
)
from tools.turns import WIDE, cost, table

STOP_S = 2.0  # for the server to end a stopped reply with its numbers; then the stream is cut
INTERRUPTED = 130
TITLE = 40  # characters of a message within a line
KEYS = (
    "Alt-Enter, or \\ at a line's end, goes on in the next line; pasted lines are one message.",
    "Up and Ctrl-R find earlier messages. Ctrl-C stops a reply; at the prompt, twice, it leaves.",
    "A message that begins with / needs a space in front of it.",
)


def run_chat(
    *,
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
) -> int:
    """Talk until the input ends; returns the exit code."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # one odd byte must not end a conversation
            stream.reconfigure(errors="replace")
    with Client(url, api_key) as client:
        wait_ready(client)
        settings: Json = {"model": model or client.first_model(), "temperature": temperature}
        if max_tokens is not None:
            settings["max_tokens"] = max_tokens
        chat = _Chat(client, settings, Conversation(system))
        return chat.with_person() if _is_person() else chat.with_pipe()


def _is_person() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def wait_ready(client: Client) -> None:
    """Wait while the server loads, and show how far it is."""
    line = ProgressLine(sys.stderr)

    def show(state: Readiness) -> None:
        line.show(f"waiting for {client.url}: {state}")

    try:
        client.wait_ready(show)
    finally:
        line.close()


@dataclass(frozen=True, slots=True)
class _Command:
    """argument: what may follow its name, for the help; "" where nothing may."""

    argument: str
    text: str
    run: Callable[[str], bool]  # False leaves


class _Chat:
    """The conversation at hand, the one that was left for it, and what may be done."""

    def __init__(self, client: Client, settings: Json, conversation: Conversation) -> None:
        self._client = client
        self._settings = settings
        self._now = conversation
        self._left: Conversation | None = None
        self._commands = {
            "/new": _Command("", "begin a new conversation", self._new),
            "/fork": _Command("[N]", "go on behind turn N in a new one; no N: list", self._fork),
            "/back": _Command("", "to the conversation that /new or /fork left", self._back),
            "/retry": _Command("", "ask again for the last reply", self._retry),
            "/stats": _Command("", "what each turn cost", self._stats),
            "/help": _Command("", "this list", self._help),
            "/quit": _Command("", "leave; so does Ctrl-D", lambda _: False),
        }

    def with_person(self) -> int:
        """Prompt, answer, until Ctrl-D, /quit or a second Ctrl-C."""
        history = History(history_file())
        typist = Typist(history, list(self._commands))
        _note(f"{self._settings['model']} at {self._client.url}; /help for help")
        if history.trouble is not None:
            _note(f"no history is kept: {history.trouble}")
        interrupted = False
        while True:
            try:
                said = typist.read()
                if said is None:
                    print()
                    return 0
                interrupted = False
                if not self._take(said):
                    return 0
            except KeyboardInterrupt:
                print()
                if interrupted and not typist.emptied:
                    return INTERRUPTED
                interrupted = not typist.emptied
                if interrupted:
                    _note("Ctrl-C again, Ctrl-D or /quit leaves")
            except ToolError as error:
                self._explain(error)

    def with_pipe(self) -> int:
        """Answer each message of standard input; the first failure ends it."""
        pipe = Pipe()
        try:
            while (said := pipe.read()) is not None:
                if not self._take(said):
                    break
        except KeyboardInterrupt:
            return INTERRUPTED
        except ToolError as error:
            self._explain(error)
            return RUNTIME
        return 0

    def _take(self, said: str) -> bool:
        """A command or a message; False to leave."""
        if not said.strip():
            return True
        if not is_command(said):
            self._say(said)
            return True
        name, _, argument = said.strip().partition(" ")
        name = {"/exit": "/quit"}.get(name, name)
        command = self._commands.get(name)
        if command is None:
            print(f"{printable(name)}: no such command; see /help, or put a space in front")
            return True
        if argument and not command.argument:
            print(f"{name} takes no argument")
            return True
        return command.run(argument.strip())

    # ---- commands --------------------------------------------------------------------------------

    def _new(self, _: str) -> bool:
        self._go(self._now.fork(0))
        _note("a new conversation")
        return True

    def _fork(self, argument: str) -> bool:
        turns = self._now.turns
        if not argument:
            self._list()
            return True
        number = turn_number(argument, turns)
        if number is None:
            there = f"give 0 to {len(turns)}" if turns else "there is no turn yet"
            print(f"/fork {printable(argument)}: no such turn; {there}")
            return True
        self._go(self._now.fork(number))
        where = f"goes on behind turn {number}" if number else "begins before the first turn"
        _note(f"a new conversation that {where}; /back returns")
        return True

    def _list(self) -> None:
        for number, turn in enumerate(self._now.turns, 1):
            print(f"{number:4}  {_title(turn.said, width(sys.stdout) - 8)}")
        if self._now.turns:
            _note("/fork N goes on behind turn N; 0: before the first")
        else:
            print("no turn yet")

    def _back(self, _: str) -> bool:
        if self._left is None:
            print("no other conversation yet")
            return True
        self._go(self._left)
        turns = self._now.turns
        last = f"; you last said: {_title(turns[-1].said, TITLE)}" if turns else ""
        _note(f"back, behind turn {len(turns)}{last}")
        return True

    def _go(self, conversation: Conversation) -> None:
        self._now, self._left = conversation, self._now

    def _retry(self, _: str) -> bool:
        now = self._now
        if now.unanswered is not None:
            self._say(now.unanswered)
        elif not now.turns:
            print("no turn yet")
        else:
            last = now.turns.pop()
            answered = False
            try:
                answered = self._say(last.said, again=True)
            finally:
                if not answered:
                    now.turns.append(last)
                    now.unanswered = None
        return True

    def _stats(self, _: str) -> bool:
        if self._now.turns:
            columns = width(sys.stdout) if _is_person() else 2 * WIDE
            shown = console(sys.stdout, None if _is_person() else columns)
            shown.print(table(self._now.turns, columns))
        else:
            print("no turn yet")
        return True

    def _help(self, _: str) -> bool:
        for name, command in self._commands.items():
            print(f"{f'{name} {command.argument}':11} {command.text}")
        for text in KEYS:
            print(textwrap.fill(text, width(sys.stdout) - 1))
        return True

    # ---- a turn ----------------------------------------------------------------------------------

    def _say(self, said: str, *, again: bool = False) -> bool:
        """One turn; False when no reply came. A stopped one stays as far as it came."""
        now = self._now
        now.unanswered = said
        body = {**self._settings, **now.request(said)}
        try:
            reply = self._show(body)
        except ServerError as error:
            if error.status != 503:
                raise
            wait_ready(self._client)
            reply = self._show(body)
        answered = now.take(said, reply, again=again)
        if _is_person():
            if answered:
                _note(*cost(reply))
                print()
            else:
                _note("stopped before a reply came; /retry asks again")
        elif reply.stopped:
            raise KeyboardInterrupt
        return answered

    def _show(self, body: Json) -> Reply:
        """Print a reply as it comes; one that Ctrl-C cut has the finish_reason None."""
        from rich.text import Text

        reply, flow, waiting = Reply(), Flow(sys.stdout, wraps=_is_person()), None
        if _is_person() and in_place(sys.stdout):
            waiting = console(sys.stdout).status(Text("waiting for the first token", "dim"))

        def show(text: str) -> None:
            if waiting is not None:
                waiting.stop()
            flow.write(text)

        try:
            with _unechoed(), _Stopping(self._client, reply):
                if waiting is not None:
                    waiting.start()
                reply.read(self._client.chat(body), show)
        except KeyboardInterrupt:
            reply.finish_reason = None
        finally:
            if waiting is not None:
                waiting.stop()
            if reply.text or reply.finish_reason is not None:
                print(flush=True)
        return reply

    def _explain(self, error: ToolError) -> None:
        hint = ""
        if isinstance(error, ServerError) and error.error_code == "context_length_exceeded":
            hint = "/fork N or /new makes room"
        elif self._now.unanswered is not None:
            hint = "nothing said is lost: /retry asks again"
        hint = hint if _is_person() else ""
        text = f"kvring: {printable(error.told)}{f'; {hint}' if hint else ''}"
        if _is_person():
            text = textwrap.fill(text, width(sys.stdout) - 1)
        print(paint(text, "red", sys.stderr), file=sys.stderr, flush=True)


class _Stopping:
    """While a reply comes, the first Ctrl-C cancels it at the server, and the stream then ends.

    A second one, or a server that does not end it, cuts the stream: KeyboardInterrupt.
    """

    def __init__(self, client: Client, reply: Reply) -> None:
        self._client = client
        self._reply = reply
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._canceller: threading.Thread | None = None

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
        signal.signal(signal.SIGINT, self._previous)
        if self._canceller is not None:
            self._canceller.join()

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._over.is_set():
            return
        if self._reply.id is None or self._canceller is not None:
            raise KeyboardInterrupt
        # in a thread: the HTTP library may hold its lock where the signal came
        self._canceller = threading.Thread(target=self._cancel, args=(self._reply.id,))
        self._canceller.start()

    def _cancel(self, reply_id: str) -> None:
        with contextlib.suppress(ToolError):
            self._client.cancel(reply_id, STOP_S)
        if self._over.wait(STOP_S):
            return
        with self._lock:
            if not self._over.is_set():
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)


@contextlib.contextmanager
def _unechoed() -> Iterator[None]:
    """Keys pressed while a reply comes are not shown in its midst; they are read afterwards."""
    if not _is_person():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _title(said: str, room: int) -> str:
    """The first words of a message, on one line."""
    return textwrap.shorten(printable(said), room, placeholder=" …")


def _note(*parts: str) -> None:
    """A dim line of the program's own, broken between its parts."""
    for line in wrapped(SEPARATOR.join(parts), width(sys.stdout)):
        print(paint(line, "dim", sys.stdout), flush=True)

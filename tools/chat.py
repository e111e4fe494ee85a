"""Owns `kvring chat`: the conversation in a terminal, and the line that says what a turn cost.

Replies go to stdout. On a terminal so does the line after each reply; in a pipe it goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from dataclasses import dataclass, field

from tools.client import Client, Json, Readiness, Reply, ServerError
from tools.errors import RUNTIME, ToolError
from tools.terminal import ProgressLine, paint

HELP = """\
/new    forget this conversation and start another
/stats  what each turn cost
/exit   leave (so does Ctrl-D)
A line that ends in \\ goes on in the next. Ctrl-C stops a reply; a second one leaves."""


@dataclass(slots=True)
class Conversation:
    """The messages so far and what every turn cost."""

    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.replies = []


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
    with Client(url, api_key) as client:
        wait_ready(client)
        settings: Json = {"model": model or client.first_model()}
        settings["temperature"] = temperature
        if max_tokens is not None:
            settings["max_tokens"] = max_tokens
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # arrow keys in input(), where Python has it
                importlib.import_module("readline")
            print(paint(f"{settings['model']} at {client.url}; /help for help", "dim", sys.stdout))
        return _talk(client, settings, Conversation(system))


def wait_ready(client: Client) -> None:
    """Wait while the server loads, and show how far it is."""
    line = ProgressLine(sys.stderr)

    def show(state: Readiness) -> None:
        line.show(f"waiting for {client.url}: {state}")

    try:
        client.wait_ready(show)
    finally:
        line.close()


def _talk(client: Client, settings: Json, conversation: Conversation) -> int:
    interactive = sys.stdin.isatty()
    interrupted = False
    while True:
        try:
            text = _read(interactive)
        except KeyboardInterrupt:
            print()
            if interrupted or not interactive:
                return 130
            interrupted = True
            print(paint("Ctrl-C again or /exit to leave", "dim", sys.stdout))
            continue
        if text is None:
            if interactive:
                print()
            return 0
        interrupted = False
        if text.startswith("/") and "\n" not in text:
            if not _command(text.strip(), conversation):
                return 0
        elif text.strip():
            try:
                reply = _say(client, settings, conversation, text)
            except ToolError as error:
                _explain(error)
                if not interactive:
                    return RUNTIME
                continue
            interrupted = reply.finish_reason is None
            if interrupted and not interactive:
                return 130


def _read(interactive: bool) -> str | None:
    """The user's next message, over several lines if they end in a backslash; None at the end."""
    lines: list[str] = []
    while True:
        if interactive:
            try:
                line = input("… " if lines else "> ")
            except EOFError:
                line = ""
                if not lines:
                    return None
        else:
            raw = sys.stdin.readline()
            if not raw:
                return "\n".join(lines) if lines else None
            line = raw.rstrip("\r\n")
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _command(text: str, conversation: Conversation) -> bool:
    """Run a /command; False to leave."""
    if text in {"/exit", "/quit"}:
        return False
    if text == "/new":
        conversation.restart()
        print(paint("a new conversation", "dim", sys.stdout))
    elif text == "/stats":
        for number, reply in enumerate(conversation.replies, 1):
            print(f"{number:3d}  {cost(reply)}")
        if not conversation.replies:
            print("no turn yet")
    elif text == "/help":
        print(HELP)
    else:
        print(f"{text}: no such command\n{HELP}")
    return True


def _say(client: Client, settings: Json, conversation: Conversation, text: str) -> Reply:
    """One turn. A stopped reply stays in the conversation as far as it came; a failed one not."""
    messages = [*conversation.messages, {"role": "user", "content": text}]
    body = {**settings, "messages": messages}
    try:
        reply = _show(client, body)
    except ServerError as error:
        if error.status != 503:
            raise
        wait_ready(client)
        reply = _show(client, body)
    if reply.text or reply.finish_reason is not None:
        conversation.messages = [*messages, {"role": "assistant", "content": reply.text}]
    conversation.replies.append(reply)
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(paint(cost(reply), "dim", stream), file=stream, flush=True)
    return reply


def _show(client: Client, body: Json) -> Reply:
    """Print a reply as it comes; Ctrl-C leaves its finish_reason None."""
    reply = Reply()
    try:
        reply.read(client.chat(body), lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        reply.finish_reason = None
    finally:
        if reply.text or reply.finish_reason is not None:
            print(flush=True)
    return reply


def cost(reply: Reply) -> str:
    """The line below a reply."""
    parts = ["no token" if reply.ttft_s is None else f"first token {reply.ttft_s:.2f} s"]
    if reply.cached is not None and reply.prefilled is not None:
        parts.append(f"{reply.cached:,} cached + {reply.prefilled:,} prefilled")
    parts.append(f"{reply.tokens:,} tokens")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.1f} tokens/s")
    if reply.finish_reason == "length":
        parts.append("cut at the token limit")
    elif reply.finish_reason is None:
        parts.append("stopped")
    return " · ".join(parts)


def _explain(error: ToolError) -> None:
    hint = ""
    if isinstance(error, ServerError) and error.error_code == "context_length_exceeded":
        hint = " (/new starts another conversation)"
    print(paint(f"kvring: {error.message}{hint}", "red", sys.stderr), file=sys.stderr, flush=True)

"""Owns sending one request and reading its answer to the end, whatever happens on the way.

No exception for what a server or a fault can do: everything is in the Record.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx

from tools.client import Json
from tools.soak.record import CHAT, Choice, Outcome, Reading, Record, Wanted

SILENCE_S = 30.0  # of a stream: the server sends a comment line every 5 s
LONGEST_S = 150.0
HANG_UP_S = 0.05  # times 1 to 7: the patience of a client that leaves before a whole answer
ASLEEP_S = 1.5  # of a slow reader
SMALL_BUFFER = 4096  # bytes that its system takes for it meanwhile


class Asker:
    """Requests to one server by the keys of its tenants. Threads may share it."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self._headers = {
            name: {"Authorization": f"Bearer {key}", "Connection": "close"}
            for name, key in keys.items()
        }
        # a new connection each time: one that was kept may be of a coordinator that is gone
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        small = httpx.HTTPTransport(
            limits=limits, socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)]
        )
        self._fast = httpx.Client(base_url=url, limits=limits, trust_env=False)
        self._slow = httpx.Client(base_url=url, transport=small, trust_env=False)

    def close(self) -> None:
        """Close what is open."""
        self._fast.close()
        self._slow.close()

    def get(self, path: str, tenant: str, timeout_s: float = 5.0) -> httpx.Response:
        """GET; raises httpx.HTTPError."""
        return self._fast.get(path, headers=self._headers[tenant], timeout=timeout_s)

    def post(self, path: str, tenant: str, body: Json, timeout_s: float) -> httpx.Response:
        """POST; raises httpx.HTTPError."""
        return self._fast.post(path, headers=self._headers[tenant], json=body, timeout=timeout_s)

    def ask(self, wanted: Wanted) -> Record:
        """Send it and read the answer."""
        choices = [Choice() for _ in range(wanted.choices)]
        record = Record(wanted, time.monotonic(), choices)
        client = self._slow if wanted.reading is Reading.SLOW else self._fast
        hangs_up = wanted.reading is Reading.LEAVE and not wanted.body["stream"]
        silence_s = SILENCE_S if wanted.body["stream"] else LONGEST_S
        if hangs_up:
            silence_s = HANG_UP_S * (1 + wanted.after)
        try:
            with client.stream(
                "POST",
                wanted.path,
                headers=self._headers[wanted.tenant],
                json=wanted.body,
                timeout=httpx.Timeout(silence_s, connect=10.0),
            ) as answer:
                record.status = answer.status_code
                if record.streamed:
                    self._stream(record, answer)
                else:
                    self._whole(record, answer)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            record.outcome, record.code = Outcome.UNREACHABLE, repr(error)
        except httpx.TimeoutException as error:
            record.outcome = Outcome.LEFT if hangs_up else Outcome.ENDLESS
            record.code = repr(error)
        except httpx.HTTPError as error:
            record.outcome, record.code = Outcome.CUT, repr(error)
        record.ended = time.monotonic()
        return record

    def _whole(self, record: Record, answer: httpx.Response) -> None:
        body = json.loads(answer.read())
        if answer.status_code != 200:
            record.outcome, record.code = Outcome.REFUSED, str(body["error"]["code"])
            return
        record.pieces.append(time.monotonic())
        for entry in body["choices"]:
            _take(record, entry, entry.get("message") or entry)
        record.usage = body["usage"]
        record.outcome = Outcome.COMPLETE

    def _stream(self, record: Record, answer: httpx.Response) -> None:
        wanted = record.wanted
        acted = wanted.reading is Reading.WHOLE
        for event in _events(record, answer):
            if time.monotonic() - record.sent > LONGEST_S:
                record.outcome = Outcome.ENDLESS
                return
            if not acted and len(record.pieces) >= wanted.after:
                acted = True
                if wanted.reading is Reading.LEAVE:
                    record.outcome = Outcome.LEFT
                    return
                if wanted.reading is Reading.SLOW:
                    time.sleep(ASLEEP_S)
                else:
                    self._cancel(wanted, answer)
            _note(record, event)
        _conclude(record)

    def _cancel(self, wanted: Wanted, answer: httpx.Response) -> None:
        path = f"/v1/cancel/{answer.headers['x-request-id']}"
        try:  # the reply may have ended meanwhile, or the coordinator: its own answer tells
            self.post(path, wanted.tenant, {}, 5.0)
        except httpx.HTTPError:
            return


def _events(record: Record, answer: httpx.Response) -> Iterator[Json]:
    """The JSON objects of a stream; counts what ends it.

    An event counts once the empty line behind it has come: who dies may leave half of one.
    """
    data: str | None = None
    for line in answer.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif line or data is None:
            continue
        elif data == "[DONE]":
            record.dones += 1
            data = None
        else:
            record.behind += record.dones
            yield json.loads(data)
            data = None


def _note(record: Record, event: Json) -> None:
    if "error" in event:
        record.errors += 1
        record.code = str(event["error"]["code"])
        return
    for entry in event["choices"]:
        before = len(record.choices[entry["index"]].text)
        _take(record, entry, entry.get("delta") or entry)
        if len(record.choices[entry["index"]].text) > before:
            record.pieces.append(time.monotonic())
        if entry["finish_reason"] and event["kvring"]["ended_by"] == "cancelled":
            record.outcome = Outcome.CANCELLED
    record.usage = event.get("usage") or record.usage


def _conclude(record: Record) -> None:
    if record.errors:
        record.outcome = Outcome.ERROR
    elif not record.dones:
        record.outcome, record.code = Outcome.CUT, "the stream ended without [DONE]"
    elif record.outcome is None:
        record.outcome = Outcome.COMPLETE


def _take(record: Record, entry: Json, holder: Json) -> None:
    choice = record.choices[entry["index"]]
    choice.text += holder.get("content") or holder.get("text") or ""
    if entry["finish_reason"] is not None:
        choice.finishes.append(entry["finish_reason"])
    if entry.get("logprobs"):
        choice.ids = (choice.ids or []) + _ids(record.wanted.path, entry["logprobs"])


def _ids(path: str, logprobs: Json) -> list[int]:
    """Token ids by their bytes: a toy's token is one. Of longer tokens, the bytes."""
    if path == CHAT:
        return [byte for each in logprobs["content"] for byte in each["bytes"]]
    return [byte for each in logprobs["tokens"] for byte in _bytes(each)]


def _bytes(token: str) -> bytes:
    if token.startswith("bytes:\\x"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()

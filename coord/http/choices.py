"""Owns the choices of one request: n replies to one prompt, read as one. Knows no HTTP, no JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from coord.http.reply import Delta, Reply


class Choices:
    """Iterate pieces() once; then usage() and report() are final."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = tuple(replies)

    async def pieces(self) -> AsyncGenerator[Delta | Reply, None]:
        """Every choice's deltas as they come, and the reply itself once it is over.

        TurnError where one failed; the others are given up then.
        """
        runs = [reply.deltas() for reply in self.replies]
        pending: dict[asyncio.Future[Delta | None], int] = {}
        try:
            for index, run in enumerate(runs):
                pending[_next(run)] = index
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=pending.__getitem__):
                    delta = future.result()
                    index = pending.pop(future)
                    if delta is None:
                        yield self.replies[index]
                    else:
                        yield delta
                        pending[_next(runs[index])] = index
        finally:
            for future in pending:
                future.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for run in runs:
                await run.aclose()
            self.close()

    def close(self) -> None:
        """Nobody reads any more. Idempotent."""
        for reply in self.replies:
            reply.close()

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object: the prompt once, as the first choice found it; all answers."""
        usage = self.replies[0].usage()
        prompt = self.replies[0].prompt_tokens
        completion = sum(reply.completion_tokens for reply in self.replies)
        return {**usage, "completion_tokens": completion, "total_tokens": prompt + completion}

    def report(self) -> dict[str, object]:
        """The `kvring` object: the first choice's, and with several all of them in `choices`."""
        reports = [reply.report() for reply in self.replies]
        return reports[0] if len(reports) == 1 else {**reports[0], "choices": reports}


def _next(run: AsyncGenerator[Delta, None]) -> asyncio.Future[Delta | None]:
    async def step() -> Delta | None:
        return await anext(run, None)

    return asyncio.ensure_future(step())

"""Wakes those who wait for news, each for the newest only; what the news is, they ask elsewhere."""

from __future__ import annotations

import asyncio


class Pulse:
    """A counter that can be waited for, until it ends."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = False
        self._next = asyncio.Event()

    def beat(self) -> None:
        """There is news."""
        self.count += 1
        self._wake()

    def end(self) -> None:
        """There will be none any more."""
        self.ended = True
        self._wake()

    async def after(self, count: int) -> int | None:
        """The newest count once it is another one than `count`; None at the end."""
        while self.count == count and not self.ended:
            await self._next.wait()
        return None if self.ended else self.count

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

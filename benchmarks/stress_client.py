"""Lead lives of stress.py against a server, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from stress_lives import Life
from stress_messages import Outcome, Stream, read_whole, request_of_life

WATCH_SECONDS = 2
LIFE_SECONDS = 240  # after which a life that has not ended is lost
AGAIN_SECONDS = 0.3  # between two calls for the same abort: SGLang ignores one for a request that it does not know yet


@dataclass
class Load:
    """The most that was seen of a server's load, in a look every few seconds."""

    running: int = 0
    waiting: int = 0
    used: int = 0

    def add(self, seen: dict[str, Any]) -> None:
        """Take in one of the loads of `/v1/loads`."""
        self.running = max(self.running, seen["num_running_reqs"])
        self.waiting = max(self.waiting, seen["num_waiting_reqs"])
        self.used = max(self.used, seen["num_used_tokens"])


async def lead_all(
    url: str, lives: Iterable[Life], concurrency: int, go_on: Callable[[], bool], done: Callable[[Life, Outcome], None]
) -> Load:
    """Lead lives, `concurrency` at a time, in order; none is started once `go_on` says no."""
    waiting, load = iter(lives), Load()

    async def worker(session: aiohttp.ClientSession) -> None:
        for life in waiting:
            if not go_on():
                return
            done(life, await lead(session, url, life))

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        watcher = asyncio.create_task(_watch(session, url, load))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker(session))
        watcher.cancel()
    return load


async def _watch(session: aiohttp.ClientSession, url: str, load: Load) -> None:
    """Look at the server's load again and again; a server that does not answer is for the lives to tell."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/v1/loads") as response:
                for seen in (await response.json())["loads"]:
                    load.add(seen)
        await asyncio.sleep(WATCH_SECONDS)


async def lead(session: aiohttp.ClientSession, url: str, life: Life) -> Outcome:
    """Lead one life to its end."""
    await asyncio.sleep(life.pause)
    start, outcome = time.monotonic(), Outcome()
    try:
        async with asyncio.timeout(LIFE_SECONDS):
            outcome = await _flush(session, url) if life.way == "flush" else await _ask(session, url, life)
    except TimeoutError:
        outcome.error = f"lost: no end within {LIFE_SECONDS} s"
    except aiohttp.ClientError as error:
        outcome.error = f"lost: {error!r}"
    outcome.seconds = time.monotonic() - start
    return outcome


async def _flush(session: aiohttp.ClientSession, url: str) -> Outcome:
    async with session.post(f"{url}/flush_cache") as response:
        return Outcome(status=response.status)


async def _ask(session: aiohttp.ClientSession, url: str, life: Life) -> Outcome:
    """Send the request, and fetch its answer or give it up."""
    fetch, ended = asyncio.ensure_future(_fetch(session, url, life)), asyncio.Event()
    fetch.add_done_callback(lambda _: ended.set())
    try:
        if life.is_cut and not life.streams:
            await asyncio.wait([fetch], timeout=life.cut_seconds)
            if life.way == "abort":
                await _abort(session, url, life, ended)
            elif not fetch.done():
                return Outcome()
        return await fetch
    finally:
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)


async def _abort(session: aiohttp.ClientSession, url: str, life: Life, ended: asyncio.Event) -> None:
    """Call for the abort of a life until it has ended."""
    while not ended.is_set():
        async with session.post(f"{url}/abort_request", json={"rid": life.rid}) as response:
            response.raise_for_status()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), AGAIN_SECONDS)


async def _fetch(session: aiohttp.ClientSession, url: str, life: Life) -> Outcome:
    path, body = request_of_life(life)
    async with session.post(url + path, json=body) as response:
        if response.status != 200:
            return Outcome(status=response.status, error=(await response.text())[:500])
        if not life.streams:
            outcome = read_whole(life.question, await response.json())
        else:
            outcome = await _stream(session, url, life, response)
        outcome.status = response.status
        return outcome


async def _stream(session: aiohttp.ClientSession, url: str, life: Life, response: aiohttp.ClientResponse) -> Outcome:
    """Read a stream to its end, or until the life is cut off."""
    stream, abort, ended = Stream(life.question), None, asyncio.Event()
    try:
        async for event in _events(response):
            stream.event(event)
            if life.is_cut and abort is None and stream.received >= life.cut_tokens:
                if life.way == "disconnect":
                    response.close()
                    break
                abort = asyncio.ensure_future(_abort(session, url, life, ended))
    finally:
        ended.set()
        if abort is not None:
            await abort
    return stream.outcome


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; SGLang puts each on one line."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line.removeprefix(b"data: "))

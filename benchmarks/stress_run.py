"""A run of stress.py on one server after the other: waves of lives, the pool at rest between them, answers alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from stress_alone import Alones
from stress_client import Load, lead_all
from stress_judge import EndError, end_of
from stress_lives import Life
from stress_messages import Outcome
from stress_server import CHUNK, DISTURBED, KINDS, Server, pool_at_rest, server
from stress_table import Led
from tqdm import tqdm

WAVE = 250  # lives between two looks at the pool at rest
RETRACTING_OF = 4  # one life of so many goes to the server that retracts, where there are both
MANY = 50  # lives, of which some must have been retracted where that is forced
LIVES_SHARE = 0.75  # of the time is for lives, the rest for answers alone


@dataclass
class Run:
    """What a run is asked for, and what it has found.

    seconds : after these no life is started, and no question asked alone; the starts of servers do not count.
    faults : what went wrong beside single lives.
    log : what the servers' logs tell, counted.
    loads : the most that was running, waiting and used in each wave.
    """

    model: Path
    folder: Path
    servers: tuple[str, ...]
    pool: int
    concurrency: int
    seconds: float
    led: list[Led] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    log: Counter[str] = field(default_factory=Counter)
    loads: list[Load] = field(default_factory=list)
    asked_alone: int = 0
    start: float = field(default_factory=time.monotonic)  # put off by what does not count

    def lead(self, lives: list[Life]) -> None:
        """Lead all lives, and judge them; the answers alone are those of the last server."""
        servers = []
        for kind, dealt in deal(lives, self.servers):
            asked = time.monotonic()
            with server(self.model, self.folder, kind, self.pool) as running:
                self.start += time.monotonic() - asked
                servers.append(running)
                self._lead_waves(running, kind, dealt)
                if kind == self.servers[-1] and running.alive:
                    self._ask_alone(servers)
                if not running.alive:
                    self.faults.append(f"the {kind} server died; see {running.log}")
            counts = running.log_counts()
            if counts["fatal lines"]:
                self.faults.append(f"the log of the {kind} server tells of a failure: {running.log}")
            if kind == "retracting" and len(dealt) >= MANY and not counts["retracted, forced"]:
                self.faults.append("the retracting server retracted nothing")
            self.log += counts

    def _lead_waves(self, running: Server, kind: str, lives: list[Life]) -> None:
        """Waves of lives; after each the pool must be whole, first as it is and then after a flush."""

        def done(life: Life, outcome: Outcome) -> None:
            try:
                led = Led(life, kind, outcome, end_of(life, outcome))
            except EndError as error:
                led = Led(life, kind, outcome, "failed", str(error))
            self.led.append(led)
            bar.update()

        def go_on() -> bool:
            return self._in_time(LIVES_SHARE) and running.alive

        with tqdm(total=len(lives), desc=f"lives on the {kind} server", mininterval=1) as bar:
            for wave in batched(lives, WAVE):
                load = asyncio.run(lead_all(running.url, wave, self.concurrency, go_on, done))
                self.loads.append(load)
                if running.alive:
                    self._check_pool(running)

    def _in_time(self, share: float = 1) -> bool:
        return time.monotonic() < self.start + share * self.seconds

    def _check_pool(self, running: Server) -> None:
        """All of the pool is available or evictable before a flush, and available after it."""
        for when in ("before", "after"):
            try:
                state = pool_at_rest(running)
                if (state.unaccounted, state.size) != (0, running.pool):
                    self.faults.append(f"{when} a flush {state.unaccounted} of {state.size} tokens are unaccounted for")
                if when == "before":
                    httpx.post(f"{running.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()
            except (httpx.HTTPError, TimeoutError) as error:
                self.faults.append(f"the pool could not be read {when} a flush: {error!r}")
                return

    def _check_whole_pool(self, running: Server) -> None:
        """A request that takes nearly all of an empty pool is served: no counter can hide a lost slot from it."""
        length = running.pool - CHUNK // 2
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "custom_params": {"kv_policy": "full"}}
        body = {"input_ids": [100 + i for i in range(length)], "sampling_params": sampling}
        answer = httpx.post(f"{running.url}/generate", json=body, timeout=300).raise_for_status().json()
        if len(answer["output_ids"]) != 8:
            self.faults.append(f"a request of {length} tokens was answered with {answer['meta_info']}")

    def _ask_alone(self, servers: list[Server]) -> None:
        """The answers alone, on the last of the servers; then its pool must be whole once more."""
        log = sum((running.log_counts() for running in servers), Counter[str]())
        disturbed = any(log[what] for what in DISTURBED)
        try:
            self._judge(Alones(servers[-1], [running.trace for running in servers], disturbed))
            self._check_pool(servers[-1])
            self._check_whole_pool(servers[-1])
        except httpx.HTTPError as error:
            self.faults.append(f"questions alone: {error!r}")

    def _judge(self, alones: Alones) -> None:
        """Ask each question that was answered, alone, and compare."""
        judged = [led for led in self.led if led.judged]
        questions = {led.life.question.number: led.life.question for led in judged}
        with tqdm(total=len(questions), desc="questions alone", mininterval=1) as bar:
            alones.ask(questions.values(), self._in_time, bar.update)
        self.asked_alone = len(alones.found)
        for led in judged:
            led.judgement = alones.judge(led.life, led.outcome)


def deal(lives: list[Life], servers: tuple[str, ...]) -> Iterator[tuple[str, list[Life]]]:
    """Which lives each server gets: of both kinds the one that retracts gets every fourth.

    A server without lives is left out, but for the last, which gives the answers alone.
    """
    for kind in KINDS:
        if kind not in servers:
            continue
        dealt = lives
        if len(servers) > 1:
            dealt = [life for life in lives if (life.number % RETRACTING_OF == 3) == (kind == "retracting")]
        if dealt or kind == servers[-1]:
            yield kind, dealt


def batched(lives: list[Life], size: int) -> Iterator[list[Life]]:
    """Lives in lists of at most `size`."""
    rest = iter(lives)
    while batch := list(itertools.islice(rest, size)):
        yield batch

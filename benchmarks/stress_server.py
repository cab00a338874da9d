"""A real SGLang server for stress.py, with SGLang's own checks for leaks on, and what its log and its counters say."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from stress_lives import ARMS, BUDGET, PERIOD

sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine"))

import harness

POOL = 1280  # tokens: a few requests at a time
CHUNK = 64  # tokens of a prompt that are prefilled at a time
START_SECONDS = 300
FLAGS = (
    *("--host", "127.0.0.1", "--dtype", "float32", "--log-level", "warning"),
    *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "24"),
    *(
        "--schedule-conservativeness",
        "0.1",
    ),  # SGLang's own estimate of what `full` will take is too low, and it retracts
    *("--incremental-streaming-output", "--sleep-on-idle"),
    *("--kv-policy", "|".join(ARMS), "--kv-budget", str(BUDGET), "--kv-period", str(PERIOD)),
)
# What a server runs with beside SGLang's checks: as it is, or made to retract a running request again and again.
KINDS: dict[str, dict[str, str]] = {
    "retracting": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"},
    "plain": {},
}
# Lines of the log by what they tell.
RETRACTED = re.compile(r"Retract requests\. #retracted_reqs: (\d+)|Testing retraction\. #retracted_reqs: (\d+)")
DISTURBED = ("retracted, pool full", "retracted, forced", "deferral warned of")
FATAL = re.compile(
    r"Scheduler hit an exception|Mem Leak Detected|memory leak detected|KV double free|use-after-free"
    r"|Subprocess .* crashed|Aborting the last request|AssertionError"
)


@dataclass
class Server:
    """A running server.

    trace : folder of the traces (`kv_trace`) of its requests, by their ids.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    trace: Path
    pool: int

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_counts(self) -> Counter[str]:
        """What its log has told so far."""
        return log_counts(self.log.read_text(errors="replace"))


def tiny_model(target: Path) -> Path:
    """The random fp32 Qwen3 of the engine tests, written anew."""
    return harness.tiny_qwen3(target, harness.smollm2())


@contextmanager
def server(model: Path, folder: Path, kind: str, pool: int) -> Iterator[Server]:
    """A server of this kind that answers; it is gone at exit. `folder` gets its log and traces."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, trace = folder / f"{kind}.log", folder / f"{kind}-traces"
    command = [Path(sys.executable).parent / "sglang", "serve", "--model-path", model, "--port", port, *FLAGS]
    command += ["--max-total-tokens", pool, "--kv-trace", trace]
    with log.open("wb") as output:
        environment = {**os.environ, **harness.ENVIRONMENT, **KINDS[kind]}
        process = subprocess.Popen([str(c) for c in command], env=environment, stdout=output, stderr=output)
    running = Server(f"http://127.0.0.1:{port}", process, log, trace, pool)
    try:
        _wait_until_ready(running)
        yield running
    finally:
        _stop(process)


def _wait_until_ready(running: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if not running.alive:
            break
        try:
            if httpx.get(f"{running.url}/health", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not come up; the end of {running.log}:\n{running.log.read_text()[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, gently if it can; its own processes watch it and go with it."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)


@dataclass(frozen=True)
class PoolState:
    """What SGLang says of its pool while nothing runs.

    unaccounted : tokens of the pool that are neither available nor held, evictable, by the radix tree.
    size : tokens of the pool.
    """

    unaccounted: int
    size: int


def pool_at_rest(running: Server, seconds: float = 60) -> PoolState:
    """Wait until no request runs or waits, and read the pool's counters, without flushing anything.

    Raises
    ------
    TimeoutError
        If requests still run after so many seconds.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = time.time()
        httpx.get(f"{running.url}/server_info", timeout=60).raise_for_status()  # wakes an idle scheduler
        time.sleep(0.2)
        (load,) = httpx.get(f"{running.url}/v1/loads", timeout=60).raise_for_status().json()["loads"]
        if load["timestamp"] > asked and load["num_running_reqs"] == load["num_waiting_reqs"] == 0:
            return PoolState(load["num_used_tokens"], load["max_total_num_tokens"])
    raise TimeoutError(f"requests still run or wait after {seconds:.0f} s: {load}")


def log_counts(text: str) -> Counter[str]:
    """Retractions, deferred evictions (the plugin warns of the first) and failures that a server's log tells of."""
    counts: Counter[str] = Counter()
    for match in RETRACTED.finditer(text):
        full, tested = match.groups()
        counts["retracted, pool full" if full else "retracted, forced"] += int(full or tested)
    counts["deferral warned of"] = text.count("has no free slots to compact a request into")
    counts["fatal lines"] = len(FATAL.findall(text))
    return counts

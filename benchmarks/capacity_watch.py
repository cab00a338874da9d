"""What an engine says of itself while it runs: SGLang's own gauges, read every fraction of a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

INTERVAL = 0.5  # seconds
GAUGES = {"running": "sglang:num_running_reqs", "used": "sglang:num_used_tokens"}


class Moment(NamedTuple):
    """seconds : since the watch began.
    running : requests in the running batch.
    used : slots of the pool that are locked: by requests, or by prompts that they share.
    """

    seconds: float
    running: float
    used: float


@contextmanager
def watched() -> Iterator[list[Moment]]:
    """The moments of an engine with `enable_metrics`, as long as the block runs; from the process that started it."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry, moments, over = CollectorRegistry(), [], threading.Event()
    MultiProcessCollector(registry)
    start = time.perf_counter()

    def watch() -> None:
        while not over.wait(INTERVAL):
            read = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
            values = {field: read.get(name, 0.0) for field, name in GAUGES.items()}
            moments.append(Moment(time.perf_counter() - start, **values))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield moments
    finally:
        over.set()
        thread.join()

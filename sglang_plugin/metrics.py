"""Prometheus metrics of a scheduler, beside SGLang's own: they appear at its `/metrics`.

They are written in the scheduler's process, where evictions happen, by the ranks that write SGLang's metrics.
Requests that still run are counted too, at most once in `INTERVAL` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import Residency, residency_of

PREFIX = "kvpolicy:"
INTERVAL = 1.0
_ATTRIBUTE = "_kvpolicy_counted"

# Added up from the state of each request; Prometheus appends `_total` to the names.
# Tokens, here and in the gauges, are per layer and KV head.
COUNTERS: dict[str, tuple[str, Callable[[Residency], float]]] = {
    "evictions": ("Evictions.", lambda state: state.evictions),
    "evicted_tokens": ("Tokens evicted.", lambda state: state.tokens_evicted),
    "evictions_deferred": ("Evictions put off for want of free slots.", lambda state: state.deferred),
    "eviction_seconds": ("Time of the scheduler spent on evictions.", lambda state: state.seconds),
    "decode_steps": ("Decode steps of requests.", lambda state: state.steps),
    "resident_token_steps": ("Resident tokens, summed over decode steps.", lambda state: state.resident_sum),
    "full_token_steps": ("Tokens of the full cache, summed over decode steps.", lambda state: state.full_sum),
}
FINISHED = "finished_requests"
GAUGES = {
    "running_requests": "Requests that decode.",
    "resident_tokens": "Tokens that these requests hold.",
    "full_tokens": "Tokens that they would hold without evictions.",
    "kv_bytes": "Bytes that they hold in the cache, over all ranks.",
    "full_kv_bytes": "Bytes that they would hold without evictions, in the precision of the model.",
}


class Counted(NamedTuple):
    """What is counted of one request, or of all that chose one policy.

    totals : of :data:`COUNTERS`, in order.
    held : requests that decode, their resident tokens, and those that their full cache would have.
    """

    totals: tuple[float, ...] = (0.0,) * len(COUNTERS)
    held: tuple[int, ...] = (0, 0, 0)

    def plus(self, now: Counted, before: Counted) -> Counted:
        """With a request as it is `now`, if it was in it as `before`."""
        totals = zip(self.totals, now.totals, before.totals, strict=True)
        held = zip(self.held, now.held, before.held, strict=True)
        return Counted(
            tuple(total + (new - old) for total, new, old in totals),
            tuple(total + (new - old) for total, new, old in held),
        )


class Metrics:
    """The metrics of one scheduler, each with a series for every policy.

    Parameters
    ----------
    labels
        SGLang's own, by name; ``policy`` is added to them.
    policies
        All that requests may choose, by the names that they call them. Their series exist from the start.
    settings_of
        The settings of SGLang's `Req`.
    bytes_per_token, full_bytes_per_token
        Of one token as it is stored, and in the precision of the model, over all ranks.
    registry
        Where the metrics are registered; by default where SGLang's are.
    clock
        Seconds, for :data:`INTERVAL`.
    """

    def __init__(
        self,
        labels: Mapping[str, Any],
        policies: Iterable[str],
        settings_of: Callable[[Any], RequestSettings],
        bytes_per_token: float,
        full_bytes_per_token: float,
        *,
        registry: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Not before SGLang has set the folder through which its processes share their metrics.
        from prometheus_client import REGISTRY, Counter, Gauge

        texts = {name: text for name, (text, _) in COUNTERS.items()} | {
            FINISHED: "Requests that ended or were aborted."
        }
        common: dict[str, Any] = {"labelnames": [*labels, "policy"], "registry": registry or REGISTRY}
        counters = {name: Counter(PREFIX + name, text, **common) for name, text in texts.items()}
        common["multiprocess_mode"] = "mostrecent"
        gauges = {name: Gauge(PREFIX + name, text, **common) for name, text in GAUGES.items()}
        self._series: dict[str, dict[str, Any]] = {
            policy: {name: metric.labels(**labels, policy=policy) for name, metric in (counters | gauges).items()}
            for policy in policies
        }
        self._counted = dict.fromkeys(self._series, Counted())
        self._shown = dict.fromkeys(self._series, Counted())
        self._settings_of = settings_of
        self._bytes_per_token, self._full_bytes_per_token = bytes_per_token, full_bytes_per_token
        self._clock, self._due = clock, clock()

    @classmethod
    def of_scheduler(
        cls, scheduler: Any, policies: Iterable[str], settings_of: Callable[[Any], RequestSettings], *per_token: float
    ) -> Metrics | None:
        """Those of a scheduler that writes SGLang's metrics; None of any other."""
        if not scheduler.metrics_reporter.current_scheduler_metrics_enabled:
            return None
        return cls(scheduler.metrics_collector.labels, policies, settings_of, *per_token)

    def decoding(self, batch: Any) -> None:
        """Before a decode step: look at its requests, unless that was done less than an interval ago."""
        if batch.is_empty() or (now := self._clock()) < self._due:
            return
        self._due = now + INTERVAL
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            if not req.finished():  # else it gave its cache back already, and leaves the batch with this step
                self._count(req, (1, length, length + residency_of(req).offset))
        self._show()

    def released(self, req: Any) -> None:
        """A request gives its cache back: it ended, or will be resumed."""
        policy = self._count(req, (0, 0, 0))
        if req.finished():
            self._series[policy][FINISHED].inc()
        self._show()

    def _count(self, req: Any, held: tuple[int, ...]) -> str:
        """Add what is new of a request to what is counted of its policy, which is returned."""
        policy, state = self._settings_of(req).arm.name, residency_of(req)
        now = Counted(tuple(read(state) for _, read in COUNTERS.values()), held)
        self._counted[policy] = self._counted[policy].plus(now, getattr(req, _ATTRIBUTE, Counted()))
        setattr(req, _ATTRIBUTE, now)
        return policy

    def _show(self) -> None:
        for policy, counted in self._counted.items():
            shown = self._shown[policy]
            if counted == shown:
                continue
            self._shown[policy], series = counted, self._series[policy]
            for name, total, before in zip(COUNTERS, counted.totals, shown.totals, strict=True):
                series[name].inc(total - before)
            _, resident, full = counted.held
            held = (*counted.held, resident * self._bytes_per_token, full * self._full_bytes_per_token)
            for name, value in zip(GAUGES, held, strict=True):
                series[name].set(value)

"""Admission by budget: what a request may still take of the pool, where SGLang counts its `max_new_tokens`.

A request that is held to a budget takes its prompt and, from its first eviction on, at most budget + period slots,
however long its answer. So the scheduler reserves that much and no more, and the length of an answer is bounded by
the model's context, not by the pool. Requests that keep everything (`full`) are counted as SGLang counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.request_settings import RequestSettings

logger = logging.getLogger(__name__)

# Decode steps between a prefill and the first eviction (Evictor._is_ready).
BEFORE_FIRST_EVICTION = 2


def growth(most: int, held: int, resident: int, left: int) -> int:
    """Slots of the pool that a request may take until it ends, beyond those it has.

    Its first eviction releases its prompt in the radix tree. What nobody else holds of it is free then, so it counts
    as the request's; what others hold is not, for the request needs slots of its own in its place.

    Parameters
    ----------
    most
        Tokens that it holds at most once it was evicted from.
    held
        Slots that are free again when it lets go of them, its own and those of its prompt that nobody else holds.
    resident
        Tokens in its row.
    left
        Tokens that it may still generate, at least 0.
    """
    if resident + left < most:
        return left
    until_first = max(most - resident, BEFORE_FIRST_EVICTION)
    return max(min(until_first, left), most + 1 - held)


class Admission:
    """Hooks of one scheduler's admission; `settings_of` gives the settings of SGLang's `Req`."""

    def __init__(self, settings_of: Callable[[Any], RequestSettings]) -> None:
        self._settings_of = settings_of
        self._tree: Any = None
        self._capacity, self._longest = 0, 0  # tokens of the pool, and of a request by the model's context
        self._warned = False

    def hooks(self) -> targets.Hooks:
        return {
            targets.MAX_NEW_TOKENS: self.around_init_max_new_tokens,
            targets.RUNNING_OFFSET: self.around_running_offset,
            targets.ADD_REQUEST: self.around_add_one_req,
            targets.ADD_CHUNK: self.around_add_chunked_req,
            targets.RETRACTION_ORDER: self.after_retraction_order,
            targets.ADD_TO_QUEUE: self.around_add_to_queue,
        }

    def attach(self, scheduler: Any) -> None:
        """Bind to a scheduler whose pools exist; no request can have come before."""
        self._tree = scheduler.tree_cache
        self._capacity = scheduler.max_total_num_tokens
        self._longest = scheduler.model_config.context_len - 1

    def _most(self, req: Any) -> int | None:
        settings = self._settings_of(req)
        return settings.arm.policy.most_resident(settings.budget, settings.period)

    def _fits(self, most: int, length: int) -> bool:
        """Whether the empty pool admits a request with `length` tokens to prefill, and holds it until its end."""
        # SGLang adds a page, here one token, and wants more room than the sum.
        return length + growth(most, length, length, self._longest) + 1 < self._capacity

    def around_init_max_new_tokens(self, original: Callable[..., None], scheduler: Any, req: Any) -> None:
        """Let an answer be as long as the model's context allows, where its cache is bounded and fits the pool."""
        if (most := self._most(req)) is None:
            original(scheduler, req)
            return
        if not self._fits(most, len(req.origin_input_ids)):
            self._warn(most)
            original(scheduler, req)
            return
        before = scheduler.max_req_len, scheduler.max_total_num_tokens
        scheduler.max_req_len, scheduler.max_total_num_tokens = self._longest, 2 * self._longest + 2
        try:
            original(scheduler, req)
        finally:
            scheduler.max_req_len, scheduler.max_total_num_tokens = before

    def _warn(self, most: int) -> None:
        if self._capacity < most + 3 and not self._warned:
            self._warned = True
            logger.warning(
                "kvpolicy: the KV pool holds %d tokens, too few for kv_budget + kv_period = %d of one request, so "
                "answers end where the pool does, before anything is evicted. Lower kv_budget, or enlarge the pool.",
                self._capacity,
                most,
            )

    def around_running_offset(self, original: Callable[..., float], adder: Any, req: Any) -> float:
        """What SGLang reserves for a running request."""
        if (most := self._most(req)) is None:
            return original(adder, req)
        # One that has ended may be in the batch still.
        return self._growth_of(req, most, to_prefill=0) if req.kv.holds_kv else 0

    def around_add_one_req(self, original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
        """Admit a request from the queue if what it will take is free."""
        if (most := self._most(req)) is None:
            return original(adder, req, *args, **kw)
        before = self._tree.evictable_size()
        lock = self._tree.lock(req.last_node)
        cached_for_it = before - self._tree.evictable_size()
        self._tree.unlock(lock)
        length = len(req.full_untruncated_fill_ids)
        reserved = growth(most, length - req.prefix_len + cached_for_it, length, _left(req))
        admitted = len(adder.can_run_list)
        adder.memory_budget.total_offset += reserved
        with _no_new_tokens(req):
            result = original(adder, req, *args, **kw)
        if len(adder.can_run_list) == admitted:
            adder.memory_budget.total_offset -= reserved
        return result

    def around_add_chunked_req(self, original: Callable[..., Any], adder: Any, req: Any) -> Any:
        """Go on with a prefill in chunks; nobody else is admitted before its last one."""
        if (most := self._most(req)) is None:
            return original(adder, req)
        to_prefill = len(req.full_untruncated_fill_ids) - req.prefix_len
        reserved = self._growth_of(req, most, to_prefill)
        with _no_new_tokens(req):
            unfinished = original(adder, req)
        if unfinished is None:
            adder.memory_budget.total_offset += reserved
        return unfinished

    def _growth_of(self, req: Any, most: int, to_prefill: int) -> int:
        """What a request with a row in the pool may still take, after another `to_prefill` tokens of its text."""
        resident, left = req.kv.kv_allocated_len + to_prefill, _left(req)
        if resident + left < most:
            return left  # without a look at the tree
        held = resident - req.kv.cache_protected_len
        if req.lock is not None:
            before = self._tree.evictable_size()
            self._tree.unlock(req.lock)
            held += self._tree.evictable_size() - before
            req.lock = self._tree.lock(req.last_node)
        return growth(most, held, resident, left)

    def after_retraction_order(self, order: list[int], reqs: list[Any]) -> list[int]:
        """Retract first whoever can be prefilled anew; SGLang takes them from the end of the list."""
        return sorted(order, key=lambda place: self._can_resume(reqs[place]))

    def _can_resume(self, req: Any) -> bool:
        """Whether the empty pool admits a request with its prompt and its output so far."""
        length = len(req.origin_input_ids) + len(req.output_ids)
        most = self._most(req)
        return length + 2 < self._capacity if most is None else self._fits(most, length)

    def around_add_to_queue(self, original: Any, scheduler: Any, req: Any, *args: Any, **kw: Any) -> None:
        """End a retracted request that has outgrown the pool with a sentence: it would wait for ever."""
        if not req.retracted_stain or self._can_resume(req):
            original(scheduler, req, *args, **kw)
            return
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        length = len(req.origin_input_ids) + len(req.output_ids)
        message = (
            f"The KV pool was full and this request had to give up its place; its prompt and output so far, {length} "
            f"tokens, are too long to be computed anew in a pool of {self._capacity}. Ask for less at a time, or "
            "enlarge the pool."
        )
        logger.warning("kvpolicy: request %s was ended. %s", req.rid, message)
        req.to_finish = FINISH_ABORT(message, status_code=503)
        scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=req.to_finish.to_json()), req)


def _left(req: Any) -> int:
    """Tokens that a request may still generate."""
    left: int = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(0, left)


@contextmanager
def _no_new_tokens(req: Any) -> Iterator[None]:
    """Within this SGLang reserves nothing for the answer, and goes by what the tree has, `ignore_eos` or not."""
    parameters = req.sampling_params
    before = parameters.max_new_tokens, parameters.ignore_eos
    parameters.max_new_tokens, parameters.ignore_eos = 0, False
    try:
        yield
    finally:
        parameters.max_new_tokens, parameters.ignore_eos = before

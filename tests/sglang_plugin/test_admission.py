"""What a request may still take of the pool, against lives that are played through slot by slot."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin.admission import Admission, growth
from kvpolicy.sglang_plugin.arms import parse_arms
from kvpolicy.sglang_plugin.request_settings import RequestSettings

BUDGET, PERIOD = 24, 8
MOST = BUDGET + PERIOD


def taken(prompt: int, exclusive: int, left: int) -> int:
    """The most slots of the pool that a request takes after its prefill, beyond its prompt's, played through.

    exclusive : of the prompt's slots, those that nobody else holds: free when the first eviction lets go of them.
    """
    own, row, most, in_tree = 0, prompt, 0, exclusive
    for step in range(left):
        if row >= MOST and step >= 1:  # the second step after the prefill is the first that may evict
            own, row, in_tree = BUDGET, BUDGET, 0
            most = max(most, own - exclusive)
        own, row = own + 1, row + 1
        most = max(most, own - (exclusive - in_tree))
    return most


@pytest.mark.parametrize("prompt", [1, 20, 31, 32, 33, 100])
def test_growth_is_what_a_life_takes_and_at_most_one_token_more(prompt: int) -> None:
    for shared, left in itertools.product((0, prompt // 2, prompt), (0, 1, 2, 3, 8, 9, 31, 32, 33, 100)):
        exclusive = prompt - shared
        promised = growth(MOST, exclusive, prompt, left)
        needed = taken(prompt, exclusive, left)
        assert promised >= needed, f"{shared = }, {left = }"
        if left >= 100:  # long enough to reach what it may hold
            assert promised <= needed + 1, f"{shared = }"


def test_a_request_that_was_evicted_from_grows_to_budget_and_period_and_no_further() -> None:
    for resident in range(BUDGET, MOST + 1):
        assert growth(MOST, resident, resident, 1000) == max(MOST + 1 - resident, 2)


def test_one_that_ends_before_its_first_eviction_takes_what_it_may_still_generate() -> None:
    assert growth(MOST, 10, 10, MOST - 11) == MOST - 11
    assert growth(MOST, 0, 10, MOST - 11) == MOST - 11


class Tree:
    """A radix tree whose lock on a node takes so many tokens from those that can be evicted."""

    def __init__(self, evictable: int, sizes: dict[str, int]) -> None:
        self._evictable, self._sizes = evictable, sizes
        self.held: dict[str, int] = {}

    def evictable_size(self) -> int:
        return self._evictable - sum(self._sizes[node] for node, holders in self.held.items() if holders)

    def lock(self, node: str) -> str:
        self.held[node] = self.held.get(node, 0) + 1
        return node

    def unlock(self, node: str) -> None:
        self.held[node] -= 1
        assert self.held[node] >= 0


def request(prompt: int, *, prefix: int = 0, policy: str = "vase-dkv", left: int = 1000, outputs: int = 0) -> Any:
    settings = RequestSettings(
        parse_arms(f"{policy}[recent:2]" if policy != "full" else policy, "")[policy_key(policy)], BUDGET, PERIOD, 0
    )
    return SimpleNamespace(
        settings=settings,
        full_untruncated_fill_ids=[0] * (prompt + outputs),
        origin_input_ids=[0] * prompt,
        output_ids=[0] * outputs,
        prefix_len=prefix,
        last_node="prompt",
        lock=None,
        retracted_stain=False,
        rid="one",
        sampling_params=SimpleNamespace(max_new_tokens=left + outputs, ignore_eos=True),
        kv=SimpleNamespace(holds_kv=True, kv_allocated_len=prompt + outputs, cache_protected_len=prompt),
    )


def policy_key(policy: str) -> str:
    return f"{policy}[recent:2]" if policy != "full" else policy


def admission(tree: Any = None, capacity: int = 1000, context: int = 5000) -> Admission:
    made = Admission(lambda req: req.settings)
    model = SimpleNamespace(context_len=context)
    made.attach(SimpleNamespace(tree_cache=tree, max_total_num_tokens=capacity, model_config=model))
    return made


def adder() -> Any:
    return SimpleNamespace(can_run_list=[], memory_budget=SimpleNamespace(total_offset=0))


def admitting(accept: bool) -> Any:
    """SGLang's `add_one_req` as far as it matters: it sees no new tokens, and goes by the tree."""

    def original(adder: Any, req: Any, *_: Any, **__: Any) -> str:
        assert (req.sampling_params.max_new_tokens, req.sampling_params.ignore_eos) == (0, False)
        if accept:
            adder.can_run_list.append(req)
        return "continue" if accept else "no token"

    return original


@pytest.mark.parametrize(
    ("in_tree", "others", "reserved"),
    [
        pytest.param(0, 0, MOST + 1 - 20, id="nothing cached"),
        pytest.param(12, 0, MOST + 1 - 20, id="a prefix that only this request will hold"),
        pytest.param(12, 1, MOST + 1 - 8, id="a prefix that another holds too"),
    ],
)
def test_an_admitted_request_reserves_its_growth_and_a_refused_one_nothing(
    in_tree: int, others: int, reserved: int
) -> None:
    tree = Tree(100, {"prompt": in_tree})
    for _ in range(others):
        tree.lock("prompt")
    hooks, req = admission(tree), request(20, prefix=in_tree)
    for accept, expected in ((False, 0), (True, reserved)):
        asked = adder()
        assert hooks.around_add_one_req(admitting(accept), asked, req, has_chunked_req=False) == (
            "continue" if accept else "no token"
        )
        assert asked.memory_budget.total_offset == expected
        assert (req.sampling_params.max_new_tokens, req.sampling_params.ignore_eos) == (1000, True)
        assert tree.held.get("prompt", 0) == others


def test_a_request_that_keeps_everything_is_left_to_sglang() -> None:
    req, hooks = request(20, policy="full"), admission(Tree(0, {}))
    assert hooks.around_running_offset(lambda _adder, _req: 77, adder(), req) == 77
    assert hooks.around_add_one_req(lambda _adder, asked: asked.sampling_params.max_new_tokens, adder(), req) == 1000


def test_a_running_request_gets_its_lock_back_and_counts_what_only_it_holds() -> None:
    tree = Tree(20, {"prompt": 20})
    hooks, req = admission(tree), request(20, outputs=5)
    req.lock = tree.lock("prompt")
    assert hooks.around_running_offset(None, adder(), req) == MOST + 1 - 25
    other = tree.lock("prompt")
    assert hooks.around_running_offset(None, adder(), req) == MOST + 1 - 5
    tree.unlock(other)
    assert (tree.held["prompt"], req.lock) == (1, "prompt")
    req.kv.holds_kv = False
    assert hooks.around_running_offset(None, adder(), req) == 0


def test_a_prefill_in_chunks_reserves_its_growth_with_the_last() -> None:
    tree = Tree(40, {"prompt": 40})
    hooks, req = admission(tree), request(60, prefix=40)
    req.kv.kv_allocated_len = req.kv.cache_protected_len = 40
    req.lock = tree.lock("prompt")
    for unfinished, expected in ((req, 0), (None, 2)):  # a prompt of 60 is more than it may hold later
        asked = adder()
        assert hooks.around_add_chunked_req(lambda _adder, _req, said=unfinished: said, asked, req) is unfinished
        assert asked.memory_budget.total_offset == expected


def clipped(scheduler: Any, req: Any) -> None:
    """SGLang's rule for `max_new_tokens`, in short."""
    length = len(req.origin_input_ids)
    most = min(scheduler.max_req_len - length - 1, scheduler.max_total_num_tokens - length - 2)
    req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, most)


@pytest.mark.parametrize(
    ("policy", "capacity", "expected"),
    [
        pytest.param("vase-dkv", 100, 4999 - 20 - 1, id="as long as the context, far beyond the pool"),
        pytest.param("vase-dkv", MOST + 3, 4999 - 20 - 1, id="in the smallest pool that holds it"),
        pytest.param("vase-dkv", MOST + 2, MOST + 1 - 20 - 1, id="not in one that never does"),
        pytest.param("full", 100, 99 - 20 - 1, id="not of one that keeps everything"),
    ],
)
def test_an_answer_may_be_as_long_as_the_context_where_the_budget_fits(
    policy: str, capacity: int, expected: int
) -> None:
    scheduler = SimpleNamespace(max_req_len=capacity - 1, max_total_num_tokens=capacity)
    req = request(20, policy=policy, left=100_000)
    admission(capacity=capacity).around_init_max_new_tokens(clipped, scheduler, req)
    assert req.sampling_params.max_new_tokens == expected
    assert (scheduler.max_req_len, scheduler.max_total_num_tokens) == (capacity - 1, capacity)


def test_a_pool_that_never_holds_a_budget_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    hooks = admission(capacity=MOST + 2)
    for _ in range(2):
        scheduler = SimpleNamespace(max_req_len=MOST + 1, max_total_num_tokens=MOST + 2)
        hooks.around_init_max_new_tokens(clipped, scheduler, request(20))
    assert [record.message.count("too few for kv_budget + kv_period = 32") for record in caplog.records] == [1]


def test_whoever_cannot_be_prefilled_anew_is_retracted_last() -> None:
    reqs = [request(20, outputs=90), request(20, outputs=10), request(20, outputs=91), request(20, outputs=5)]
    hooks = admission(capacity=100)
    assert hooks.after_retraction_order([0, 1, 2, 3], reqs) == [0, 2, 1, 3]
    assert hooks.after_retraction_order([3, 2, 1, 0], reqs) == [2, 0, 3, 1]


@pytest.mark.parametrize(("outputs", "retracted", "queued"), [(10, True, True), (90, True, False), (90, False, True)])
def test_a_retracted_request_that_outgrew_the_pool_is_ended(outputs: int, retracted: bool, queued: bool) -> None:
    pytest.importorskip("sglang", reason="SGLang's own record of an abort is used")
    req, sent, asked = request(20, outputs=outputs), [], []
    req.retracted_stain = retracted
    scheduler = SimpleNamespace(send_abort_output=lambda abort, req: sent.append(abort))
    hooks = admission(capacity=100)

    def original(_scheduler: Any, _req: Any, is_retracted: bool = False) -> None:
        asked.append(is_retracted)

    hooks.around_add_to_queue(original, scheduler, req, is_retracted=retracted)
    assert asked == ([retracted] if queued else [])
    if not queued:
        (abort,) = sent
        assert abort.finished_reason["status_code"] == 503
        assert "110 tokens, are too long to be computed anew in a pool of 100" in abort.finished_reason["message"]

"""A cache in low bits against plain transformers that codes every row by definition and follows every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import arms
import harness
import pytest
from packed_reference import PackedResidentCache
from transformers import AutoModelForCausalLM

from kvpolicy.reports.trace_file import load_trace

TOKENS, LEAST = 180, 90
GROUP, SHARE = 16, "0.1"
FULL = arms.Arm("full")
EVICTING = [arm for arm in arms.methods(32) if arm.name in ("vase-dkv", "vase-attnv")]
ARMS = [FULL, *EVICTING]


class Format(NamedTuple):
    """How an engine stores its cache, and the reference's own words for it."""

    name: str
    arguments: dict[str, Any]
    reference: dict[str, Any]
    may_part: int  # requests of an arm whose runs may part where a number lies between two codes, but for rounding


FORMATS = [
    Format("range-int4", {"kv_protect": SHARE}, {"bits": 4, "share": SHARE}, 0),
    Format("range-int2", {"kv_protect": SHARE, "kv_quant_keys": "int8"}, {"bits": 2, "share": SHARE, "key_bits": 8}, 1),
    Format("int8", {"kv_quant_keys": "int4"}, {"bits": 8, "key_bits": 4}, 1),
]


class Ran(NamedTuple):
    format: Format
    trace: Path
    responses: dict[str, list[dict[str, Any]]]


def settings(chosen: Format, trace: Path) -> dict[str, Any]:
    return {
        "kv_policy": "|".join(arm.name for arm in ARMS),
        "kv_budget": arms.BUDGET,
        "kv_period": arms.PERIOD,
        "kv_seed": arms.SEED,
        "kv_trace": str(trace),
        "kv_quant": chosen.name,
        "kv_quant_group": GROUP,
        **chosen.arguments,
    }


@pytest.fixture(scope="module", params=FORMATS, ids=lambda each: each.name)
def ran(
    request: pytest.FixtureRequest, tiny: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Ran:
    """Every arm on every prompt, each alone: in a batch the last bits differ, and a code may fall the other way."""
    chosen: Format = request.param
    trace = tmp_path_factory.mktemp("trace")
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
    with harness.engine(tiny, **settings(chosen, trace)) as running:
        for arm in ARMS:
            for prompt in prompts:
                found[arm.name] += harness.per_request(running, [prompt], [{"kv_policy": arm.name}], TOKENS)
                harness.flush(running)
    return Ran(chosen, trace, found)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_it_says_and_keeps_what_plain_transformers_does(
    arm: arms.Arm, ran: Ran, tiny: Path, prompts: list[list[int]]
) -> None:
    import torch

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    parted = 0
    for prompt, response in zip(prompts, ran.responses[arm.name], strict=True):
        cache = PackedResidentCache(group=GROUP, recent=arms.PERIOD, **ran.format.reference)
        expected = arm.expected(model, prompt, TOKENS, cache)
        agreed = agreed_tokens(response, ran.trace, expected, len(prompt))
        print(ran.format.name, arm.name, agreed, f"{len(set(expected.tokens))} different tokens")
        assert agreed >= LEAST
        parted += agreed < TOKENS
        record = harness.report(response)
        assert (record["evictions"] > 0) == (arm is not FULL)
        if agreed == TOKENS and "share" in ran.format.reference:
            assert record["protected_end"] == pytest.approx(cache.protected(), abs=1e-6)
            assert record["protected_rows_denied"] == 0
    assert parted <= ran.format.may_part


def test_a_ladder_leaves_tokens_fewer_levels(tiny: Path, prompts: list[list[int]]) -> None:
    """ThinKV's bits by kind of thought: the same choice at the first eviction, coarser numbers after it."""
    plain, ladder = "thinkv[segment:16]", "thinkv[segment:16;ladder:R2E2T4]"
    launch = {"kv_quant": "int4", "kv_quant_keys": "int4", "kv_quant_group": GROUP}
    arguments = {"kv_policy": f"{plain}|{ladder}", "kv_budget": arms.BUDGET, "kv_period": arms.PERIOD, **launch}
    with harness.engine(tiny, **arguments) as running:
        found = {}
        for arm in (plain, ladder):
            (found[arm],) = harness.per_request(running, prompts[1:2], [{"kv_policy": arm}], TOKENS)
            harness.flush(running)
    coarse, full = (harness.report(found[arm]) for arm in (ladder, plain))
    assert coarse["evictions"] >= 2
    assert "code_bits_end" not in full
    # All complete segments that are no transition are coarse; the newest tokens, fewer than half, are not.
    assert 2 < coarse["code_bits_end"] < 3.5
    assert coarse["kv_bytes_per_token"] == full["kv_bytes_per_token"]
    ours, theirs = (found[arm]["output_ids"] for arm in (ladder, plain))
    first = arms.BUDGET + arms.PERIOD - len(prompts[1])
    assert ours[:first] == theirs[:first]
    assert ours != theirs


def test_kernels_store_read_and_move_the_same(tiny: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Triton's interpreter runs all of them: packing, attention, unpacking for a second prefill, compaction."""
    import torch

    chosen, tokens = FORMATS[0], 44
    environment = {"KVPOLICY_KERNELS": "triton", "KVPOLICY_TEST_INTERPRET": "1"}
    with harness.engine(tiny, environment, **settings(chosen, tmp_path)) as running:
        choice = [{"kv_policy": "vase-dkv"}]
        (response,) = harness.per_request(running, prompts[1:2], choice, tokens)
        (longer,) = harness.per_request(running, [[*prompts[1], 5, 6, 7]], choice, 4)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    cache = PackedResidentCache(group=GROUP, recent=arms.PERIOD, **chosen.reference)
    (vase_dkv,) = (arm for arm in EVICTING if arm.name == "vase-dkv")
    expected = vase_dkv.expected(model, prompts[1], tokens, cache)
    assert agreed_tokens(response, tmp_path, expected, len(prompts[1])) == tokens
    assert harness.report(response)["evictions"] >= 1
    assert longer["meta_info"]["cached_tokens"] == len(prompts[1])


def agreed_tokens(response: dict[str, Any], trace: Path, expected: Any, prompt: int) -> int:
    """Tokens before the two runs part: by a token, or by what a head keeps at an eviction."""
    pairs = zip(response["output_ids"], expected.tokens, strict=True)
    agreed = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(expected.tokens))
    if expected.evictions:
        kept = load_trace(trace / f"{response['meta_info']['id']}.npz")
        for i, eviction in enumerate(expected.evictions):
            if eviction.true_len > prompt + agreed:
                break
            assert kept.true_len[i] == eviction.true_len
            if kept.kept(i).tolist() != eviction.kept.tolist():
                return eviction.true_len - prompt
    return agreed


def test_what_is_reported_is_what_is_stored(ran: Ran) -> None:
    """Bits of one element, by hand: codes, two fp32 numbers a group, and what protection takes."""
    key_bits = {"none": 32, "int8": 8, "int4": 4}[ran.format.arguments.get("kv_quant_keys", "none")]
    numbers = 2 * 32 / GROUP
    bits = (key_bits + numbers * (key_bits < 32) + ran.format.reference["bits"] + numbers) / 2
    for response in (response for responses in ran.responses.values() for response in responses):
        record = harness.report(response)
        assert record["kv_quant"] == ran.format.name
        beside = record["bits_per_element"] - bits
        if "share" in ran.format.reference:  # rows for a tenth of all slots and for 128 requests, and the index
            assert 16 * 0.1 < beside < 32 / 32 + 0.5 * (0.1 * 33 + 128 * (2 * arms.PERIOD + 4) * 33 / 8192) + 0.1
        else:
            assert beside == pytest.approx(0, abs=1e-9)
        assert record["kv_bytes_per_token"] * 32 == pytest.approx(
            record["bits_per_element"] * record["kv_bytes_per_token_full"]
        )
        assert record["kv_bytes_full_mean"] == pytest.approx(record["full_mean"] * record["kv_bytes_per_token_full"])

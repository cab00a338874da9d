"""Hold an engine's evictions and output against the independent reference, with the margin rule.

Two fp32 programs that add in different orders differ in the last bits, so a pick may differ where
two scores are nearly equal, and a token where two logits are. From there on the runs are different
runs: the comparison of that request ends, and the near-tie is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch

from kvpolicy.reports.trace_file import load_trace

SCORE_GAP = 1e-4  # relative
LOGIT_GAP = 1e-3  # the reference's two best logits; fp32 noise of these models is about 1e-5


@dataclass
class Agreement:
    """What was compared before the first near-tie, if there was one."""

    evictions: int = 0
    tokens: int = 0
    near_ties: int = 0


def compare(response: dict[str, Any], trace: Path, expected: reference.ReferenceRun) -> Agreement:
    """Assert that one response and its trace agree with the reference run, up to near-ties."""
    agreement = Agreement()
    actual = response["output_ids"]
    length = len(expected.tokens)
    same = next((i for i, pair in enumerate(zip(actual, expected.tokens, strict=True)) if pair[0] != pair[1]), length)
    trace_file = load_trace(trace / f"{response['meta_info']['id']}.npz")
    prompt = response["meta_info"]["prompt_tokens"]
    assert len(trace_file.true_len) == response["meta_info"]["kv_policy"]["evictions"]
    if same == length:
        evicted_at = trace_file.true_len.tolist()
        if evicted_at and evicted_at[-1] == prompt + length - 1:
            evicted_at.pop()  # before the step that SGLang prepares beyond the last token
        assert evicted_at == [eviction.true_len for eviction in expected.evictions]
    for i, eviction in enumerate(expected.evictions):
        if eviction.true_len > prompt + same:  # the cache holds tokens that the runs do not share
            break
        assert trace_file.true_len[i] == eviction.true_len
        if not _same_up_to_ties(torch.from_numpy(trace_file.kept(i)).long(), eviction):
            agreement.near_ties += 1
            same = min(same, eviction.true_len - prompt)
            break
        agreement.evictions += 1
    if same < length and not agreement.near_ties:
        assert expected.margins[same] < LOGIT_GAP, f"token {same} differs at a margin of {expected.margins[same]}"
        agreement.near_ties += 1
    agreement.tokens = same
    return agreement


def _same_up_to_ties(kept: torch.Tensor, eviction: reference.Eviction) -> bool:
    """True if equal; False if they differ in near-ties alone; fails otherwise."""
    if torch.equal(kept, eviction.kept):
        return True
    for layer, head in np.ndindex(*kept.shape[:2]):
        scores = dict(
            zip(
                eviction.resident_positions[layer, head].tolist(),
                eviction.scores[layer, head].tolist(),
                strict=True,
            )
        )
        ours, theirs = set(kept[layer, head].tolist()), set(eviction.kept[layer, head].tolist())
        assert ours <= scores.keys(), f"layer {layer} head {head} keeps tokens that were not resident"
        if eviction.tied[layer, head]:
            continue
        for a, b in zip(sorted(ours - theirs), sorted(theirs - ours), strict=True):
            gap = abs(scores[a] - scores[b]) / max(abs(scores[a]), abs(scores[b]))
            assert gap < SCORE_GAP, f"layer {layer} head {head} keeps {a} instead of {b} at a score gap of {gap}"
    return False

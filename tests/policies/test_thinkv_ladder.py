"""ThinKV's ladder: how many bits each kind of thought gets."""

from __future__ import annotations

import re

import pytest
import torch

from kvpolicy.policies.thinkv import ThinKV
from tests.policies.matrix import noise_of
from tests.policies.thinkv_segments import synthetic

PERIOD = 8


def test_each_kind_of_thought_has_its_bits() -> None:
    # A transition, an execution, a reasoning segment, and an incomplete one, which keeps all that the cache has.
    now = synthetic([0.9, 0.2, 0.5], 7, previous_len=55)
    policy = ThinKV(segment=16, ladder="R8E4T2")
    kept = policy.select(now, 40, PERIOD, noise_of(2))
    bits = policy.code_bits(now, kept)
    assert bits is not None
    assert bits.dtype == torch.uint8
    assert bits.tolist() == [[[2] * 4 + [4] * 8 + [8] * 16 + [8] * 7] * 3] * 2
    assert policy.widths == (8, 4, 2)
    assert torch.equal(kept, ThinKV(segment=16).select(now, 40, PERIOD, noise_of(2)))


def test_bits_follow_the_tokens_that_a_head_keeps() -> None:
    now = synthetic([0.9, 0.2, 0.5], 0)
    keep = torch.tensor([[0, 20, 40], [1, 2, 47], [16, 17, 31]]).expand(2, 3, 3)
    bits = ThinKV(segment=16, ladder="R4E4T2").code_bits(now, keep)
    assert bits is not None
    assert bits.tolist() == [[[2, 4, 4], [2, 2, 4], [4, 4, 4]]] * 2


def test_without_a_ladder_nothing_is_said_of_bits() -> None:
    now = synthetic([0.9, 0.2, 0.5], 7)
    assert ThinKV(segment=16).widths == ()
    assert ThinKV(segment=16).code_bits(now, torch.zeros(2, 3, 1, dtype=torch.int64)) is None


@pytest.mark.parametrize("ladder", ["R4E4", "R4E4T3", "r4e4t2", "4,4,2", "R4E4T2 "])
def test_a_ladder_that_is_none_is_refused(ladder: str) -> None:
    sentence = (
        f"ladder:{ladder}; it is written like R4E4T2, the bits (2, 4 or 8) of reasoning, execution and transition"
    )
    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        ThinKV(ladder=ladder).check(4096, 64)

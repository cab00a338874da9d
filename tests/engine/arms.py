"""What one engine runs side by side in the tests: each arm's name, and its score in the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference
import reference_scores as scores
import torch

from kvpolicy.policies.base import Noise
from kvpolicy.policies.curdkv import CurDKV
from kvpolicy.policies.vase_attnv import RESERVE, SAMPLING
from kvpolicy.policies.vase_dkv import VaseDKV
from tests.policies.oracle import Method

BUDGET, PERIOD, SINKS, SEED = 64, 16, 4, 7


@dataclass(frozen=True)
class Arm:
    """A policy as `kv_policy` names it, and how `reference.run` does the same.

    score : of each token, with `sinks` and `recent` tokens kept whatever theirs; or
    method : makes an independent reference for one request.
    due : where the policy has a rule of its own.
    stay : whether places decide, which kept tokens do not leave: by a random number, or between equal scores, as of a
        token that occurs twice, whose values are equal in the first layer. Where they do not and no score looks at the
        order of tokens, the reference keeps age order: the tokens must be the same.
    """

    name: str
    score: reference.Score | None = None
    sinks: int = SINKS
    recent: int = PERIOD
    method: Callable[[], Method] | None = None
    due: Callable[[int, int], bool] | None = None
    period: int = PERIOD
    stay: bool = False

    @property
    def choice(self) -> dict[str, Any]:
        return {"kv_policy": self.name, "kv_period": self.period}

    def expected(
        self, model: Any, prompt: list[int], tokens: int, cache: reference._ResidentCache | None = None
    ) -> reference.ReferenceRun:
        return reference.run(
            model,
            prompt,
            max_new_tokens=tokens,
            budget=BUDGET,
            period=self.period,
            recent=self.recent,
            sinks=self.sinks,
            score=self.method() if self.method is not None else self.score,
            due=self.due,
            stay=self.stay,
            cache=cache,
        )


def uniform(stream: int = 0, seed: int = SEED) -> scores.Noise:
    def numbers(eviction: int, layer: int, heads: int, tokens: int) -> torch.Tensor:
        return Noise(seed, eviction, (layer,)).uniform(heads, tokens, stream=stream)[0]

    return numbers


def vase_attnv(seed: int = SEED, **changes: Any) -> reference.Score:
    published = {"n_reserve": BUDGET // 4, "reserve": "range", "sample": True, "window": PERIOD, **changes}
    noises = {"uniform": uniform(SAMPLING, seed), "reserve_uniform": uniform(RESERVE, seed)}
    return scores.vase_attnv_score(budget=BUDGET, recent=PERIOD, sinks=SINKS, **noises, **published)


def vase_dkv(head_dim: int, seed: int = SEED) -> reference.Score:
    def projection(eviction: int, layer: int) -> torch.Tensor:
        return VaseDKV().drawn_projection(head_dim, Noise(seed, eviction, (layer,)))[0]

    return scores.vase_dkv_score(projection, recent=PERIOD)


def curdkv(head_dim: int) -> reference.Score:
    def projection(layer: int) -> torch.Tensor:
        return CurDKV().drawn_projection(head_dim, Noise(SEED, 0, (layer,)))[0]

    return scores.curdkv_score(projection, recent=PERIOD)


@functools.cache
def methods(head_dim: int) -> tuple[Arm, ...]:
    """The methods in their published form."""
    return (
        Arm("vase-dkv", vase_dkv(head_dim)),
        Arm("vase-attnv", vase_attnv()),
        Arm("snapkv", scores.snapkv_score("vase", PERIOD), sinks=0),
        Arm("curdkv", curdkv(head_dim)),
    )


@functools.cache
def ablations(head_dim: int) -> tuple[Arm, ...]:
    """The arms that take a method apart, and the controls."""
    attnv = {
        "reserve:variance": {"reserve": "variance"},
        "reserve:l2": {"reserve": "l2"},
        "reserve:random": {"reserve": "random"},
        "reserve:off": {"reserve": "off"},
        "sample:false": {"sample": False},
        "reserve:off;sample:false": {"reserve": "off", "sample": False},
        "pooling:none": {"pooling": "none"},
        "n_value_reserve:24;window:8;pooling:max;kernel:7;temperature:2": {
            "n_reserve": 24,
            "window": 8,
            "pooling": "max",
            "kernel": 7,
            "temperature": 2.0,
        },
    }
    measures = ("range", "variance", "l2")
    return (
        *(Arm(f"vase-attnv[{options}]", vase_attnv(**changes)) for options, changes in attnv.items()),
        Arm("vase-dkv[projection:fixed]", curdkv(head_dim)),
        Arm("curdkv[variant:windowed]", scores.curdkv_windowed_score()),
        Arm("snapkv[variant:rkv]", scores.snapkv_score("rkv", 8), sinks=0, recent=8),
        Arm("snapkv[variant:kvpress;window:12]", scores.snapkv_score("kvpress", 12), sinks=0, recent=12),
        *(Arm(f"evict-large-range[measure:{m}]", scores.value_measure_score(m, -1), stay=True) for m in measures),
        *(Arm(f"evict-small-range[measure:{m}]", scores.value_measure_score(m, 1), stay=True) for m in measures),
        Arm("random", scores.random_score(uniform()), stay=True),
    )

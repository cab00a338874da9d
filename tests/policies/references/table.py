"""Every method that has an independent reference, under which options, for models of which shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvpolicy.policies.query_statistics import QueryStatistics, write
from tests.policies.life import Due, above_budget
from tests.policies.oracle import Method
from tests.policies.references.alpha import Alpha
from tests.policies.references.epikv import EpiKV
from tests.policies.references.epikv_lag import EpiKVLag
from tests.policies.references.epikv_seg import EpiKVSeg
from tests.policies.references.h2o import H2O
from tests.policies.references.keydiff import KeyDiff
from tests.policies.references.lagkv import LagKV
from tests.policies.references.lagkv_ratio import LagKVRatio
from tests.policies.references.raas import RaaS
from tests.policies.references.rkv import RKV
from tests.policies.references.thinkv import ThinKV
from tests.policies.references.tova import TOVA
from tests.policies.references.triattention import Statistics, TriAttention, random_statistics

CASES = 200


class Shape(NamedTuple):
    """Of a model; `group` query heads share a KV head."""

    layers: int
    heads: int
    group: int
    head_dim: int


@dataclass(frozen=True)
class Entry:
    """A policy under some options and the reference that does the same.

    options : what `kv_options` would say for a model of this shape; the folder is for files that it names.
    method : a new reference for one request to such a model.
    layers : fewest and most layers of the models; periods, extra : eviction periods, and steps beyond the usual.
    spare : most tokens of a budget above the least; cases : random requests.
    """

    policy: str
    method: Callable[[Shape], Method]
    options: Callable[[Shape, Path], dict[str, str]] = lambda shape, folder: {}
    label: str = ""
    due: Due = above_budget
    layers: tuple[int, int] = (1, 3)
    periods: tuple[int, ...] = (1, 1, 2, 3, 5, 8)
    extra: int = 0
    spare: int = 25
    cases: int = CASES

    def __str__(self) -> str:
        return " ".join(filter(None, [self.policy, self.label]))


def plain(policy: str, method: Callable[[], Method], **options: object) -> Entry:
    """An entry whose options and reference are the same for all models."""
    texts = {name: str(value) for name, value in options.items()}
    label = ";".join(f"{name}:{text}" for name, text in texts.items())
    return Entry(policy, lambda shape: method(), lambda shape, folder: texts, label)


def lagkv_ratio(lag: int, ratio: float, sinks: int, value_weight: float) -> Entry:
    """Its evictions have a time of their own, which the budget and the period do not change."""

    def method() -> LagKVRatio:
        return LagKVRatio(lag, ratio, sinks, value_weight)

    entry = plain("lagkv-ratio", method, lag=lag, ratio=ratio, sinks=sinks, score_v_ratio=value_weight)
    return replace(entry, due=method().due, extra=2 * lag + sinks + 20)


def thinkv(segment: int, *, cases: int, **bounds: float) -> Entry:
    """Of the models' layers the last two say what a segment is about; texts of many segments."""

    def method() -> ThinKV:
        return ThinKV(segment, layers=2, **bounds)

    entry = plain("thinkv", method, segment=segment, layers=2, **bounds)
    return replace(entry, periods=(5, 8, 16), extra=50, cases=cases)


def epikv(signal: str, window: int = 64, *, layers: tuple[int, int] = (3, 6), cases: int = CASES) -> Entry:
    """Of models with enough layers for two bands."""
    entry = plain("epikv", lambda: EpiKV(signal, window), signal=signal, window=window)
    return replace(entry, layers=layers, cases=cases)


def epikv_seg(segment: int, high: int, middle: int, low: int, **rest: int) -> Entry:
    """Segments of so many tokens, and how many decode tokens they keep by how much their keys vary."""

    def method() -> EpiKVSeg:
        return EpiKVSeg(segment, {"high": high, "middle": middle, "low": low})

    entry = plain("epikv-seg", method, segment=segment, keep_high=high, keep_middle=middle, keep_low=low)
    return replace(entry, layers=(3, 5), **rest)  # type: ignore[arg-type]


def statistics_of(shape: Shape) -> Statistics:
    return random_statistics(shape.layers, shape.heads * shape.group, shape.head_dim)


def statistics_file(shape: Shape, folder: Path, rope_theta: float = 1e6) -> Path:
    """The same as `triattention` reads them."""
    path = folder / f"{'-'.join(map(str, shape))}.safetensors"
    if not path.exists():
        told = statistics_of(shape)
        mean = told.mean.real.contiguous(), told.mean.imag.contiguous()
        write(QueryStatistics(*mean, told.mean_length, told.frequencies, told.scaling, shape.heads, rope_theta), path)
    return path


def triattention(mode: str, *, recent: int = 0, sinks: int = 0, cases: int = CASES) -> Entry:
    """With statistics of random queries.

    Two decode tokens alone have equal scores: in standard deviations they are 1 and -1 in any head. So there are more,
    by recent ones or by a period above 1.
    """

    def method(shape: Shape) -> TriAttention:
        return TriAttention(statistics_of(shape), mode, recent, sinks)

    def options(shape: Shape, folder: Path) -> dict[str, str]:
        texts = {"mode": mode, "recent": str(recent), "sinks": str(sinks)}
        return {"stats": str(statistics_file(shape, folder)), **texts}

    periods = (1, 2, 3, 5, 8) if recent else (2, 3, 5, 8)
    label = f"mode:{mode};recent:{recent};sinks:{sinks}"
    return Entry("triattention", method, options, label, periods=periods, cases=cases)


def alpha(redundancy: str, diversity: float = 0.5, **rest: int) -> Entry:
    """By the score of keydiff, with its sinks and recent tokens."""

    def method() -> Alpha:
        return Alpha(strength=diversity, redundancy=redundancy)

    entry = plain("alpha", method, base="keydiff", redundancy=redundancy, diversity=diversity)
    return replace(entry, **rest)  # type: ignore[arg-type]


def alpha_by_triattention(mode: str) -> Entry:
    """By the score of triattention, which keeps the prompt."""

    def method(shape: Shape) -> Alpha:
        return Alpha(TriAttention(statistics_of(shape), mode).shared, recent=3, sinks=0, prompt=True)

    def options(shape: Shape, folder: Path) -> dict[str, str]:
        return {"base": f"triattention[stats:{statistics_file(shape, folder)};mode:{mode};recent:3]"}

    return Entry("alpha", method, options, f"base:triattention;mode:{mode}", cases=70)


REFERENCES = [
    plain("rkv", lambda: RKV("official")),
    replace(plain("rkv", lambda: RKV("paper"), variant="paper"), cases=50),
    plain("rkv", lambda: RKV("vase"), variant="vase"),
    plain("tova", TOVA),
    plain("keydiff", KeyDiff),
    plain("lagkv", lambda: LagKV(lag=5), lag=5),
    plain("lagkv", lambda: LagKV(lag=8, sinks=2), lag=8, sinks=2),
    replace(lagkv_ratio(lag=6, ratio=0.5, sinks=4, value_weight=1.0), cases=120),
    replace(lagkv_ratio(lag=5, ratio=0.3, sinks=1, value_weight=0.5), cases=80),
    plain("h2o", H2O),
    plain("raas", RaaS),
    plain("raas", lambda: RaaS(alpha=0.02), rule="threshold", alpha=0.02),
    thinkv(segment=12, cases=120),
    thinkv(segment=20, low=0.42, high=0.5, cases=80),
    epikv("zscore"),
    epikv("zscore", 7),
    epikv("raw"),
    epikv("rolling", 6),
    epikv("adaptive", layers=(8, 16), cases=100),
    replace(epikv("zscore", cases=40), extra=70),  # longer than the window
    epikv_seg(8, 4, 2, 1, spare=40),
    epikv_seg(16, 9, 3, 0, spare=60),
    epikv_seg(128, 64, 32, 8, spare=600, cases=12),  # as published
    plain("epikv-lag", lambda: EpiKVLag(chunk=8), chunk=8),
    replace(plain("epikv-lag", EpiKVLag), spare=400, cases=12),  # as published
    triattention("kv_head"),
    triattention("global", cases=100),
    triattention("layer_head", cases=100),
    triattention("kv_head", recent=3, sinks=2, cases=100),
    alpha("max"),
    alpha("mean"),
    alpha("sum"),
    alpha("max", 0.0),
    alpha("max", 3.0, spare=250, cases=15),
    alpha_by_triattention("kv_head"),
    alpha_by_triattention("global"),
    alpha_by_triattention("layer_head"),
]

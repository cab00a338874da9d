"""Which budgets and formats take the same mean KV bytes: what to compare, before anything is run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.quant.kv_bytes import kv_bytes_per_token
from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.memory import within_tolerance


class Shape(NamedTuple):
    """Of a model's cache: layers, KV heads, channels of a head, bytes of a number."""

    layers: int
    heads: int
    head_dim: int
    item_bytes: int

    @property
    def token_bytes(self) -> float:
        """Of one token, in the precision of the model."""
        return kv_bytes_per_token(self.layers, self.heads, self.head_dim, 8 * self.item_bytes)


class Text(NamedTuple):
    """A response: tokens of its prompt, and decode steps."""

    prompt: int
    steps: int


class Pool(NamedTuple):
    """What an engine has for its cache: bytes, requests that run at once, newest tokens that stay unpacked of each."""

    size: float
    requests: int
    recent: int


@dataclass(frozen=True)
class Choice:
    """A way to store tokens, with the budget that makes its mean KV bytes those of the target.

    quant : None in the precision of the model.
    token_bytes : of one token, scales, index and protected rows included.
    pool_tokens : that the pool holds.
    whole_bytes : mean of a response that is never evicted from.
    budget : None where the whole cache is no larger than the target, or no budget is small enough.
    mean_bytes : with that budget; of the whole cache without one.
    """

    quant: CacheFormat | None
    token_bytes: float
    pool_tokens: int
    whole_bytes: float
    budget: int | None
    mean_bytes: float
    target: float

    @property
    def matched(self) -> bool:
        """Whether a report would call it matched with the target."""
        return within_tolerance(self.mean_bytes / self.target)


def mean_resident(text: Text, budget: int, period: int) -> float:
    """Mean over decode steps of the tokens that a step attends to, if budget + period are cut back to the budget.

    The row grows from the prompt by one a step; before each step but the first it is cut if it is due. In the long run
    that is ``budget + (period + 1) / 2``.
    """
    ramp = min(max(1, budget + period - text.prompt), text.steps)
    rounds, rest = divmod(text.steps - ramp, period)
    total = _series(text.prompt, ramp) + rounds * _series(budget, period) + _series(budget, rest)
    return total / text.steps


def _series(start: int, steps: int) -> float:
    """``start + 1`` to ``start + steps``, added up."""
    return steps * start + steps * (steps + 1) / 2


def weighted(texts: Sequence[Text], mean: Callable[[Text], float]) -> float:
    """The mean over all decode steps of all responses, as reports weight it."""
    return sum(text.steps * mean(text) for text in texts) / sum(text.steps for text in texts)


def whole(text: Text) -> float:
    """:func:`mean_resident` of a request that is never evicted from."""
    return text.prompt + (text.steps + 1) / 2


def stored(shape: Shape, quant: CacheFormat | None, pool: Pool) -> tuple[float, int]:
    """Bytes of one token as it is stored, and how many the pool holds.

    Of a format that protects tokens, the rows of running requests are divided among the pool's tokens.

    Raises
    ------
    AbError
        If the pool holds no token.
    """
    if quant is None:
        bytes_of, most = _per_token(shape.token_bytes), int(pool.size / shape.token_bytes)
    else:
        sizes = (shape.heads, shape.head_dim, shape.item_bytes)
        slot, row = shape.layers * quant.slot_bytes(*sizes), shape.layers * quant.protected_row_bytes(*sizes)

        def bytes_of(tokens: int) -> float:
            return tokens * slot + row * quant.protected_rows(tokens, pool.requests, pool.recent)

        most = int(pool.size / slot)
    tokens = bisect_right(range(1, most + 1), pool.size, key=bytes_of)
    if not tokens:
        raise AbError(f"a pool of {pool.size / 2**20:.1f} MiB holds no token; it must be larger.")
    return bytes_of(tokens) / tokens, tokens


def _per_token(token_bytes: float) -> Callable[[int], float]:
    return lambda tokens: tokens * token_bytes


def choose(
    shape: Shape,
    quant: CacheFormat | None,
    pool: Pool,
    texts: Sequence[Text],
    target: float,
    period: int,
    allowed: Callable[[int], bool],
) -> Choice:
    """The budget under which the mean KV bytes are nearest to `target`.

    allowed : whether the policy can work with a budget.

    Raises
    ------
    AbError
        See :func:`stored`.
    """
    token_bytes, pool_tokens = stored(shape, quant, pool)
    whole_bytes = token_bytes * weighted(texts, whole)

    def bytes_with(budget: int) -> float:
        return token_bytes * weighted(texts, lambda text: mean_resident(text, budget, period))

    budget = None
    if whole_bytes > target:
        longest = max(text.prompt + text.steps for text in texts)
        below = bisect_right(range(1, longest + 1), target, key=bytes_with)  # the largest that is not above
        nearest = min((each for each in (below, below + 1) if each), key=lambda each: abs(bytes_with(each) - target))
        budget = nearest if allowed(nearest) else None
    mean_bytes = whole_bytes if budget is None else bytes_with(budget)
    return Choice(quant, token_bytes, pool_tokens, whole_bytes, budget, mean_bytes, target)


def formats(
    names: Iterable[str], keys: Iterable[str], groups: Iterable[int | None], shares: Iterable[float], head_dim: int
) -> list[CacheFormat]:
    """All combinations, fitted to heads of this size; shares only of formats that protect.

    Raises
    ------
    AbError
        If one is no format, or does not fit.
    """
    found: dict[CacheFormat, None] = {}
    try:
        for name, of_keys, group, share in product(names, keys, groups, shares):
            chosen = CacheFormat(name, group=group, keys=of_keys, protect=share).fitted(head_dim)
            found[chosen if chosen.protects else CacheFormat(name, group=chosen.group, keys=of_keys)] = None
    except ValueError as error:
        raise AbError(f"{error}.") from error
    return list(found)


def arm_text(choice: Choice, policy: str, period: int) -> str:
    """As `kvpolicy ab --arm` takes it; settings that are defaults are left out, but for the group."""
    parts = (
        [] if choice.budget is None else [f"kv_policy={policy}", f"kv_budget={choice.budget}", f"kv_period={period}"]
    )
    if (quant := choice.quant) is not None:
        parts += [f"kv_quant={quant.name}", f"kv_quant_group={quant.group}"]
        parts += [f"kv_quant_keys={quant.keys}"] if quant.keys != "none" else []
        parts += [f"kv_protect={quant.protect:g}"] if quant.protects else []
    return ",".join(parts) or "full"

"""The life of one request without an engine: a text of random tensors, and who evicts what of it.

A real policy and a reference each live through the same text; what they still hold after each eviction is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy
from tests.policies.oracle import Kept, Method, Snapshot

# (resident, budget, period, tokens evicted before) -> whether an eviction is due
Due = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class Text:
    """What a model computes for each token of a text, whatever is resident.

    keys, values : ``[L, H_kv, T, D]``; queries : ``[L, H_q, T, D]``; hidden : fp32 ``[L, T, E]``.
    prompt_len : tokens of the prompt, at least 1; the others are decoded one by one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    hidden: torch.Tensor
    prompt_len: int

    @property
    def length(self) -> int:
        return self.keys.shape[2]


def random_text(
    layers: int,
    heads: int,
    group: int,
    head_dim: int,
    *,
    prompt_len: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Text:
    """Tokens as unequal as in `candidates.py`; half of the keys lean towards one of a few directions that they share.

    The queries of a query head have a direction in common, and each leans towards the key of some token. So attention
    is unequal and moves on, and some keys of a head are alike and most are not.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        tokens, channels = draw(layers, heads, length, 1), draw(layers, heads, 1, head_dim)
        return x * tokens.mul(0.5).exp() * channels.mul(0.5).exp()

    def pick(source: torch.Tensor, count: int) -> torch.Tensor:
        """Random rows of ``[L, H, n, D]``: ``[L, H, count, D]``."""
        index = torch.randint(source.shape[2], (layers, heads, count, 1), generator=generator)
        return source.gather(2, index.expand(-1, -1, -1, head_dim))

    leaning = draw(layers, heads, length, 1).clamp_min(0) * 1.5
    keys = scaled(draw(layers, heads, length, head_dim) + leaning * pick(draw(layers, heads, 5, head_dim), length))
    values = scaled(draw(layers, heads, length, head_dim))
    common = draw(layers, heads, group, 1, head_dim)
    own = draw(layers, heads, group, length, head_dim)
    towards = pick(keys, group * length).view(layers, heads, group, length, head_dim)
    lean = 0.3 * head_dim**0.5 * towards / towards.norm(dim=-1, keepdim=True)
    queries = (common + 0.5 * own + lean).flatten(1, 2)
    hidden = draw(layers, length, 6) * draw(1, length, 1).exp()
    return Text(keys.to(dtype), values.to(dtype), queries.to(dtype), hidden, prompt_len)


class Request:
    """A request on its way through a text: which tokens are resident."""

    def __init__(self, text: Text, budget: int, period: int) -> None:
        layers, heads = text.keys.shape[:2]
        self.text, self.budget, self.period = text, budget, period
        self.positions = torch.arange(text.prompt_len).repeat(layers, heads, 1)
        self.true_len, self.previous_len, self.evictions = text.prompt_len, 0, 0

    @property
    def resident(self) -> int:
        return self.positions.shape[2]

    @property
    def finished(self) -> bool:
        return self.true_len == self.text.length

    def decode(self) -> None:
        """Compute one token, which every head appends."""
        newest = torch.full((*self.positions.shape[:2], 1), self.true_len)
        self.positions = torch.cat([self.positions, newest], dim=-1)
        self.true_len += 1

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[L, H_kv, T, D]`` those of the resident tokens."""
        return x.gather(2, self.positions[..., None].expand(-1, -1, -1, x.shape[-1]))

    def cut(self, indices: torch.Tensor) -> None:
        """Evict all resident tokens but these."""
        self.positions = self.positions.gather(-1, indices)
        self.previous_len = self.true_len
        self.evictions += 1

    def snapshot(self) -> Snapshot:
        text = self.text
        return Snapshot(
            keys=self.rows(text.keys).float(),
            values=self.rows(text.values).float(),
            positions=self.positions,
            queries=text.queries[:, :, : self.true_len].float(),
            hidden=text.hidden[:, : self.true_len],
            prompt_len=text.prompt_len,
            true_len=self.true_len,
            previous_len=self.previous_len,
            eviction=self.evictions,
            budget=self.budget,
            period=self.period,
        )


class Driver:
    """Does for a policy what an engine does: gathers what it needs, lets it observe and select."""

    def __init__(self, policy: Policy, request: Request, seed: int = 0) -> None:
        self.policy, self.request, self.seed = policy, request, seed
        self.needs = policy.needs(request.period)
        self.statistic: torch.Tensor | None = None  # of the tokens resident when the policy last observed
        self.unseen = 0
        if policy.accumulates:
            assert self.needs.queries >= request.period, f"{policy.name} accumulates, but misses queries"
            self.statistic = torch.full(request.positions.shape, torch.nan)

    def decoded(self) -> torch.Tensor | None:
        """To be called after each decode step; the indices to keep, if an eviction is due."""
        request, policy = self.request, self.policy
        self.unseen += 1
        evicted = request.true_len - request.resident
        due = policy.due(request.resident, request.budget, request.period, evicted=evicted)
        if policy.accumulates and (due or self.unseen == request.period):
            self.statistic = policy.observe(self.candidates(), request.period)
            assert self.statistic.shape == request.positions.shape
            assert self.statistic.dtype == torch.float32
            self.unseen = 0
        if not due:
            return None
        n_keep = policy.n_keep(request.resident, request.budget, evicted=evicted)
        noise = Noise(self.seed, request.evictions, tuple(range(len(request.positions))))
        kept = policy.select(self.candidates(), n_keep, request.period, noise)
        assert kept.shape[-1] <= n_keep, f"{policy.name} keeps {kept.shape[-1]} of {n_keep = }"
        if self.statistic is not None:
            self.statistic = self.statistic.gather(-1, kept)
        return kept

    def candidates(self) -> Candidates:
        request, text, needs = self.request, self.request.text, self.needs
        true_len, statistic = request.true_len, self.statistic
        if statistic is not None:
            appended = request.resident - statistic.shape[-1]
            statistic = torch.nn.functional.pad(statistic, (0, appended), value=torch.nan)
        return Candidates(
            shape=(*request.positions.shape[:2], request.resident),
            keys=request.rows(text.keys) if needs.keys else None,
            values=request.rows(text.values) if needs.values else None,
            queries=text.queries[:, :, max(0, true_len - needs.queries) : true_len] if needs.queries else None,
            positions=request.positions.clone() if needs.positions else None,
            hidden_change=self._hidden_change() if needs.hidden_bands else None,
            statistic=statistic,
            unseen=self.unseen if self.policy.accumulates else 0,
            prompt_len=text.prompt_len,
            true_len=true_len,
            previous_len=request.previous_len,
        )

    def _hidden_change(self) -> torch.Tensor:
        """fp32 ``[bands, T]``, of all tokens decoded so far."""
        request, hidden = self.request, self.request.text.hidden
        change = (hidden[:, 1:] - hidden[:, :-1]).norm(dim=-1)  # column t - 1 is of the token at position t
        decoded = change[:, request.text.prompt_len - 1 : request.true_len - 1]
        bands = [list(band.layers(len(hidden))) for band in self.needs.hidden_bands]
        return torch.stack([decoded[layers].mean(dim=0) for layers in bands])


@dataclass(frozen=True)
class Round:
    """After an eviction at `true_len` computed tokens: the positions ``[L, H_kv, K]`` that are still held.

    kept : what the reference said; None for a policy.
    """

    true_len: int
    positions: torch.Tensor
    kept: Kept | None = None


def policy_rounds(policy: Policy, text: Text, budget: int, period: int, *, seed: int = 0) -> Iterator[Round]:
    """The evictions of a policy; the first after the first decode step at the earliest."""
    request = Request(text, budget, period)
    driver = Driver(policy, request, seed)
    while not request.finished:
        request.decode()
        indices = driver.decoded()
        if indices is not None:
            request.cut(indices)
            yield Round(request.true_len, request.positions)


def above_budget(resident: int, budget: int, period: int, evicted: int) -> bool:
    """When an eviction is due for all methods but those that say otherwise."""
    return resident >= budget + period


def method_rounds(method: Method, text: Text, budget: int, period: int, due: Due = above_budget) -> Iterator[Round]:
    """The evictions of a reference."""
    request = Request(text, budget, period)
    while not request.finished:
        request.decode()
        now = request.snapshot()
        method.decoded(now)
        if due(request.resident, budget, period, request.true_len - request.resident):
            kept = method.keep(now)
            request.cut(kept.indices)
            yield Round(request.true_len, request.positions, kept)

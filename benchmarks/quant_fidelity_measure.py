"""What quant_fidelity.py asks of an engine, the reference's text or to follow it, and what it makes of the steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ablation_kl import GREEDY, KL, force, generator, record
from ablation_study import Refused
from quant_fidelity_study import ITEM_BYTES, Format, Study, digest

# Top-1 agreement that values in 8 bits, and keys as they are, must reach.
GOAL_FORMAT, GOAL = "int8", 0.95
CONFIDENCE = 0.95

Advance = Callable[[int], None]


class Reference(NamedTuple):
    """What the model says with its cache in its own precision.

    texts : of each prompt; log_probs : the file of each prompt with those of its steps; capacity : tokens in the pool.
    """

    texts: list[list[int]]
    log_probs: list[Path]
    capacity: int

    @property
    def digest(self) -> str:
        return digest(self.texts)


class Followed(NamedTuple):
    """Of a prompt's decode steps: is the likeliest token the reference's, and the KL divergence; its cache's report."""

    agrees: npt.NDArray[np.bool_]
    kl: npt.NDArray[np.float64]
    report: dict[str, Any]


def write_reference(engine: Any, study: Study, folder: Path, advance: Advance) -> Reference:
    """Let the model answer all prompts, with the log-probabilities of each step in files in `folder`.

    Raises
    ------
    Refused
        If no answer has a second token.
    """
    log_probs = [folder / f"log_probs-{prompt}.npy" for prompt in range(len(study.prompts))]
    texts: list[list[int]] = []
    for group in groups(study):
        with tempfile.TemporaryDirectory(dir=folder) as tables:
            chosen = slice(group.start, group.stop)
            parameters: list[dict[str, Any]] = [{} for _ in group]
            limit, files = study.args.tokens, log_probs[chosen]
            texts += record(generator(engine), study.prompts[chosen], parameters, limit, files, Path(tables))
        advance(len(group))
    if max(map(len, texts)) < 2:
        raise Refused("the model ends each of its answers with its first token, so there is no decode step to compare.")
    return Reference(texts, log_probs, capacity(engine))


def follow(engine: Any, study: Study, reference: Reference, advance: Advance) -> list[Followed]:
    """Make an engine say the reference's texts, in the same batches.

    The first token of a text is left out: it comes from the prefill, which attends to keys and values as they were
    computed, so that every format agrees on it.
    """
    found = []
    for group in groups(study):
        chosen = slice(group.start, group.stop)
        texts = reference.texts[chosen]
        parameters: list[dict[str, Any]] = [{} for _ in group]
        with tempfile.TemporaryDirectory(dir=reference.log_probs[0].parent) as tables:
            files = reference.log_probs[chosen]
            forced = force(generator(engine), study.prompts[chosen], texts, parameters, files, Path(tables))
        for text, (table, report) in zip(texts, forced, strict=True):
            found.append(Followed(table[1:, GREEDY] == np.array(text[1:]), table[1:, KL], report))
        advance(len(group))
    return found


def groups(study: Study) -> list[range]:
    """Prompts that are sent together."""
    count, batch = len(study.prompts), study.args.batch
    return [range(first, min(first + batch, count)) for first in range(0, count, batch)]


def capacity(engine: Any) -> int:
    """How many tokens SGLang has made room for."""
    (state,) = engine.get_server_info()["internal_states"]
    return int(state["memory_usage"]["token_capacity"])


def row_of(chosen: Format, study: Study, reference: Reference, followed: list[Followed], tokens: int) -> dict[str, Any]:
    """What is written of a format whose engine has room for so many tokens."""
    agreed = np.array([each.agrees.sum() for each in followed])
    steps = np.array([len(each.agrees) for each in followed])
    low, high = interval(agreed, steps)
    agreement = float(agreed.sum() / steps.sum())
    each_prompt = zip(study.problems, followed, strict=True)
    has_goal = chosen.stored is not None and (chosen.stored.name, chosen.stored.keys) == (GOAL_FORMAT, "none")
    return {
        "format": chosen.name,
        "steps": int(steps.sum()),
        "agreed": int(agreed.sum()),
        "agreement": agreement,
        "agreement_low": low,
        "agreement_high": high,
        "goal": GOAL if has_goal else None,
        "goal_met": agreement >= GOAL if has_goal else None,
        **divergence(np.concatenate([each.kl for each in followed])),
        **storage(chosen, study, [each.report for each in followed]),
        "token_capacity": tokens,
        "token_capacity_full": reference.capacity,
        "text_sha256": reference.digest,
        "per_prompt": [
            {"problem": problem.id, "steps": len(one.agrees), "agreed": int(one.agrees.sum()), **divergence(one.kl)}
            for problem, one in each_prompt
        ],
    }


def divergence(kl: npt.NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and 99th percentile over steps, in nats; None where there are none."""
    if not len(kl):
        return {"kl_mean": None, "kl_p99": None}
    return {"kl_mean": float(kl.mean()), "kl_p99": float(np.quantile(kl, 0.99))}


def interval(agreed: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Of the agreement over all steps, 95 %: the wider one, at each end, of two intervals.

    Wilson's takes steps for independent, which those of one prompt are not. A bootstrap over prompts does not, but
    knows of no spread where all prompts agree alike; where only one prompt has steps, it cannot be had.

    agreed, steps : int64 ``[prompts]``, at least two.
    """
    from scipy.stats import binomtest, bootstrap

    wilson = binomtest(int(agreed.sum()), int(steps.sum())).proportion_ci(CONFIDENCE, method="wilson")
    asked = steps > 0
    if asked.sum() < 2:
        return float(wilson.low), float(wilson.high)

    def share(some: npt.NDArray[np.int64], of: npt.NDArray[np.int64], axis: int) -> Any:
        return some.sum(axis=axis) / of.sum(axis=axis)

    resampled = bootstrap(
        (agreed[asked], steps[asked]),
        share,
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return min(float(wilson.low), float(resampled.low)), max(float(wilson.high), float(resampled.high))


def storage(chosen: Format, study: Study, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cache takes, as responses report it, and what the tokens of these requests took of it.

    ``bits_per_element`` is all that is allocated, divided by the slots of the pool: it has the protected rows that a
    full pool would need. ``bits_in_use`` counts the protected tokens that requests had at their end, mean over
    requests; of short ones that is far more, since their sinks and newest tokens are most of them.
    """
    first, item = reports[0], ITEM_BYTES[study.args.dtype]
    full = first.get("kv_bytes_per_token_full", first["kv_bytes_per_token"])
    found: dict[str, Any] = {
        "group": first.get("kv_quant_group"),
        "bits_per_element": first.get("bits_per_element", 8.0 * item),
        "bits_in_use": 8.0 * item,
        "kv_bytes_per_token": first["kv_bytes_per_token"],
        "kv_bytes_per_token_full": full,
        "protected_end": None,
        "protected_rows_denied": None,
    }
    if chosen.stored is None:
        return found
    engines = tuple(first[name] for name in ("kv_quant", "kv_quant_group", "kv_quant_keys"))
    asked = (chosen.stored.name, chosen.stored.group, chosen.stored.keys)
    assert engines == asked, f"the engine stores its cache as {engines}, not as {asked}"
    taken = float(chosen.stored.slot_bytes(1, study.head_dim, item))
    if chosen.stored.protects:
        found["protected_end"] = float(np.mean([report["protected_end"] for report in reports]))
        found["protected_rows_denied"] = max(report["protected_rows_denied"] for report in reports)
        taken += found["protected_end"] * chosen.stored.protected_row_bytes(1, study.head_dim, item)
    return {**found, "bits_in_use": 8 * taken / (2 * study.head_dim)}

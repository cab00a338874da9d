"""Output folders of arms, as lm-eval leaves them, and records of their caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATE = "2026-01-02T03-04-05.678901"
TASK = "kvp_math500"
BYTES = 1000.0  # of a token

Row = dict[str, Any]


def record(prompt: int = 20, steps: int = 200, budget: int = 64, period: int = 16, **changed: Any) -> dict[str, Any]:
    """A response of `steps` decode steps after `prompt` tokens, evicted to `budget` whenever it has a period more."""
    resident = mean = float(prompt)
    evictions, sums, peak = 0, 0.0, prompt
    for _ in range(steps):
        if resident >= budget + period:
            evictions, resident = evictions + 1, float(budget)
        resident += 1
        sums, peak = sums + resident, max(peak, int(resident))
    if steps:
        mean = sums / steps
    tokens = {
        "resident_mean": mean,
        "resident_peak": peak,
        "resident_end": int(resident),
        "full_mean": prompt + (steps + 1) / 2,
        "full_end": prompt + steps,
    }
    return {
        "policy": "vase-dkv",
        "options": "",
        "budget": budget,
        "period": period,
        "seed": 0,
        "sampling_seed": None,
        "evictions": evictions,
        "tokens_evicted": evictions * period,
        "evictions_deferred": 0,
        "decode_steps": steps,
        **tokens,
        "kv_bytes_per_token": BYTES,
        **{f"kv_bytes_{name.removeprefix('resident_')}": BYTES * value for name, value in tokens.items()},
        "token_state_bytes": 0,
        **changed,
    }


def full(prompt: int = 20, steps: int = 200, **changed: Any) -> dict[str, Any]:
    """The same response with the whole cache."""
    return record(prompt, steps, budget=10**9) | {"policy": "full"} | changed


def row(verdict: str = "correct", **changed: Any) -> Row:
    """What a kvp_ task logs of one response."""
    flags = {"truncated": False, "looped": False, "garbage": False, "unfinished_thinking": False}
    return {"verdict": verdict, "answer": "7", **flags, "tokens": 200, **changed}


def sample(
    number: int,
    rows: Sequence[Row],
    records: Sequence[Mapping[str, Any]] | None = None,
    *,
    identifier: str | None = None,
    prompt: str | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """One document as lm-eval logs it: one request for each of its responses."""
    document = {
        "id": identifier or f"test/algebra/{number}.json",
        "problem": f"{number} + 1",
        "answer": str(number + 1),
    }
    prompt = prompt or f"What is {number} + 1?"
    texts = [f"Response {index} to {number}: \\boxed{{{each.get('answer')}}}" for index, each in enumerate(rows)]
    settings = [{"temperature": 0.6, "custom_params": {"kv_seed": 100 * number + i}} for i in range(len(rows))]
    logged: dict[str, Any] = {
        "doc_id": number,
        "doc": document,
        "target": document["answer"],
        "arguments": {f"gen_args_{i}": {"arg_0": prompt, "arg_1": each} for i, each in enumerate(settings)},
        "resps": [[text] for text in texts],
        "filtered_resps": texts,
        "filter": "none",
        "doc_hash": digest(json.dumps(document)),
        "prompt_hash": digest(prompt),
        "target_hash": digest(document["answer"]),
        "exact_match": sum(each.get("verdict") == "correct" for each in rows) / len(rows),
        "responses": list(rows),
    }
    if records is not None:
        logged["kv_policy"] = list(records) if len(records) > 1 else records[0]
    return logged | changed


def write(
    folder: Path,
    samples: Sequence[Mapping[str, Any]],
    *,
    task: str = TASK,
    model: str = "org/model",
    date: str = DATE,
    **model_args: Any,
) -> Path:
    """One run of one task."""
    target = folder / model.replace("/", "__")
    target.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(each)}\n" for each in samples)
    (target / f"samples_{task}_{date}.jsonl").write_text(lines, encoding="utf-8")
    results = {"model_name": model, "config": {"model_args": {"pretrained": model, **model_args}}}
    (target / f"results_{date}.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""Part `free` of ablation.py: every arm answers all problems freely; how do its answers fail?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ablation_study import Study

from kvpolicy.lmeval_tasks import answers, failures

SAMPLING = {"temperature": 0.6, "top_p": 0.95}
REPORTED = ("evictions", "tokens_evicted", "retractions", "resident_mean", "full_mean")


def free_running(engine: Any, study: Study, repeats: range) -> Iterator[dict[str, Any]]:
    """All arms and budgets on all problems, in one batch; yields a row per response.

    Parameters
    ----------
    repeats : of each problem. Number 0 is decoded greedily, the others are sampled.
    """
    problems = range(len(study.problems))
    places = [(cell, problem, repeat) for cell in study.cells for repeat in repeats for problem in problems]
    parameters = [
        {
            **(SAMPLING if repeat else {"temperature": 0}),
            "max_new_tokens": study.args.tokens,
            "custom_params": study.parameters(cell, problem, repeat),
        }
        for cell, problem, repeat in places
    ]
    start = time.perf_counter()
    responses = engine.generate(
        input_ids=[study.prompts[problem] for _, problem, _ in places], sampling_params=parameters
    )
    seconds = time.perf_counter() - start
    for (cell, problem, repeat), response in zip(places, responses, strict=True):
        meta, text = response["meta_info"], response["text"]
        truncated = meta["finish_reason"]["type"] == "length"
        yield {
            "part": "free",
            **cell._asdict(),
            "problem": study.problems[problem].id,
            "repeat": repeat,
            "decoding": "sampled" if repeat else "greedy",
            "prompt_tokens": meta["prompt_tokens"],
            "tokens": meta["completion_tokens"],
            "truncated": truncated,
            "looped": failures.looped(text),
            "garbage": failures.garbage(text),
            "correct": answers.is_correct(text, study.problems[problem].answer, truncated=truncated),
            **{name: meta["kv_policy"][name] for name in REPORTED},
            "batch": len(places),
            "batch_seconds": round(seconds, 2),
            "text": text,
        }

"""Part `kl` of ablation.py: how far eviction moves the next token's distribution, on one and the same text.

The full cache answers greedily, and the log-probabilities of its every step go to a file. Every arm is then made to
say the same tokens, and the exact KL(full || arm) over the vocabulary is taken at each step. Both happen in the
scheduler process, in SGLang's custom logit processor, which calls `observe`; the rest runs in the launching process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ablation_observer import EVICTIONS, FORCED, GREEDY, KL, LOG_PROBS, STEPS
from ablation_study import Study
from numpy.lib.format import open_memmap

# One batch: token ids and sampling parameters to responses, through the logit processor.
Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[dict[str, Any]]]


def generator(engine: Any) -> Generate:
    """What an engine generates, through the logit processor."""
    from ablation_processor import TeacherForcing

    processor = TeacherForcing.to_str()

    def generate(ids: list[list[int]], parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        responses: list[dict[str, Any]] = engine.generate(
            input_ids=ids, sampling_params=parameters, custom_logit_processor=processor
        )
        return responses

    return generate


def divergences(engine: Any, study: Study, group: range) -> Iterator[dict[str, Any]]:
    """All arms and budgets on one group of problems; yields a row for each."""
    prompts = [study.prompts[problem] for problem in group]
    cells = [[study.parameters(cell, problem) for problem in group] for cell in study.cells]
    for cell, prompt, row in measure(generator(engine), prompts, cells, study.args.tokens):
        yield {"part": "kl", **study.cells[cell]._asdict(), "problem": study.problems[group[prompt]].id, **row}


def measure(
    generate: Generate, prompts: Sequence[list[int]], cells: Sequence[Sequence[dict[str, Any]]], tokens: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Run all cells on the text of the first one, for one group of prompts; yields (cell, prompt, row).

    Parameters
    ----------
    cells : for each arm and budget the ``kv_…`` parameters of each prompt. The first must be the full cache; it is
        run twice, and its row is the noise floor: what batches of other sizes alone make of it.
    tokens : at most so many are compared per prompt; log-probabilities take ``4 * tokens * vocabulary`` bytes per
        prompt on disk until the group is done.
    """
    with tempfile.TemporaryDirectory(prefix="kvpolicy-ablation-") as name:
        folder = Path(name)
        log_probs = [folder / f"log_probs-{prompt}.npy" for prompt in range(len(prompts))]
        texts = record(generate, prompts, cells[0], tokens, log_probs, folder)
        places = [(cell, prompt) for cell in range(len(cells)) for prompt in range(len(prompts))]
        forced = force(
            generate,
            [prompts[prompt] for _, prompt in places],
            [texts[prompt] for _, prompt in places],
            [cells[cell][prompt] for cell, prompt in places],
            [log_probs[prompt] for _, prompt in places],
            folder,
        )
        for (cell, prompt), (table, report) in zip(places, forced, strict=True):
            yield cell, prompt, {**summary(table, np.array(texts[prompt])), "evictions": report["evictions"]}


def record(
    generate: Generate,
    prompts: Sequence[list[int]],
    parameters: Sequence[dict[str, Any]],
    tokens: int,
    log_probs: Sequence[Path],
    folder: Path,
) -> list[list[int]]:
    """Let the reference answer greedily, in one batch, with at most so many tokens; its texts.

    Parameters
    ----------
    parameters : the ``kv_…`` parameters of each prompt
    log_probs : for each prompt the file that receives the log-probabilities of its steps
    folder : receives the step tables, which are of no use afterwards
    """
    tables = [folder / f"recorded-{prompt}.npy" for prompt in range(len(prompts))]
    each = zip(parameters, log_probs, tables, strict=True)
    requests = [_request(own, tokens, path, table) for own, path, table in each]
    texts = [response["output_ids"] for response in generate(list(prompts), requests)]
    for text, table in zip(texts, tables, strict=True):
        seen = np.load(table)[: len(text)]
        check(seen, text, seen[:, GREEDY])
    return texts


def force(
    generate: Generate,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    parameters: Sequence[dict[str, Any]],
    log_probs: Sequence[Path],
    folder: Path,
) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Make each request, in one batch, say the text that was recorded with its log-probabilities.

    Returns for each its step table, fp64 ``[tokens, 3]`` with columns `KL`, `GREEDY`, `EVICTIONS`, and the report of
    its cache. The other arguments are those of :func:`record`.
    """
    tables = [folder / f"forced-{request}.npy" for request in range(len(prompts))]
    each = zip(parameters, texts, log_probs, tables, strict=True)
    requests = [_request(own, len(text), path, table, text) for own, text, path, table in each]
    found = []
    for text, table, response in zip(texts, tables, generate(list(prompts), requests), strict=True):
        steps, report = np.load(table), response["meta_info"]["kv_policy"]
        check(steps, text, np.array(response["output_ids"]))
        assert report["retractions"] == 0, "a retracted request was prefilled anew, with a full cache"
        found.append((steps, report))
    return found


def _request(
    parameters: dict[str, Any], steps: int, log_probs: Path, table: Path, forced: list[int] | None = None
) -> dict[str, Any]:
    """Sampling parameters of an observed request, with an empty step table."""
    open_memmap(table, mode="w+", dtype=np.float64, shape=(steps, 3))[:] = np.nan
    custom = {**parameters, LOG_PROBS: str(log_probs), STEPS: str(table)}
    request = {"temperature": 0, "max_new_tokens": steps, "custom_params": custom}
    return request if forced is None else {**request, "ignore_eos": True, "custom_params": {**custom, FORCED: forced}}


def check(table: np.ndarray, text: Sequence[int], said: np.ndarray) -> None:
    """Every step was observed, in its place: a wrong count of steps would compare distributions of other tokens."""
    assert len(table) == len(text), f"{len(table)} steps were observed of {len(text) = }"
    assert not np.isnan(table).any(), "the logit processor missed a step"
    assert np.array_equal(said, text), "the tokens that were observed are not those of the text"


def summary(table: np.ndarray, text: np.ndarray) -> dict[str, Any]:
    """Mean KL and top-1 agreement over all steps, those after the first eviction, and those after exactly one."""
    parts = {"all": table[:, EVICTIONS] >= 0, "after": table[:, EVICTIONS] >= 1, "once": table[:, EVICTIONS] == 1}
    row: dict[str, Any] = {}
    for name, chosen in parts.items():
        row[f"steps_{name}"] = count = int(chosen.sum())
        row[f"kl_{name}"] = float(table[chosen, KL].mean()) if count else None
        row[f"agree_{name}"] = float((table[chosen, GREEDY] == text[chosen]).mean()) if count else None
    return row

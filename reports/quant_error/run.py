"""One run of a quantization-error report: the model, and the text under each arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from kvpolicy.quant.codec import Codec
from kvpolicy.reports.quant_error.arms import both_arms, comparison, key_arms
from kvpolicy.reports.quant_error.capture import LayerRows, QuantErrorError, check_model, run_reading
from kvpolicy.reports.quant_error.measure import LayerMeasures, measure_layer
from kvpolicy.reports.quant_error.output import output_errors, run_arm
from kvpolicy.reports.quant_error.report import Report, arms_of


class Plan(NamedTuple):
    """What is known before the model is loaded.

    share : of the tokens, to be protected
    values, keys : codecs
    run_keys : whether the model is run with low-bit keys too, or they are only measured
    """

    ids: list[int]
    source: str
    share: float
    head_dim: int
    cache_dtype: torch.dtype
    values: Sequence[Codec]
    keys: Sequence[Codec]
    run_keys: bool


def load(name: str, dtype: str, device: str | None) -> Any:
    """A causal language model of transformers, ready to run; `name` is a folder or a hub id.

    Raises
    ------
    QuantErrorError
        If it cannot be loaded, a weight of it is missing, or the device cannot hold it.
    """
    from transformers import AutoModelForCausalLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise QuantErrorError(f"--model {name} cannot be loaded: {first_line(error)}") from None
    if missing := sorted(loading["missing_keys"]):  # they were drawn at random
        raise QuantErrorError(f"--model {name} lacks weights of a {type(model).__name__}: {missing[0]}")
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise QuantErrorError(f"--device {device} cannot hold the model: {first_line(error)}") from None


def measured(model: Any, plan: Plan, name: str) -> Report:
    """The report of a model that :func:`load` loaded as `name`.

    Raises
    ------
    QuantErrorError
        If its attention is no plain one, a codec cannot store its rows, or memory is too small.
    """
    check_model(model, plan.ids)
    sizes = (plan.share, plan.head_dim, plan.cache_dtype, len(plan.ids))
    comparisons = [comparison(codec, *sizes) for codec in plan.values]
    keys = key_arms(plan.keys)
    both = both_arms(keys, comparisons) if plan.run_keys else []
    arms = arms_of(comparisons, keys, both)
    run_through = [arm for arm in arms if plan.run_keys or arm not in keys]
    layers: list[LayerMeasures] = []
    outputs = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rows of the cache", total=1 + len(run_through))

        def measure(rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
            layers.append(measure_layer(rows, arms))
            progress.advance(task, 1 / model.config.get_text_config(decoder=True).num_hidden_layers)
            return rows.keys, rows.values

        try:
            reference = run_reading(model, plan.ids, measure, plan.cache_dtype)
            for arm in run_through:
                progress.update(task, description=arm.name)
                changed = run_arm(model, plan.ids, arm, plan.cache_dtype, _halves(progress, task, len(layers)))
                halves = _halves(progress, task, len(plan.ids) - 1)
                outputs[arm.name] = output_errors(reference, changed, plan.ids, halves)
        except torch.OutOfMemoryError:
            raise QuantErrorError("out of memory; lower --tokens") from None
    return Report(
        model=Path(name).resolve().name if Path(name).exists() else name,
        source=plan.source,
        tokens=len(plan.ids),
        dtype=model.dtype,
        cache_dtype=plan.cache_dtype,
        head_dim=plan.head_dim,
        share=plan.share,
        comparisons=comparisons,
        keys=keys,
        both=both,
        layers=layers,
        outputs=outputs,
    )


def first_line(error: Exception) -> str:
    """What an error of transformers or PyTorch says, to end a sentence with."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _halves(progress: Progress, task: TaskID, steps: int) -> Callable[[], None]:
    """Advances by half an arm in so many steps."""
    return lambda: progress.advance(task, 0.5 / steps)

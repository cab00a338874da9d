"""How far does each low-bit cache format move a model from its own output, at how many real bits?

An engine with the full cache answers GSM8K problems greedily. Then one engine per format is made to say the same
tokens: at each decode step, is its likeliest token the same, and how large is KL(full || format) over the vocabulary?
All engines get the same share of memory, and say for how many tokens their cache has room in it. One JSON line per
format goes to a file when the format is done; formats that are there with the same settings are not run again.

    python benchmarks/quant_fidelity.py                 # up to 64 prompts, 64 tokens, nine formats: ten engines
    python benchmarks/quant_fidelity.py --quick         # 2 prompts, 16 tokens, two formats: three engines
    python benchmarks/quant_fidelity.py --formats full int8 'range-int4[group:32;keys:int8;protect:0.1]'
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Also under PYTHONSAFEPATH, and for the scheduler process, which inherits it.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ablation_study import Refused
from conditions import conditions
from quant_fidelity_measure import capacity, follow, row_of, write_reference
from quant_fidelity_study import ITEM_BYTES, Format, Study, parse_format, prepare
from quant_fidelity_table import Row, add_row, measured, read_rows, table

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ["full", "int8", "range-int8", "int4", "int4[group:32]", "range-int4", "int2", "range-int2"]
FORMATS += ["range-int4[keys:int8]"]
QUICK = {"formats": ["full", "int8"], "prompts": 2, "tokens": 16}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick and defaults fill in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder or hub id of a chat model (default SmolLM2-135M-Instruct)")
    add("--dtype", choices=ITEM_BYTES, default="bfloat16", help="of weights and full cache (default %(default)s)")
    formats = "full, or kv_quant with options group, keys, protect"
    add("--formats", nargs="+", metavar="FORMAT", help=f"{formats} (default {' '.join(FORMATS)})".replace("%", "%%"))
    add(
        "--prompts", type=int, metavar="N", help="problems of the GSM8K sample, then of $KVPOLICY_DATA/gsm8k.jsonl (64)"
    )
    add("--tokens", type=int, metavar="N", help="of each answer, at most (default 64)")
    add("--period", type=int, default=64, help="kv_period: newest tokens that range- formats protect (default 64)")
    add("--batch", type=int, default=16, help="prompts at a time (default %(default)s)")
    add("--memory", type=float, default=0.1, help="mem_fraction_static of every engine (default %(default)s)")
    add("--out", type=Path, default=ROOT / "out/quant_fidelity.jsonl", help="rows are appended to it")
    add("--quick", action="store_true", help="2 prompts, 16 tokens, formats full and int8, where not named")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else {"formats": FORMATS, "tokens": 64}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


@contextmanager
def running(study: Study, chosen: Format) -> Iterator[Any]:
    """An engine that stores its cache so; all get the same arguments otherwise, and the same share of memory."""
    import sglang

    from kvpolicy.sglang_plugin.platform import has_accelerator

    args = study.args
    engine = sglang.Engine(
        model_path=args.model,
        dtype=args.dtype,
        kv_policy="full",
        kv_period=args.period,
        **chosen.arguments,
        enable_custom_logit_processor=True,
        max_running_requests=args.batch,
        mem_fraction_static=args.memory,
        chunked_prefill_size=-1,  # a chunk is a step to the logit processor
        # What low-bit storage needs on a GPU, so that nothing but the format differs.
        attention_backend="triton" if has_accelerator() else None,
        disable_prefill_cuda_graph=True,
        log_level="error",
        sleep_on_idle=True,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def measure(study: Study, progress: Progress) -> dict[str, Row]:
    """Run the formats that have no row yet, in turn; the rows of all, by format."""
    out, prompts = study.args.out, len(study.prompts)
    done = measured(read_rows(out), study)
    if all(chosen.name in done for chosen in study.formats):
        return done
    out.parent.mkdir(parents=True, exist_ok=True)
    task = progress.add_task("the model's own output", total=prompts * (1 + len(study.formats)))

    def advance(count: int) -> None:
        progress.advance(task, count)

    with tempfile.TemporaryDirectory(prefix=".quant-fidelity-", dir=out.parent) as folder:
        with running(study, parse_format("full", study.args.period)) as engine:
            reference = write_reference(engine, study, Path(folder), advance)
        done = measured(read_rows(out), study, reference.digest)
        for chosen in study.formats:
            progress.update(task, description=chosen.name)
            if chosen.name in done:
                advance(prompts)
                continue
            with running(study, chosen) as engine:
                tokens, followed = capacity(engine), follow(engine, study, reference, advance)
            row = row_of(chosen, study, reference, followed, tokens)
            done[chosen.name] = {**row, **study.settings, **conditions()}
            add_row(out, done[chosen.name])
    return done


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    try:
        known = read_rows(args.out)
        study = prepare(args)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            rows = measure(study, progress)
    except Refused as error:
        sys.exit(f"quant_fidelity: {error}")
    console = Console()
    console.width = max(console.width, 160)
    console.print(table([rows[chosen.name] for chosen in study.formats]))
    print(f"{len(read_rows(args.out)) - len(known)} new rows: {args.out}")


if __name__ == "__main__":
    main()

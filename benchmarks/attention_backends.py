"""How fast does stock SGLang decode with one attention backend, and with another?

One engine for each backend, the same settings, the same prompts, in turns, so that a machine that changes its pace does
so for all. In the first round the prompts are prefilled, in the others they are in the radix cache; a round decodes to
`--tokens`. Each round gives a row: seconds until the last request had its first token, and time of a decode step.
Rows are appended to a file as they are measured; the table has the fastest round of each backend and batch.

    python benchmarks/attention_backends.py                                       # on two slow cores: 10 minutes
    python benchmarks/attention_backends.py --prompts 96 --tokens 320 --dtype float32
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from decode import ROOT, read_prompts
from decode_batch import STREAM_EVERY, decode
from default_model import smollm2
from number_tables import numbers_table, printed


@dataclass(frozen=True)
class Row:
    """One round of one batch.

    cached : tokens of the prompts that the radix cache had
    first_token_seconds : until the slowest request had its first token
    """

    backend: str
    batch: int
    prompt: int
    tokens: int
    round: int
    cached: int
    first_token_seconds: float
    step_milliseconds: float
    tokens_per_second: float


def measure(engine: Any, backend: str, prompts: list[list[int]], tokens: int, number: int) -> Row:
    """Decode a batch to `tokens` tokens; `prompts` have the same length."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": tokens,
        "ignore_eos": True,
        "stream_interval": STREAM_EVERY,
    }
    begin = time.perf_counter()
    timed = engine.loop.run_until_complete(decode(engine, prompts, sampling, [tokens]))
    first, last = (max(request.at[mark] for request in timed) for mark in (1, tokens))
    return Row(
        backend=backend,
        batch=len(prompts),
        prompt=len(prompts[0]),
        tokens=tokens,
        round=number,
        cached=sum(request.last["meta_info"]["cached_tokens"] for request in timed),
        first_token_seconds=round(first - begin, 3),
        step_milliseconds=round((last - first) / (tokens - 1) * 1e3, 2),
        tokens_per_second=round(len(prompts) * (tokens - 1) / (last - first), 2),
    )


def table(rows: list[Row]) -> Table:
    """The fastest round of each backend and batch; speed is a multiple of the first backend's."""
    names = ("backend", "batch", "tokens", "prefill s", "ms/step", "tokens/s", "speed")
    shown = numbers_table("Decoding", names)
    for batch in sorted({row.batch for row in rows}):
        of_batch = [row for row in rows if row.batch == batch]
        best = {
            name: min((row for row in of_batch if row.backend == name), key=lambda row: row.step_milliseconds)
            for name in dict.fromkeys(row.backend for row in of_batch)
        }
        first = next(iter(best.values())).step_milliseconds
        for name, row in best.items():
            cold = next(each for each in of_batch if each.backend == name and each.round == 0)
            shown.add_row(
                name,
                str(batch),
                f"{row.prompt} to {row.prompt + row.tokens}",
                f"{cold.first_token_seconds:.1f}",
                f"{row.step_milliseconds:.1f}",
                f"{row.tokens_per_second:.1f}",
                f"{first / row.step_milliseconds:.2f}",
            )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--backends", default="torch_native,kvp_cpu", help="attention_backend of each engine")
    parser.add_argument("--batches", default="1,8", help="requests at a time (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=1984, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each backend and batch (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "attention_backends.jsonl", help="appended to")
    args = parser.parse_args()
    args.backends, args.batches = args.backends.split(","), [int(batch) for batch in args.batches.split(",")]
    if args.tokens % STREAM_EVERY:
        parser.error(f"--tokens must be a multiple of {STREAM_EVERY}, between which the clock is not read")
    if args.model is None:
        args.model = smollm2()
    return args


def main() -> None:
    args = arguments()
    import sglang

    common = {
        "model_path": str(args.model),
        "device": "cuda",
        "dtype": args.dtype,
        "log_level": "error",
        "sleep_on_idle": True,  # the engines whose turn it is not leave the processor alone
        "max_total_tokens": max(args.batches) * (args.prompts + args.tokens + 64),
        "max_running_requests": max(args.batches),
    }
    prompts = read_prompts(args.model, max(args.batches), args.prompts)
    engines: dict[str, Any] = {}
    rows: list[Row] = []
    provenance = {**conditions(), "model": args.model.name, "dtype": args.dtype}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for backend in args.backends:
            engines[backend] = sglang.Engine(**common, attention_backend=backend)
            engines[backend].generate(input_ids=prompts[0][:8], sampling_params={"max_new_tokens": 4})
        with args.out.open("a") as file:
            for batch in args.batches:
                for engine in engines.values():
                    while not engine.flush_cache().success:
                        time.sleep(0.1)
                for number in range(args.rounds):
                    for backend, engine in engines.items():
                        rows.append(measure(engine, backend, prompts[:batch], args.tokens, number))
                        file.write(json.dumps({**asdict(rows[-1]), **provenance}) + "\n")
                        file.flush()
    finally:
        for engine in engines.values():
            engine.shutdown()
    printed(table(rows))


if __name__ == "__main__":
    main()

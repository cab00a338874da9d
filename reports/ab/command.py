"""`kvpolicy ab`: run several policies and formats with lm-eval, and compare what they do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvpolicy.lmeval_tasks.split import Part
from kvpolicy.reports.ab.arms import AbError, ArmSpec, items, parse_arms
from kvpolicy.reports.ab.jobs import is_complete, jobs_of
from kvpolicy.reports.ab.plan import Plan, PlanError, PlanFile, load_plan, record_run, write_plan
from kvpolicy.reports.ab.run import run_all
from kvpolicy.reports.ab.settings import Settings, Split, versions
from kvpolicy.reports.lmeval_output import OutputError

RESERVED = ("split", "subset", "repeats")  # of the metadata: each has an option here

_EPILOG = """\
An arm is one of
  [NAME=]POLICY                            full, vase-dkv, …
  [NAME=]argument=value,argument=value     kv_policy=vase-dkv,kv_budget=2048 or kv_quant=range-int4
  [NAME=]FOLDER                            results of lm_eval --log_samples that are there already

  kvpolicy ab --model Qwen/Qwen3-4B --tasks kvp_math500 --split dev --arm full \\
    --arm kv_policy=vase-dkv,kv_budget=2048 --arm kv_quant=range-int4 -o out/ab

Each arm is run by stock lm-eval, one after the other, with its results, its log and run.json in FOLDER/NAME. What is
complete is not run again: after an interruption give the same command. FOLDER gets index.html, one page with all
figures, and report.json with all numbers. Which budget has the bytes of which format: kvpolicy ab-budgets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arms, what they are run on, and where the report goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--arm", action="append", required=True, metavar="ARM", help="once for each; see below")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="of the report and the runs")
    parser.add_argument("--baseline", metavar="NAME", help="arm that the others are compared with (default: the first)")
    runs = parser.add_argument_group("runs", "needed where an arm is to be run")
    runs.add_argument("--model", help="folder or hub id")
    runs.add_argument("--tasks", metavar="NAMES", help="of lm-eval, with commas: kvp_math500,kvp_aime25")
    runs.add_argument(
        "--split", choices=("dev", "confirm", "all"), help="part of each task (default: all); confirm writes a plan"
    )
    runs.add_argument("--subset", type=int, metavar="N", help="so many problems of the part, the same in each run")
    runs.add_argument("--repeats", type=int, metavar="K", help="samples of each problem (default: the task's own)")
    runs.add_argument("--gen-kwargs", default="", metavar="ARGS", help="generation: max_gen_toks=8192,temperature=0")
    runs.add_argument("--model-args", default="", metavar="ARGS", help="of all arms: tp_size=2,mem_fraction_static=0.8")
    runs.add_argument("--metadata", default="", metavar="ARGS", help="more options of the tasks: enable_thinking=True")
    runs.add_argument("--no-chat-template", action="store_true", help="for a model that is no chat model")
    runs.add_argument("--batch-size", default="auto", help="of lm-eval (auto: all requests at once)")
    runs.add_argument(
        "--chunk",
        type=int,
        metavar="N",
        help="problems of one run of lm-eval, so that less is lost; arms take turns; needs --subset",
    )
    runs.add_argument("--plan", type=Path, metavar="FILE", help="of the confirm part (default: FOLDER/plan.json)")


def run(args: argparse.Namespace) -> int:
    """Run what is to be run, and write the report."""
    console = Console(stderr=True)
    try:
        arms = parse_arms(args.arm)
        if args.baseline is not None and args.baseline not in [arm.name for arm in arms]:
            raise AbError(f"--baseline {args.baseline} is not an arm; they are {', '.join(arm.name for arm in arms)}.")
        plan = _run(arms, args, console)
        _report(arms, args, plan)
    except (AbError, OutputError, PlanError) as error:
        raise SystemExit(f"kvpolicy ab: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("kvpolicy ab: interrupted; the same command goes on where it was.") from None
    return 0


def _run(arms: Sequence[ArmSpec], args: argparse.Namespace, console: Console) -> PlanFile | None:
    """Run the arms that are no folders; the plan, where there is one."""
    path = args.plan or args.out / "plan.json"
    ours = [arm for arm in arms if arm.arguments is not None]
    if not ours:
        return None if args.plan is None else _plan_of(arms, args.plan)
    settings = _settings(args)
    # All arms' first problems before anyone's second: what an interruption leaves can be compared.
    rounds = zip(*(jobs_of(arm, settings, args.out, args.chunk) for arm in ours), strict=True)
    jobs = [job for of_all_arms in rounds for job in of_all_arms]
    if args.split != "confirm":
        run_all(jobs, lambda _: None, console)
        return None
    plan, out = _plan(arms, settings, args.baseline), args.out.resolve()
    recorded = {run.folder for run in load_plan(path, plan).runs} if path.exists() else set()
    if early := [job.arm for job in jobs if str(out / job.arm) not in recorded and is_complete(job)]:
        raise AbError(
            f"arm {early[0]} was run before {path} was written: its results are known already; "
            "take another folder for -o, or name it as results."
        )
    write_plan(path, plan)
    run_all(jobs, lambda arm: record_run(path, out / arm), console)
    return load_plan(path)


def _plan_of(arms: Sequence[ArmSpec], path: Path) -> PlanFile:
    """The plan of results that are there already."""
    file = load_plan(path)
    if strangers := [arm.name for arm in arms if arm.name not in file.plan.arms]:
        raise AbError(f"{path} plans no arm {strangers[0]}; its arms are {', '.join(file.plan.arms)}.")
    return file


def _settings(args: argparse.Namespace) -> Settings:
    for name in ("model", "tasks"):
        if not getattr(args, name):
            raise AbError(f"--{name} is needed to run an arm.")
    for name in ("subset", "repeats", "chunk"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise AbError(f"--{name} must be at least 1, got {number}.")
    if args.chunk is not None and args.subset is None:
        raise AbError("--chunk needs --subset, which says how many problems there are; all of a part is a subset too.")
    metadata = items(args.metadata, "--metadata")
    if taken := [name for name in RESERVED if name in metadata]:
        raise AbError(f"--metadata {taken[0]}=… has an option of its own: --{taken[0]}.")
    return Settings(
        model=args.model,
        tasks=tuple(filter(None, args.tasks.split(","))),
        split=args.split or "all",
        subset=args.subset,
        repeats=args.repeats,
        model_args=items(args.model_args, "--model-args"),
        gen_kwargs=items(args.gen_kwargs, "--gen-kwargs"),
        metadata=metadata,
        chat_template=not args.no_chat_template,
        batch_size=args.batch_size,
    )


def _plan(arms: Sequence[ArmSpec], settings: Settings, baseline: str | None) -> Plan:
    first = baseline or arms[0].name
    seeds = {settings.model_arguments(arm.arguments or {}).get("kv_seed", "0") for arm in arms}
    try:
        numbers = tuple(sorted(map(int, seeds)))
    except ValueError:
        raise AbError(f"kv_seed must be a whole number, got {', '.join(sorted(seeds))}.") from None
    return Plan(
        arms={arm.name: dict(arm.arguments or {"folder": str(arm.folder)}) for arm in arms},
        tasks=settings.tasks,
        split="confirm",
        comparisons=tuple((first, arm.name) for arm in arms if arm.name != first),
        seeds=numbers,
        settings={**settings.shared, "versions": versions()},
    )


def _report(arms: Sequence[ArmSpec], args: argparse.Namespace, plan: PlanFile | None) -> None:
    from kvpolicy.reports.ab.document import document
    from kvpolicy.reports.ab.origin import read_all
    from kvpolicy.reports.ab.page import page
    from kvpolicy.reports.ab.report import make_report
    from kvpolicy.reports.ab.sentences import plan_sentence, sentence
    from kvpolicy.reports.ab.tables import summary_rows

    split: Split | None = args.split or ("all" if any(arm.arguments is not None for arm in arms) else None)
    part: Part | None = args.split if args.split != "all" else None
    found = [read_all(arm.name, arm.folder or args.out / arm.name, part) for arm in arms]
    report = make_report(
        [arm for arm, _ in found], [origin for _, origin in found], split=split, baseline=args.baseline, plan=plan
    )
    numbers = json.dumps(document(report), allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    _write(args.out, {"report.json": numbers, "index.html": page(report)})
    console = Console(highlight=False)
    for task in report.pairs.tasks:
        rows = summary_rows(report, task)
        table = Table(title=task, box=SIMPLE)
        for heading in rows.header:
            table.add_column(heading, overflow="fold")
        for row in rows.rows:
            table.add_row(*row)
        console.print(table)
    for comparison in report.comparisons:
        console.print(sentence(comparison, len(report.comparisons)), markup=False, soft_wrap=True)
    for line in (plan_sentence(report), *(f"warning: {warning}" for warning in report.warnings)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{args.out} holds index.html and report.json", markup=False, soft_wrap=True)


def _write(folder: Path, files: dict[str, str]) -> None:
    """All are written before one takes its place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f".{name}.part").write_text(text, encoding="utf-8")
    for name in files:
        os.replace(folder / f".{name}.part", folder / name)

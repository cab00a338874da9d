"""The `kvpolicy` command: thin, each subcommand imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys

# subcommand -> (module with `add_arguments(parser)` and `run(args) -> int`, one line for the overview)
COMMANDS = {
    "flags": ("kvpolicy.sglang_plugin.flags_command", "print the --kv-… flags of SGLang's servers and of Engine(...)"),
    "policies": ("kvpolicy.sglang_plugin.policies_command", "list the policies with their options and defaults"),
    "tasks": ("kvpolicy.lmeval_tasks.command", "print the folder to give to lm_eval --include_path"),
    "cache": ("kvpolicy.reports.cache_command", "what happened to the KV cache in an lm-eval output folder"),
    "epikv-bands": ("kvpolicy.reports.epikv.bands_command", "measure which layers epikv should compare in a model"),
    "calibrate": ("kvpolicy.reports.calibrate_command", "make the query statistics of a model that triattention needs"),
    "quant-error": ("kvpolicy.reports.quant_error.command", "what low-bit keys and values would do to a model"),
    "ab": ("kvpolicy.reports.ab.command", "run policies and formats with lm-eval, and compare what they do"),
    "ab-budgets": ("kvpolicy.reports.ab.budgets_command", "budgets and formats of equal mean KV bytes, to compare"),
    "doctor": (
        "kvpolicy.sglang_plugin.doctor_command",
        "is this machine ready, what will be hooked, and would a launch be refused",
    ),
    "survivors": ("kvpolicy.reports.survivors.command", "draw which tokens a policy kept, from a file of kv_trace"),
}
# What `doctor` tries beside what it knows itself: name -> function that returns what works, or raises RuntimeError.
TRIALS = {"sandbox": "kvpolicy.lmeval_tasks.sandbox.choice:choose"}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its exit status is the process'."""
    parser = argparse.ArgumentParser(prog="kvpolicy", description="KV-cache eviction policies inside SGLang.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if argv[:1] == [name]:
            command = importlib.import_module(module)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run, trials=TRIALS)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())

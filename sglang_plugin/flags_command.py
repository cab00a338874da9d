"""`kvpolicy flags`: the same text that `python -m sglang.launch_server --help` shows for this plugin."""

from __future__ import annotations

import argparse

from kvpolicy.sglang_plugin.config import ARGUMENTS
from kvpolicy.sglang_plugin.flags import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(_args: argparse.Namespace) -> int:
    """Print the flags, and the names they have elsewhere."""
    parser = argparse.ArgumentParser(prog="sglang serve", add_help=False, usage=argparse.SUPPRESS)
    add_flags(parser)
    print(parser.format_help())
    print("The same as keywords of Engine(...) and as keys of lm_eval --model_args:")
    print("  " + ", ".join(f"{name}={field.default}" for name, field in ARGUMENTS.items() if name != "kv_policy"))
    print("  lm_eval --model sglang --model_args pretrained=MODEL,kv_policy=vase-dkv,kv_budget=4096 --tasks TASK")
    return 0

"""`kvpolicy tasks`: where lm-eval finds this package's tasks (it has no entry point for them)."""

from __future__ import annotations

import argparse
import importlib.resources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""
    parser.epilog = 'Use: lm_eval --include_path "$(kvpolicy tasks)" --tasks kvp_gsm8k_sample …'


def run(_args: argparse.Namespace) -> int:
    """Print the folder, alone on its line."""
    print(importlib.resources.files("kvpolicy") / "lmeval_tasks")
    return 0

"""`kvpolicy policies`: every policy with what `kv_options` can set."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin.errors import KVPolicyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A policy's name, to read its documentation in full."""
    parser.add_argument("name", nargs="?", help="show the documentation of one policy")


def run(args: argparse.Namespace) -> int:
    """Print one line a policy, or one policy's documentation."""
    if args.name is not None:
        if args.name not in POLICIES:
            raise KVPolicyError(f"{args.name!r} is not a policy; known: {', '.join(POLICIES)}.")
        print(inspect.getdoc(POLICIES[args.name]()))
        return 0
    for name, load in POLICIES.items():
        policy = load()
        options = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(policy))  # type: ignore[arg-type]
        print(f"{name:15} {(inspect.getdoc(policy) or '').splitlines()[0]}")
        print(f"{'':15} {'kv_options: ' + options if options else 'no options'}")
    return 0

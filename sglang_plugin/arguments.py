"""The `kv_*` arguments on their way into SGLang's `ServerArgs` record and out of it again."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any

from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.config import ARGUMENTS, KVPolicyConfig, config_from
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.flags import add_flags

_RECORD_KEY = "_kvpolicy_config"


def config_of(server_args: Any) -> KVPolicyConfig | None:
    """The configuration that rides on a `ServerArgs` record, also after it was pickled to a child."""
    config: KVPolicyConfig | None = vars(server_args).get(_RECORD_KEY)
    return config


def attach(server_args: Any, config: KVPolicyConfig) -> None:
    """Put a configuration on a record (in its `__dict__`: its fields are sealed)."""
    vars(server_args)[_RECORD_KEY] = config


def take_arguments(keywords: dict[str, Any]) -> KVPolicyConfig | None:
    """Remove the `kv_*` arguments of this plugin from `keywords` and return what they configure.

    Raises
    ------
    KVPolicyError
        On a bad value, or a `kv_*` name that neither this plugin nor SGLang knows.
    """
    from sglang.srt.server_args import ServerArgs

    for name in keywords:
        if name.startswith("kv_") and name not in ARGUMENTS and name not in ServerArgs.__struct_fields__:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise KVPolicyError(f"{name} is not an argument: kvpolicy's are {', '.join(ARGUMENTS)}{hint}")
    return config_from({name: keywords.pop(name) for name in list(keywords) if name in ARGUMENTS})


def after_add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's parser."""
    add_flags(parser, check=lambda: targets.verify({targets.FROM_CLI_ARGS: around_from_cli_args}))


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Build SGLang's record, and put the configuration of the `--kv-…` flags on it."""
    from kvpolicy.sglang_plugin import launcher

    config = config_from({name: getattr(args, name, None) for name in ARGUMENTS})
    launcher.fit_to_machine(vars(args))
    launcher.fit_to_policy(vars(args), config)
    server_args = original(cls, args)
    if config is not None:
        launcher.prepare(server_args, config)
    return server_args

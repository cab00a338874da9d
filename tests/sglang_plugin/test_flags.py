"""The `--kv-…` flags on a parser such as SGLang's."""

from __future__ import annotations

import argparse
import re

import pytest

from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin.config import ARGUMENTS, KVPolicyConfig, config_from
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.flags import add_flags

ALL_FLAGS = [
    *("--kv-policy", "vase-dkv", "--kv-budget", "512", "--kv-period", "32"),
    *("--kv-seed", "7", "--kv-options", "rank:8;sinks:2", "--kv-trace", "out/t"),
]


class Counter:
    """A check that counts how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def parser_with(check: Counter | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model-path")
    add_flags(parser, check)
    return parser


def test_flags_that_are_not_given_are_none() -> None:
    args = vars(parser_with().parse_args(["--model-path", "x"]))
    assert {name: args[name] for name in ARGUMENTS} == dict.fromkeys(ARGUMENTS)


def test_flags_are_read_as_arguments_of_a_configuration() -> None:
    args = vars(parser_with().parse_args(ALL_FLAGS))
    config = config_from({name: args[name] for name in ARGUMENTS})
    assert config == KVPolicyConfig("vase-dkv", 512, 32, 7, "rank:8;sinks:2", "out/t")


def test_several_policies_with_options_are_one_value() -> None:
    args = parser_with().parse_args(["--kv-policy", "full|vase-dkv[rank:8;sinks:2]"])
    config = config_from({name: getattr(args, name) for name in ARGUMENTS})
    assert config is not None
    assert list(config.arms) == ["full", "vase-dkv[rank:8;sinks:2]"]


def test_a_flag_can_be_joined_to_its_value() -> None:
    assert parser_with().parse_args(["--kv-policy=full"]).kv_policy == "full"


def test_every_argument_has_a_flag_of_its_own_group_with_help() -> None:
    parser = parser_with()
    (group,) = (group for group in parser._action_groups if group.title == "KV policy (kvpolicy)")
    flags = {action.option_strings[0]: action.help for action in group._group_actions}
    assert list(flags) == ["--" + name.replace("_", "-") for name in ARGUMENTS]
    assert all(flags.values())


def test_the_help_names_every_policy_and_the_real_defaults() -> None:
    texts = {action.dest: str(action.help) for action in parser_with()._actions}
    assert all(name in texts["kv_policy"] for name in POLICIES)
    default = KVPolicyConfig("vase-dkv")
    for name in ("budget", "period", "seed"):
        assert f"(default {getattr(default, name)})" in texts[f"kv_{name}"]


def test_the_example_of_options_in_the_help_is_a_policy() -> None:
    (help_text,) = (str(action.help) for action in parser_with()._actions if action.dest == "kv_policy")
    (example,) = re.findall(r"'([\w-]+\[.*?\])'", help_text)
    assert list(KVPolicyConfig(example).arms) == [example]


@pytest.mark.parametrize(
    ("command_line", "calls"),
    [
        pytest.param([], 0, id="no argument"),
        pytest.param(["--model-path", "x"], 0, id="SGLang's own only"),
        pytest.param(["--kv-policy", "full"], 1, id="one flag"),
        pytest.param(["--kv-budget", "5"], 1, id="a flag without a policy"),
        pytest.param(ALL_FLAGS, 6, id="all"),
    ],
)
def test_the_check_runs_only_when_a_flag_is_met(command_line: list[str], calls: int) -> None:
    check = Counter()
    parser_with(check).parse_args(command_line)
    assert check.calls == calls


def test_a_failing_check_stops_the_parser() -> None:
    def refuse() -> None:
        raise KVPolicyError("the hook is missing.")

    parser = argparse.ArgumentParser()
    add_flags(parser, refuse)
    assert parser.parse_args([]).kv_policy is None
    with pytest.raises(KVPolicyError, match="the hook is missing"):
        parser.parse_args(["--kv-policy", "full"])


def test_a_flag_without_a_value_is_a_usage_error() -> None:
    with pytest.raises(argparse.ArgumentError, match="expected one argument"):
        parser_with().parse_args(["--kv-policy"])

"""How `kv_policy` names one policy or several, each with options of its own."""

from __future__ import annotations

import pytest

from kvpolicy.policies.full import Full
from kvpolicy.policies.snapkv import SnapKV
from kvpolicy.policies.streaming_llm import StreamingLLM
from kvpolicy.policies.vase_attnv import VaseAttnV
from kvpolicy.policies.vase_dkv import VaseDKV
from kvpolicy.sglang_plugin.arms import Arm, parse_arms
from kvpolicy.sglang_plugin.errors import KVPolicyError

ATTNV = "vase-attnv[reserve:random;sample:false]"


def test_one_name_is_one_arm() -> None:
    assert parse_arms("vase-dkv", "") == {"vase-dkv": Arm("vase-dkv", "vase-dkv", "", VaseDKV())}


def test_several_names_are_arms_in_their_order() -> None:
    arms = parse_arms("snapkv|full|vase-dkv", "")
    assert list(arms) == ["snapkv", "full", "vase-dkv"]
    assert [arm.policy for arm in arms.values()] == [SnapKV(), Full(), VaseDKV()]
    assert all(arm.name == name == arm.policy_name for name, arm in arms.items())


def test_options_in_brackets_belong_to_their_arm_alone() -> None:
    arms = parse_arms(f"vase-attnv|{ATTNV}|vase-dkv[rank:8]", "")
    assert list(arms) == ["vase-attnv", ATTNV, "vase-dkv[rank:8]"]
    assert arms["vase-attnv"].policy == VaseAttnV()
    assert arms[ATTNV].policy == VaseAttnV(reserve="random", sample=False)
    assert arms["vase-dkv[rank:8]"].policy == VaseDKV(rank=8)


def test_the_parts_of_a_name_are_told_apart() -> None:
    arm = parse_arms(f"full|{ATTNV}", "")[ATTNV]
    assert (arm.name, arm.policy_name, arm.options) == (ATTNV, "vase-attnv", "reserve:random;sample:false")


def test_options_beside_a_single_name_are_its_own() -> None:
    (arm,) = parse_arms("vase-dkv", "rank:8;sinks:2").values()
    assert arm == Arm("vase-dkv", "vase-dkv", "rank:8;sinks:2", VaseDKV(rank=8, sinks=2))


def test_brackets_and_separate_options_make_the_same_policy() -> None:
    (inside,) = parse_arms("vase-dkv[rank:8;sinks:2]", "").values()
    (beside,) = parse_arms("vase-dkv", "rank:8;sinks:2").values()
    assert (inside.policy, inside.policy_name, inside.options) == (beside.policy, beside.policy_name, beside.options)


def test_empty_brackets_are_the_published_defaults_under_another_name() -> None:
    arms = parse_arms("vase-dkv|vase-dkv[]", "")
    assert arms["vase-dkv[]"] == Arm("vase-dkv[]", "vase-dkv", "", VaseDKV())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("full | vase-dkv[rank:8]", id="around the bar"),
        pytest.param("  full|vase-dkv[rank:8]\n", id="at the ends"),
        pytest.param("full\t|\t vase-dkv[rank:8] ", id="tabs"),
    ],
)
def test_spaces_around_names_do_not_count(text: str) -> None:
    assert parse_arms(text, "") == parse_arms("full|vase-dkv[rank:8]", "")


def test_a_policy_from_another_module_may_have_brackets_too() -> None:
    name = "kvpolicy.policies.streaming_llm:StreamingLLM[sinks:2]"
    (arm,) = parse_arms(name, "").values()
    assert arm == Arm(name, "kvpolicy.policies.streaming_llm:StreamingLLM", "sinks:2", StreamingLLM(sinks=2))


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        pytest.param("full|vase-dkv", "rank:8", "belongs to one policy, but kv_policy names 2", id="options for two"),
        pytest.param("full|vase-dkv", "rank:8", "behind its name: full[rank:8].", id="what to write"),
        pytest.param("vase-dkv[sinks:1]|full", "rank:8", "its name: vase-dkv[rank:8].", id="what to write instead"),
        pytest.param("vase-dkv[rank:8]", "rank:8", "options of its own, so kv_options must not", id="options twice"),
        pytest.param("vase-dkv[]", "rank:8", "options of its own, so kv_options must not", id="empty brackets"),
        pytest.param("full|vase-dkv|full", "", "kv_policy names 'full' twice.", id="same arm twice"),
        pytest.param("full| full", "", "kv_policy names 'full' twice.", id="twice but for a space"),
        pytest.param(f"{ATTNV}|{ATTNV}", "", f"names {ATTNV!r} twice.", id="same options twice"),
        pytest.param("vase-dkv[rank:8", "", "'vase-dkv[rank:8' must end with ']'", id="unclosed"),
        pytest.param("vase-dkv[rank:8|full", "", "'vase-dkv[rank:8' must end with ']'", id="unclosed before another"),
        pytest.param("vase-dkv[rank:8]x", "", "'vase-dkv[rank:8]x' must end with ']'", id="text behind"),
        pytest.param("vase-dkv]", "", "'vase-dkv]' is not known; did you mean 'vase-dkv'?", id="never opened"),
        pytest.param("vase[rank:8]", "", "'vase' is not known; did you mean 'vase-dkv'?", id="unknown policy"),
        pytest.param("full|vase", "", "'vase' is not known; did you mean 'vase-dkv'?", id="unknown second"),
        pytest.param("full|vase-dkv[ranks:8]", "", "'vase-dkv' has no option 'ranks'", id="unknown option"),
        pytest.param("full|vase-dkv[rank:x]", "", "'rank' must be a whole number, got 'x'.", id="bad value"),
        pytest.param("full|vase-dkv[rank]", "", "written name:value;name:value, got 'rank'.", id="no value"),
        pytest.param("full|full[sinks:4]", "", "'full' has no option 'sinks'", id="options of full"),
        pytest.param("full||vase-dkv", "", "kv_policy '' is not known", id="empty between"),
        pytest.param("|full", "", "kv_policy '' is not known", id="empty first"),
        pytest.param("full|", "", "kv_policy '' is not known", id="empty last"),
        pytest.param("full|[sinks:4]", "", "kv_policy '' is not known", id="options of nothing"),
        pytest.param("full,vase-dkv", "", "kv_policy 'full,vase-dkv' is not known", id="commas"),
    ],
)
def test_a_wrong_list_is_answered_with_one_sentence(text: str, options: str, sentence: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        parse_arms(text, options)
    message = str(caught.value)
    assert sentence in message
    assert message.endswith(".")
    assert not message.endswith("..")
    assert "\n" not in message


def test_check_is_that_of_the_policy_in_a_sentence_of_the_plugin() -> None:
    arm = parse_arms("vase-dkv[sinks:2;recent:8]", "")["vase-dkv[sinks:2;recent:8]"]
    arm.check(11, 64)
    with pytest.raises(KVPolicyError, match=r"^kv_budget=10 leaves nothing to choose: .* keeps 10 tokens.*[^.]\.$"):
        arm.check(10, 64)

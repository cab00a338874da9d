from __future__ import annotations

import copy
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.sampling import check, check_room, sample_seed, seeded

QWEN3 = {"until": [], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_gen_toks": 100}
GREEDY = {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": 100}


@pytest.mark.parametrize(
    ("generation", "repeats"),
    [
        pytest.param(QWEN3, 1, id="one sample"),
        pytest.param(QWEN3, 8, id="several"),
        pytest.param(GREEDY, 1, id="greedy"),
        pytest.param(GREEDY | {"do_sample": True}, 1, id="greedy, though it says otherwise"),
        pytest.param({"max_gen_toks": 1}, 1, id="greedy, since nothing is said"),
        pytest.param(QWEN3 | {"n": 1}, 8, id="n of one"),
    ],
)
def test_settings_that_are_followed_pass(generation: dict[str, Any], repeats: int) -> None:
    check(generation, repeats)


@pytest.mark.parametrize(
    ("changed", "repeats", "sentence"),
    [
        pytest.param({"max_new_tokens": 9}, 1, r"^max_new_tokens of --gen_kwargs would be ignored; .* max_gen_toks\.$"),
        pytest.param({"max_tokens": 9}, 1, r"^max_tokens of --gen_kwargs would be ignored;"),
        pytest.param({"max_completion_tokens": 9}, 1, r"^max_completion_tokens of --gen_kwargs would be ignored;"),
        pytest.param({"max_length": 9}, 1, r"^max_length of --gen_kwargs would be ignored;"),
        pytest.param({"max_gen_toks": 0}, 1, r"^max_gen_toks must be a whole number of at least 1, got 0\.$"),
        pytest.param({"max_gen_toks": "9k"}, 1, r"^max_gen_toks must be .* got '9k'\.$"),
        pytest.param({"max_gen_toks": True}, 1, r"^max_gen_toks must be .* got True\.$"),
        pytest.param({"max_gen_toks": None}, 1, r"^max_gen_toks must be .* got None\.$"),
        pytest.param({"n": 4}, 1, r"^n=4 of --gen_kwargs would hand responses to the wrong problems;"),
        pytest.param(
            {"do_sample": False}, 1, r"^do_sample is off, but at temperature 0\.6 SGLang samples all the same;"
        ),
        pytest.param({"do_sample": None}, 1, r"^do_sample is off, but"),
        pytest.param({"temperature": 0.0}, 2, r"^at temperature 0 the 2 samples of a problem would be copies;"),
        pytest.param({"temperature": 0}, 8, r"^at temperature 0 the 8 samples"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changed: dict[str, Any], repeats: int, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        check(QWEN3 | changed, repeats)


def test_a_prompt_fits_to_the_last_token() -> None:
    check_room(["one", "three", "two"], 95, 100, len)
    with pytest.raises(TaskError) as caught:
        check_room(["one", "three", "two"], 96, 100, len)
    assert str(caught.value) == (
        "a prompt of 5 tokens and max_gen_toks=96 exceed the context length of 100, and lm-eval would cut the prompt; "
        "lower it with --gen_kwargs max_gen_toks=95 or raise context_length."
    )


def test_without_a_tokenizer_a_prompt_counts_the_most_tokens_it_can_have() -> None:
    check_room(["é" * 10], 78, 100, None)
    with pytest.raises(TaskError, match=r"^a prompt of up to 22 tokens and max_gen_toks=79 exceed .* max_gen_toks=78 "):
        check_room(["é" * 10], 79, 100, None)


def test_each_sample_of_each_document_has_a_seed_of_its_own() -> None:
    seeds = {
        (base, identifier, repeat): sample_seed(base, identifier, repeat)
        for base in (0, 1, 11)
        for identifier in ("a", "b", "1", "a-1")
        for repeat in range(16)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds.values())
    assert sample_seed(0, "aime25-0", 0) == 3766142586  # the last 32 bits of md5sum; frozen, or runs cannot be repeated


def seed_of(generation: dict[str, Any]) -> Any:
    return generation.get("custom_params", {}).get("kv_seed")


@pytest.mark.parametrize(
    ("custom", "metadata", "base"),
    [
        pytest.param(None, {"kv_policy": "full"}, 0, id="the launch has none"),
        pytest.param(None, {"kv_policy": "full", "kv_seed": None}, 0, id="none"),
        pytest.param(None, {"kv_policy": "full", "kv_seed": 5}, 5, id="of the launch"),
        pytest.param({"kv_seed": 6}, {"kv_policy": "full", "kv_seed": 5}, 6, id="of the request"),
        pytest.param({"kv_policy": "full"}, {}, 0, id="the request chooses a policy"),
        pytest.param({"kv_seed": 6}, {}, 6, id="the request has a seed"),
    ],
)
def test_the_seed_comes_from_that_of_the_run(custom: Any, metadata: dict[str, Any], base: int) -> None:
    given = QWEN3 | ({} if custom is None else {"custom_params": custom})
    before = copy.deepcopy(given)
    own = seeded(given, metadata, "a", 3)
    assert given == before
    assert own == given | {"custom_params": {**(custom or {}), "kv_seed": sample_seed(base, "a", 3)}}


@pytest.mark.parametrize("custom", [None, {"thinking_budget": 3}], ids=["nothing", "of others"])
@pytest.mark.parametrize("metadata", [{}, {"kv_policy": None}, {"kv_seed": 3}], ids=["stock", "none", "seed alone"])
def test_an_engine_without_the_plugin_is_sent_nothing_of_ours(custom: Any, metadata: dict[str, Any]) -> None:
    given = QWEN3 | ({} if custom is None else {"custom_params": custom})
    assert seeded(given, metadata, "a", 0) == given


@pytest.mark.parametrize("seed", ["7", 1.5, True])
def test_a_seed_that_is_no_number_is_refused(seed: Any) -> None:
    with pytest.raises(TaskError, match=r"^kv_seed must be a whole number, got "):
        seeded(QWEN3, {"kv_policy": "full", "kv_seed": seed}, "a", 0)


def test_a_cache_in_low_bits_reads_seeds_too() -> None:
    """A launch with `kv_quant` alone has the plugin; a run without either has not."""
    sent = seeded({"temperature": 0.6}, {"kv_quant": "int4"}, "a", 0)
    assert sent == seeded({"temperature": 0.6}, {"kv_policy": "full"}, "a", 0)
    assert seeded({"temperature": 0.6}, {"kv_quant": None}, "a", 0) == {"temperature": 0.6}

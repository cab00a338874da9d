"""Generation settings: what would silently do nothing is refused, and each sample gets a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError

# lm-eval's SGLang model reads max_gen_toks and overwrites the first of these; the others SGLang does not know.
_OTHER_LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_length")
_MOST = 2**32


def check(generation: Mapping[str, Any], repeats: int) -> None:
    """Raise TaskError on generation settings that lm-eval or SGLang would accept and not follow."""
    for name in _OTHER_LIMITS:
        if name in generation:
            raise TaskError(f"{name} of --gen_kwargs would be ignored; lm-eval takes the limit from max_gen_toks.")
    limit = generation.get("max_gen_toks")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise TaskError(f"max_gen_toks must be a whole number of at least 1, got {limit!r}.")
    if generation.get("n", 1) != 1:
        raise TaskError(
            f"n={generation['n']} of --gen_kwargs would hand responses to the wrong problems; "
            "for several samples of each, use --metadata repeats=…."
        )
    temperature = generation.get("temperature", 0.0)
    if temperature > 0 and not generation.get("do_sample"):
        raise TaskError(
            f"do_sample is off, but at temperature {temperature} SGLang samples all the same; "
            "set temperature=0 for greedy decoding, or do_sample=True."
        )
    if temperature == 0 and repeats > 1:
        raise TaskError(
            f"at temperature 0 the {repeats} samples of a problem would be copies; set --metadata repeats=1, "
            "or a temperature."
        )


def check_room(
    prompts: Iterable[str], max_gen_toks: int, context_length: int, tokens_of: Callable[[str], int] | None
) -> None:
    """Raise TaskError if lm-eval would cut the front off a prompt to make room for the response.

    tokens_of : number of tokens of a prompt; without it a prompt counts as many tokens as it has bytes, the most it
    can have, and two more for what a tokenizer may put before it.
    """
    count = tokens_of or (lambda text: len(text.encode()) + 2)
    longest = max(map(count, prompts))
    if longest + max_gen_toks > context_length:
        most = "" if tokens_of else "up to "
        raise TaskError(
            f"a prompt of {most}{longest} tokens and max_gen_toks={max_gen_toks} exceed the context length of "
            f"{context_length}, and lm-eval would cut the prompt; lower it with --gen_kwargs "
            f"max_gen_toks={max(context_length - longest, 1)} or raise context_length."
        )


def seeded(generation: Mapping[str, Any], metadata: Mapping[str, Any], identifier: str, repeat: int) -> dict[str, Any]:
    """A copy of `generation` with the seed of one sample, where the engine has the plugin to read it.

    That is so if the run has a `kv_policy` (``full`` for the whole cache) or a `kv_quant`, or its generation settings
    choose a policy.
    The seed is a hash of the document's id, the number of the repeat and the `kv_seed` of the run, so a sample is
    the same in any subset, batch and order, under each policy, and differs from the other samples.
    """
    custom = generation.get("custom_params") or {}
    served = any(metadata.get(name) is not None for name in ("kv_policy", "kv_quant"))
    if not served and not any(str(name).startswith("kv_") for name in custom):
        return dict(generation)
    base = custom.get("kv_seed", metadata.get("kv_seed"))
    if base is None:
        base = 0
    if isinstance(base, bool) or not isinstance(base, int):
        raise TaskError(f"kv_seed must be a whole number, got {base!r}.")
    return {**generation, "custom_params": {**custom, "kv_seed": sample_seed(base, identifier, repeat)}}


def sample_seed(base: int, identifier: str, repeat: int) -> int:
    """Seed of one sample, ``0 <= seed < 2**32``."""
    digest = hashlib.md5(f"{base}\n{identifier}\n{repeat}".encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % _MOST

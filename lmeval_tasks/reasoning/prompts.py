"""What a model is asked, and how its chat template is told to think or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.documents import LETTERS

_PROBE = [{"role": "user", "content": "1 + 1"}]

ChatTemplate = Callable[..., str]


def prompt(doc: Mapping[str, Any]) -> str:
    """The problem, its choices where it has some, and the request for a boxed answer."""
    if "choices" not in doc:
        return f"{doc['problem']}\n\nReason step by step, and put your final answer within \\boxed{{}}."
    choices = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, doc["choices"], strict=True))
    return (
        f"{doc['problem']}\n\n{choices}\n\n"
        "Reason step by step, and put the letter of the right choice, and nothing else, within \\boxed{}."
    )


def with_thinking(chat_template: ChatTemplate | None, enabled: bool) -> ChatTemplate:
    """The model's chat template with ``enable_thinking`` set, which lm-eval's SGLang model cannot pass on.

    chat_template : method of an lm-eval model that has a tokenizer.

    Raises
    ------
    TaskError
        If there is no chat template, or it renders the same either way.
    """
    tokenizer = getattr(getattr(chat_template, "__self__", None), "tokenizer", None)
    if tokenizer is None:
        raise TaskError("enable_thinking is for the model's chat template; add --apply_chat_template, or leave it out.")

    def render(history: list[dict[str, str]], add_generation_prompt: bool = True, thinking: bool = enabled) -> str:
        rendered: str = tokenizer.apply_chat_template(
            history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            enable_thinking=thinking,
        )
        return rendered

    if render(_PROBE) == render(_PROBE, thinking=not enabled):
        raise TaskError(
            "the model's chat template does not read enable_thinking, so it would change nothing; leave it out."
        )
    return render


def opens_thinking(rendered: str) -> bool:
    """Whether a prompt ends in ``<think>``: then the response starts with thoughts, without saying so."""
    return rendered.rstrip().endswith("<think>")

from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.prompts import opens_thinking, prompt, with_thinking
from tests.lmeval_tasks.reasoning.stock_sglang import Tokenizer, model

HISTORY = [{"role": "user", "content": "2 + 2"}]


def test_a_problem_is_asked_for_a_box() -> None:
    asked = prompt({"id": "a", "problem": "What is 1 + 1?", "answer": "2"})
    assert asked == "What is 1 + 1?\n\nReason step by step, and put your final answer within \\boxed{}."


def test_a_question_with_choices_is_asked_for_a_letter() -> None:
    asked = prompt({"id": "a", "problem": "Which?", "choices": ["x", "y: 1", "z", "w"], "answer": "C"})
    assert asked.startswith("Which?\n\nA) x\nB) y: 1\nC) z\nD) w\n\nReason step by step, and put the letter")
    assert asked.endswith("within \\boxed{}.")


@pytest.mark.parametrize(
    ("rendered", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Put your thoughts after <think>.", False),
    ],
)
def test_a_template_may_open_the_thinking(rendered: str, opens: bool) -> None:
    assert opens_thinking(rendered) == opens


def test_the_chat_template_is_told() -> None:
    template = model(lambda *_: "").apply_chat_template
    assert "<think>" not in template(HISTORY)
    assert with_thinking(template, True)(HISTORY) == template(HISTORY)
    assert with_thinking(template, False)(HISTORY) == template(HISTORY) + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_template_that_does_not_listen_is_refused(enabled: bool) -> None:
    template = model(lambda *_: "", Tokenizer(reads_thinking=False)).apply_chat_template
    with pytest.raises(TaskError, match=r"chat template does not read enable_thinking, so it would change nothing;"):
        with_thinking(template, enabled)


def test_thinking_without_a_chat_template_is_refused() -> None:
    with pytest.raises(TaskError, match=r"^enable_thinking is for the model's chat template; add --apply_chat_temp"):
        with_thinking(None, True)

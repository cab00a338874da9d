import json
from decimal import InvalidOperation

import pytest

from kvpolicy.lmeval_tasks.answers import is_correct
from kvpolicy.lmeval_tasks.grading.extract import final_answer
from kvpolicy.lmeval_tasks.gsm8k_sample.task import DATA

SOLUTIONS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]

GOLDEN = {
    "hashes": ("9 * 2 = 18\n#### 18", "18"),
    "hashes with commas and dollar": ("So\n#### $70,000", "70000"),
    "hashes in bold": ("#### **18**", "18"),
    "hashes with unit": ("#### 18 dollars", "18"),
    "box": (r"So she makes \boxed{18}.", "18"),
    "box with decimals": (r"\boxed{18.00}", "18"),
    "box with text": (r"\boxed{\text{18 dollars}}", "18"),
    "box with escaped dollar": (r"\boxed{\$18}", "18"),
    "box with equation": (r"\boxed{x = 18}", "18"),
    "box with LaTeX thousands": (r"\boxed{70{,}000}", "70000"),
    "box with thin spaces": (r"\boxed{70\,000}", "70000"),
    "two boxes": (r"\boxed{3} per day, \boxed{18} in all", "18"),
    "answer is": ("The answer is 18.", "18"),
    "answer is, then a sentence": ("The answer is 18. She works 7 days a week.", "18"),
    "answer is, in LaTeX": (r"The final answer is: \(18\)", "18"),
    "answer is, in bold": ("**Answer:** 18 eggs on 3 days", "18"),
    "answer is a calculation": ("The answer is 16 - 3 + 5 = 18", "18"),
    "answer is a product": (r"Answer: $9 \times 2 = 18$", "18"),
    "last of several marked": ("The answer is 20. No: the answer is 18.", "18"),
    "marked goes before last": ("The answer is 18, for 7 days.", "18"),
    "list heading is no answer": ("#### 1. Count the eggs\nShe has 16.\n#### 2. Sell them\nSo she makes $18.", "18"),
    "last number": ("She makes 9 * 2 = $18 every day.", "18"),
    "last number with commas": ("a profit of $70,000.", "70000"),
    "last number, decimals": ("It costs $2.50", "2.5"),
    "last number with a unit": ("He runs 540m on the 3rd day", "540"),
    "after a bracket": ("#### (5)", "5"),
    "negative": ("The answer is -5.", "-5"),
    "negative dollars": ("#### -$5", "-5"),
    "true minus sign": ("#### \N{MINUS SIGN}5", "-5"),
    "difference is not negative": ("there are 13-5", "5"),
    "percent": ("The answer is 25%.", "25"),
    "after thinking": ("<think>The answer is 20?</think>The answer is 18.", "18"),
    "thinking opened by the prompt": (r"maybe \boxed{20}</think>So 18.", "18"),
    "empty box quoted from the question": (r"I put it within \boxed{}. She makes 18", "18"),
    "gold with comma": ("#### 57500", "57,500"),
}
# Answers, though no numbers.
OTHER_ANSWERS = {
    "boxed fraction": (r"1/2 is \boxed{\frac{1}{2}}", "2"),
    "boxed word": (r"After 2 days: \boxed{none}", "2"),
}
NO_ANSWER = {
    "empty": "",
    "no number": "I do not know.",
    "empty box": r"\boxed{}",
    "unclosed box": r"so \boxed{",
    "thinking that never ends": "<think>The answer is 18. But wait",
    "digits inside a word": "see table A18b",
}


@pytest.mark.parametrize(("text", "gold"), GOLDEN.values(), ids=GOLDEN)
def test_final_number_is_found(text: str, gold: str) -> None:
    assert is_correct(text, gold)
    assert not is_correct(text, "999")


@pytest.mark.parametrize(("text", "number"), OTHER_ANSWERS.values(), ids=OTHER_ANSWERS)
def test_a_number_within_another_answer_is_not_it(text: str, number: str) -> None:
    assert not is_correct(text, number)


@pytest.mark.parametrize("text", NO_ANSWER.values(), ids=NO_ANSWER)
def test_no_number_is_no_answer(text: str) -> None:
    assert final_answer(text, numeric=True).answer is None
    assert not is_correct(text, "18")


@pytest.mark.parametrize(
    ("text", "number"),
    [("She has 16 - 3 = 13", None), (r"so \boxed{13} and then", "13"), ("#### 13\n\nQuestion", "13")],
    ids=["a step", "boxed", "hashes"],
)
def test_truncated_response_needs_a_marked_answer(text: str, number: str | None) -> None:
    assert final_answer(text, numeric=True, truncated=True).answer == number
    assert is_correct(text, "13")
    assert is_correct(text, "13", truncated=True) == (number is not None)


def test_garbage_is_graded_in_no_time() -> None:
    assert not is_correct("9" * 200_000 + "_", "18")
    assert not is_correct("\\boxed{" * 2_000, "18")
    assert not is_correct("#### " * 50_000, "18")


@pytest.mark.parametrize("gold", ["", "none", r"\frac{1}{2}"])
def test_a_gold_answer_that_is_no_number_is_refused(gold: str) -> None:
    with pytest.raises(InvalidOperation):
        is_correct("18", gold)


@pytest.mark.parametrize("row", SOLUTIONS, ids=lambda row: row["id"])
@pytest.mark.parametrize(
    "wrapping", ["{solution}", r"So \boxed{{{answer}}}.", "The answer is {answer}.", "#### ${answer}.00", "{answer}"]
)
def test_gold_solutions_are_correct(row: dict[str, str], wrapping: str) -> None:
    assert is_correct(wrapping.format(**row), row["answer"])

from __future__ import annotations

import random
import time

import pytest

from kvpolicy.lmeval_tasks.grading.extract import Extraction, final_answer

BOXES = {
    "plain": (r"so \boxed{18}.", "18"),
    "nested braces": (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    "escaped braces": (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    "an escaped brace alone": (r"\boxed{\left\{ x > 0 \right.} }", r"\left\{ x > 0 \right."),
    "last of two": (r"\boxed{3} and \boxed{18}", "18"),
    "outermost of nested": (r"\boxed{x = \boxed{5}}", r"x = \boxed{5}"),
    "two in one": (r"\boxed{\boxed{1}, \boxed{2}}", r"\boxed{1}, \boxed{2}"),
    "nested in one that stays open": (r"\boxed{ \boxed{5}", "5"),
    "behind an open brace": (r"{ so \boxed{5}", "5"),
    "behind a stray closing brace": (r"} so \boxed{5}", "5"),
    "fbox": (r"\boxed{3} \fbox{5}", "5"),
    "doubled backslash": (r"\\boxed{5}", "5"),
    "after a line break": (r"\\\boxed{5}", "5"),
    "space before the brace": ("\\boxed \n{5}", "5"),
    "full stop inside": (r"\boxed{5.}", "5."),
    "no braces": (r"$x = \boxed 5$", "5"),
    "no braces, no space": (r"\boxed5.", "5"),
    "no braces, letter": (r"\boxed x$", "x"),
    "no braces, negative": (r"\boxed -5 as said", "-5"),
    "no braces, fraction": (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
    "no braces goes before an earlier box": (r"\boxed{3} \boxed 5", "5"),
    "unclosed after a closed one": (r"\boxed{5}, again \boxed{5", "5"),
    "empty after one that is not": (r"\boxed{5}, in \boxed{ } as asked", "5"),
}
NO_BOX = {
    "empty text": "",
    "no box": "The answer is 18.",
    "empty": r"\boxed{}",
    "of spaces": "\\boxed{ \n}",
    "of punctuation": r"\boxed{.}",
    "unclosed": r"\boxed{18",
    "unclosed with braces inside": r"\boxed{\frac{1}{2}",
    "closed by an escaped brace": r"\boxed{18\}",
    "the word alone": r"I write \boxed and stop",
    "the word in code": r"I use `\boxed`.",
    "another command": r"\boxedtext{18}",
    "no backslash": "boxed{18}",
}


@pytest.mark.parametrize(("text", "answer"), BOXES.values(), ids=BOXES)
def test_what_the_last_box_holds(text: str, answer: str) -> None:
    assert final_answer(text) == Extraction(answer, unfinished_thinking=False)


@pytest.mark.parametrize("text", NO_BOX.values(), ids=NO_BOX)
def test_no_box_is_no_answer(text: str) -> None:
    assert final_answer(text) == Extraction(None, unfinished_thinking=False)


@pytest.mark.parametrize(
    ("text", "thinking", "answer", "unfinished"),
    [
        (r"<think>\boxed{4}</think>\boxed{5}", None, "5", False),
        (r"\boxed{4}</think>\boxed{5}", None, "5", False),
        (r"\boxed{4}</think>\boxed{5}", True, "5", False),
        (r"\boxed{4}</think>no", True, None, False),
        (r"\boxed{5}", None, "5", False),
        (r"\boxed{5}", False, "5", False),
        (r"\boxed{5}", True, None, True),
        ("", True, None, True),
        (r"<think>\boxed{5}", None, None, True),
        (r"<think>\boxed{5}", False, None, True),
        (r"<think>\boxed{5}", True, None, True),
        (r"<think></think><think>\boxed{5}", None, None, True),
        (r"<think>a</think>\boxed{4}</think>\boxed{5}", None, "5", False),
    ],
)
def test_thinking_is_no_answer(text: str, thinking: bool | None, answer: str | None, unfinished: bool) -> None:
    for numeric in (False, True):
        assert final_answer(text, thinking=thinking, numeric=numeric) == Extraction(answer, unfinished)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"#### 17, so \boxed{18}", "18"),
        (r"\boxed{17}, so #### 18", "18"),
        (r"\boxed{17}. The answer is 18.", "18"),
        (r"\boxed{17}, 7 days a week", "17"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("9 * 2 = $18 every day", "$18"),
        (r"in \boxed{}: 18", "18"),
        ("nothing", None),
    ],
)
def test_a_number_may_be_marked_otherwise(text: str, answer: str | None) -> None:
    assert final_answer(text, numeric=True).answer == answer


def test_the_last_number_of_a_truncated_text_is_no_answer() -> None:
    assert final_answer("16 - 3 = 13", numeric=True, truncated=True).answer is None
    assert final_answer("16 - 3 = 13", numeric=True, truncated=False).answer == "13"
    assert final_answer("#### 13 and", numeric=True, truncated=True).answer == "13"


def last_balanced(text: str) -> str | None:
    """The definition, by trying every box: the one that closes last, and of those the widest."""
    found = []
    for start in range(len(text)):
        if text.startswith("\\boxed{", start):
            depth = 0
            for end in range(start + 6, len(text)):
                depth += (text[end] == "{") - (text[end] == "}")
                if depth == 0:
                    found.append((end, -start, text[start + 7 : end]))
                    break
    return max((item for item in found if item[2]), default=(0, 0, None))[2]


@pytest.mark.parametrize("seed", range(200))
def test_random_braces_against_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(["\\boxed{", "{", "}", "a", "b"], [3, 1, 4, 2, 2], k=rng.randrange(1, 30)))
    # A brace that closes nothing ends nothing; the definition takes any text without one.
    depth, kept = 0, ""
    for part in text:
        depth += (part == "{") - (part == "}")
        kept, depth = (kept + part, depth) if depth >= 0 else (kept, 0)
    assert final_answer(kept).answer == last_balanced(kept)


HOSTILE = {
    "open boxes": "\\boxed{" * 15_000,
    "nested boxes": "\\boxed{" * 12_000 + "5" + "}" * 12_000,
    "closed boxes": "\\boxed{5}" * 12_000,
    "backslashes": "\\" * 100_000,
    "spaces after the command": "\\boxed" + " " * 100_000,
    "commands and spaces": ("\\boxed" + " " * 10) * 6_000,
    "boxes without braces": "\\boxed " * 15_000,
    "boxes without braces, commands": "\\boxed" + "\\a" * 50_000,
    "boxes without braces, groups": ("\\boxed\\a{" + "x" * 79) * 1_200,
    "open braces": "{" * 100_000,
    "closing braces": "}" * 100_000,
    "open thinking": "<think>" * 15_000,
    "closed thinking": "</think>" * 12_000,
    "digits": "9" * 100_000,
    "markers": "the answer is " * 7_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("numeric", [False, True])
def test_a_long_hostile_text_takes_no_time(text: str, numeric: bool) -> None:
    start = time.process_time()
    final_answer(text, numeric=numeric)
    assert time.process_time() - start < 1

import time

import pytest

from kvpolicy.lmeval_tasks.livecodebench.code_block import last_program

FOUND = {
    "one block": ("```python\nprint(1)\n```", "print(1)"),
    "the last of two": ("```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```\nDone.", "print(2)"),
    "after the thinking": ("```python\nprint(1)\n```</think>So\n```python\nprint(2)\n```", "print(2)"),
    "thinking in the text": ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "print(2)"),
    "Python before other languages": ("```python\nprint(1)\n```\n```text\n1\n```", "print(1)"),
    "Python before no language": ("```python\nprint(1)\n```\nprints\n```\n1\n```", "print(1)"),
    "no language": ("```\nprint(1)\n```", "print(1)"),
    "the last without a language": ("```\nprint(1)\n```\n```\nprint(2)\n```", "print(2)"),
    "capital letters": ("```Python\nprint(1)\n```", "print(1)"),
    "py": ("```py\nprint(1)\n```", "print(1)"),
    "python3": ("``` python3 \nprint(1)\n```", "print(1)"),
    "with a title": ("```python title=a.py\nprint(1)\n```", "print(1)"),
    "tildes": ("~~~python\nprint('```')\n~~~", "print('```')"),
    "four marks around three": ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
    "in a list": ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)"),
    "Windows lines": ("```python\r\nprint(1)\r\nprint(2)\r\n```\r\n", "print(1)\nprint(2)"),
    "other line separators stay": ("```python\ns = '\x0c\u2028'\n```", "s = '\x0c\u2028'"),
    "begun anew": ("```python\nprint(1\nWait.\n```python\nprint(2)\n```", "print(2)"),
    "cut off in the next block": ("```python\nprint(1)\n```\nOr:\n```python\nprint(", "print(1)"),
    "empty": ("```python\n```", ""),
}
NONE = {
    "empty": "",
    "no block": "print(1)",
    "cut off": "```python\nprint(1)",
    "another language": "```cpp\nint main() {}\n```",
    "in one line": "```python print(1)```",
    "only in the thinking": "```python\nprint(1)\n```</think>So print(1).",
    "closed by another mark": "```python\nprint(1)\n~~~",
    "closed by fewer marks": "````python\nprint(1)\n```",
}


@pytest.mark.parametrize(("text", "program"), FOUND.values(), ids=FOUND)
def test_program(text: str, program: str) -> None:
    assert last_program(text) == (program, False)


@pytest.mark.parametrize("text", NONE.values(), ids=NONE)
def test_no_program(text: str) -> None:
    assert last_program(text) == (None, False)


@pytest.mark.parametrize("thinking", [True, None])
def test_thinking_that_never_ends_is_no_answer(thinking: bool | None) -> None:
    opened = "" if thinking else "<think>"
    assert last_program(f"{opened}```python\nprint(1)\n```", thinking=thinking) == (None, True)


@pytest.mark.parametrize(
    "text", ["```" * 200_000, "```\n" * 100_000, "```python\n" * 100_000, "`" * 500_000, " \t" * 300_000]
)
def test_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    last_program(text)
    assert time.process_time() - start < 2

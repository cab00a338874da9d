from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("TaskError('The file is empty.')", "kvpolicy: The file is empty.\n"),
        ("ValueError('elsewhere')", "ValueError: elsewhere\n"),
    ],
)
def test_only_a_refusal_ends_the_process_with_its_sentence_alone(raised: str, shown: str) -> None:
    code = f"from kvpolicy.lmeval_tasks.errors import TaskError; TaskError('made, and caught'); raise {raised}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith(shown)
    assert ("Traceback" in ended.stderr) == ("elsewhere" in raised)

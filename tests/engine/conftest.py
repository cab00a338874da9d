"""Session fixtures of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # harness and reference are modules of this folder

import harness

PROMPT_LENGTHS = (20, 47, 90)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return harness.smollm2()


@pytest.fixture(scope="session")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3", smollm2)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Three prompts of random tokens, of different lengths."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(100, 40000, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def stock_tokens(tiny: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What SGLang without a policy generates: 120 tokens a prompt, all in one batch."""
    with harness.engine(tiny) as running:
        return [response["output_ids"] for response in harness.greedy(running, prompts, 120)]

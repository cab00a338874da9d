"""Changes of hidden states through chunked prefills, decode steps and row reuse, against plain lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Band
from kvpolicy.sglang_plugin.hidden_taps import HiddenTaps

DEPTH, ROWS, WIDTH, SIZE = 8, 4, 40, 6
BANDS = (Band(2, 2), Band(0.5, 0.75), Band(4, 4))  # layer 2, layers 4 to 6, layer 4
LAYERS = ((2,), (4, 5, 6), (4,))
DECODE = SimpleNamespace(is_decode=lambda: True)
EXTEND = SimpleNamespace(is_decode=lambda: False)


def make() -> HiddenTaps:
    return HiddenTaps(BANDS, DEPTH, ROWS, WIDTH, SIZE, torch.float32, torch.device("cpu"))


class Texts:
    """Random hidden states of every layer and token, per request; feeds them to the taps as SGLang would."""

    def __init__(self, lengths: dict[int, int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = {row: torch.randn(DEPTH, n, SIZE, generator=generator) for row, n in lengths.items()}

    def batch(self, mode: Any, spans: dict[int, tuple[int, int]]) -> tuple[Any, dict[int, torch.Tensor]]:
        positions = torch.cat([torch.arange(*span) for span in spans.values()])
        forward = SimpleNamespace(
            forward_mode=mode,
            positions=positions,
            req_pool_indices=torch.tensor(list(spans)),
            extend_seq_lens_cpu=[stop - start for start, stop in spans.values()],
        )
        layers = {
            layer: torch.cat([self.hidden[row][layer, slice(*span)] for row, span in spans.items()])
            for layer in range(DEPTH)
        }
        return forward, layers

    def prefill(self, taps: HiddenTaps, spans: dict[int, tuple[int, int]]) -> None:
        forward, layers = self.batch(EXTEND, spans)
        taps.plan_prefill(forward)
        for layer in taps.layers:
            taps.record(layers[layer], layer, forward)

    def decode(self, taps: HiddenTaps, positions: dict[int, int]) -> None:
        forward, layers = self.batch(DECODE, {row: (position, position + 1) for row, position in positions.items()})
        for layer in taps.layers:
            taps.record(layers[layer], layer, forward)

    def expected(self, row: int, prompt: int, length: int) -> torch.Tensor:
        hidden = self.hidden[row]
        return torch.stack([
            torch.stack([
                sum((hidden[layer, t] - hidden[layer, t - 1]).norm() for layer in layers) / len(layers)  # type: ignore[misc]
                for t in range(prompt, length)
            ])
            for layers in LAYERS
        ])  # fmt: skip


def test_only_the_layers_of_the_bands_are_tapped() -> None:
    assert make().layers == (2, 4, 5, 6)


def test_changes_of_decoded_tokens_whatever_was_prefilled_in_pieces_and_decoded_beside() -> None:
    taps, texts = make(), Texts({1: 20, 2: 30, 3: 12})
    texts.prefill(taps, {1: (0, 7), 3: (0, 4)})
    texts.prefill(taps, {2: (9, 15)})  # nine tokens were in the radix tree
    texts.decode(taps, {3: 4, 1: 7})
    texts.prefill(taps, {2: (15, 21)})
    for step in range(8):
        texts.decode(taps, {2: 21 + step, 1: 8 + step, 3: 5 + min(step, 6)} if step < 7 else {1: 15, 2: 28})
    for row, prompt, length in ((1, 7, 16), (2, 21, 29), (3, 4, 12)):
        torch.testing.assert_close(taps.changes(row, prompt, length, BANDS), texts.expected(row, prompt, length))
    two = taps.changes(2, 21, 29, (BANDS[2], BANDS[0]))
    torch.testing.assert_close(two, texts.expected(2, 21, 29)[[2, 0]])


def test_tokens_that_are_prefilled_again_after_a_retraction_have_their_changes() -> None:
    taps, texts = make(), Texts({1: 20})
    texts.prefill(taps, {1: (5, 11)})  # the prompt of six ends at position 5: five tokens were in the tree
    texts.prefill(taps, {1: (11, 14)})
    texts.decode(taps, {1: 14})
    torch.testing.assert_close(taps.changes(1, 6, 15, BANDS), texts.expected(1, 6, 15))


def test_a_row_that_is_used_again_shows_nothing_of_before() -> None:
    taps, first, second = make(), Texts({1: 20}), Texts({1: 20}, seed=1)
    for texts in (first, second):
        texts.prefill(taps, {1: (0, 5)})
        for position in range(5, 9):
            texts.decode(taps, {1: position})
        torch.testing.assert_close(taps.changes(1, 5, 9, BANDS), texts.expected(1, 5, 9))


def test_a_prefill_that_passed_no_hook_is_noticed() -> None:
    taps, texts = make(), Texts({1: 20})
    forward, layers = texts.batch(EXTEND, {1: (0, 5)})
    taps.plan_prefill(forward)
    taps.record(layers[2], 2, forward)
    with pytest.raises(RuntimeError, match="disable-prefill-cuda-graph"):
        taps.plan_prefill(forward)
    with pytest.raises(RuntimeError, match="disable-prefill-cuda-graph"):
        taps.changes(1, 5, 5, BANDS)


def test_a_dummy_prefill_is_not_recorded() -> None:
    taps, texts = make(), Texts({1: 20})
    forward, layers = texts.batch(EXTEND, {1: (0, 5)})
    taps.record(layers[2], 2, forward)
    assert taps.changes(1, 0, 5, BANDS).eq(0).all()


def test_the_hook_asks_the_next_layer_for_its_input_and_leaves_others_theirs() -> None:
    taps, texts, seen = make(), Texts({1: 20}), []
    texts.prefill(taps, {1: (0, 5)})
    forward, layers = texts.batch(DECODE, {1: (5, 6)})
    for keywords in ({}, {"capture_output": lambda hidden, **ownership: seen.append((hidden, ownership))}):
        args, changed = taps.asking_for(2)(None, ("positions", "hidden", forward), dict(keywords))
        assert args == ("positions", "hidden", forward)
        changed["capture_output"](layers[2], owned=True)
    assert len(seen) == 1
    assert seen[0][1] == {"owned": True}
    before = texts.hidden[1][2]
    assert taps.changes(1, 5, 6, BANDS)[0, 0] == 0  # recorded twice: the same state follows itself
    assert torch.equal(taps._newest[0, 1], before[5])


def test_memory_is_linear_in_the_longest_text() -> None:
    taps = make()
    assert taps.bytes_per_request == 4 * (4 * SIZE + 3 * WIDTH)  # newest states of 4 layers, 3 numbers a token
    assert taps.total_bytes == ROWS * taps.bytes_per_request

import time

import pytest

from kvpolicy.lmeval_tasks.failures import garbage, looped

SENTENCE = "She sells 9 eggs. "
PROSE = (
    "Janet's ducks lay 16 eggs per day, of which she eats three and bakes four. That leaves 16 - 3 - 4 = 9 eggs. "
    "At two dollars each she makes 9 * 2 = 18 dollars every day, so the final answer is \\boxed{18}."
)

LOOPS = {
    "sentence five times": SENTENCE * 5,
    "after healthy text": PROSE + SENTENCE * 5,
    "within the last 500 characters": SENTENCE * 5 + "x" * (500 - 5 * len(SENTENCE)),
    "over line breaks": "Wait, I am wrong.\n" * 5,
    "a span of ten": "0123456789" * 5,
    "a span of forty": "".join(map(chr, range(48, 88))) * 5,
    "a short phrase that fills longer spans": "Wait. " * 10,
    "one character": "!" * 50,
    "cut off in the sixth round": SENTENCE * 5 + SENTENCE[:7],
}
NO_LOOPS = {
    "empty": "",
    "prose": PROSE,
    "sentence four times": SENTENCE * 4,
    "four and a half times": SENTENCE * 4 + SENTENCE[:9],
    "not in a row": "".join(f"{SENTENCE}{number}" for number in range(11, 20)),
    "before the last 500 characters": SENTENCE * 9 + (PROSE * 3)[:500],
    "a span of 41": "".join(map(chr, range(48, 89))) * 5,
    "a short phrase, too few times": "Wait. " * 8,
}
GARBAGE = {
    "31 of the last 100": PROSE + "é" * 31,
    "emoji": "\N{GRINNING FACE}" * 31,
    "one character in more than half of 200": PROSE + ("a1" * 33 + "a2" * 34 + "aa" * 33)[:200],
    "one character fills the end": PROSE + "!" * 101,
}
NO_GARBAGE = {
    "empty": "",
    "one digit": "7",
    "prose": PROSE,
    "30 of the last 100": "é" * 30 + "x1y2z3w" * 10,
    "foreign text further up": "é" * 500 + (PROSE * 2)[:200],
    "half of the last 200": PROSE + "ab" * 100,
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_a_repeated_span_at_the_end_is_a_loop(text: str) -> None:
    assert looped(text)


@pytest.mark.parametrize("text", NO_LOOPS.values(), ids=NO_LOOPS)
def test_other_text_does_not_loop(text: str) -> None:
    assert not looped(text)


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_a_flood_at_the_end_is_garbage(text: str) -> None:
    assert garbage(text)


@pytest.mark.parametrize("text", NO_GARBAGE.values(), ids=NO_GARBAGE)
def test_other_text_is_no_garbage(text: str) -> None:
    assert not garbage(text)


HOSTILE = {
    "near-repetitions": "".join(SENTENCE * 4 + chr(0x100 + i % 500) for i in range(1400)),
    "one character": "a" * 100_000,
    "almost one character": ("a" * 49 + "b") * 2_000,
    "line breaks": "\n" * 100_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_long_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    for _ in range(20):
        looped(text), garbage(text)
    assert time.process_time() - start < 1

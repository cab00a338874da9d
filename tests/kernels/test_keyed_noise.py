"""Counter-based noise against splitmix64 in Python integers, and against the distributions it promises."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvpolicy.kernels.keyed_noise import hash_keys, mixed_seed, standard_normal, uniform

MASK = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(state: int) -> int:
    """The first output of splitmix64 (Steele, Lea, Flood 2014) for a seed."""
    z = (state + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def reference_hash(*keys: int) -> int:
    """Each key is xored into the state, followed by one round; the result is unsigned."""
    state = 0
    for key in keys:
        state = splitmix64(state ^ (key & MASK))
    return state


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def tensors(*keys: int) -> list[torch.Tensor]:
    return [torch.tensor(key, dtype=torch.int64) for key in keys]


@pytest.mark.parametrize(
    ("seed", "index", "output"),
    [
        pytest.param(0, 0, 0xE220A8397B1DCDAF, id="seed 0"),
        pytest.param(1234567, 0, 6457827717110365317, id="seed 1234567, first"),
        pytest.param(1234567, 1, 3203168211198807973, id="seed 1234567, second"),
        pytest.param(1234567, 2, 9817491932198370423, id="seed 1234567, third"),
    ],
)
def test_one_key_gives_the_published_outputs_of_splitmix64(seed: int, index: int, output: int) -> None:
    key = signed((seed + index * GOLDEN) & MASK)
    assert int(hash_keys(*tensors(key))) & MASK == output
    assert reference_hash(key) == output


@pytest.mark.parametrize("n_keys", [1, 2, 3, 5, 6])
def test_hashes_equal_the_reference_in_python_integers(n_keys: int) -> None:
    rng = random.Random(n_keys)
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 2**32]
    for _ in range(100):
        keys = [rng.choice([*edges, rng.getrandbits(64) - 2**63]) for _ in range(n_keys)]
        assert int(hash_keys(*tensors(*keys))) == signed(reference_hash(*keys)), keys


def test_numbers_count_as_tensors_of_one_number_do() -> None:
    tail = torch.arange(5)
    for numbers in [(0,), (2**63 - 1, -(2**63)), (-1, 7, 2**32)]:
        for draw in (hash_keys, uniform, standard_normal):
            assert torch.equal(draw(*numbers, tail), draw(*tensors(*numbers), tail))
    with pytest.raises(AssertionError, match="before"):
        hash_keys(tail, 3)


def test_a_narrow_key_is_widened() -> None:
    keys = torch.tensor(2**40), torch.arange(5)
    assert torch.equal(hash_keys(keys[0], keys[1].int()), hash_keys(*keys))


def test_the_order_and_the_number_of_keys_matter() -> None:
    keys = [(1, 2), (2, 1), (1,), (1, 0), (0, 1), (1, 2, 0)]
    assert len({int(hash_keys(*tensors(*key))) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((0,), id="zero"),
        pytest.param((0, 0), id="two zeros"),
        pytest.param((5, 1), id="small"),
        pytest.param((2**63 - 1, 3), id="the largest"),
        pytest.param((-(2**63), 0), id="the smallest"),
        pytest.param((-1, -2, -3), id="negative"),
    ],
)
def test_a_mixed_seed_is_the_lower_63_bits_of_the_hash(keys: tuple[int, ...]) -> None:
    assert mixed_seed(*keys) == reference_hash(*keys) & (2**63 - 1)


def test_mixed_seeds_of_different_keys_differ() -> None:
    numbers = [0, 1, 2, -1, 7, 2**31, 2**63 - 1, -(2**63)]
    pairs = [(a, b) for a in numbers for b in numbers]
    mixed = [mixed_seed(*pair) for pair in pairs] + [mixed_seed(number) for number in numbers]
    assert len(set(mixed)) == len(mixed)
    assert all(0 <= seed < 2**63 for seed in mixed)
    assert mixed_seed(7, 0) != 7


def test_a_value_does_not_depend_on_the_shape_it_is_drawn_in() -> None:
    layers, heads, tokens = torch.tensor([3, 9]).view(2, 1, 1), torch.arange(3).view(3, 1), torch.arange(63)
    seed = torch.tensor(5)
    for draw, error in ((hash_keys, 0), (uniform, 0), (standard_normal, 1e-6)):
        block = draw(seed, layers, heads, tokens)
        assert block.shape == (2, 3, 63)
        for layer, head, token in [(0, 0, 0), (1, 2, 62), (1, 0, 31)]:
            alone = draw(*tensors(5, (3, 9)[layer], head, token))
            torch.testing.assert_close(block[layer, head, token], alone, rtol=error, atol=error)


def test_uniform_takes_the_upper_52_bits_of_the_hash() -> None:
    values = uniform(torch.tensor(7), torch.arange(111))
    assert values.dtype == torch.float64
    for counter, value in enumerate(values.tolist()):
        assert value == ((reference_hash(7, counter) >> 12) + 0.5) / 2**52


def key_of(output: int) -> int:
    """The single key that hashes to `output`: every step of splitmix64 can be undone."""

    def unshift(z: int, bits: int) -> int:
        x = z
        for _ in range(64 // bits):
            x = z ^ (x >> bits)
        return x

    z = unshift(output, 31) * pow(MIX_2, -1, 1 << 64) & MASK
    z = unshift(z, 27) * pow(MIX_1, -1, 1 << 64) & MASK
    return signed((unshift(z, 30) - GOLDEN) & MASK)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(0, id="all zeros"),
        pytest.param(1, id="one"),
        pytest.param(2**63, id="half"),
        pytest.param(MASK, id="all ones"),
    ],
)
def test_uniform_stays_inside_the_open_interval_at_the_ends_of_the_hash(output: int) -> None:
    assert reference_hash(key_of(output)) == output
    assert 0 < float(uniform(*tensors(key_of(output)))) < 1
    assert math.isfinite(standard_normal(*tensors(key_of(output))))


def test_uniform_values_are_uniform() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = uniform(torch.tensor(3), torch.arange(8)[:, None], torch.arange(5000)).flatten()
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


def test_normal_values_are_standard_normal() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = standard_normal(torch.tensor(3), torch.arange(8)[:, None], torch.arange(5000)).flatten()
    assert values.dtype == torch.float32
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-3


def test_moments_of_normal_values() -> None:
    values = standard_normal(torch.tensor(0), torch.arange(20)[:, None], torch.arange(5000)).double().flatten()
    # Standard errors of the mean of x, x^2, x^3 and x^4 for a standard normal x: sqrt of 1, 2, 15 and 96 over n.
    for power, (expected, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert float(values.pow(power).mean()) == pytest.approx(expected, abs=5 * (variance / len(values)) ** 0.5)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "layer", "counter"])
def test_neighbouring_keys_give_uncorrelated_values(axis: int) -> None:
    keys = [torch.arange(30).view([-1 if i == axis else 1 for i in range(3)]) for axis in range(3)]
    values = standard_normal(*keys).double()
    a, b = values.narrow(axis, 0, 29).flatten(), values.narrow(axis, 1, 29).flatten()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / len(a) ** 0.5

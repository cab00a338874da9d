"""Projected energies from paged buffers against those of gathered keys and values."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.projected_energy_paged import projected_energy_paged, projected_energy_paged_reference
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted
from tests.kernels.paged_cases import DTYPES, random_pool, shuffled_rows
from tests.kernels.tolerance import assert_close

CPU = torch.device("cpu")
SHARED_MEMORY = 227 * 1024  # that a program on an H100 or H200 may have
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])


def random_projection(shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """``[R, L, D, r]``, another matrix for each request and layer."""
    generator = torch.Generator().manual_seed(shape[-2])
    return torch.randn(shape, generator=generator).to(device)


def sums(keys: Pool, values: Pool, rows: Rows, projection: torch.Tensor) -> torch.Tensor:
    """The definition in fp64, of all tokens at once, each with the matrices of its own request."""
    owner = torch.repeat_interleave(torch.tensor(rows.lengths))
    matrices = projection.cpu().double()[owner].permute(1, 0, 2, 3)  # [L, T, D, r]
    slots = rows.slots.cpu()
    tokens = (torch.stack([buffer.cpu()[slots].double() for buffer in pool.buffers]) for pool in (keys, values))
    key_energy, value_energy = ((x @ matrices).square().sum(-1) for x in tokens)
    return (key_energy * value_energy).transpose(1, 2)


@dtypes
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("lengths", [(1,), (63,), (111,), (63, 0, 111, 1)], ids=str)
def test_one_launch_gives_every_request_its_energies(
    lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device, launches: Counter[str]
) -> None:
    rows = shuffled_rows(lengths, 200, device, seed=head_dim)
    keys, values = (random_pool((2, 200, 3, head_dim), dtype, rows, seed) for seed in (1, 2))
    projection = random_projection((len(lengths), 2, head_dim, 20), device)
    energies = projected_energy_paged(keys, values, rows, projection)
    assert launches == {"_projected_energy_kernel": 1}
    assert energies.dtype == torch.float32
    assert_close(energies, projected_energy_paged_reference(keys, values, rows, projection))
    assert_close(energies, sums(keys, values, rows, projection))


@pytest.mark.parametrize("rank", [1, 7, 16, 32, 33, 64])
def test_other_ranks(rank: int, device: torch.device) -> None:
    rows = shuffled_rows((5, 65), 80, device)
    keys, values = (random_pool((2, 80, 2, 60), torch.bfloat16, rows, seed) for seed in (1, 2))
    projection = random_projection((2, 2, 60, rank), device)
    assert_close(projected_energy_paged(keys, values, rows, projection), sums(keys, values, rows, projection))


def test_a_worked_example(device: torch.device) -> None:
    # k G = (1*1 + 2*3, 1*2 + 2*4) = (7, 10), v G = (1*1 - 1*3, 1*2 - 1*4) = (-2, -2)
    keys, values = (Pool.of([torch.tensor([[[1.0, x]]], device=device)]) for x in (2, -1))
    projection = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=device)
    energies = projected_energy_paged(keys, values, shuffled_rows([1], 1, device), projection)
    assert energies.tolist() == [[[(49 + 100) * (4 + 4)]]]


@dtypes
def test_infinities_and_nans_are_those_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    rows = shuffled_rows([7], 9, device)
    keys, values = (random_pool((1, 9, 1, 60), dtype, rows, seed) for seed in (1, 2))
    projection = random_projection((1, 1, 60, 20), device).abs()
    projection[0, 0, 3, :10] = 1.0  # of one bit: the parts of it that are left are 0
    projection[0, 0, 4, :10] = 2.0**-10 + 2.0**-30
    odd = [[inf, 0, 0], [-inf, 0, 0], [inf, inf, 0], [inf, -inf, 0], [nan, 0, 0], [0, 0, inf], [inf, 0, nan]]
    for slot, (third, fourth, last) in zip(rows.slots.tolist(), odd, strict=True):
        row = keys.buffers[0][slot, 0]
        row[3], row[4], row[59] = third, fourth, last
    energies = projected_energy_paged(keys, values, rows, projection)
    assert_close(energies.flatten(), torch.tensor([inf, inf, inf, nan, nan, inf, nan]))
    assert_close(energies, projected_energy_paged_reference(keys, values, rows, projection))
    assert_close(energies, projected_energy_paged(values, keys, rows, projection))


def test_energies_of_zero_stay_zero(device: torch.device) -> None:
    rows = shuffled_rows([3], 3, device)
    zero, other = Pool.of([torch.zeros(3, 2, 64, device=device)]), random_pool((1, 3, 2, 64), torch.float32, rows)
    projection = random_projection((1, 1, 64, 20), device)
    assert projected_energy_paged(zero, other, rows, projection).tolist() == [[[0.0] * 3] * 2]


def test_large_keys_do_not_overflow_the_cache_dtype(device: torch.device) -> None:
    keys = Pool.of([torch.full((1, 1, 64), 300.0, dtype=torch.float16, device=device)])  # 64 * 300^2 is beyond fp16
    energies = projected_energy_paged(keys, keys, shuffled_rows([1], 1, device), torch.ones(1, 1, 64, 1, device=device))
    assert_close(energies, torch.tensor([[[(64 * 300.0) ** 4]]]))


def test_slots_beyond_two_to_the_31_elements(device: torch.device) -> None:
    keys, values = (Pool.of([far_buffer(8, 128, device)]) for _ in range(2))
    last = values.shape[1] - 1
    rows = Rows.of([torch.tensor([last, 5], device=device), torch.tensor([last - 1], device=device)])
    for slot in rows.slots.tolist():
        for pool, seed in ((keys, slot), (values, slot + 1)):
            pool.buffers[0][slot] = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
    projection = random_projection((2, 1, 128, 20), device)
    energies = projected_energy_paged(keys, values, rows, projection)
    assert (energies > 0).all()
    assert_close(energies, projected_energy_paged_reference(keys, values, rows, projection))


@pytest.mark.parametrize("lengths", [(0,), (0, 0)], ids=str)
def test_no_token_needs_no_launch(lengths: tuple[int, ...], device: torch.device, launches: Counter[str]) -> None:
    rows = shuffled_rows(lengths, 4, device)
    pool = random_pool((2, 4, 3, 64), torch.bfloat16, rows)
    projection = random_projection((len(lengths), 2, 64, 20), device)
    assert projected_energy_paged(pool, pool, rows, projection).shape == (2, 3, 0)
    assert launches == {}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param((1, 2, 8, 4), "projection.shape", id="too few requests"),
        pytest.param((2, 1, 8, 4), "projection.shape", id="too few layers"),
        pytest.param((2, 2, 7, 4), "projection.shape", id="another head size"),
        pytest.param((2, 2, 8, 65), "rank", id="too many columns"),
        pytest.param((2, 2, 8, 0), "rank", id="no column"),
    ],
)
def test_a_projection_that_does_not_fit_is_a_programming_error(shape: tuple[int, ...], message: str) -> None:
    rows = shuffled_rows([3, 1], 5, CPU)
    pool = random_pool((2, 5, 3, 8), torch.float32, rows)
    with pytest.raises(AssertionError, match=message):
        projected_energy_paged(pool, pool, rows, torch.zeros(shape))


def test_what_the_kernel_assumes_of_pools_is_asserted() -> None:
    rows, projection = shuffled_rows([3], 5, CPU), torch.zeros(1, 1, 8, 4)
    fine = random_pool((1, 5, 2, 8), torch.float32, rows)
    with pytest.raises(AssertionError, match="shape"):
        projected_energy_paged(fine, random_pool((1, 6, 2, 8), torch.float32, rows), rows, projection)
    with pytest.raises(AssertionError, match="dtype"):
        projected_energy_paged(fine, random_pool((1, 5, 2, 8), torch.float16, rows), rows, projection)
    with pytest.raises(AssertionError, match="16 bytes"):
        projected_energy_paged(fine, Pool.of([torch.zeros(1 + 5 * 2 * 8)[1:].view(5, 2, 8)]), rows, projection)
    with pytest.raises(AssertionError, match="fp32"):
        projected_energy_paged(fine, fine, rows, projection.double())
    with pytest.raises(AssertionError, match="contiguous"):
        projected_energy_paged(fine, fine, rows, torch.zeros(1, 1, 4, 8).mT)
    with pytest.raises(AssertionError, match="256"):
        projected_energy_paged(*[random_pool((1, 5, 1, 257), torch.float32, rows)] * 2, rows, torch.zeros(1, 1, 257, 4))


@pytest.mark.parametrize(
    ("head_dim", "rank", "dtype"),
    [
        pytest.param(64, 20, torch.bfloat16, id="64"),
        pytest.param(80, 20, torch.bfloat16, id="80"),
        pytest.param(128, 20, torch.bfloat16, id="128"),
        pytest.param(256, 64, torch.bfloat16, id="256"),
        pytest.param(128, 20, torch.float16, id="fp16"),
    ],
)
def test_the_product_runs_on_tensor_cores_and_fits(head_dim: int, rank: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    rows = shuffled_rows([5], 9, CPU)
    pool = random_pool((1, 9, 8, head_dim), dtype, rows)
    with interpreted() as launched:
        projected_energy_paged(pool, pool, rows, random_projection((1, 1, head_dim, rank), CPU))
    code = machine_code(launched[0])
    assert "wgmma.mma_async.sync.aligned.m64n" in code.ptx
    assert ".f32.bf16.bf16" in code.ptx
    assert code.shared <= SHARED_MEMORY
    if dtype == torch.bfloat16:
        assert code.ptx.count("cp.async.cg.shared.global") >= 2  # the next keys and values come during the product
        assert code.spilled <= 64

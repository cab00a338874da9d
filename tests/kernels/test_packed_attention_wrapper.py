"""What the wrapper of packed attention does beside attention: no launch without need, and what it asserts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kvpolicy.kernels.packed_attention import packed_attention
from kvpolicy.kernels.packed_buffer import Buffer
from tests.kernels.bf16_rounding import bf16_is_rounded  # noqa: F401
from tests.kernels.compiling import machine_code
from tests.kernels.interpreting import interpreted
from tests.kernels.packed_cases import Batch, Case, empty_buffer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Case("fp32", (1, 63, 0, 40), 2, 2, 64, None, (4, 32), protected_values=0.2)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen tokens are several parts."""
    pytest.importorskip("triton")
    from kvpolicy.kernels import packed_attention_kernel

    monkeypatch.setattr(packed_attention_kernel, "LEAST_PART", 32)


def attend(batch: Batch, keys: Buffer, values: Buffer, *, use_triton: bool = True) -> torch.Tensor:
    return packed_attention(
        batch.queries, keys, values, *batch.tensors, batch.queries.shape[-1] ** -0.5, use_triton=use_triton
    )


@pytest.mark.parametrize("use_triton", [False, True])
def test_no_request_needs_no_launch(device: torch.device, launches: Counter[str], use_triton: bool) -> None:
    batch, keys, values = SMALL.draw(device)
    nobody = Batch(batch.queries[:0], batch.req_to_token, batch.req_pool_indices[:0], batch.seq_lens[:0])
    assert attend(nobody, keys, values, use_triton=use_triton).shape == (0, 4, 64)
    assert launches == {}


def test_a_cpu_runs_no_kernel_unless_it_is_told_to(launches: Counter[str]) -> None:
    batch, keys, values = SMALL.draw(torch.device("cpu"))
    output = packed_attention(batch.queries, keys, values, *batch.tensors, 0.125)
    assert torch.equal(output, attend(batch, keys, values, use_triton=False))
    assert launches == {}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"values": torch.zeros(9, 2, 80)}, "keys.shape", id="values of another head size"),
        pytest.param({"queries": torch.zeros(2, 4, 80)}, "does not fit", id="queries of another head size"),
        pytest.param({"queries": torch.zeros(2, 3, 64)}, "must be a multiple", id="a group that is no whole number"),
        pytest.param({"queries": torch.zeros(2, 4, 64).half()}, "as the queries", id="queries of another dtype"),
        pytest.param({"queries": torch.zeros(3, 4, 64)}, "must be requests", id="a query without a request"),
        pytest.param({"req_to_token": torch.zeros(3, 9).long()}, "must be int32", id="slots of another type"),
        pytest.param({"seq_lens": torch.ones(2)}, "must be int32 or int64", id="lengths that are none"),
        pytest.param({"scaling": 0.0}, "must be positive", id="no factor"),
        pytest.param({"keys": torch.zeros(2, 9, 64).transpose(0, 1)}, "contiguous", id="keys that lie apart"),
        pytest.param({"values": empty_buffer(9, 2, (64, 4, 32), BF16)}, "values are", id="values of another dtype"),
        pytest.param(
            {
                "queries": torch.zeros(2, 4, 96),
                "keys": torch.zeros(9, 2, 96),
                "values": empty_buffer(9, 2, (96, 4, 48), FP32),
            },
            "a power of two",
            id="groups of 48",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_a_programming_error(change: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {
        "queries": torch.zeros(2, 4, 64),
        "keys": torch.zeros(9, 2, 64),
        "values": torch.zeros(9, 2, 64),
        "req_to_token": torch.zeros(3, 9, dtype=torch.int32),
        "req_pool_indices": torch.arange(2),
        "seq_lens": torch.ones(2, dtype=torch.int64),
        "scaling": 1.0,
    }
    with pytest.raises(AssertionError, match=sentence):
        packed_attention(**{**arguments, **change}, use_triton=True)


@pytest.mark.parametrize("packing", [(4, 64), (2, 32), (8, 128)], ids=str)
@pytest.mark.parametrize("keys", [False, True])
def test_products_are_those_of_tensor_cores(packing: tuple[int, int], keys: bool) -> None:
    pytest.importorskip("triton")
    case = Case("", (5,), 8, 4, 128, packing if keys else None, packing, BF16, protected_values=0.2)
    batch, key_buffer, values = case.draw(torch.device("cpu"))
    with interpreted() as launched:
        attend(batch, key_buffer, values)
    assert len(launched) == 2
    code = machine_code(launched[0])
    assert code.ptx.count("mma.sync") >= 24
    assert code.ptx.count("cp.async.cg") >= 8  # loaded ahead, 16 bytes at a time
    assert code.spilled == 0
    assert code.shared <= 227 * 2**10 // 3  # so that three programs share a multiprocessor of an H100 or H200

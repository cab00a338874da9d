"""One layer's keys or values as low-bit codes in paged slots, with the rows that are kept as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpolicy.kernels.pack_rows import PackedRows, check_layout, pack_rows, unpack_rows


@dataclass(frozen=True, eq=False)
class PackedBuffer:
    """``[S, H, D]`` of slots, KV heads and channels, stored as :class:`PackedRows`.

    A row is what :func:`unpack_rows` makes of its codes, rounded to `dtype`; or, where ``index[s, h]`` is not negative,
    the protected row ``rows[index[s, h], h]``, exact.

    codes : uint8 ``[S, H, D * bits / 8]``
    scale, minimum : ``[S, H, D / group]`` in the dtype of the model
    bits, group : see :func:`check_layout`
    index : int32 ``[S, H]``, -1 where a row is not protected; None if none ever is
    rows : ``[P, H, D]`` in the dtype of the model. The last one is spare: no index names it, and what writes without a
        wait for the device leaves there what belongs nowhere.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    group: int
    index: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        slots, heads, head_dim = self.shape
        check_layout(head_dim, self.bits, self.group)
        assert self.codes.dtype == torch.uint8, f"{self.codes.dtype = } must be uint8"
        groups = (slots, heads, head_dim // self.group)
        for name, tensor in (("scale", self.scale), ("minimum", self.minimum)):
            assert tensor.shape == groups, f"{name} is {tuple(tensor.shape)}, must be {groups}"
            assert tensor.dtype == self.dtype, f"{name} is {tensor.dtype}, must be {self.dtype = }"
        assert (self.index is None) == (self.rows is None), "index and rows belong together"
        if self.index is not None and self.rows is not None:
            assert self.index.shape == (slots, heads), f"{self.index.shape = } must be {(slots, heads)}"
            assert self.index.dtype == torch.int32, f"{self.index.dtype = } must be int32"
            assert self.rows.shape[1:] == (heads, head_dim), f"{self.rows.shape = } must be [P, {heads}, {head_dim}]"
            assert len(self.rows) > 0, "the spare row is missing"
            assert self.rows.dtype == self.dtype, f"{self.rows.dtype = } must be {self.dtype = }"
        for tensor in self.tensors:
            assert tensor.is_contiguous(), f"{tensor.stride() = } must be those of a contiguous tensor"
            assert tensor.device == self.device, f"{tensor.device = } must be {self.device = }"

    @property
    def shape(self) -> torch.Size:
        """``(S, H, D)``."""
        slots, heads, width = self.codes.shape
        return torch.Size((slots, heads, width * 8 // self.bits))

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, and of what is read."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All there is: whoever moves slots moves the first three, or four, of them."""
        every = (self.codes, self.scale, self.minimum, self.index, self.rows)
        return tuple(tensor for tensor in every if tensor is not None)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """``[n, H, D]`` of `dtype`: the rows in these slots (int64 ``[n]``), and no other is unpacked.

        Where rows are protected the host waits for the device; :func:`unpack_rows_paged` does the same without.
        """
        packed = PackedRows(*(tensor.index_select(0, slots) for tensor in (self.codes, self.scale, self.minimum)))
        rows = unpack_rows(packed, self.bits, self.dtype)
        if self.index is not None and self.rows is not None:
            index = self.index.index_select(0, slots).flatten()
            places = (index >= 0).nonzero()[:, 0]
            heads, head_dim = rows.shape[1:]
            numbers = index.index_select(0, places).long() * heads + places % heads
            exact = self.rows.flatten(0, 1).index_select(0, numbers)
            rows.view(-1, head_dim).index_copy_(0, places, exact)
        return rows

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        return self.read(slots)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Pack `rows` (``[n, H, D]`` of `dtype`) into distinct slots (int64 ``[n]``, not negative).

        Where the index of a slot and head names a protected row, that row is written too. Nothing waits for the device.
        """
        packed = pack_rows(rows, self.bits, self.group)
        for stored, new in zip((self.codes, self.scale, self.minimum), packed, strict=True):
            stored.index_copy_(0, slots, new)
        if self.index is not None and self.rows is not None:
            spare, heads, head_dim = len(self.rows) - 1, *rows.shape[1:]
            index = self.index.index_select(0, slots).long()
            numbers = torch.where(index >= 0, index, spare) * heads + torch.arange(heads, device=index.device)
            self.rows.view(-1, head_dim).index_copy_(0, numbers.flatten(), rows.reshape(-1, head_dim))


Buffer = torch.Tensor | PackedBuffer  # `[S, H, D]` either way: both have shape, dtype, device and `buffer[slots]`


def assert_for_kernels(buffer: PackedBuffer) -> None:
    """What Triton kernels assume of a buffer beyond what every :class:`PackedBuffer` is."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert buffer.dtype in dtypes, f"{buffer.dtype = } must be one of {dtypes}"
    head_dim, group = buffer.shape[-1], buffer.group
    fits = group == head_dim or group & (group - 1) == 0
    assert fits, f"{group = } must be a power of two, or all of {head_dim = }"
    assert head_dim <= 1024, f"{head_dim = } must be at most 1024"

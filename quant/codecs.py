"""The codecs by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpolicy.kernels.pack_rows import BITS
from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.blockwise import Blockwise
from kvpolicy.quant.codec import Codec, Unchanged

DEFAULT_GROUP = 64
_GROUPS = {"": DEFAULT_GROUP, "-g16": 16, "-g32": 32, "-g64": 64, "-gD": None}

CODECS: dict[str, Callable[[], Codec]] = {
    "none": Unchanged,
    **{f"int{bits}{end}": partial(AsymmetricInt, bits, group) for bits in BITS for end, group in _GROUPS.items()},
    "nf4": partial(Blockwise, "nf4"),
    "fp4": partial(Blockwise, "fp4"),
    "int8-blockwise": partial(Blockwise, "int8-blockwise"),
}


def codec(name: str) -> Codec:
    """The codec called `name`; ``int2``, ``int4`` and ``int8`` without a group have groups of 64 channels.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; use one of {', '.join(CODECS)}")
    return CODECS[name]()

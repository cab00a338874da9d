"""EpiKV's signals: what the change of the hidden state says of a token at the moment it is generated."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from kvpolicy.policies.base import Band

Signal = Literal["zscore", "raw", "rolling", "adaptive"]
LEAST_DEVIATION = 1e-6


class Form(NamedTuple):
    """Layers that a signal compares, as shares of the depth of the published model of 32 layers, and A's weight."""

    band_a: Band
    band_b: Band
    weight_a: float = 1.0


ONE_LAYER = Form(Band(10 / 32, 10 / 32), Band(21 / 32, 21 / 32))
FORMS: dict[Signal, Form] = {
    "zscore": ONE_LAYER,
    "raw": ONE_LAYER,
    "rolling": ONE_LAYER,
    "adaptive": Form(Band(7 / 32, 13 / 32), Band(18 / 32, 25 / 32), weight_a=1.29),
}


def band_signal(change: torch.Tensor, columns: torch.Tensor, signal: Signal, window: int) -> torch.Tensor:
    """The signal of some decode tokens; each depends on the changes up to its own token only.

    zscore, adaptive : ``w * z_a - z_b``, where ``z`` is a change in standard deviations (of a population, plus 1e-6)
        from the mean of the newest `window` changes of its band, itself among them; 0 for the first token.
    raw : ``d_a - d_b``, the changes themselves.
    rolling : mean of ``d_a - d_b`` over the newest `window` tokens.

    Parameters
    ----------
    change : ``[2, T]`` float
        Of bands A and B, see :attr:`Candidates.hidden_change`; computed in fp64.
    columns : int64 ``[K]``
        Columns of the tokens asked about. -1, before the first, has the signal 0.

    Returns
    -------
    fp64 ``[K]``.
    """
    assert len(change) == 2, f"{change.shape = }: two bands are compared"
    padded = functional.pad(change.double(), (window, 0))  # each window is whole, and empty before the first token
    reach = columns[:, None] + torch.arange(1, window + 1, device=columns.device)
    windows, inside = padded[:, reach], reach >= window
    newest, count = windows[..., -1], inside.sum(dim=-1).clamp_min(1)
    if signal == "raw":
        return newest[0] - newest[1]
    mean = windows.sum(dim=-1) / count
    if signal == "rolling":
        return mean[0] - mean[1]
    deviation = (((windows - mean[..., None]) * inside).square().sum(dim=-1) / count).sqrt()
    z = torch.where(count < 2, 0.0, (newest - mean) / (deviation + LEAST_DEVIATION))
    return FORMS[signal].weight_a * z[0] - z[1]

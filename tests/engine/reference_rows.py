"""Where kept tokens lie in the reference, for methods whose random numbers, or ties, belong to places."""

import torch


def in_their_rows(index: torch.Tensor) -> torch.Tensor:
    """Reorder `index` [H_kv, K]: of the first K rows each kept one stays, and later ones fill those of evicted ones."""
    heads = []
    for kept in index.tolist():
        later = [row for row in kept if row >= len(kept)]
        heads.append([row if row in kept else later.pop(0) for row in range(len(kept))])
    return torch.tensor(heads).to(index)

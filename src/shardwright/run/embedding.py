"""The token embedding.

B batch, S sequence, E hidden.
"""

import torch
from torch import Tensor, nn

from shardwright.run.linear import Join, local, same


class Embedding(nn.Module):
    """Rows of a table by token id. With tp a rank has the rows from ``first_row`` on, and ``join`` adds up
    what each rank found."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.first_row: int | None = None
        self.join: Join = same

    def forward(self, token_BS: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.first_row is None:
            return nn.functional.embedding(token_BS, weight)
        row_BS = token_BS - self.first_row
        elsewhere_BS = (row_BS < 0) | (row_BS >= weight.shape[0])
        row_BS = row_BS.masked_fill_(elsewhere_BS, 0)
        found_BSE = nn.functional.embedding(row_BS, weight)
        return self.join(found_BSE.masked_fill(elsewhere_BS[..., None], 0.0))

"""How the rows of a tensor fall into matrices that are quantised each on its own.

A tensor (B, R, C) is either B matrices of R rows, or one matrix whose R rows belong to G groups of sizes that only the
device knows.  The columnwise direction has its own order of rows, *slots*: each matrix or group filled up with zero
rows, so that blocks never cross a group.

Slots of a grouped tensor: group g starts at the sum, over earlier groups, of sizes rounded up to ``alignment`` (the K
tile of a wgrad kernel).  There are :func:`slot_count` slots, which depends on the capacity R, on G and on the
alignment, never on the sizes; slots past the last group are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad


def slot_count(rows: int, groups: int, alignment: int) -> int:
    """Slots of a grouped tensor: the most that groups of ``rows`` rows in total can need."""
    return (rows + min(rows, groups) * (alignment - 1)) // alignment * alignment


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """Absolute values, with 0 for NaN: what an amax is taken of."""
    return torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf)


@dataclass(frozen=True, eq=False)
class Matrices:
    """``batch`` matrices of ``rows`` rows.

    Attributes
    ----------
    batch, rows
        B and R.
    count
        Matrices that have an amax of their own: B, or G.
    slots
        Rows of a matrix in the columnwise direction: R rounded up to the block.
    stacked
        Whether results keep the dimension of the batch.
    """

    batch: int
    rows: int
    count: int
    slots: int
    stacked: bool

    @property
    def sizes(self) -> torch.Tensor | None:
        """Slots of each group, (G,) int32; None where rows have no groups."""
        return None

    def clean(self, x: torch.Tensor) -> torch.Tensor:
        """(B, R, C) with zeros in rows that belong to no matrix."""
        return x

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, R, C) to (B, slots, C)."""
        return pad(x, (0, 0, 0, self.slots - self.rows)) if self.slots > self.rows else x

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, slots, C) to (B, R, C)."""
        return x[:, : self.rows]

    def tile_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(B, R, C) with each matrix or group starting a tile of scales of its own."""
        return x

    def first_rows(self, block: int, device: torch.device) -> torch.Tensor:
        """Row of B * R, or one past the last, with which each block of slots starts: (B, slots / block)."""
        matrix = torch.arange(self.batch, dtype=torch.int64, device=device).unsqueeze(1) * self.rows
        return matrix + torch.arange(0, self.slots, block, dtype=torch.int64, device=device)

    def starts_empty(self, block: int, device: torch.device) -> torch.Tensor:
        """Whether the first slot of each block of slots has no row: (B, slots / block)."""
        return (torch.arange(0, self.slots, block, dtype=torch.int64, device=device) >= self.rows).expand(
            self.batch, -1
        )

    def amax(self, x: torch.Tensor, *, in_slots: bool = False, per_column: bool = False) -> torch.Tensor:
        """Largest magnitude of each matrix of (B, R, C), or of (B, slots, C): (count,) or (count, C) in fp32."""
        sizes = _rows_or_columns(x, per_column)
        largest = pad(sizes, (0, 0, 0, 1)).amax(1)
        return largest if per_column else largest[:, 0]

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """Values of each matrix, (count,) or (count, C), against (B, R, C); 0 for rows of no matrix."""
        return values.reshape(self.batch, 1, -1)

    def per_slot(self, values: torch.Tensor) -> torch.Tensor:
        """As :meth:`per_row`, against (B, slots, C)."""
        return values.reshape(self.batch, 1, -1)


@dataclass(frozen=True, eq=False)
class Groups(Matrices):
    """One matrix whose rows belong to groups; B is 1.

    Attributes
    ----------
    row_group : Tensor (R,)
        Group of each row, G for rows past the last.
    row_slot : Tensor (R,)
        Slot of each row, one past the last slot for rows of no group.
    slot_group, slot_row : Tensor (slots,)
        Group of each slot, G for slots past the last; and its row, R where it has none.
    slot_sizes : Tensor (G,), int32
    """

    row_group: torch.Tensor
    row_slot: torch.Tensor
    slot_group: torch.Tensor
    slot_row: torch.Tensor
    slot_sizes: torch.Tensor

    @property
    def sizes(self) -> torch.Tensor:
        """Slots of each group, (G,) int32."""
        return self.slot_sizes

    def clean(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of no group become 0, whatever they held."""
        return torch.where((self.row_group < self.count).reshape(1, -1, 1), x, 0)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Each slot gets its row, or zeros."""
        return pad(x, (0, 0, 0, 1))[:, self.slot_row]

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Each row from its slot; rows of no group are 0."""
        return pad(x, (0, 0, 0, self.slots + 1 - x.shape[1]))[:, self.row_slot]

    def tile_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows at their slots."""
        return self.pad(x)

    def first_rows(self, block: int, device: torch.device) -> torch.Tensor:
        """Row with which each block of slots starts, R for one without rows: (1, slots / block)."""
        return self.slot_row[::block].unsqueeze(0)

    def starts_empty(self, block: int, device: torch.device) -> torch.Tensor:
        """The same, R standing for no row: (1, slots / block)."""
        return (self.slot_row[::block] == self.rows).unsqueeze(0)

    def amax(self, x: torch.Tensor, *, in_slots: bool = False, per_column: bool = False) -> torch.Tensor:
        """Largest magnitude of each group; 0 for an empty one."""
        group = self.slot_group if in_slots else self.row_group
        sizes = _rows_or_columns(x, per_column)[0]
        largest = sizes.new_zeros(self.count + 1, sizes.shape[-1])
        largest = largest.scatter_reduce(0, group.unsqueeze(-1).expand_as(sizes), sizes, "amax")[:-1]
        return largest if per_column else largest[:, 0]

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the row's group."""
        return self._spread(values, self.row_group)

    def per_slot(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the slot's group."""
        return self._spread(values, self.slot_group)

    def _spread(self, values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return pad(values.reshape(self.count, -1), (0, 0, 0, 1))[group].unsqueeze(0)


def _rows_or_columns(x: torch.Tensor, per_column: bool) -> torch.Tensor:
    """Magnitudes of (B, R, C) in fp32, or the largest of each row, (B, R, 1)."""
    sizes = magnitude(x)
    return sizes.float() if per_column else sizes.amax(-1, keepdim=True).float()


def make_groups(sizes: torch.Tensor, rows: int, alignment: int) -> Groups:
    """Lay groups of rows out, on the device of their sizes and without reading them.

    Parameters
    ----------
    sizes : Tensor (G,), int32 or int64
        Negative sizes count as 0, and what goes past ``rows`` is cut off, as kernels do.
    rows
        R, the capacity.
    alignment
        Slots of a group are a multiple of this.
    """
    groups, device = sizes.shape[0], sizes.device
    slots = slot_count(rows, groups, alignment)
    ends = sizes.to(torch.int64).clamp(min=0, max=rows).cumsum(0).clamp(max=rows)
    starts = pad(ends, (1, 0))[:-1]
    slot_sizes = (ends - starts + alignment - 1) // alignment * alignment
    slot_ends = slot_sizes.cumsum(0)
    shift = pad(slot_ends - slot_sizes - starts, (0, 1))  # from a group's rows to its slots; a last entry for no group

    row = torch.arange(rows, dtype=torch.int64, device=device)
    row_group = torch.searchsorted(ends, row, right=True)
    row_slot = torch.where(row_group < groups, row + shift[row_group], slots)

    slot = torch.arange(slots, dtype=torch.int64, device=device)
    slot_group = torch.searchsorted(slot_ends, slot, right=True)
    slot_row = slot - shift[slot_group]
    slot_row = torch.where(slot_row < pad(ends, (0, 1))[slot_group], slot_row, rows)
    return Groups(1, rows, groups, slots, False, row_group, row_slot, slot_group, slot_row, slot_sizes.to(torch.int32))

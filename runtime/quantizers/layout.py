"""Layouts of block scales: compact, and swizzled into the 128x4 tiles that block-scaled tensor cores read.

Compact: a matrix of scales, each standing where its block stands in the operand.  Swizzled: tiles of 128 rows by 4
scales, 512 bytes each, row-major; in a tile the scale of row r and column c is byte
``(r % 32) * 16 + r // 32 * 4 + c``.  Rows count along the dimension of the GEMM's output and columns along its
contraction, so a columnwise operand's scales are transposed first.  The edges are filled up with zeros.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

TILE_ROWS = 128
TILE_COLUMNS = 4


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of scales, rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Move compact scales into 128x4 tiles.

    Parameters
    ----------
    scales : Tensor (..., R, C), one byte an element

    Returns
    -------
    Tensor (..., R rounded up to 128, C rounded up to 4)
        Contiguous, of the same type; its bytes in order are the tiles.  The shape only says how many there are.
    """
    *batch, rows, columns = scales.shape
    full_rows, full_columns = swizzled_shape(rows, columns)
    full = pad(scales.contiguous().view(torch.uint8), (0, full_columns - columns, 0, full_rows - rows))
    tiles = full.reshape(math.prod(batch), full_rows // TILE_ROWS, 4, 32, full_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*batch, full_rows, full_columns).view(scales.dtype)


def unswizzle(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of :func:`swizzle`: the compact scales (..., rows, columns)."""
    *batch, full_rows, full_columns = scales.shape
    shape = (math.prod(batch), full_rows // TILE_ROWS, full_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    full = scales.view(torch.uint8).reshape(shape).permute(0, 1, 4, 3, 2, 5).reshape(*batch, full_rows, full_columns)
    return full[..., :rows, :columns].contiguous().view(scales.dtype)

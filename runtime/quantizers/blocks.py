"""What quantisers with a scale for each block share: blocks of 1 x b along either direction, and of b x b."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..errors import UnsupportedError
from .base import Direction, Parts, QuantizedTensor, Quantizer
from .matrices import Matrices, magnitude


def block_amax(x: torch.Tensor, block: int) -> torch.Tensor:
    """Largest magnitude of each block of a row: (B, outer, n) to (B, outer, n / block), a last short block included."""
    return magnitude(split_blocks(x, block)).amax(-1).float()


def tile_amax(x: torch.Tensor, block: int) -> torch.Tensor:
    """Largest magnitude of each block x block tile: (B, slots, C) to (B, slots / block, C / block)."""
    return torch.unflatten(block_amax(x, block), 1, (x.shape[1] // block, block)).amax(2)


def split_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """(..., n) to (..., n / block, block), a last short block filled up with zeros."""
    columns = x.shape[-1]
    full = pad(x, (0, -columns % block)) if columns % block else x
    return torch.unflatten(full, -1, (full.shape[-1] // block, block))


def scale_blocks(x: torch.Tensor, factors: torch.Tensor, block: int) -> torch.Tensor:
    """Each block of (..., n) times its factor of (..., n / block)."""
    return (split_blocks(x, block) * factors.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]


@dataclass(frozen=True)
class BlockQuantizer(Quantizer):
    """A scale for each block, and perhaps a second level of scales for whole matrices or rows."""

    @property
    @abc.abstractmethod
    def two_dimensional(self) -> bool:
        """Whether blocks are b x b, and both directions therefore share the numbers."""

    @abc.abstractmethod
    def _block_scale(
        self, amax: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale of blocks as stored, and the fp32 factor of their elements.

        ``outer`` is the amax of the second level, in a shape that broadcasts against that of the blocks; ``dtype`` is
        the type of what is quantised.
        """

    @abc.abstractmethod
    def _encode(self, x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Data of scaled elements, with what :meth:`_draw` drew for them."""

    @abc.abstractmethod
    def _decode(self, codes: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Elements of data."""

    @abc.abstractmethod
    def _decode_scale(self, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Factors of stored scales."""

    def _transform(self, slots: torch.Tensor) -> torch.Tensor:
        """What to do to (B, slots, C) before it is quantised columnwise."""
        return slots

    def _draw(self, x: torch.Tensor, matrices: Matrices, rng: torch.Tensor | None) -> torch.Tensor | None:
        """Random numbers from 0 to 255 for (B, slots, C), uint8; None where nothing is left to chance."""
        return None

    def _outer_amax(self, x: torch.Tensor, matrices: Matrices, direction: Direction) -> torch.Tensor:
        """Amax of the second level, of (B, R, C) or columnwise of (B, slots, C)."""
        return matrices.amax(x, in_slots=direction == "columnwise")

    def _spread_outer(self, amax: torch.Tensor, matrices: Matrices, direction: Direction) -> torch.Tensor:
        """Amax of the second level in a shape that broadcasts against oriented blocks."""
        if direction == "rowwise":
            return matrices.per_row(amax)
        return matrices.per_slot(amax).transpose(1, 2)[..., :: self.block]

    def _quantize(
        self, x: torch.Tensor, matrices: Matrices, scale: torch.Tensor | None, rng: torch.Tensor | None
    ) -> Parts:
        if scale is not None:
            raise UnsupportedError(f"{type(self).__name__}.quantize(scale=...)", ["scales are those of the blocks"])
        tiles = tile_amax(matrices.pad(x), self.block) if self.two_dimensional else None
        amax = column_amax = self._outer_amax(x, matrices, "rowwise")
        rowwise = columnwise = None
        drawn = self._draw(x, matrices, rng)
        if self.rowwise:
            blocks = None if tiles is None else matrices.unpad(tiles.repeat_interleave(self.block, 1))
            noise = None if drawn is None else matrices.unpad(drawn)
            rowwise = self._cast(x, blocks, self._spread_outer(amax, matrices, "rowwise"), noise)
        if self.columnwise:
            slots = self._transform(matrices.pad(x))
            column_amax = self._outer_amax(slots, matrices, "columnwise")
            outer = self._spread_outer(column_amax, matrices, "columnwise")
            blocks = None if tiles is None else tiles.transpose(1, 2).repeat_interleave(self.block, 1)[:, : x.shape[-1]]
            noise = None if drawn is None else drawn.transpose(1, 2)
            columnwise = self._cast(slots.transpose(1, 2), blocks, outer, noise)
        return Parts(rowwise, columnwise, amax, column_amax)

    def _cast(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor | None,
        outer: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of an oriented tensor."""
        blocks = block_amax(x, self.block) if blocks is None else blocks
        scale, factor = self._block_scale(blocks, outer, x.dtype)
        return self._encode(scale_blocks(x.float(), factor, self.block), noise), scale

    def values(self, q: QuantizedTensor, direction: Direction, compute: torch.dtype) -> torch.Tensor:
        """Elements times the scales of their blocks."""
        elements = self._decode(q.oriented_codes(direction), compute)
        return scale_blocks(elements, self._decode_scale(self._scales_of(q, direction), compute), self.block)

    def _scales_of(self, q: QuantizedTensor, direction: Direction) -> torch.Tensor:
        """Stored scales, one to each block of each outer index."""
        return q.oriented_scales(direction)

"""Random bits that depend on nothing but a seed and a counter: Philox4x32-7, in plain torch, alike on every device.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), with the
least rounds that pass their tests.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 7


def philox4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], rounds: int = _ROUNDS
) -> tuple[torch.Tensor, ...]:
    """Four 32-bit random words for each counter.

    Parameters
    ----------
    counter, key
        Four words, and two, from 0 to 2^32 - 1, as int64 tensors that broadcast.
    rounds
        How often they are mixed.

    Returns
    -------
    tuple of four Tensor, int64
        Words from 0 to 2^32 - 1.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        # As signed numbers the products wrap around, and have the right 64 bits.
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (q >> 32 & _MASK) ^ c1 ^ k0, q & _MASK, (p >> 32 & _MASK) ^ c3 ^ k1, p & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bytes(rng: torch.Tensor, blocks: torch.Tensor, series: torch.Tensor) -> torch.Tensor:
    """Sixteen random bytes for each of some blocks.

    Parameters
    ----------
    rng : Tensor (2,), int64
        Seed, and an offset that a caller moves on from call to call; never read by the host.
    blocks : Tensor, int64
        Their numbers, not negative.
    series : Tensor, int64
        Broadcasts against ``blocks``, from 0 to 2^32 - 1: a number of another series is another block.

    Returns
    -------
    Tensor (*blocks.shape, 16), uint8
        Byte i of block b is byte i % 4, from the lowest, of word i // 4 that the counter
        (b mod 2^32, b div 2^32, offset mod 2^32, series) gives under the key of the seed's low and high half.
    """
    seed, offset = rng[0], rng[1]
    counter = (blocks & _MASK, blocks >> 32, offset & _MASK, series)
    words = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK)), -1)
    return torch.stack([(words >> shift & 0xFF).to(torch.uint8) for shift in (0, 8, 16, 24)], -1).flatten(-2)

"""Narrow formats: every bf16 value rounded as a table of all representable numbers says; packing; random bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_grouped_mlp.quantizers import formats
from cute_grouped_mlp.quantizers.layout import swizzle, unswizzle
from cute_grouped_mlp.quantizers.philox import philox4x32, random_bytes

#: Exponent bits, mantissa bits, and how many codes from 0 up are finite and not negative.
FORMATS = {"e4m3": (4, 3, 127), "e5m2": (5, 2, 124), "e2m1": (2, 1, 8)}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def table(name):
    """All finite numbers that are not negative, by code."""
    exponent_bits, mantissa_bits, count = FORMATS[name]
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    return np.array(values)


def nearest(name, x):
    """Codes of float64 numbers: the nearest number of the table, the even code of two, the last one beyond it."""
    values = table(name)
    size = np.minimum(np.abs(x), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    below = above - 1
    to_above, to_below = values[above] - size, size - values[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    sign = np.signbit(x) * (8 if name == "e2m1" else 128)
    codes = np.where(take_above, above, below) + sign
    return np.where(np.isnan(x), 7 if name == "e2m1" else 127, codes).astype(np.uint8)


def encode(name, x):
    return formats.encode_e2m1(x) if name == "e2m1" else formats.encode_fp8(x, TORCH[name])


def decode(name, codes):
    return formats.decode_e2m1(codes) if name == "e2m1" else formats.decode_fp8(codes, TORCH[name])


def every_bf16():
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@pytest.mark.parametrize("name", FORMATS)
def test_every_bf16_value_is_rounded_to_nearest_even(name):
    x = every_bf16()
    np.testing.assert_array_equal(encode(name, x).numpy(), nearest(name, x.double().numpy()))


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_values_at_and_beside_every_halfway_point(name):
    values = table(name)
    halfway = torch.from_numpy((values[1:] + values[:-1]) / 2).float()  # exact
    beside = [torch.nextafter(halfway, halfway.new_tensor(side)) for side in (-torch.inf, torch.inf)]
    x = torch.cat((halfway, *beside, torch.from_numpy(values).float(), torch.tensor([1e-45, 1e38])))
    x = torch.cat((x, -x))
    np.testing.assert_array_equal(encode(name, x).numpy(), nearest(name, x.double().numpy()))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_number_and_back(name):
    values = table(name)
    codes = torch.arange(len(values), dtype=torch.uint8)
    codes = torch.cat((codes, codes + (8 if name == "e2m1" else 128)))
    expected = np.concatenate((values, -values))
    decoded = decode(name, codes)
    np.testing.assert_array_equal(decoded.double().numpy(), expected)
    np.testing.assert_array_equal(np.signbit(decoded.numpy()), np.signbit(expected))
    assert torch.equal(encode(name, decoded), codes)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_infinities_saturate_and_nan_stays_nan(name):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])
    values = decode(name, encode(name, x))
    limit = formats.FP8_MAX[TORCH[name]]
    assert values[:2].tolist() == [limit, -limit]
    assert values[2:].isnan().all()
    assert encode(name, x)[2:].tolist() == [0x7F, 0x7F]


def test_e2m1_has_no_nan_and_saturates():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0])
    assert formats.encode_e2m1(x).tolist() == [7, 15, 7, 7, 8]


def test_e8m0_rounds_up_to_powers_of_two():
    x = every_bf16()
    x = x[~x.signbit()]
    extra = torch.tensor([2.0**-127, 2.0**-127 * (1 + 2**-20), 1e-45, 1 + 2**-23, 2.0**127, 3e38])
    x = torch.cat((x, extra))
    powers = 2.0 ** np.arange(-127, 128)
    expected = np.minimum(np.searchsorted(powers, x.double().numpy()), 254)
    expected[x.isnan().numpy()] = 255
    codes = formats.encode_e8m0(x)
    np.testing.assert_array_equal(codes.numpy(), expected)


def test_e8m0_codes_decode_and_have_exact_reciprocals():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values, reciprocals = formats.decode_e8m0(codes).double(), formats.reciprocal_e8m0(codes).double()
    np.testing.assert_array_equal(values[:255].numpy(), 2.0 ** np.arange(-127, 128))
    np.testing.assert_array_equal(reciprocals[:255].numpy(), 2.0 ** -np.arange(-127.0, 128))
    assert values[255].isnan()
    assert reciprocals[255].isnan()
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float().double()[:255], values[:255])


@given(st.integers(0, 3), st.integers(0, 40))
@settings(max_examples=20, deadline=None)
def test_packing_e2m1_and_back(rows, pairs):
    codes = torch.randint(0, 16, (rows, 2 * pairs), dtype=torch.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.shape == (rows, pairs)
    assert torch.equal(formats.unpack_e2m1(packed), codes)


def test_the_first_of_two_e2m1_codes_is_in_the_low_half():
    assert formats.pack_e2m1(torch.tensor([[3, 9]], dtype=torch.uint8)).tolist() == [[0x93]]


def test_stochastic_rounding_takes_each_neighbour_as_often_as_it_is_near():
    bits = torch.arange(256)
    for value, below, above in ((0.125, 0.0, 0.5), (-0.75, -0.5, -1.0), (2.25, 2.0, 3.0), (4.5, 4.0, 6.0), (5, 4, 6)):
        rounded = formats.decode_e2m1(formats.encode_e2m1_stochastic(torch.full((256,), float(value)), bits))
        share = (value - below) / (above - below)
        assert (rounded == above).sum() == 256 * share, value
        assert (rounded == below).sum() == 256 * (1 - share), value


def test_stochastic_rounding_is_one_integer_addition():
    """Against the definition: up where the fraction of the distance to the number below, and bits / 256, make 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.rand(40000, generator=generator) * 6, torch.rand(5000, generator=generator) * 2**-7))
    bits = torch.randint(0, 256, x.shape, generator=generator)
    numbers = table("e2m1").astype(float)
    size = x.double().numpy()
    size = np.where(size < 1, np.floor(size * 2**23) / 2**23, size)
    below = np.searchsorted(numbers, size, side="right") - 1
    gap = np.diff(np.append(numbers, 8.0))[below]
    expected = below + ((size - numbers[below]) / gap + bits.numpy() / 256 >= 1)
    assert formats.encode_e2m1_stochastic(x, bits).tolist() == np.minimum(expected, 7).tolist()
    assert len(set(expected.tolist())) == 8


def test_stochastic_rounding_leaves_representable_numbers_and_saturates():
    bits = torch.arange(256)
    for code, value in enumerate(table("e2m1")):
        for sign in (1, -1):
            x = torch.full((256,), sign * value)
            assert (formats.encode_e2m1_stochastic(x.float(), bits) == code + (0 if sign > 0 else 8)).all()
    x = torch.tensor([6.5, 100.0, torch.inf, -torch.inf, torch.nan])
    assert formats.encode_e2m1_stochastic(x, torch.full((5,), 255)).tolist() == [7, 7, 7, 15, 7]


def words(*values):
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [  # the generator's published answers
        ({}, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ({}, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        ({}, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        ({"rounds": 10}, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(rounds, counter, key, expected):
    assert tuple(int(word) for word in philox4x32(words(*counter), words(*key), **rounds)) == expected


def test_random_bytes_depend_on_seed_offset_block_and_series_only():
    rng, blocks, series = torch.tensor([-5, 2**40 + 3]), torch.arange(1000), torch.tensor(0)
    first = random_bytes(rng, blocks, series)
    assert first.shape == (1000, 16)
    assert torch.equal(first[10:20], random_bytes(rng, blocks[10:20], series))
    changes = [(rng + torch.tensor(step), blocks, series) for step in ((1, 0), (2**32, 0), (0, 1))]
    for other in (*changes, (rng, blocks + 1000, series), (rng, blocks + 2**32, series), (rng, blocks, series + 1)):
        assert (first == random_bytes(*other)).float().mean() < 0.02
    assert first.unique().tolist() == list(range(256))
    assert abs(first.double().mean().item() - 127.5) < 3


@given(st.integers(0, 2), st.integers(1, 300), st.integers(1, 13))
@settings(max_examples=30, deadline=None)
def test_swizzling_scales_and_back(batch, rows, columns):
    shape = (batch, rows, columns) if batch else (rows, columns)
    scales = torch.randint(1, 255, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    swizzled = swizzle(scales)
    assert swizzled.dtype == scales.dtype
    assert swizzled.shape[-2:] == (-(-rows // 128) * 128, -(-columns // 4) * 4)
    assert torch.equal(unswizzle(swizzled, rows, columns).view(torch.uint8), scales.view(torch.uint8))


def test_swizzled_bytes_stand_where_the_tile_says():
    rows, columns = 200, 7
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.int32).to(torch.uint8)
    flat = swizzle(scales).flatten()
    seen = torch.zeros_like(flat, dtype=torch.bool)
    for r in range(rows):
        for c in range(columns):
            at = ((r // 128) * 2 + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[at] == scales[r, c]
            seen[at] = True
    assert not flat[~seen].any()

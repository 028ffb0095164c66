"""Quantisers of each recipe against slow loops over blocks and elements, written apart from them, and against torchao.

torchao is not a dependency: those tests run where it is installed, ``pip install --no-deps torchao``.
"""

import importlib.util
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.errors import ConfigError, ShapeError, UnsupportedError
from cute_grouped_mlp.quantizers.nvfp4 import hadamard

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LEAST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
MANTISSA = {E4M3: 3, E5M2: 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
f32 = np.float32
FP32_MAX = np.finfo(np.float32).max

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install --no-deps torchao"
)


def round_fp8(values, dtype):
    """Numbers to nearest even on the grids of their binades, cut to the largest."""
    size = np.minimum(np.abs(values), 2 * LARGEST[dtype])
    step = np.maximum(2.0 ** (np.frexp(size)[1] - 1 - MANTISSA[dtype]), LEAST[dtype])
    return np.copysign(np.minimum(np.rint(size / step) * step, LARGEST[dtype]), values)


def round_e2m1(values):
    """Numbers to nearest even; NaN to 6."""
    size = np.minimum(np.abs(values), 8.0)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0))
    rounded = np.copysign(np.minimum(np.rint(size / step) * step, 6.0), values)
    return np.where(np.isnan(values), 6.0, rounded)


def amax_of(values):
    return f32(max((abs(v) for v in values if not math.isnan(v)), default=0.0))


def scale_of(amax, largest, power_of_two, if_infinite):
    if amax == 0 or math.isinf(amax):
        return f32(1)
    with np.errstate(over="ignore"):
        scale = f32(largest) / amax
    scale = f32(if_infinite) if math.isinf(scale) else scale
    return f32(2.0 ** math.floor(math.log2(scale))) if power_of_two else scale


def exponent_of(amax, largest, margin=0):
    """Smallest power of two, from 2^-127 to 2^127, that amax / largest does not exceed."""
    quotient = float(f32(amax) * f32(2.0**margin / largest))
    if math.isinf(quotient):
        return 127
    if quotient == 0:
        return -127
    fraction, exponent = math.frexp(quotient)
    return min(max(exponent - (fraction == 0.5), -127), 127)


def mxfp8_blocks(x, dtype, margin=0):
    """Exponents (R, C / 32) and elements (R, C) of float64 rows."""
    exponents = np.zeros((x.shape[0], x.shape[1] // 32), int)
    elements = np.zeros_like(x)
    for r, c in np.ndindex(exponents.shape):
        block = x[r, 32 * c : 32 * c + 32]
        exponents[r, c] = exponent = exponent_of(amax_of(block), LARGEST[dtype], margin)
        # In fp32, as the GPU has it: a quotient below its least number is 0.
        elements[r, 32 * c : 32 * c + 32] = round_fp8((f32(block) * f32(2.0**-exponent)).astype(float), dtype)
    return exponents, elements


def nvfp4_blocks(x, amax):
    """Scales (R, C / 16), and elements (R, C), of float64 rows under the amax of each row."""
    scales = np.zeros((x.shape[0], x.shape[1] // 16))
    elements = np.zeros_like(x)
    for r, c in np.ndindex(scales.shape):
        block = x[r, 16 * c : 16 * c + 16]
        encode = f32(1) if amax[r] == 0 else np.minimum(f32(2688) / f32(amax[r]), FP32_MAX)
        encode = f32(1) if encode == 0 else encode
        scaled = min(amax_of(block) * (encode * (f32(1) / f32(6))), FP32_MAX)
        scales[r, c] = round_fp8(float(scaled), E4M3)
        factor = np.minimum(f32(1) / (f32(scales[r, c]) * (f32(1) / encode)), FP32_MAX)
        elements[r, 16 * c : 16 * c + 16] = round_e2m1((f32(block) * factor).astype(float))
    return scales, elements


def same(actual, expected):
    """Equal numbers, NaN at the same places, and the same signs of zero."""
    actual, expected = actual.double().numpy(), np.asarray(expected, dtype=np.float64)
    np.testing.assert_array_equal(actual, expected)
    where = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual)[where], np.signbit(expected)[where])


def nvfp4_elements(packed):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return values[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]


def some(rows, columns, dtype=torch.bfloat16, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp(spread * torch.randn(rows, columns, generator=generator))
    return x.to(dtype)


def with_edges(dtype=torch.bfloat16):
    """(64, 64): blocks of zeros, of one value, tiny, huge, subnormal, with NaN, with infinities, of NaN alone."""
    x = some(64, 64, dtype)
    info = torch.finfo(dtype)
    x[0] = 0.0
    x[1] = -0.0
    x[2] = info.tiny
    x[3] = info.tiny * info.eps  # the least subnormal
    x[4] = info.max
    x[5, ::3] = torch.nan
    x[6, 7] = torch.inf
    x[7, 40] = -torch.inf
    x[8] = torch.nan
    x[9, :16] = 1e-30
    x[10, 1:] = 0.0
    return x


EDGES = [some(64, 64), with_edges(), with_edges(torch.float32), some(32, 96, torch.float16, 3, 0.5)]
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class TestCurrentScaling:
    @quiet
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    @pytest.mark.parametrize("power_of_two", [False, True])
    @pytest.mark.parametrize("x", [some(33, 48), some(8, 24, torch.float32), with_edges()[:6], with_edges()[8:]])
    def test_against_a_loop(self, x, dtype, power_of_two):
        q = cgq.Float8CurrentScalingQuantizer(dtype, power_of_two).quantize(x)
        wide = x.double().numpy()
        amax = amax_of(wide.ravel())
        scale = scale_of(amax, LARGEST[dtype], power_of_two, FP32_MAX)
        assert q.amax.tolist() == [amax]
        assert q.rowwise_scale_inv.tolist() == [f32(1) / scale]
        expected = round_fp8((f32(wide) * scale).astype(float), dtype)
        same(q.rowwise_data.float(), expected)
        same(q.columnwise_data.float(), expected.T)
        assert q.columnwise_scale_inv.tolist() == q.rowwise_scale_inv.tolist()

    def test_amax_of_zero_or_infinity_gives_scale_one(self):
        for value in (0.0, torch.inf):
            q = cgq.Float8CurrentScalingQuantizer().quantize(torch.full((2, 8), value))
            assert q.rowwise_scale_inv.tolist() == [1.0]
            assert q.amax.tolist() == [value]
            assert q.dequantize().unique().tolist() == [min(value, 448.0)]

    def test_the_least_amax_gives_the_largest_scale(self):
        q = cgq.Float8CurrentScalingQuantizer().quantize(torch.full((1, 8), 1e-45))
        assert q.rowwise_scale_inv.tolist() == [f32(1) / FP32_MAX]
        assert q.dequantize().isfinite().all()

    def test_takes_no_scale(self):
        with pytest.raises(UnsupportedError, match="scale"):
            cgq.Float8CurrentScalingQuantizer().quantize(torch.zeros(2, 8), scale=torch.ones(1))


class TestDelayedScaling:
    def test_the_scale_is_the_callers_and_the_amax_is_the_tensors(self):
        x = some(16, 32)
        q = cgq.DelayedScalingQuantizer(E5M2).quantize(x, scale=torch.tensor([3.0]))
        same(q.rowwise_data.float(), round_fp8(x.double().numpy() * 3, E5M2))
        assert q.rowwise_scale_inv.tolist() == [f32(1) / f32(3)]
        assert q.amax.item() == x.abs().max()

    def test_scales_by_group_and_one_by_default(self):
        x = torch.ones(6, 8)
        q = cgq.DelayedScalingQuantizer().quantize(x, torch.tensor([2, 0, 3]), scale=torch.tensor([2.0, 4.0, 8.0]))
        assert q.rowwise_data.float()[:, 0].tolist() == [2, 2, 8, 8, 8, 0]
        assert q.dequantize()[:, 0].tolist() == [1, 1, 1, 1, 1, 0]
        assert q.amax.tolist() == [1, 0, 1]
        assert cgq.DelayedScalingQuantizer().quantize(x).rowwise_scale_inv.tolist() == [1.0]

    def test_what_is_too_large_is_cut(self):
        q = cgq.DelayedScalingQuantizer().quantize(torch.full((1, 8), -10.0), scale=torch.tensor([1000.0]))
        assert (q.rowwise_data.float() == -448).all()

    def test_a_wrong_scale_says_so(self):
        with pytest.raises(ShapeError, match=r"scale is torch\.float64 of shape"):
            cgq.DelayedScalingQuantizer().quantize(torch.zeros(2, 8), scale=torch.ones(2).double())


@quiet
class TestBlockFP8:
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    @pytest.mark.parametrize("power_of_two", [False, True])
    @pytest.mark.parametrize("dim", [1, 2])
    @pytest.mark.parametrize("x", [some(130, 200), with_edges(), with_edges(torch.float32), some(8, 130, DTYPES[1])])
    def test_against_a_loop(self, x, dtype, power_of_two, dim):
        q = cgq.Float8BlockQuantizer(dtype, power_of_two, dim).quantize(x)
        rows = 1 if dim == 1 else 128
        for wide, data, scale_inv, along in (
            (x.double().numpy(), q.rowwise_data, q.rowwise_scale_inv, x.shape[1]),
            (x.double().numpy().T, q.columnwise_data[:, : x.shape[0]], q.columnwise_scale_inv, x.shape[0]),
        ):
            expected = np.zeros_like(wide)
            assert scale_inv.shape == (-(-wide.shape[0] // rows), -(-along // 128))
            for r, c in np.ndindex(tuple(scale_inv.shape)):
                block = (slice(rows * r, rows * r + rows), slice(128 * c, 128 * c + 128))
                amax = amax_of(wide[block].ravel())
                scale = scale_of(amax, LARGEST[dtype], power_of_two, torch.finfo(x.dtype).max)
                assert scale_inv[r, c].item() == f32(1) / scale
                expected[block] = round_fp8((f32(wide[block]) * scale).astype(float), dtype)
            same(data.float(), expected)

    def test_scales_of_a_block_column_lie_side_by_side(self):
        q = cgq.Float8BlockQuantizer(block_scaling_dim=1).quantize(some(130, 384))
        assert (q.rowwise_scale_inv.shape, q.rowwise_scale_inv.stride()) == ((130, 3), (1, 130))
        assert (q.columnwise_scale_inv.shape, q.columnwise_scale_inv.stride()) == ((384, 2), (1, 384))
        q = cgq.Float8BlockQuantizer(block_scaling_dim=1).quantize(torch.randn(2, 130, 384), batched=True)
        assert (q.rowwise_scale_inv.shape, q.rowwise_scale_inv.stride()) == ((2, 130, 3), (390, 1, 130))
        assert cgq.Float8BlockQuantizer().quantize(some(130, 384)).rowwise_scale_inv.is_contiguous()

    def test_columns_past_the_rows_are_zero(self):
        q = cgq.Float8BlockQuantizer(block_scaling_dim=1).quantize(some(130, 128))
        assert q.columnwise_data.shape == (128, 256)
        assert not q.columnwise_data[:, 130:].view(torch.uint8).any()

    def test_scales_are_not_swizzled(self):
        with pytest.raises(UnsupportedError, match="swizzled"):
            cgq.Float8BlockQuantizer().quantize(some(8, 128), swizzled=True)


@quiet
class TestMXFP8:
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    @pytest.mark.parametrize("x", EDGES)
    @pytest.mark.parametrize("margin", [0, 3])
    def test_against_a_loop(self, x, dtype, margin):
        q = cgq.MXFP8Quantizer(dtype, margin=margin).quantize(x)
        wide = x.double().numpy()
        for data, scale, expected in (
            (q.rowwise_data, q.rowwise_scale_inv, mxfp8_blocks(wide, dtype, margin)),
            (q.columnwise_data.t(), q.columnwise_scale_inv.view(torch.uint8).t(), mxfp8_blocks(wide.T, dtype, margin)),
        ):
            np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), expected[0] + 127)
            same(data.float(), expected[1])

    def test_an_empty_block_and_a_nan(self):
        x = torch.zeros(1, 64)
        x[0, 40] = torch.nan
        q = cgq.MXFP8Quantizer(columnwise=False).quantize(x)
        assert q.rowwise_scale_inv.view(torch.uint8).tolist() == [[0, 0]]
        assert q.dequantize().isnan().nonzero().tolist() == [[0, 40]]
        assert not q.dequantize().nan_to_num(0).any()

    @given(st.integers(-100, 100), st.integers(0, 2**32 - 1), st.sampled_from([E4M3, E5M2]))
    @settings(max_examples=40, deadline=None)
    def test_a_round_trip_errs_by_half_a_step_at_most(self, exponent, seed, dtype):
        x = (some(32, 64, torch.float32, seed, 1.0) * 2.0**exponent).to(torch.bfloat16)
        q = cgq.MXFP8Quantizer(dtype).quantize(x)
        size = x.double().abs()
        rows = size.reshape(32, 2, 32).amax(-1).repeat_interleave(32, 1)
        for direction, amax in (("rowwise", rows), ("columnwise", size.amax(0))):
            error = (q.dequantize(direction, torch.float64) - x.double()).abs()
            # Relative to the number, or for subnormal elements half the least one times the scale.
            step = 2 * amax / LARGEST[dtype] * LEAST[dtype]
            assert (error <= torch.maximum(size * 2.0 ** -MANTISSA[dtype], step) / 2).all()

    def test_square_blocks_hold_the_same_numbers_in_both_directions(self):
        x = some(96, 64)
        q = cgq.MXFP8Quantizer(with_2d_quantization=True).quantize(x)
        assert torch.equal(q.rowwise_data.view(torch.uint8), q.columnwise_data.view(torch.uint8))
        scales = q.rowwise_scale_inv.view(torch.uint8)
        for r, c in np.ndindex(3, 2):
            tile = x[32 * r : 32 * r + 32, 32 * c : 32 * c + 32].double().numpy()
            exponent = exponent_of(amax_of(tile.ravel()), 448.0)
            assert (scales[32 * r : 32 * r + 32, c] == exponent + 127).all()
            assert (q.columnwise_scale_inv.view(torch.uint8)[r, 32 * c : 32 * c + 32] == exponent + 127).all()
            expected = round_fp8(tile * 2.0**-exponent, E4M3)
            same(q.rowwise_data[32 * r : 32 * r + 32, 32 * c : 32 * c + 32].float(), expected)

    @needs_torchao
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    @pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
    def test_against_torchao_on_ten_thousand_tensors(self, dtype, x_dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
        x = some(40000, 64, x_dtype, 1).reshape(10000, 4, 64)
        x[::100, 0] = 0.0
        q = cgq.MXFP8Quantizer(dtype).quantize(x, batched=True)
        for oriented, data, scale in (
            (x, q.rowwise_data, q.rowwise_scale_inv),
            # Columnwise blocks are 4 rows and 28 rows of zeros.
            (
                torch.nn.functional.pad(x, (0, 0, 0, 28)).transpose(1, 2).contiguous(),
                q.columnwise_data.transpose(1, 2),
                q.columnwise_scale_inv.view(torch.uint8).transpose(1, 2),
            ),
        ):
            ao_scale, ao_data = to_mx(oriented, dtype, 32, ScaleCalculationMode.RCEIL)
            assert torch.equal(ao_scale.view(torch.uint8), scale.view(torch.uint8))
            assert torch.equal(ao_data.view(torch.uint8), data.view(torch.uint8))


def sylvester(n=16):
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])


SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float64)


@quiet
class TestNVFP4:
    @pytest.mark.parametrize("x", [*EDGES, some(32, 64, torch.float32, 5, 6.0), some(16, 32) * 1e-38])
    def test_against_a_loop(self, x):
        q = cgq.NVFP4Quantizer().quantize(x)
        wide = x.double().numpy()
        amax = amax_of(wide.ravel())
        assert q.amax.tolist() == [amax]
        for data, scale, oriented in (
            (q.rowwise_data, q.rowwise_scale_inv, wide),
            (q.columnwise_data, q.columnwise_scale_inv, wide.T),
        ):
            scales, elements = nvfp4_blocks(oriented, [amax] * len(oriented))
            same(scale.float(), scales)
            same(nvfp4_elements(data), elements)

    def test_the_order_of_roundings_on_ten_thousand_tensors(self):
        x = some(40000, 32, torch.bfloat16, 4, 1.0).reshape(10000, 4, 32)
        q = cgq.NVFP4Quantizer(columnwise=False).quantize(x, batched=True)
        blocks = x.float().numpy().reshape(10000, 4, 2, 16)
        encode = f32(2688) / np.abs(blocks).max((1, 2, 3), keepdims=True)
        scales = round_fp8((np.abs(blocks).max(-1, keepdims=True) * (encode * (f32(1) / f32(6)))).astype(float), E4M3)
        with np.errstate(divide="ignore"):
            factor = np.minimum(f32(1) / (f32(scales) * (f32(1) / encode)), FP32_MAX)
        same(q.rowwise_scale_inv.float(), scales[..., 0])
        same(nvfp4_elements(q.rowwise_data), round_e2m1((blocks * factor).astype(float)).reshape(x.shape))

    def test_row_scaling_against_a_loop(self):
        x = some(32, 48)
        q = cgq.NVFP4Quantizer(row_scaled_nvfp4=True).quantize(x)
        wide = x.double().numpy()
        for data, scale, amax, oriented in (
            (q.rowwise_data, q.rowwise_scale_inv, q.amax, wide),
            (q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax[0], wide.T),
        ):
            rows = [amax_of(row) for row in oriented]
            assert amax.tolist() == rows
            scales, elements = nvfp4_blocks(oriented, rows)
            same(scale.float(), scales)
            same(nvfp4_elements(data), elements)

    def test_square_blocks_against_a_loop(self):
        x = some(32, 48)
        q = cgq.NVFP4Quantizer(with_2d_quantization=True).quantize(x)
        wide = x.double().numpy()
        amax = amax_of(wide.ravel())
        for r, c in np.ndindex(2, 3):
            tile = (slice(16 * r, 16 * r + 16), slice(16 * c, 16 * c + 16))
            encode = f32(2688) / amax
            scale = round_fp8(float(amax_of(wide[tile].ravel()) * (encode * (f32(1) / f32(6)))), E4M3)
            factor = f32(1) / (f32(scale) * (f32(1) / encode))
            elements = round_e2m1((f32(wide[tile]) * factor).astype(float))
            same(nvfp4_elements(q.rowwise_data)[tile], elements)
            same(nvfp4_elements(q.columnwise_data).t()[tile], elements)
            assert (q.rowwise_scale_inv.float()[tile[0], c] == scale).all()
            assert (q.columnwise_scale_inv.float()[tile[1], r] == scale).all()

    def test_the_hadamard_transform_is_of_columns_with_fixed_signs(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(-255, 256, (48, 32), generator=generator).to(torch.bfloat16)  # sums are exact in fp32
        q = cgq.NVFP4Quantizer(with_rht=True).quantize(x)
        matrix = np.diag(SIGNS) @ sylvester() / 4
        blocks = x.double().numpy().T.reshape(32, 3, 16) @ matrix
        oriented = torch.from_numpy(blocks.reshape(32, 48)).to(torch.bfloat16).double().numpy()
        amax = amax_of(oriented.ravel())
        assert q.columnwise_amax.tolist() == [amax]
        assert q.amax.item() == x.abs().max()
        scales, elements = nvfp4_blocks(oriented, [amax] * 32)
        same(q.columnwise_scale_inv.float(), scales)
        same(nvfp4_elements(q.columnwise_data), elements)
        plain = cgq.NVFP4Quantizer().quantize(x)
        assert torch.equal(q.rowwise_data, plain.rowwise_data)

    def test_the_order_of_additions_in_the_hadamard_transform(self):
        x = some(16, 64, torch.float32, 6, 6.0)  # sums lose bits
        expected = x.numpy() * SIGNS.astype(np.float32)[:, None]
        for distance in (1, 2, 4, 8):
            for i in range(16):
                if not i & distance:
                    a, b = expected[i].copy(), expected[i + distance].copy()
                    expected[i], expected[i + distance] = a + b, a - b
        same(hadamard(x.unsqueeze(0))[0], expected / 4)

    def test_two_transformed_operands_contract_to_the_product_of_the_originals(self):
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(64, 32, generator=generator) for _ in range(2))
        hx, hdy = (hadamard(t.double().unsqueeze(0))[0] for t in (x, dy))
        torch.testing.assert_close(hdy.t() @ hx, (dy.t() @ x).double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hadamard(hx.unsqueeze(0), inverse=True)[0], x.double())

    def test_dequantising_undoes_the_transform(self):
        x = some(64, 64, torch.float32, 2, 0.3)
        quantizer = cgq.NVFP4Quantizer(with_rht=True)
        error = quantizer.quantize(x).dequantize("columnwise") - x
        assert error.norm() / x.norm() < 0.12

    def test_stochastic_rounding_repeats_with_its_seed_and_is_unbiased(self):
        # One magnitude, and a full-scale element in every block: all scales are exact.
        x = torch.full((256, 64), 2.25)
        x[:, ::16] = 6.0
        x[::16] = 6.0
        quantizer = cgq.NVFP4Quantizer(stochastic_rounding=True, seed=7)
        q = quantizer.quantize(x)
        again = quantizer.quantize(x, rng=torch.tensor([7, 0]))
        assert torch.equal(q.rowwise_data, again.rowwise_data)
        assert torch.equal(q.columnwise_data, again.columnwise_data)
        for rng in ([8, 0], [7, 1]):
            assert not torch.equal(q.rowwise_data, quantizer.quantize(x, rng=torch.tensor(rng)).rowwise_data)
        square = torch.maximum(x[:64], x[:64].t())  # symmetric: only the bits tell rows from columns
        assert not torch.equal(quantizer.quantize(square).rowwise_data, quantizer.quantize(square).columnwise_data)
        for direction in ("rowwise", "columnwise"):
            values = q.dequantize(direction)[x == 2.25]
            assert values.round(decimals=5).unique().tolist() == [2.0, 3.0]
            assert values.mean().item() == pytest.approx(2.25, abs=0.02)

    def test_nan_becomes_six(self):
        x = torch.full((1, 16), 6.0)
        x[0, 3] = -torch.nan
        q = cgq.NVFP4Quantizer(columnwise=False).quantize(x)
        assert q.amax.tolist() == [6.0]
        assert q.dequantize().unique().numel() == 1

    @needs_torchao
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_against_torchao_on_ten_thousand_tensors(self, dtype):
        """Torchao rounds in another order: a code may differ by one, at a halfway point, where fp32 cannot tell."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
        x = some(40000, 32, dtype, 1, 1.0).reshape(10000, 4, 32)
        q = cgq.NVFP4Quantizer(columnwise=False).quantize(x, batched=True)
        pairs = [nvfp4_quantize(x[i], 16, q.amax[i] / 2688) for i in range(len(x))]
        scales = torch.stack([scale for scale, _ in pairs]).float()
        data = nvfp4_elements(torch.stack([packed.reshape(4, 16) for _, packed in pairs]))
        ours_scales, ours = q.rowwise_scale_inv.float(), nvfp4_elements(q.rowwise_data)
        factor = 2688 / q.amax.double().reshape(-1, 1, 1)
        wanted = x.double().abs().reshape(10000, 4, 2, 16).amax(-1) / 6 * factor
        other = scales != ours_scales
        assert other.sum() < 2e-3 * other.numel()
        assert self.at_halfway(wanted, scales, ours_scales)[other].all()
        wanted = x.double() * factor / ours_scales.double().repeat_interleave(16, -1)
        other_element = (ours != data) & ~other.repeat_interleave(16, -1)
        assert other_element.sum() < 5e-4 * ours.numel()
        assert self.at_halfway(wanted, data, ours)[other_element].all()

    @staticmethod
    def at_halfway(wanted, a, b):
        """Whether numbers are as near to a as to b, but for what fp32 arithmetic loses."""
        return (wanted - (a.double() + b.double()) / 2).abs() < 1e-6 * wanted.abs()


class TestCall:
    @pytest.mark.parametrize("quantizer", [cgq.MXFP8Quantizer(), cgq.NVFP4Quantizer(), cgq.Float8BlockQuantizer()])
    def test_leading_dimensions_are_flattened_and_come_back(self, quantizer):
        x = some(24, 64)
        flat, deep = quantizer.quantize(x), quantizer.quantize(x.reshape(2, 3, 4, 64))
        assert deep.shape == (2, 3, 4, 64)
        assert deep.rowwise_data.shape[:-1] == (2, 3, 4)
        assert torch.equal(deep.rowwise_scale_inv.view(torch.uint8), flat.rowwise_scale_inv.view(torch.uint8))
        for direction in ("rowwise", "columnwise"):
            assert torch.equal(deep.dequantize(direction), flat.dequantize(direction).reshape(2, 3, 4, 64))
            assert deep.dequantize(direction).dtype == torch.bfloat16
            assert deep.dequantize(direction, torch.float32).dtype == torch.float32

    def test_one_direction_only(self):
        for quantizer in (cgq.MXFP8Quantizer, cgq.NVFP4Quantizer, cgq.Float8CurrentScalingQuantizer):
            x, both = some(32, 32), quantizer().quantize(some(32, 32))
            rows, columns = quantizer(columnwise=False).quantize(x), quantizer(rowwise=False).quantize(x)
            assert rows.columnwise_data is None
            assert rows.columnwise_scale_inv is None
            assert columns.rowwise_data is None
            assert torch.equal(rows.rowwise_data.view(torch.uint8), both.rowwise_data.view(torch.uint8))
            assert torch.equal(columns.columnwise_data.view(torch.uint8), both.columnwise_data.view(torch.uint8))
            with pytest.raises(UnsupportedError, match="columnwise"):
                rows.dequantize("columnwise")
            assert columns.device == x.device

    def test_wrong_arguments_are_named_all_at_once(self):
        with pytest.raises(ShapeError, match=r"x is torch.float64.*shape \(4, 33\).*split_sizes is torch.float32"):
            cgq.MXFP8Quantizer().quantize(torch.zeros(4, 33).double(), torch.zeros(2))
        with pytest.raises(ShapeError, match="batched"):
            cgq.MXFP8Quantizer().quantize(torch.zeros(4, 32), batched=True)
        with pytest.raises(ShapeError, match="group_alignment is 32"):
            cgq.MXFP8Quantizer(group_alignment=32).quantize(torch.zeros(4, 32), torch.tensor([4]), swizzled=True)
        with pytest.raises(UnsupportedError, match="scale"):
            cgq.NVFP4Quantizer().quantize(torch.zeros(4, 32), scale=torch.ones(1))

    def test_wrong_fields_are_named(self):
        with pytest.raises(ConfigError, match=r"fp8_dtype is torch\.bfloat16"):
            cgq.MXFP8Quantizer(torch.bfloat16)
        with pytest.raises(ConfigError, match="group_alignment is 48; allowed: a multiple of 32"):
            cgq.MXFP8Quantizer(group_alignment=48)
        with pytest.raises(ConfigError, match="rowwise and columnwise are False"):
            cgq.NVFP4Quantizer(rowwise=False, columnwise=False)
        with pytest.raises(ConfigError, match="block_scaling_dim is 3"):
            cgq.Float8BlockQuantizer(block_scaling_dim=3)
        with pytest.raises(ConfigError, match="with_2d_quantization"):
            cgq.NVFP4Quantizer(with_2d_quantization=True, with_rht=True)

    def test_nothing_is_recorded_for_autograd(self):
        x = some(32, 32).requires_grad_()
        assert not cgq.MXFP8Quantizer().quantize(x).dequantize().requires_grad

"""Groups of rows, batches of matrices, layouts of scales, exact emulation, and what a recipe implies (N5, N14)."""

import dataclasses
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_grouped_mlp as cgm
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.errors import ConfigError, GroupedMLPError, UnsupportedError
from cute_grouped_mlp.quantizers.philox import random_bytes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUANTIZERS = {
    "current": cgq.Float8CurrentScalingQuantizer(),
    "current_pow2_e5m2": cgq.Float8CurrentScalingQuantizer(E5M2, True),
    "delayed": cgq.DelayedScalingQuantizer(),
    "block_1d": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": cgq.Float8BlockQuantizer(block_scaling_dim=2),
    "mxfp8": cgq.MXFP8Quantizer(),
    "mxfp8_e5m2": cgq.MXFP8Quantizer(E5M2),
    "mxfp8_2d": cgq.MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4": cgq.NVFP4Quantizer(),
    "nvfp4_rht": cgq.NVFP4Quantizer(with_rht=True),
    "nvfp4_rows": cgq.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_rows_rht": cgq.NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True),
    "nvfp4_2d": cgq.NVFP4Quantizer(with_2d_quantization=True),
}
ALL = pytest.mark.parametrize("name", QUANTIZERS)
INEXACT = cgq.Float8BlockQuantizer(force_pow_2_scales=False, block_scaling_dim=1)
DIRECTIONS = ("rowwise", "columnwise")


def some(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()).to(dtype)


def bits(t):
    return t if t.dtype == torch.float32 else t.view(torch.uint8)


def same(a, b):
    assert a.shape == b.shape
    assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


sizes_of_groups = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 130]), min_size=1, max_size=5)


@ALL
@given(sizes=sizes_of_groups, past=st.sampled_from([0, 1, 40]), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_groups_together_equal_each_alone(name, sizes, past, seed):
    quantizer, columns = QUANTIZERS[name], 160
    x = some(sum(sizes) + past, columns, seed=seed)
    x[sum(sizes) :] = torch.nan  # past the last group: must reach nothing
    q = quantizer.quantize(x, torch.tensor(sizes, dtype=torch.int32))
    assert q.columnwise_sizes.tolist() == [-(-size // 128) * 128 for size in sizes]
    assert q.matrices.slots == cgq.slot_count(len(x), len(sizes), 128)
    packed = 2 if name.startswith("nvfp4") else 1
    as_rows = not quantizer.transposed
    row = slot = 0
    for group, size in enumerate(sizes):
        alone = quantizer.quantize(x[row : row + size])
        same(q.rowwise_data[row : row + size], alone.rowwise_data)
        slots = alone.matrices.slots
        if quantizer.block == 1:
            same(q.rowwise_scale_inv[group], alone.rowwise_scale_inv[0])
            same(q.columnwise_scale_inv[group], alone.columnwise_scale_inv[0])
        elif name == "block_2d":
            tiles = slice(slot // 128, (slot + slots) // 128)
            same(q.rowwise_scale_inv[tiles], alone.rowwise_scale_inv)
            same(q.columnwise_scale_inv[:, tiles], alone.columnwise_scale_inv)
        else:
            same(q.rowwise_scale_inv[row : row + size], alone.rowwise_scale_inv)
            blocks = slice(slot // quantizer.block, (slot + slots) // quantizer.block)
            scales = q.columnwise_scale_inv[blocks] if as_rows else q.columnwise_scale_inv[:, blocks]
            same(scales, alone.columnwise_scale_inv)
        here = slice(slot // packed, (slot + slots) // packed)
        same(q.columnwise_data[here] if as_rows else q.columnwise_data[:, here], alone.columnwise_data)
        if name.startswith("nvfp4_rows"):
            same(q.amax[row : row + size], alone.amax)
        else:
            same(q.amax[group], alone.amax[0])
        same(q.columnwise_amax[group], alone.columnwise_amax[0])
        for direction in DIRECTIONS:
            same(q.dequantize(direction)[row : row + size], alone.dequantize(direction))
        row, slot = row + size, slot + -(-size // 128) * 128
    assert not bits(q.rowwise_data)[row:].any()
    assert not bits(q.columnwise_data if as_rows else q.columnwise_data.t())[slot // packed :].any()
    for direction in DIRECTIONS:
        assert not q.dequantize(direction)[row:].any()
        assert not q.operand(direction)[row if direction == "rowwise" else slot :].any()


@ALL
def test_a_batch_equals_each_matrix_alone(name):
    quantizer = QUANTIZERS[name]
    w = some(3, 48, 64)
    w[1] = 0
    q = quantizer.quantize(w, batched=True)
    for i in range(3):
        alone = quantizer.quantize(w[i])
        for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            one = getattr(alone, field)
            same(getattr(q, field)[i], one[0] if quantizer.block == 1 and "scale" in field else one)
        for direction in DIRECTIONS:
            same(q.dequantize(direction)[i], alone.dequantize(direction))
            same(q.operand(direction)[i], alone.operand(direction))
            values, _ = cgq.emulate(q, direction)
            same(values[i], cgq.emulate(alone, direction)[0])


@ALL
def test_sizes_are_cut_as_kernels_cut_them(name):
    x = some(40, 128)
    q = QUANTIZERS[name].quantize(x, torch.tensor([10, -3, 100, 5]))
    expected = QUANTIZERS[name].quantize(x, torch.tensor([10, 0, 30, 0]))
    for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "columnwise_sizes"):
        same(getattr(q, field), getattr(expected, field))


@ALL
def test_sizes_of_any_type_and_stride(name):
    x = some(64, 128)
    sizes = torch.tensor([20, 9, 30, 9])
    expected = QUANTIZERS[name].quantize(x, torch.tensor([20, 30])).columnwise_data
    same(QUANTIZERS[name].quantize(x, sizes[::2]).columnwise_data, expected)
    same(QUANTIZERS[name].quantize(x, sizes[::2].int()).columnwise_data, expected)


@ALL
@pytest.mark.parametrize("shape", [(0, 128), (64, 128)])
def test_nothing_is_read_by_the_host(name, shape):
    """On the meta device there is nothing to read: a host read raises."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for sizes in (None, torch.empty(3, dtype=torch.int64, device="meta")):
        q = QUANTIZERS[name].quantize(x, sizes)
        real = QUANTIZERS[name].quantize(torch.zeros(shape), None if sizes is None else torch.zeros(3).long())
        for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
            assert getattr(q, field).shape == getattr(real, field).shape
        assert q.dequantize("columnwise").shape == shape
        cgq.emulate(q, "columnwise", status=torch.zeros(1, dtype=torch.int32, device="meta"))


def test_stochastic_rounding_reads_nothing_either():
    x = torch.empty(64, 128, device="meta")
    cgq.NVFP4Quantizer(stochastic_rounding=True).quantize(x, torch.empty(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("batched", [False, True])
def test_an_element_gets_the_same_random_byte_in_both_directions(batched):
    """Blocks of 8 rows begin with a group, or with a matrix; a block's number is that of its first element."""
    columns, rng = 48, torch.tensor([3, 1])
    if batched:
        shape, sizes, starts = (2, 37, columns), None, [0, 37]
        lengths = [37, 37]
    else:
        lengths, starts = [20, 0, 33, 21], [0, 20, 20, 53]
        shape, sizes = (80, columns), torch.tensor(lengths)
    x = torch.full(shape, 2.25)
    x[..., ::16] = 6.0
    flat = x.view(-1, columns)
    for start in starts:
        flat[start::16] = 6.0
    flat[:, 0] = 6.0  # every block has a 6, so that all scales are exact
    q = cgq.NVFP4Quantizer(stochastic_rounding=True).quantize(x, sizes, batched=batched, rng=rng)
    rowwise, columnwise = (q.dequantize(direction).reshape(-1, columns) for direction in DIRECTIONS)
    drawn = set()
    for start, length in zip(starts, lengths, strict=True):
        for row in range(length):
            first = start + row // 8 * 8
            drawn_bytes = random_bytes(rng, first * columns + torch.arange(0, columns, 2), torch.tensor(0))
            byte = drawn_bytes[:, [row % 8, 8 + row % 8]].flatten()
            expected = torch.where(flat[start + row] == 6.0, 6.0, torch.where(byte >= 192, 3.0, 2.0))
            for values in (rowwise, columnwise):
                torch.testing.assert_close(values[start + row], expected, rtol=1e-6, atol=0)
            drawn |= set(expected.tolist())
    assert drawn == {2.0, 3.0, 6.0}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rows", [3, 8, 11])
def test_random_bytes_of_slots_without_rows(rows, batched):
    """After the transform they hold numbers too: eight of them have bytes of a series of their own."""
    quantizer = cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, group_alignment=16)
    rng, columns = torch.tensor([3, 1]), 32
    x, sizes = (some(2, rows, columns), None) if batched else (some(rows + 40, columns), torch.tensor([rows, 40]))
    matrices = quantizer._matrices(x, sizes, batched)
    drawn = quantizer._draw(x.reshape(matrices.batch, -1, columns), matrices, rng)
    for start, slots in ((0, drawn[0]), (rows, drawn[1] if batched else drawn[0, 16:])):
        length = 40 if start and not batched else rows
        for slot in range(0, 16, 8):
            series = torch.tensor(int(slot >= length))
            expected = random_bytes(rng, (start + slot) * columns + torch.arange(0, columns, 2), series)
            same(slots[slot : slot + 8].t().reshape(-1, 16), expected)


@ALL
def test_no_rows_and_only_empty_groups(name):
    for rows, sizes in ((0, None), (0, [0, 0]), (5, [0, 0, 0])):
        x = torch.full((rows, 128), torch.nan, dtype=torch.bfloat16)
        q = QUANTIZERS[name].quantize(x, None if sizes is None else torch.tensor(sizes))
        for direction in DIRECTIONS:
            assert q.dequantize(direction).shape == x.shape
            assert not q.dequantize(direction).any()
        assert not q.amax.any()


@ALL
def test_many_groups(name):
    sizes = torch.arange(1025) % 3
    x = some(int(sizes.sum()) + 1, 128)
    quantizer = dataclasses.replace(QUANTIZERS[name], group_alignment=QUANTIZERS[name].block)
    q = quantizer.quantize(x, sizes)
    assert q.columnwise_sizes.sum() <= q.matrices.slots
    last = slice(len(x) - 1 - int(sizes[-1]), len(x) - 1)
    same(q.dequantize("columnwise")[last], quantizer.quantize(x[last]).dequantize("columnwise"))


class TestSwizzled:
    """N14: one layout for every number of groups, in what is made and in what is read."""

    NAMES = pytest.mark.parametrize("name", [n for n in QUANTIZERS if QUANTIZERS[n].tiled_scales])

    @NAMES
    @pytest.mark.parametrize("sizes", [None, [200], [100, 0, 70], [128, 128]])
    def test_holds_the_same_numbers(self, name, sizes):
        x = some(260, 160)
        sizes = None if sizes is None else torch.tensor(sizes)
        compact, swizzled = (QUANTIZERS[name].quantize(x, sizes, swizzled=flag) for flag in (False, True))
        assert not compact.swizzled
        for direction in DIRECTIONS:
            same(swizzled.dequantize(direction), compact.dequantize(direction))
            same(swizzled.operand(direction), compact.operand(direction))
            same(swizzled.oriented_scales(direction), compact.oriented_scales(direction))

    @NAMES
    def test_of_a_batch(self, name):
        w = some(3, 48, 160)
        q = QUANTIZERS[name].quantize(w, batched=True, swizzled=True)
        blocks = 160 // q.quantizer.block
        assert q.rowwise_scale_inv.shape == (3, 128, -(-blocks // 4) * 4)
        for i in range(3):
            same(q.rowwise_scale_inv[i], QUANTIZERS[name].quantize(w[i], swizzled=True).rowwise_scale_inv)
            same(q.columnwise_scale_inv[i], QUANTIZERS[name].quantize(w[i], swizzled=True).columnwise_scale_inv)

    @NAMES
    def test_n14_a_group_starts_a_tile_whatever_the_number_of_groups(self, name):
        x = some(512, 256)
        quantizer = QUANTIZERS[name]
        alone = quantizer.quantize(x[:256], swizzled=True)
        blocks, block = 256 // quantizer.block, quantizer.block
        for sizes in ([256], [256, 0], [0, 256], [256, 100], [256, 256]):
            q = quantizer.quantize(x, torch.tensor(sizes), swizzled=True)
            slots = cgq.slot_count(512, len(sizes), 128)
            assert slots == (512 if len(sizes) == 1 else 640)  # of the capacity, not of the sizes
            assert q.rowwise_scale_inv.shape == (slots, blocks)
            assert q.columnwise_scale_inv.shape == (256, slots // block)
            # Two tiles of rows: the first 256 slots of the first group that has rows.
            same(q.rowwise_scale_inv[:256], alone.rowwise_scale_inv)
            tiles, width = bits(q.columnwise_scale_inv).reshape(2, -1, 512), 256 // block // 4
            same(tiles[:, :width], bits(alone.columnwise_scale_inv).reshape(2, width, 512))

    @NAMES
    def test_a_tile_holds_scales_of_one_group_and_zeros(self, name):
        x = some(100, 128)
        q = QUANTIZERS[name].quantize(x, torch.tensor([30, 70]), swizzled=True)
        for group, rows in enumerate((slice(0, 30), slice(30, 100))):
            alone = QUANTIZERS[name].quantize(x[rows], swizzled=True)
            same(q.rowwise_scale_inv[128 * group : 128 * group + 128], alone.rowwise_scale_inv)


class TestEmulation:
    @ALL
    @pytest.mark.parametrize("sizes", [None, [30, 0, 45]])
    def test_is_exact(self, name, sizes):
        q = QUANTIZERS[name].quantize(some(80, 160), None if sizes is None else torch.tensor(sizes))
        for direction in DIRECTIONS:
            values, alpha = cgq.emulate(q, direction, check=True)
            assert values.dtype == torch.bfloat16
            assert alpha.dtype == torch.float32
            assert values.is_contiguous()
            if name.startswith("nvfp4_rows"):
                factor = alpha.reshape(-1, 1) if direction == "rowwise" else q.matrices.per_slot(alpha)[0]
            elif sizes is None:
                factor = alpha.reshape(1, 1)
            else:
                counts = sizes if direction == "rowwise" else q.columnwise_sizes.tolist()
                counts = torch.tensor([*counts, len(values) - sum(counts)])  # rows past the last group are 0
                factor = torch.repeat_interleave(torch.cat((alpha, alpha[:1])), counts).unsqueeze(1)
            assert torch.equal(values.double() * factor.double(), q.operand(direction, torch.float64))

    @ALL
    def test_wgrad_of_slots_is_wgrad_of_rows(self, name):
        """The columnwise operands contract over slots to what the dequantised rows would give."""
        quantizer, sizes = QUANTIZERS[name], torch.tensor([30, 0, 45])
        x, dy = (quantizer.quantize(some(80, 160, seed=seed), sizes) for seed in (1, 2))
        assert torch.equal(x.columnwise_sizes, dy.columnwise_sizes)
        of_slots = [q.operand("columnwise", torch.float64) for q in (x, dy)]
        of_rows = [q.dequantize("columnwise", torch.float64) for q in (x, dy)]
        slot = row = 0
        for size, slots in zip(sizes.tolist(), x.columnwise_sizes.tolist(), strict=True):
            a, b = (t[slot : slot + slots] for t in of_slots)
            c, d = (t[row : row + size] for t in of_rows)
            if name in ("nvfp4_rht", "nvfp4_rows_rht"):  # padding holds a part of the transformed rows
                assert (b.t() @ a - d.t() @ c).norm() < 0.1 * (d.t() @ c).norm() + 1e-9
            else:
                torch.testing.assert_close(b.t() @ a, d.t() @ c)
            slot, row = slot + slots, row + size

    @given(st.integers(0, 2**31), st.integers(-90, 90))
    @settings(max_examples=30, deadline=None)
    def test_every_magnitude_within_range_is_exact(self, seed, exponent):
        x = (some(32, 64, dtype=torch.float32, seed=seed) * 2.0**exponent).to(torch.bfloat16)
        for name in ("mxfp8", "mxfp8_e5m2", "nvfp4", "nvfp4_rht", "block_1d"):
            q = QUANTIZERS[name].quantize(x)
            for direction in DIRECTIONS:
                values, alpha = cgq.emulate(q, direction)
                assert torch.equal(values.double() * alpha.double(), q.operand(direction, torch.float64))

    @pytest.mark.parametrize(("exponent", "bad"), [(-118, True), (-117, False), (119, False), (120, True)])
    def test_range_check(self, exponent, bad):
        x = torch.tensor([[448.0, 2.0**-9] + [0.0] * 30])
        q = cgq.MXFP8Quantizer(columnwise=False).quantize(x)
        scale = torch.tensor([[2.0**exponent]]).to(torch.float8_e8m0fnu)
        q = dataclasses.replace(q, rowwise_scale_inv=scale)
        status = torch.tensor([1], dtype=torch.int32)
        cgq.emulate(q, status=status)
        assert status.tolist() == [1 | cgq.OUT_OF_RANGE if bad else 1]
        if not bad:
            cgq.emulate(q, check=True)
            return
        with pytest.raises(GroupedMLPError, match="outside of bf16's normal numbers"):
            cgq.emulate(q, check=True)

    def test_nan_passes_and_is_in_range(self):
        x = some(4, 32)
        x[1, 3] = torch.nan
        values, _ = cgq.emulate(cgq.MXFP8Quantizer().quantize(x), check=True)
        assert values.isnan().nonzero().tolist() == [[1, 3]]

    def test_scales_that_are_no_powers_of_two_cannot_be_exact(self):
        q = INEXACT.quantize(some(8, 128))
        with pytest.raises(UnsupportedError, match="force_pow_2_scales"):
            cgq.emulate(q)
        values, alpha = cgq.emulate(q, exact=False)
        assert alpha.tolist() == [1.0]
        assert torch.equal(values, q.operand("rowwise").to(torch.bfloat16))


class TestQuantizerFor:
    """N5: HYBRID means E5M2 for gradients."""

    @pytest.mark.parametrize("recipe", [None, cgm.HighPrecision()])
    def test_high_precision_has_none(self, recipe):
        assert cgq.quantizer_for(recipe, "input") is None

    @pytest.mark.parametrize(
        ("recipe", "forward", "gradient"),
        [
            (cgm.Float8CurrentScaling(), E4M3, E5M2),
            (cgm.Float8CurrentScaling(fp8_format=cgm.Format.E4M3), E4M3, E4M3),
            (cgm.DelayedScaling(), E4M3, E5M2),
            (cgm.Float8BlockScaling(), E4M3, E4M3),
            (cgm.Float8BlockScaling(fp8_format=cgm.Format.HYBRID), E4M3, E5M2),
            (cgm.MXFP8BlockScaling(), E4M3, E4M3),
            (cgm.MXFP8BlockScaling(fp8_format=cgm.Format.HYBRID), E4M3, E5M2),
        ],
    )
    def test_n5_formats(self, recipe, forward, gradient):
        for role, dtype in (("input", forward), ("weight", forward), ("grad_output", gradient)):
            quantizer = cgq.quantizer_for(recipe, role)
            assert quantizer.fp8_dtype == dtype
            q = quantizer.quantize(some(32, 128))
            assert q.rowwise_data.dtype == q.columnwise_data.dtype == dtype

    def test_fields_reach_the_quantizer(self):
        assert cgq.quantizer_for(cgm.Float8CurrentScaling(use_power_2_scales=True), "input").force_pow_2_scales
        block = cgm.Float8BlockScaling(use_f32_scales=True)
        made = [cgq.quantizer_for(block, role) for role in ("input", "weight", "grad_output")]
        assert [q.block_scaling_dim for q in made] == [1, 2, 1]
        assert not any(q.force_pow_2_scales for q in made)
        square = cgm.MXFP8BlockScaling(enable_2d_quantization=True, margin=2)
        made = [cgq.quantizer_for(square, role) for role in ("input", "weight", "grad_output")]
        assert [(q.with_2d_quantization, q.margin) for q in made] == [(False, 2), (True, 2), (False, 2)]

    def test_nvfp4(self):
        roles = ("input", "weight", "grad_output")
        x, w, dy = (cgq.quantizer_for(cgm.NVFP4BlockScaling(), role, seed=5) for role in roles)
        assert x == cgq.NVFP4Quantizer(with_rht=True, seed=5)
        assert w == cgq.NVFP4Quantizer(with_2d_quantization=True)
        assert dy == cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, seed=5)
        plain = cgm.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True, row_scaled_activation=True
        )
        x, w, dy = (cgq.quantizer_for(plain, role) for role in roles)
        assert x == cgq.NVFP4Quantizer(row_scaled_nvfp4=True)
        assert w == dy == cgq.NVFP4Quantizer()

    def test_foreign_recipes_go_by_their_class_name_and_attributes(self):
        class MXFP8BlockScaling:
            margin = 0
            fp8_format = types.SimpleNamespace(name="HYBRID")

        class NVFP4BlockScaling:
            disable_rht = True
            disable_stochastic_rounding = disable_2d_quantization = False
            nvfp4_4over6 = "none"

        assert cgq.quantizer_for(MXFP8BlockScaling(), "grad_output") == cgq.MXFP8Quantizer(E5M2)
        foreign = NVFP4BlockScaling()
        assert cgq.quantizer_for(foreign, "input") == cgq.NVFP4Quantizer()
        foreign.nvfp4_4over6 = "all"
        with pytest.raises(UnsupportedError, match="4over6"):
            cgq.quantizer_for(foreign, "input")

    def test_custom_recipes_are_asked(self):
        made = cgq.MXFP8Quantizer()
        asked = []
        recipe = cgm.CustomRecipe(qfactory=lambda role: asked.append(role) or made)
        assert cgq.quantizer_for(recipe, "weight") is made
        assert asked == ["weight"]

    def test_what_is_unknown_says_so(self):
        with pytest.raises(ConfigError, match="role is 'output'"):
            cgq.quantizer_for(cgm.MXFP8BlockScaling(), "output")
        with pytest.raises(UnsupportedError, match="object"):
            cgq.quantizer_for(object(), "input")

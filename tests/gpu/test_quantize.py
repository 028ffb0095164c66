"""Kernels that quantise, bit for bit against the quantisers in plain torch, on the same device."""

import dataclasses
import math

import pytest
import torch

from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.quantizers import launch

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Quantisers of activations and gradients.
GROUPED = {
    "mxfp8_e4m3": cgq.MXFP8Quantizer(),
    "mxfp8_e5m2": cgq.MXFP8Quantizer(E5M2),
    "mxfp8_margin": cgq.MXFP8Quantizer(margin=2),
    "mxfp8_align32": cgq.MXFP8Quantizer(group_alignment=32),
    "nvfp4": cgq.NVFP4Quantizer(),
    "nvfp4_rht": cgq.NVFP4Quantizer(with_rht=True),
    "nvfp4_sr": cgq.NVFP4Quantizer(stochastic_rounding=True, seed=5),
    "nvfp4_rht_sr": cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, seed=(7 << 40) + 3),
    "nvfp4_align16": cgq.NVFP4Quantizer(with_rht=True, group_alignment=16),
    "block_1d": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "block_1d_fp32": cgq.Float8BlockQuantizer(force_pow_2_scales=False, block_scaling_dim=1),
    "block_2d_e5m2": cgq.Float8BlockQuantizer(E5M2, block_scaling_dim=2),
    "current": cgq.Float8CurrentScalingQuantizer(),
    "delayed": cgq.DelayedScalingQuantizer(),
    "delayed_e5m2": cgq.DelayedScalingQuantizer(E5M2, group_alignment=24),
}
#: Quantisers of weights.
BATCHED = {
    "mxfp8": cgq.MXFP8Quantizer(),
    "mxfp8_2d": cgq.MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4_2d": cgq.NVFP4Quantizer(with_2d_quantization=True),
    "block_2d": cgq.Float8BlockQuantizer(),
    "block_1d": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d_fp32": cgq.Float8BlockQuantizer(force_pow_2_scales=False),
    "current": cgq.Float8CurrentScalingQuantizer(force_pow_2_scales=True),
    "delayed": cgq.DelayedScalingQuantizer(),
}
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
#: (T, C, splits).  The first row of a group is never aligned where a size is odd.
SHAPES = {
    "n9_scale_tails": (1537, 160, (1, 63, 64, 65, 127, 129, 1088)),
    "n14_one_group_half_full": (512, 256, (256,)),
    "n14_two_groups_half_full": (512, 256, (100, 156)),
    "empty_groups": (700, 192, (0, 0, 162, 0, 257, 31, 0, 33, 0)),
    "all_empty": (70, 64, (0, 0)),
    "more_than_a_thousand_groups": (1500, 64, (1,) * 1000 + (0,) * 24 + (400,)),
}


def specs_of(quantizer, directions, batched, emulate, amax=False):
    rowwise, columnwise = directions
    return [
        spec
        for spec in launch._specs(Arch.SM90A, quantizer, rowwise, columnwise, batched, emulate, amax)
        if spec is not None
    ]


#: Everything this file launches: tests/gpu/build.py compiles it beforehand, on the CPU.
SPECS = tuple(
    dict.fromkeys(
        spec
        for quantizers, batched in ((GROUPED, False), (BATCHED, True))
        for quantizer in quantizers.values()
        for directions in DIRECTIONS.values()
        for emulate, amax in ((True, False), (True, True), (False, False))
        for spec in specs_of(quantizer, directions, batched, emulate, amax)
    )
)


def numbers(kind, rows, columns):
    """bf16 numbers of a kind."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    x = torch.randn(rows, columns, device="cuda", generator=generator)
    if kind == "normal":
        return x.to(torch.bfloat16)
    if kind == "spread":
        return (x * torch.exp(4 * torch.randn(rows, columns, device="cuda", generator=generator))).to(torch.bfloat16)
    if kind == "edges":
        x = x.to(torch.bfloat16)
        info = torch.finfo(torch.bfloat16)
        values = [0.0, -0.0, info.tiny, info.tiny / 128, info.max, -info.max, 1e-30, 1e-36, 3e37]
        for row, value in enumerate(values):  # whole rows of one value, and one such value in a row
            x[row::41] = value
            x[row + len(values) :: 41, row::23] = value
        x[20::41, ::3] = math.nan
        x[21::41, 7::50] = math.inf
        x[22::41, 40::60] = -math.inf
        x[23::41] = math.nan
        x[:, 24] = 0.0
        x[:, 25] = math.nan
        return x
    raise AssertionError(kind)


def every_bf16(order):
    """All 65,536 bf16 values."""
    bits = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16)
    if order == "shuffled":
        bits = bits[torch.randperm(65536, device="cuda", generator=torch.Generator("cuda").manual_seed(1))]
    return bits.view(torch.bfloat16).reshape(512, 128)


def same(name, actual, expected):
    """Equal bits; for NaN it is enough that both are."""
    assert (actual is None) == (expected is None), name
    if actual is None:
        return
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, name
    strides = zip(actual.shape, actual.stride(), expected.stride(), strict=True)
    assert all(n == 1 or stride == wanted for n, stride, wanted in strides), name
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    wrong = actual.view(bits) != expected.view(bits)
    if actual.element_size() > 1 and actual.dtype.is_floating_point:
        wrong &= ~(actual.isnan() & expected.isnan())
    if wrong.any():
        at = wrong.nonzero()
        where = tuple(at[0].tolist())
        raise AssertionError(
            f"{name}: {len(at)} of {wrong.numel()} differ, first at {where}: {actual[where]} is not {expected[where]}; "
            f"rows {sorted(set(at[:, 0].tolist()))[:12]}, columns {sorted(set(at[:, -1].tolist()))[:12]}"
        )


def reference(quantizer, x, sizes, directions, **arguments):
    """Operands in plain torch, with the status and amax that it leaves."""
    rowwise, columnwise = directions
    quantizer = dataclasses.replace(quantizer, rowwise=rowwise, columnwise=columnwise)
    q = quantizer.quantize(x, sizes, **arguments)
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    made = {}
    for direction, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
        if wanted:
            made[direction] = cgq.emulate(q, direction, exact=False, status=status)
    return q, made, status


def check_emulated(quantizer, x, sizes, directions, **arguments):
    q, expected, expected_status = reference(quantizer, x, sizes, directions, **arguments)
    amax = torch.full_like(q.amax, 1.5)
    expected_amax = torch.maximum(amax, q.amax)
    rowwise, columnwise = directions
    for _ in range(2):  # the second time into memory that holds NaN
        status = torch.zeros(1, dtype=torch.int32, device="cuda")
        given = amax.clone()
        made = cgq.emulated_operands(
            quantizer, x, sizes, rowwise=rowwise, columnwise=columnwise, status=status, amax=given, **arguments
        )
        for name, operand in zip(("rowwise", "columnwise"), made, strict=True):
            assert (operand is None) == (name not in expected)
            if operand is None:
                continue
            values, alpha = expected[name]
            same(name, operand.values, values)
            same(f"{name} alpha", operand.alpha, alpha if quantizer.has_alpha else None)
            same(f"{name} sizes", operand.sizes, q.columnwise_sizes if name == "columnwise" else None)
            operand.values.fill_(math.nan)
        same("amax", given, expected_amax)
        same("status", status, expected_status)
        del made, operand


def launched_by_kernels(quantizer, x, sizes, directions):
    rowwise, columnwise = directions
    return (
        launch.specs_of(quantizer, x, sizes, batched=x.dim() == 3, rowwise=rowwise, columnwise=columnwise) is not None
    )


def grouped(kind, shape):
    tokens, columns, splits = SHAPES[shape]
    x = numbers(kind, tokens, columns)
    x[sum(splits) :] = math.nan
    sizes = torch.tensor(splits, device="cuda")  # int64: the kernels read low words
    return x, sizes


def rng_of(quantizer):
    if getattr(quantizer, "stochastic_rounding", False):
        return {"rng": torch.tensor([(9 << 33) + 11, (1 << 32) + 77], device="cuda")}
    return {}


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GROUPED)
def test_n9_n14_emulated_groups(name, shape, directions):
    x, sizes = grouped("normal", shape)
    assert launched_by_kernels(GROUPED[name], x, sizes, directions)
    check_emulated(GROUPED[name], x, sizes, directions, **rng_of(GROUPED[name]))


@pytest.mark.parametrize("kind", ["spread", "edges"])
@pytest.mark.parametrize("name", GROUPED)
def test_emulated_numbers(name, kind):
    x, sizes = grouped(kind, "n9_scale_tails")
    check_emulated(GROUPED[name], x, sizes, (True, True))


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("name", GROUPED)
def test_emulated_every_bf16(name, order):
    x = every_bf16(order)
    check_emulated(GROUPED[name], x, torch.tensor([65, 447], device="cuda", dtype=torch.int32), (True, True))


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("shape", [(3, 96, 128), (2, 200, 144), (5, 130, 320)], ids=str)
@pytest.mark.parametrize("name", BATCHED)
def test_emulated_matrices(name, shape, directions):
    batch, rows, columns = shape
    if columns % BATCHED[name].divisor:
        columns += 16
    x = numbers("edges" if batch == 5 else "normal", batch * rows, columns).reshape(batch, rows, columns)
    assert launched_by_kernels(BATCHED[name], x, None, directions)
    check_emulated(BATCHED[name], x, None, directions, batched=True)


@pytest.mark.parametrize("name", BATCHED)
def test_emulated_matrix_without_groups(name):
    x = numbers("normal", 77, 96).reshape(7, 11, 96)
    assert launched_by_kernels(BATCHED[name], x, None, (True, True))
    check_emulated(BATCHED[name], x, None, (True, True))


def test_delayed_scaling_takes_scales():
    x, sizes = grouped("spread", "empty_groups")
    scale = torch.rand(sizes.shape[0], device="cuda") * 100
    check_emulated(cgq.DelayedScalingQuantizer(), x, sizes, (True, True), scale=scale)
    check_emulated(cgq.DelayedScalingQuantizer(E5M2), x, sizes, (False, True), scale=scale)


@pytest.mark.parametrize("splits", [(300, 500), (-5, 100, 7), (2**31 - 1, 3), (40, -1, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4_rht", "block_1d", "current"])
def test_sizes_that_are_not_valid(name, splits):
    x = numbers("normal", 333, 128)
    sizes = torch.tensor(splits, device="cuda", dtype=torch.int32)
    rowwise, columnwise = True, True
    _, expected, _ = reference(GROUPED[name], x, sizes, (True, True))
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    made = cgq.emulated_operands(GROUPED[name], x, sizes, rowwise=rowwise, columnwise=columnwise, status=status)
    for operand, direction in zip(made, ("rowwise", "columnwise"), strict=True):
        same(direction, operand.values, expected[direction][0])
    assert status.item() == kernels.INVALID_SPLITS


@pytest.mark.parametrize("value", [2.0**-126, 2.0**-120, 2.0**-133, 3.38e38, math.inf, 1.0, 0.0])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "block_1d", "block_1d_fp32", "block_2d_e5m2"])
def test_products_out_of_range_are_reported(name, value):
    for row, column in ((0, 0), (77, 100), (299, 255)):
        x = torch.zeros(300, 256, device="cuda", dtype=torch.bfloat16)
        x[row, column] = value
        x[row, column ^ 1] = value * 2.0**-6
        sizes = torch.tensor([200, 100], device="cuda")
        for directions in DIRECTIONS.values():
            check_emulated(GROUPED[name], x, sizes, directions)


@pytest.mark.parametrize("kind", ["normal", "spread", "edges"])
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("name", GROUPED)
def test_packed_groups(name, directions, kind):
    shape = {"row": "n9_scale_tails", "col": "empty_groups"}.get(
        next(k for k, v in DIRECTIONS.items() if v == directions)
    )
    x, sizes = grouped(kind, shape or "n9_scale_tails")
    check_packed(GROUPED[name], x, sizes, directions, **rng_of(GROUPED[name]))


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("name", ["nvfp4_rht_sr", "block_1d", "block_2d_e5m2", "delayed_e5m2"])
def test_packed_pieces_of_many_groups(name, directions):
    """Bands of pieces reach over windows of groups, and each CTA works on several."""
    x, sizes = grouped("normal", "more_than_a_thousand_groups")
    check_packed(GROUPED[name], x, sizes, directions, **rng_of(GROUPED[name]))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht", "nvfp4_rht_sr"])
def test_nvfp4_groups_of_any_magnitude(name):
    """Scales of the second level from the least to the largest: divisions whose operands or results are subnormal."""
    exponents = (-132, -128, -126, -122, -118, -114, -110, -70, -60, -50, 0, 60, 100, 120, 126)
    sizes = torch.full((len(exponents),), 48, device="cuda")
    scale = torch.tensor(exponents, device="cuda").repeat_interleave(48).unsqueeze(1)
    x = numbers("spread", 48 * len(exponents), 128).float().clamp(-1.9, 1.9)
    x = torch.ldexp(x, scale).to(torch.bfloat16)
    check_emulated(GROUPED[name], x, sizes, (True, True), **rng_of(GROUPED[name]))
    check_packed(GROUPED[name], x, sizes, (True, True), **rng_of(GROUPED[name]))


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("name", BATCHED)
def test_packed_matrices(name, directions):
    x = numbers("edges", 5 * 136, 160).reshape(5, 136, 160)
    check_packed(BATCHED[name], x, None, directions, batched=True)


def rows_in_runs(columns):
    """Rows that are work enough for the schedule to hand out pieces in runs of up to four: quantize_schedule.jinja."""
    teams = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    return 2 * 4 * 4 * teams * 128 // -(-columns // 128)


@pytest.mark.parametrize(
    "columns", [1104, 1296]
)  # nine pieces, the last one short, and eleven: runs of 4, 4 and 1 or 3
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht_sr"])
def test_packed_runs(name, columns):
    """With much work a team takes neighbouring pieces of a row in turn, and writes their rows' scales together."""
    tokens = rows_in_runs(columns)
    sizes = torch.tensor([0, 1, tokens // 3, 129, 0, tokens // 2, 1000], device="cuda")
    check_packed(GROUPED[name], numbers("edges", tokens, columns), sizes, (True, True), **rng_of(GROUPED[name]))


@pytest.mark.parametrize("columns", [256, 1104])
def test_packed_runs_of_matrices(columns):
    rows = rows_in_runs(columns) // 56 * 8
    x = numbers("edges", 7 * rows, columns).reshape(7, rows, columns)
    check_packed(BATCHED["nvfp4_2d"], x, None, (True, True), batched=True)


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
def test_packed_scales_of_many_pieces(directions):
    tokens = rows_in_runs(1104)
    sizes = torch.tensor([0, 1, tokens // 3, 129, 0, tokens // 2, 1000], device="cuda")
    check_packed(GROUPED["block_1d"], numbers("edges", tokens, 1104), sizes, directions)


def check_packed(quantizer, x, sizes, directions, **arguments):
    rowwise, columnwise = directions
    expected = dataclasses.replace(quantizer, rowwise=rowwise, columnwise=columnwise).quantize(x, sizes, **arguments)
    where = {"batched": arguments.get("batched", False), "rowwise": rowwise, "columnwise": columnwise}
    specs = launch.specs_of(quantizer, x, sizes, **where, emulate=False)
    assert specs is not None
    for _ in range(2):
        q = launch.quantized(quantizer, specs, x, sizes, **arguments)
        for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            got, want = getattr(q, name), getattr(expected, name)
            same(name, got, want)
        for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            if (t := getattr(q, name)) is not None:  # its memory is handed out again
                torch.as_strided(t, (t.numel(),), (1,)).view(torch.uint8).fill_(0xAB)
        del q, t, got


def test_replayed_graph_follows_the_sizes():
    quantizer = GROUPED["nvfp4_rht"]
    x = numbers("normal", 500, 128)
    sizes = torch.tensor([100, 400], device="cuda", dtype=torch.int32)
    cgq.emulated_operands(quantizer, x, sizes, rowwise=True, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = cgq.emulated_operands(quantizer, x, sizes, rowwise=True, columnwise=True)
    for splits in ((100, 400), (333, 5), (0, 500), (0, 0)):
        sizes.copy_(torch.tensor(splits))
        graph.replay()
        _, expected, _ = reference(quantizer, x, sizes, (True, True))
        for operand, direction in zip(made, ("rowwise", "columnwise"), strict=True):
            same(direction, operand.values, expected[direction][0])
            same(f"{direction} alpha", operand.alpha, expected[direction][1])


def test_offsets_beyond_31_bits():
    """More than 2^31 elements: the last rows are those of the tensor alone."""
    rows, columns = 300_000, 7424
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-500:] = numbers("normal", 500, columns)
    sizes = torch.tensor([rows - 500, 500], device="cuda")
    quantizer = cgq.MXFP8Quantizer()
    row, column = cgq.emulated_operands(quantizer, x, sizes, rowwise=True, columnwise=True)
    _, expected, _ = reference(quantizer, x[-500:], torch.tensor([500], device="cuda"), (True, True))
    same("rowwise", row.values[-500:], expected["rowwise"][0])
    first = -(-(rows - 500) // 128) * 128
    same("columnwise", column.values[first : first + 512], expected["columnwise"][0][:512])
    assert not row.values[: rows - 500].any()
    assert not column.values[:first].any()

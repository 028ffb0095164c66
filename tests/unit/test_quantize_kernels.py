"""Kernels that quantise: specs, sources, resources, and how the runtime calls them.  The GPU tests run them."""

import dataclasses
import itertools
import json
import re

import pytest
import torch

from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.codegen.catalog import default_catalog, full_catalog
from cute_grouped_mlp.codegen.compile import compile_kernel
from cute_grouped_mlp.codegen.errors import RenderError
from cute_grouped_mlp.codegen.quantize_contexts import QuantizeContext
from cute_grouped_mlp.codegen.quantize_decisions import quantize_tensors, shared_bytes
from cute_grouped_mlp.codegen.render import render
from cute_grouped_mlp.codegen.select import amax_spec, quantize_spec
from cute_grouped_mlp.codegen.spec import Arch, Element, KernelSpec, Pass, Quantization, Scaling
from cute_grouped_mlp.quantizers import formats, launch
from cute_grouped_mlp.quantizers.emulation import out_of_range
from cute_grouped_mlp.quantizers.nvfp4 import HADAMARD_SIGNS

E5M2 = torch.float8_e5m2
BASE = Quantization(Scaling.MXFP8, Element.E4M3)
#: Another value of each field.
OTHER = {
    "scaling": Scaling.NVFP4,
    "element": Element.E5M2,
    "rowwise": False,
    "columnwise": False,
    "emulate": False,
    "batched": True,
    "two_dimensional": True,
    "power_of_two": False,
    "margin": -3,
    "rht": True,
    "stochastic": True,
    "amax": True,
}
DIRECTIONS = ((True, False), (False, True), (True, True))
SPECS = tuple(spec for spec in full_catalog(Arch.SM90A) if spec.kernel.quantizes)
QUANTIZERS = {
    "mxfp8": cgq.MXFP8Quantizer(E5M2, margin=1),
    "mxfp8_2d": cgq.MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4": cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "nvfp4_2d": cgq.NVFP4Quantizer(with_2d_quantization=True),
    "block_1d": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": cgq.Float8BlockQuantizer(force_pow_2_scales=False),
    "current": cgq.Float8CurrentScalingQuantizer(),
    "delayed": cgq.DelayedScalingQuantizer(),
}


def spec_of(**fields):
    return quantize_spec(Arch.SM90A, dataclasses.replace(BASE, **fields))


class TestSpec:
    @pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Quantization)])
    def test_each_field_is_part_of_the_identity(self, field):
        base, changed = spec_of(), spec_of(**{field: OTHER[field]})
        assert changed.name != base.name
        assert changed.digest != base.digest
        assert changed.name.isidentifier()

    @pytest.mark.parametrize("fields", list(itertools.combinations(OTHER, 2)))
    def test_json_round_trip(self, fields):
        spec = spec_of(**{field: OTHER[field] for field in fields})
        assert KernelSpec.from_dict(json.loads(spec.to_json())) == spec
        amax = amax_spec(Arch.SM90A, batched=True, rht=True)
        assert KernelSpec.from_dict(json.loads(amax.to_json())) == amax

    def test_other_kernels_json_is_what_it_was(self):
        assert "quantization" not in KernelSpec(Arch.SM90A, Pass.REDUCE).to_dict()

    def test_from_dict_refuses_what_it_does_not_know(self):
        data = spec_of().to_dict()
        with pytest.raises(ValueError, match="mxfp6"):
            KernelSpec.from_dict({**data, "quantization": {**data["quantization"], "scaling": "mxfp6"}})
        with pytest.raises(TypeError):
            KernelSpec.from_dict({**data, "quantization": {**data["quantization"], "colour": "red"}})

    def test_equal_specs_are_one_object(self):
        assert spec_of() is spec_of()
        assert amax_spec(Arch.SM90A, batched=False, rht=True) is amax_spec(Arch.SM90A, batched=False, rht=True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"element": Element.E2M1}, "mxfp8 has no elements e2m1"),
            ({"rowwise": False, "columnwise": False}, "rowwise, columnwise or both"),
            ({"rht": True}, "rht and stochastic belong to nvfp4"),
            ({"power_of_two": False, "amax": True}, "power_of_two belongs to block_fp8; amax belongs to per_tensor"),
            ({"scaling": Scaling.PER_TENSOR, "two_dimensional": True, "margin": 1}, "no blocks; margin belongs to"),
            ({"scaling": None}, "needs scaling and element"),
        ],
    )
    def test_a_spec_that_makes_no_sense_is_refused(self, changes, message):
        with pytest.raises(RenderError, match=message):
            render(spec_of(**changes))

    def test_other_passes_take_no_quantization(self):
        with pytest.raises(RenderError, match="reduce takes no quantization"):
            render(KernelSpec(Arch.SM90A, Pass.REDUCE, quantization=BASE))
        with pytest.raises(RenderError, match="amax takes batched and rht"):
            render(KernelSpec(Arch.SM90A, Pass.AMAX, quantization=BASE))
        with pytest.raises(RenderError, match="quantize needs a quantization"):
            render(KernelSpec(Arch.SM90A, Pass.QUANTIZE))


class TestSource:
    def test_every_kernel_renders_under_a_name_of_its_own(self):
        sources = {spec.name: render(spec).source for spec in SPECS}
        assert len(sources) == len(SPECS) > 200
        for source in sources.values():
            body = source.split("\n", 3)[3]
            assert max(map(len, body.splitlines())) <= 120

    def test_no_function_of_a_kernel_is_unused(self):
        for spec in SPECS[::7]:
            source = render(spec).source
            for name in re.findall(r"^def (\w+)\(", source, re.MULTILINE):
                if name not in ("launch", "fake_arguments"):
                    assert len(re.findall(rf"\b{name}\(", source)) > 1, f"{spec.name}: {name}"

    def test_signs_of_the_transform_are_the_quantisers(self):
        bits = int(QuantizeContext(amax_spec(Arch.SM90A, batched=False, rht=True)).hadamard_signs, 16)
        assert tuple(-1 if bits >> i & 1 else 1 for i in range(16)) == HADAMARD_SIGNS

    @pytest.mark.parametrize("element", [Element.E4M3, Element.E5M2])
    def test_products_under_safe_scales_are_normal_and_no_further(self, element):
        """The range check is skipped under these scales: no element may leave bf16's normal numbers, some do beyond."""
        scope = {}
        exec("\n".join(QuantizeContext(spec_of(element=element)).constants), scope)
        dtype = {Element.E4M3: torch.float8_e4m3fn, Element.E5M2: E5M2}[element]
        elements = formats.decode_fp8(torch.arange(256, dtype=torch.int32).to(torch.uint8), dtype)
        elements = elements[elements.isfinite()]
        first, last = scope["SAFE_CODES"]
        for code in range(256):
            scale = formats.decode_e8m0(torch.tensor([code], dtype=torch.int32).to(torch.uint8))
            outside = bool(out_of_range(elements * scale)) if code < 255 else True
            assert outside == (not first <= code <= last), code
        exec("\n".join(QuantizeContext(spec_of(scaling=Scaling.BLOCK_FP8, element=element)).constants), scope)
        low, high = scope["SAFE_SCALES"]
        assert (low, high) == (2.0 ** (first - 127), 2.0 ** (last - 127))

    def test_the_constant_of_mxfp8_is_rounded_as_torch_rounds_it(self):
        for element, margin in itertools.product((Element.E4M3, Element.E5M2), (0, 2, -1)):
            scope = {}
            exec("\n".join(QuantizeContext(spec_of(element=element, margin=margin)).constants), scope)
            one = torch.ones(1) * (2.0**margin / element.largest)
            assert scope["INVERSE_LARGEST"] == one.item()


class TestCatalog:
    def test_the_default_catalog_has_what_emulated_steps_need(self):
        catalog = set(default_catalog(Arch.SM90A))
        for recipe in (cgq_recipe("MXFP8BlockScaling"), cgq_recipe("NVFP4BlockScaling")):
            for role, batched in (("input", False), ("weight", True), ("grad_output", False)):
                quantizer = cgq.quantizer_for(recipe, role)
                for rowwise, columnwise in DIRECTIONS:
                    found = launch._specs(Arch.SM90A, quantizer, rowwise, columnwise, batched, True, False)
                    assert {spec for spec in found if spec is not None} <= catalog

    def test_specs_that_the_runtime_chooses_can_be_found_by_name(self):
        for quantizer, directions, batched, emulate in every_call():
            found = launch._specs(Arch.SM90A, quantizer, *directions, batched, emulate, True)
            if getattr(quantizer, "margin", 0) == 0:
                assert {spec for spec in found if spec is not None} <= set(SPECS)


def cgq_recipe(name):
    import cute_grouped_mlp as cgm

    return getattr(cgm, name)()


def every_call():
    return itertools.product(QUANTIZERS.values(), DIRECTIONS, (False, True), (False, True))


class TestLaunch:
    """A kernel gets the arguments that it declares, and outputs of the shapes that the quantiser's result has."""

    @pytest.fixture
    def calls(self):
        made = []

        class Recorder:
            def prepare(self, specs, device):
                made.append(tuple(specs))

            def sm_count(self, device):
                return 132

            def get(self, spec):
                return lambda *arguments: made.append((spec, arguments))

        with kernels.using(Recorder()):
            yield made

    @pytest.mark.parametrize("name", QUANTIZERS)
    def test_arguments_and_shapes(self, calls, name):
        quantizer = QUANTIZERS[name]
        kinds = ("groups", "batch", "one matrix")
        for directions, kind, emulate in itertools.product(DIRECTIONS, kinds, (False, True)):
            batched, sizes = kind == "batch", torch.tensor([200, 0, 33, 250]) if kind == "groups" else None
            x = torch.randn(3, 200, 128).to(torch.bfloat16)
            specs = launch._specs(Arch.SM90A, quantizer, *directions, kind != "groups", emulate, False)
            calls.clear()
            run = launch.emulated if emulate else launch.quantized
            made = run(quantizer, specs, x, sizes, batched=batched)
            assert calls[0] == tuple(spec for spec in specs[::-1] if spec is not None)
            for spec, arguments in calls[1:]:
                self.check_arguments(spec, arguments)
            rowwise, columnwise = directions
            wanted = dataclasses.replace(quantizer, rowwise=rowwise, columnwise=columnwise)
            expected = wanted.quantize(x, sizes, batched=batched)
            if not emulate:
                for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
                    self.same_kind(getattr(made, field), getattr(expected, field))
                continue
            for operand, direction, on in zip(made, ("rowwise", "columnwise"), directions, strict=True):
                assert (operand is not None) == on
                if operand is not None:
                    values, alpha = cgq.emulate(expected, direction, exact=False)
                    self.same_kind(operand[0], values)
                    self.same_kind(operand[1], alpha if quantizer.has_alpha else None)
                    self.same_kind(operand[2], expected.columnwise_sizes if direction == "columnwise" else None)

    def check_arguments(self, spec, arguments):
        context = QuantizeContext(spec)
        assert len(arguments) == len(context.parameters) + 1
        dtypes = {"BFloat16": torch.bfloat16, "Float32": torch.float32, "Uint8": torch.uint8}
        dtypes |= {"Int32": torch.int32, "Int64": torch.int64}
        extents = {}
        for declared, got in zip(quantize_tensors(spec), arguments, strict=False):
            assert got.dtype == dtypes[declared.dtype], declared.name
            assert got.dim() == len(declared.shape), declared.name
            assert declared.strided or got.is_contiguous(), declared.name
            for extent, size in zip(declared.shape, got.shape, strict=True):
                name, _, divisor = extent.partition(" / ")
                if not divisor and not name.isdigit():
                    assert extents.setdefault(name, size) == size, (declared.name, extent)
                elif name in extents:
                    assert -(-extents[name] // int(divisor)) == size, (declared.name, extent)
        assert all(isinstance(value, int) for value in arguments[len(quantize_tensors(spec)) :])

    def same_kind(self, got, expected):
        assert (got is None) == (expected is None)
        if got is not None:
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            for n, stride, wanted in zip(got.shape, got.stride(), expected.stride(), strict=True):
                assert n == 1 or stride == wanted

    def test_plain_torch_does_what_kernels_cannot(self):
        x = torch.randn(64, 64).to(torch.bfloat16)
        where = {"batched": False, "rowwise": True, "columnwise": True}
        assert launch.specs_of(cgq.MXFP8Quantizer(), x, None, **where) is None  # not on a GPU
        row_scaled = cgq.NVFP4Quantizer(row_scaled_nvfp4=True)
        assert launch.quantization_of(row_scaled, rowwise=True, columnwise=True, batched=False) is None

        class Mine(cgq.MXFP8Quantizer):
            pass

        assert launch.quantization_of(Mine(), rowwise=True, columnwise=True, batched=False) is None

    def test_the_transform_is_left_out_where_nothing_is_transformed(self):
        quantizer = QUANTIZERS["nvfp4"]
        q = launch.quantization_of(quantizer, rowwise=True, columnwise=False, batched=False)
        assert not q.rht
        assert launch.quantization_of(quantizer, rowwise=False, columnwise=True, batched=False).rht

    def test_an_amax_is_measured_once(self, calls):
        """Delayed scaling's comes out of the kernel that quantises; MXFP8's, which nothing else needs, of its own."""
        x = torch.randn(64, 64).to(torch.bfloat16)
        sizes = torch.tensor([64])
        history = torch.zeros(1)
        for name, count in (("delayed", 1), ("mxfp8", 2), ("current", 2)):
            specs = launch._specs(Arch.SM90A, QUANTIZERS[name], True, True, False, True, True)
            calls.clear()
            launch.emulated(QUANTIZERS[name], specs, x, sizes, amax=history)
            launched = calls[1:]
            assert len(launched) == count, name
            direct = [a for _, arguments in launched for a in arguments if a is history]
            assert len(direct) == (name != "current"), name


@pytest.mark.parametrize(
    "fields",
    [
        {"scaling": Scaling.BLOCK_FP8},
        {"scaling": Scaling.BLOCK_FP8, "two_dimensional": True, "power_of_two": False},
        {"scaling": Scaling.NVFP4, "element": Element.E2M1, "rht": True, "stochastic": True, "emulate": False},
        {"scaling": Scaling.NVFP4, "element": Element.E2M1, "stochastic": True, "emulate": False},
        {"scaling": Scaling.PER_TENSOR, "amax": True, "emulate": False},
        {"emulate": False, "batched": True},
    ],
    ids=lambda fields: "_".join(map(str, fields)),
)
def test_k4_kernels_outside_the_default_catalog(tmp_path, fields):
    spec = spec_of(**fields)
    compiled = compile_kernel(spec, tmp_path)
    assert compiled.report.spill_stores <= 64
    assert compiled.report.smem == shared_bytes(spec)
    assert compiled.report.mma == ()
    ptx = (tmp_path / "kernel.ptx").read_text()
    estimate = "rcp.approx.ftz.f32"  # NVFP4's, of numbers that are normal; a Newton step makes it exact
    assert (estimate in ptx) == (spec.quantization.scaling is Scaling.NVFP4)
    assert ".ftz" not in ptx.replace(estimate, ""), "subnormal numbers would be flushed to zero"
    assert "div.full" not in ptx
    assert "div.approx" not in ptx

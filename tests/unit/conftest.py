"""Fixtures of several unit tests: the two paths of a call, specs, and a small kernel in place of a rendered one."""

import hashlib
from pathlib import Path

import pytest
import torch

from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.render import Rendered
from cute_grouped_mlp.codegen.spec import Arch, DType, KernelSpec, Pass
from cute_grouped_mlp.reference_kernels import ReferenceKernels

DATA = Path(__file__).parent / "data"


class SmallRendered(Rendered):
    """A kernel that no template made; its line n comes from line 100 + n of a template that does not exist."""

    @property
    def line_map(self):
        return (None, *(("sm90/small.py.jinja", 100 + n) for n in range(2, self.source.count("\n") + 2)))


@pytest.fixture(params=["torch", "kernels"])
def path(request):
    """Plain torch, and the host code of kernels with torch functions in their place."""
    if request.param == "torch":
        yield request.param
        return
    with kernels.using(ReferenceKernels()):
        yield request.param


@pytest.fixture
def ref():
    """Run this project's kernels as torch functions, so that fused plans run on the CPU; new tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    with kernels.using(ReferenceKernels()) as provider:
        yield provider
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def specs():
    """Two specs whose kernels are small: specs(n) is the n-th."""
    kinds = (DType.FP32, DType.BF16, DType.FP16)
    return lambda n=0: KernelSpec(Arch.SM90A, Pass.REDUCE, probs=kinds[n % 3], numerics=("bf16", "fp16")[n // 3 % 2])


@pytest.fixture
def small(specs):
    """Make the copy kernel, with a text replaced if wanted, as the rendered source of a spec."""

    def make(spec=None, old="", new=""):
        source = (DATA / "copy_kernel.py").read_text()
        assert old in source
        source = source.replace(old, new)
        return SmallRendered(spec or specs(), source, hashlib.sha256(source.encode()).hexdigest())

    return make

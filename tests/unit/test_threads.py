"""One module called by several threads at once, each under a recipe of its own."""

import sys
import threading

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

G, H, F = 2, 64, 64
SIZES = (33, 31)


@pytest.fixture(params=["torch", "kernels"])
def path(request):
    """Plain torch, and the host code of kernels with torch functions in their place."""
    if request.param == "torch":
        yield request.param
        return
    with kernels.using(ReferenceKernels()):
        yield request.param


@pytest.fixture
def frequent_switches():
    """Let Python change threads a thousand times more often than it does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


def test_each_thread_gets_the_numbers_of_its_recipe(path, frequent_switches):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes = torch.randn(sum(SIZES), H, dtype=torch.bfloat16), torch.tensor(SIZES)
    recipes = [
        cgm.MXFP8BlockScaling(),
        cgm.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
        cgm.Float8CurrentScaling(),
        cgm.HighPrecision(),
    ]

    def step(recipe):
        mine = x.clone().requires_grad_()
        with cgm.autocast(recipe=recipe):
            y = module(mine, sizes)
        return y.detach(), *torch.autograd.grad(y, (mine, *module.parameters()), torch.ones_like(y))

    expected = [step(recipe) for recipe in recipes]
    assert len({tuple(results[0].flatten().tolist()) for results in expected}) == len(recipes), (
        "the recipes cannot be told apart"
    )
    barrier = threading.Barrier(len(recipes))
    wrong, done, errors = [], [], []

    def work(recipe, lone):
        try:
            barrier.wait()
            for _ in range(15):
                done.append(recipe)
                if not all(map(torch.equal, step(recipe), lone)):
                    wrong.append(type(recipe).__name__)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(recipes, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong, f"{len(wrong)} of {len(done)} steps: {wrong}"

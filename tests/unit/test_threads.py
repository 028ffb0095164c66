"""One module called by several threads at once, each under a recipe of its own."""

import copy
import sys
import threading

import pytest
import torch

import cute_grouped_mlp as cgm

G, H, F = 2, 64, 64
SIZES = (33, 31)


@pytest.fixture
def frequent_switches():
    """Let Python change threads a thousand times more often than it does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


def recipes_of():
    """Recipes that give different numbers at each call, and the same at the next call; no two of one class."""
    return [
        cgm.MXFP8BlockScaling(),
        cgm.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
        cgm.Float8CurrentScaling(),
        cgm.HighPrecision(),
    ]


def module_of():
    torch.manual_seed(0)
    return cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)


def inputs_of():
    generator = torch.Generator().manual_seed(1)  # torch's own is all threads' together
    return torch.randn(sum(SIZES), H, dtype=torch.bfloat16, generator=generator), torch.tensor(SIZES)


def step(module, recipe):
    x, sizes = inputs_of()
    x.requires_grad_()
    with cgm.autocast(recipe=recipe):
        y = module(x, sizes)
    return y.detach(), *torch.autograd.grad(y, (x, *module.parameters()), torch.ones_like(y))


def run_in_threads(work, items):
    """Call ``work(item, barrier)`` in a thread of its own for each item; returns what was raised."""
    barrier = threading.Barrier(len(items), timeout=60)
    errors = []

    def guarded(item):
        try:
            work(item, barrier)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("first_calls", [False, True])
def test_each_thread_gets_the_numbers_of_its_recipe(path, frequent_switches, first_calls):
    """Of a module that has its plans, and of modules that nobody called before."""
    recipes, module = recipes_of(), module_of()
    expected = [step(module, recipe) for recipe in recipes]
    assert len({tuple(results[0].flatten().tolist()) for results in expected}) == len(recipes), "recipes look alike"
    rounds, wrong = 15, []
    modules = [copy.deepcopy(module) for _ in range(rounds)] if first_calls else [module] * rounds

    def work(item, barrier):
        recipe, lone = item
        for called in modules:
            barrier.wait()
            if not all(map(torch.equal, step(called, recipe), lone)):
                wrong.append(type(recipe).__name__)

    errors = run_in_threads(work, list(zip(recipes, expected, strict=True)))
    assert not errors
    assert not wrong, f"{len(wrong)} of {rounds * len(recipes)} steps: {wrong}"


def test_operations_of_two_threads_may_wait_for_each_other():
    """Nothing is locked while operations run: ranks that are threads of one process exchange rows there."""

    class Exchange(cgm.BasicOperation):
        def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
            barriers[0].wait()
            return input_ * 1

    module = cgm.Sequential(cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16), Exchange())
    x, sizes = inputs_of()
    barriers = [threading.Barrier(2, timeout=20)]

    def work(recipe, barrier):
        with torch.no_grad(), cgm.autocast(recipe=recipe):
            module(x, sizes)

    assert not run_in_threads(work, [cgm.MXFP8BlockScaling(), cgm.MXFP8BlockScaling()])


def test_a_backward_ends_the_step_of_its_own_state():
    """Another recipe's backward in between must not change the random bits of this one's."""
    module = module_of()
    x, sizes = inputs_of()
    gradients = []
    for between in (False, True):
        torch.manual_seed(2)
        module.reset_recipe_state()
        other = None
        if between:
            with cgm.autocast(recipe=cgm.MXFP8BlockScaling()):
                other = module(x, sizes).sum()
        torch.manual_seed(2)
        with cgm.autocast(recipe=cgm.NVFP4BlockScaling()):
            y = module(x, sizes).sum()
        if other is not None:
            other.backward()
        gradients.append(torch.autograd.grad(y, list(module.parameters())))
        assert module.fc1.recipe_state.updates == 1
    assert all(map(torch.equal, *gradients))

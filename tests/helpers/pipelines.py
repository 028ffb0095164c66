"""Pipelines of two layers and an activation, and how they run, for several files of tests."""

import torch

import cute_grouped_mlp as cgm

G, H, F, T = 3, 32, 32, 20  # blocks of MXFP8 fit


def make(**options):
    torch.manual_seed(0)
    options = {"bias": False, "dtype": torch.bfloat16, **options}
    return cgm.Sequential(
        cgm.GroupedLinear(G, H, 2 * F, **options), cgm.ScaledSwiGLU(), cgm.GroupedLinear(G, F, H, **options)
    )


def inputs(x_grad=True, probs_grad=True, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).to(dtype).requires_grad_(x_grad)
    sizes = torch.tensor([7, 0, 9])
    probs = torch.rand(T, generator=generator).requires_grad_(probs_grad)
    return x, sizes, probs, sizes


def run(module, args, recipe=None):
    with cgm.autocast(recipe=recipe):
        return module(*args)


def fused(fuser):
    return [type(op).__name__ for op, _ in fuser.last_plan.forward_ops]


FUSED, UNFUSED = ["FusedGroupedMLP"], ["GroupedLinear", "ScaledSwiGLU", "GroupedLinear"]


class Scale(cgm.BasicOperation):
    """y = factor x, the factor being a parameter."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(float(factor)))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.save_for_backward(input_ if ctx.requires_grad else None, self.factor)
        return input_ * self.factor

    def op_backward(self, ctx, grad_output):
        x, factor = ctx.saved_tensors
        return grad_output * factor, ((grad_output * x).sum(),)

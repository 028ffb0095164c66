"""Jinja templates of the kernels: data for :mod:`cute_grouped_mlp.codegen.render`."""

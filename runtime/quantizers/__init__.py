"""Quantisers in plain torch, the reference of every recipe's numbers.

Users import :mod:`cute_grouped_mlp.quantization`.
"""

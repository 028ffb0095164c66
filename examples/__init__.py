"""Runnable examples: ``python -m cute_grouped_mlp.examples.train_moe``."""

"""Rendered default kernels, the reviewable golden copy.

Written by ``cute-grouped-mlp generate``; ``generate --check`` (and a test) fails when they differ from what the templates
render now.  Nothing here is imported at run time.
"""

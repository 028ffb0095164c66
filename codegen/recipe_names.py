"""The one table of recipes' names on command lines: ``list``, ``build``, the demo and the documentation."""

from __future__ import annotations

from .spec import NUMERICS

#: Short name of each class of recipes; :attr:`Recipe.kind` is the same.
SHORT = {
    "HighPrecision": "high_precision",
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "float8_current",
    "Float8BlockScaling": "float8_block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
#: Class of a recipe and numerics of the model, by what ``--recipe`` takes, in small letters.
RECIPES = {
    **{name.lower(): (name, "bf16") for name in SHORT},
    **{short: (name, "bf16") for name, short in SHORT.items()},
    **{numerics: ("HighPrecision", numerics) for numerics in NUMERICS},
}
#: What ``--recipe`` takes, for messages.
ALLOWED = ", ".join(
    [*(f"{name} or {short}" for name, short in SHORT.items()), *(f"{n} (HighPrecision in {n})" for n in NUMERICS)]
)

"""From a variant's name back to its spec: any kernel that can be rendered, not only those of a catalog."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import replace

from . import tiles
from .catalog import full_catalog
from .errors import GroupedMLPError
from .spec import Arch, KernelSpec, Schedule, TileConfig, check_quantization

_TILE = re.compile(r"_(\d+)x(\d+)_(\d+)x(\d+)_(co|pp)$")
_MARGIN = re.compile(r"_m(minus)?(\d+)(?=_|$)")
_SCHEDULES = {"co": Schedule.COOPERATIVE, "pp": Schedule.PINGPONG}


def named(name: str, arch: Arch | None = None) -> KernelSpec:
    """Return the spec with a variant name, whatever its tile config and its margin of MXFP8's scales.

    Parameters
    ----------
    name
        As :attr:`KernelSpec.name` is.
    arch
        The only architecture that it may have; any by default.

    Raises
    ------
    GroupedMLPError
        If there is no such kernel, with the nearest names; or if its tile config is not valid, with every reason.
    """
    spec = _read(name)
    if spec is None or spec.name != name:
        near = [] if spec is None else [spec.name]
        raise GroupedMLPError(f"there is no variant {name!r}; {_hint(name, near)}")
    problems = [*tiles.check(spec), *check_quantization(spec)]
    if arch not in (None, spec.arch):
        problems.append(f"it is a kernel of {spec.arch.value}, not of {arch.value}")
    if problems:
        raise GroupedMLPError(f"the variant {name!r} cannot be built: {'; '.join(problems)}")
    return spec


def _read(name: str) -> KernelSpec | None:
    """Take the numbers out of a name, look up what it is a variant of, and put them in."""
    tile, margin = _TILE.search(name), _MARGIN.search(name)
    family = name if tile is None else name[: tile.start()]
    spec = _families().get(family)
    if spec is None and margin is not None:
        spec = _families().get(family[: margin.start()] + family[margin.end() :])
        if spec is None or spec.quantization is None:
            return None
        value = int(margin[2]) * (-1 if margin[1] else 1)
        spec = replace(spec, quantization=replace(spec.quantization, margin=value))
    if spec is None or tile is None:
        return spec
    tile_m, tile_n, cluster_m, cluster_n = map(int, tile.groups()[:4])
    return replace(spec, tile=TileConfig(tile_m, tile_n, cluster_m, cluster_n, _SCHEDULES[tile[5]]))


@functools.cache
def _families() -> dict[str, KernelSpec]:
    """Kernels by their names, tile configs taken out."""
    plain = (replace(spec, tile=None) for arch in Arch for spec in full_catalog(arch))
    return {spec.name: spec for spec in plain}


def _hint(name: str, near: list[str]) -> str:
    """Say which names are near, tile configs included."""
    if not near:
        catalog = [spec.name for arch in Arch for spec in full_catalog(arch)]
        near = difflib.get_close_matches(name, catalog, n=3)
    if not near:
        return "all of the default catalog: cute-grouped-mlp list"
    return f"near it: {', '.join(near)}"

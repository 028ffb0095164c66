"""Compiles every kernel that the GPU tests launch, and the default catalog, on a machine without a GPU.

python tests/gpu/build.py DIR [-j N]
CUTE_GROUPED_MLP_AOT_DIRS=DIR python -m pytest -m gpu          (on the GPU machine)
"""

import argparse
import importlib.util
import pathlib
import sys

from cute_grouped_mlp.codegen.aot import build_folder
from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.spec import Arch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    options = parser.parse_args()
    specs = list(default_catalog(Arch.SM90A))
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "helpers"))  # as pytest does
    for name in ("test_kernels", "test_module", "test_quantize", "test_recipes"):
        loaded = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
        tests = importlib.util.module_from_spec(loaded)
        loaded.loader.exec_module(tests)
        specs += tests.SPECS
    specs = tuple(dict.fromkeys(specs))
    print(f"{len(specs)} kernels")
    done = iter(range(1, len(specs) + 1))
    build_folder(
        specs,
        options.folder,
        jobs=options.jobs,
        progress=lambda spec, *_: print(f"{next(done)}/{len(specs)} {spec.name}", flush=True),
    )


if __name__ == "__main__":
    main()

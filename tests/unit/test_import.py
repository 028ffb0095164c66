"""``import cute_grouped_mlp`` imports nothing but its own modules beside torch, starts no CUDA and creates no file."""

import os
import subprocess
import sys


def test_import_adds_nothing_but_the_packages_own_modules(tmp_path):
    code = (
        "import sys, torch; before = set(sys.modules); import cute_grouped_mlp; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before})); print(torch.cuda.is_initialized())"
    )
    env = os.environ | {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "CUTE_GROUPED_MLP_CACHE_DIR": str(tmp_path),
    }
    shown = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["cute_grouped_mlp", "False"]
    assert not list(tmp_path.iterdir())

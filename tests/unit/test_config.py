"""The settings object."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_grouped_mlp as cgm
from cute_grouped_mlp.config import PREFIX, SETTINGS, Settings

settings = cgm.settings


def test_defaults_without_environment():
    fresh = Settings({})
    assert {name: getattr(fresh, name) for name in SETTINGS} == {n: s.default for n, s in SETTINGS.items()}
    assert fresh.fuse is True
    assert fresh.jit is True
    assert fresh.sm100 == "off"
    assert fresh.plan_cache_size == 64


def test_environment_is_parsed_by_type():
    fresh = Settings(
        {
            "CUTE_GROUPED_MLP_FUSE": "0",
            "CUTE_GROUPED_MLP_JIT": "off",
            "CUTE_GROUPED_MLP_CACHE_DIR": "/tmp/cache",
            "CUTE_GROUPED_MLP_AOT_DIRS": os.pathsep.join(("/a", "/b")),
            "CUTE_GROUPED_MLP_DEBUG_CHECKS": "yes",
            "CUTE_GROUPED_MLP_SM100": "Unverified",
            "CUTE_GROUPED_MLP_PLAN_CACHE_SIZE": "3",
            "OTHER": "x",
        }
    )
    assert (fresh.fuse, fresh.jit, fresh.debug_checks) == (False, False, True)
    assert fresh.cache_dir == Path("/tmp/cache")
    assert fresh.aot_dirs == (Path("/a"), Path("/b"))
    assert fresh.sm100 == "unverified"
    assert fresh.plan_cache_size == 3
    assert Settings({"CUTE_GROUPED_MLP_FUSE": ""}).fuse is True


@pytest.mark.parametrize(
    ("variable", "text"), [("FUSE", "perhaps"), ("PLAN_CACHE_SIZE", "many"), ("PLAN_CACHE_SIZE", "0"), ("SM100", "on")]
)
def test_bad_environment_values_name_the_variable_or_setting(variable, text):
    with pytest.raises(cgm.ConfigError, match=f"(?i){variable}.*allowed"):
        Settings({PREFIX + variable: text})


def test_typos_in_the_environment_are_pointed_out():
    with pytest.warns(UserWarning, match="CUTE_GROUPED_MLP_FUZE.*did you mean CUTE_GROUPED_MLP_FUSE"):
        Settings({"CUTE_GROUPED_MLP_FUZE": "0"})


def test_typos_in_code_are_rejected():
    with pytest.raises(AttributeError, match="did you mean fuse"):
        settings.fuze = False
    with pytest.raises(AttributeError, match="debug_check"), settings.override(debug_check=True):
        pass
    with pytest.raises(cgm.ConfigError, match=r"settings\.fuse is 1; allowed: True or False"):
        settings.fuse = 1


def test_override_restores_and_each_change_is_a_generation():
    before = settings.generation
    with settings.override(fuse=False, debug_checks=True):
        assert (settings.fuse, settings.debug_checks) == (False, True)
        inside = settings.generation
        assert inside > before
    assert (settings.fuse, settings.debug_checks) == (True, False)
    assert settings.generation > inside
    with pytest.raises(RuntimeError, match="inside"), settings.override(fuse=False):
        raise RuntimeError("inside")
    assert settings.fuse is True


def test_log_level_adds_and_removes_one_handler():
    logger = logging.getLogger("cute_grouped_mlp")
    before = list(logger.handlers)
    with settings.override(log_level="INFO"), settings.override(log_level="DEBUG"):
        assert logger.level == logging.DEBUG
        assert len(logger.handlers) == len(before) + 1
    assert logger.handlers == before
    assert logger.level == logging.NOTSET


def test_importing_touches_neither_cuda_nor_the_dsl_and_writes_nothing(tmp_path):
    code = """
import sys
import torch
before = set(sys.modules)
import cute_grouped_mlp
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"cutlass", "tvm_ffi", "jinja2", "filelock", "platformdirs", "rich", "typer"}, new
assert not torch.cuda.is_initialized()
"""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("CUTE_GROUPED_MLP_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_is_documented():
    assert all(s.doc and s.allowed for s in SETTINGS.values())
    assert {name for name in Settings.__annotations__ if name[0] != "_"} == {*SETTINGS, "generation", "stamp"}


def test_watchers_are_called_after_a_change():
    fresh, seen = Settings({}), []
    fresh.on_change("fuse", lambda: seen.append(fresh.fuse))
    fresh.jit = False
    with fresh.override(fuse=False):
        assert seen == [False]
    assert seen == [False, True]

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
def test_bad_environment_values_are_said_at_once_and_are_errors_where_they_are_used(variable, text, caplog):
    fresh = Settings({PREFIX + variable: text, PREFIX + "JIT": "of", PREFIX + "CHECK_RANGE": "off"})
    for name in (variable, "JIT"):
        assert f"{PREFIX}{name} is" in caplog.text
        with pytest.raises(cgm.ConfigError, match=f"{PREFIX}{name} is .*; allowed: "):
            getattr(fresh, name.lower())
    assert fresh.problems().keys() == {variable.lower(), "jit"}
    assert fresh.check_range is False
    with fresh.override(jit=True):
        assert fresh.jit is True
        assert fresh.problems().keys() == {variable.lower()}
    with pytest.raises(cgm.ConfigError, match=PREFIX):
        fresh.values()
    assert "jit='not valid'" in repr(fresh)
    fresh.jit = False
    assert fresh.jit is False


def test_a_bad_value_is_one_line_at_the_import():
    command = [sys.executable, "-c", "import cute_grouped_mlp as cgm; print(cgm.settings.fuse); cgm.settings.jit"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUTE_GROUPED_MLP_JIT": "of"})
    assert result.stdout == "True\n"
    first, *_, last = result.stderr.splitlines()
    problem = "CUTE_GROUPED_MLP_JIT is 'of'; allowed: True or False (on or off)"
    assert first == f"{problem}. Whatever needs it will fail"
    assert last == f"cute_grouped_mlp.codegen.errors.ConfigError: {problem}"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("CUTE_GROUPED_MLP_FUZE", "FUSE"), ("CUTE_GROUPED_MLP_JITT", "JIT"), ("CUTE_GROUPED_MPL_JIT", "JIT"),
     ("cute_grouped_mlp_jit", "JIT"), ("CUTE_GROUPEDMLP_AOT_DIRS", "AOT_DIRS"),
     ("CUTE_GROUPED_MLP_CACHEDIR", "CACHE_DIR")],
)  # fmt: skip
def test_typos_in_the_environment_are_pointed_out(variable, meant):
    with pytest.warns(UserWarning, match=f"{variable}.*did you mean CUTE_GROUPED_MLP_{meant}"):
        Settings({variable: "0"})


def test_other_programs_variables_are_left_alone(recwarn):
    Settings({"CUTE_DSL_ARCH": "sm_90a", "MLP_SIZE": "3", "GROUPED": "1", "TORCH_LOGS": "", "CUTE_DSL_CACHE_DIR": "x"})
    assert not recwarn.list


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

"""The command cute-grouped-mlp."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen import aot, choice, cli, compile, generated, interpreter
from cute_grouped_mlp.codegen.activations import ACTIVATIONS
from cute_grouped_mlp.codegen.artifacts import ArtifactStore
from cute_grouped_mlp.codegen.catalog import DEFAULT_ACTIVATIONS, default_catalog
from cute_grouped_mlp.codegen.recipe_names import RECIPES
from cute_grouped_mlp.codegen.render import render
from cute_grouped_mlp.codegen.spec import Arch, Pass
from cute_grouped_mlp.codegen.variants import named
from cute_grouped_mlp.recipe import __name__ as recipes
from cute_grouped_mlp.recipe_catalog import recipe_catalog

CATALOG = default_catalog(Arch.SM90A)
REDUCE = [spec for spec in CATALOG if spec.kernel is Pass.REDUCE]


@pytest.fixture(autouse=True)
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_GROUPED_MLP_CACHE_DIR", str(tmp_path / "store"))


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command in this process; returns exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cute-grouped-mlp", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capfd.readouterr()

    return run


def fails(result, *parts, code=1):
    """An error is told in plain words, without a traceback, and nothing else is said."""
    got, _, error = result
    assert got == code
    assert "Traceback" not in error
    for part in parts:
        assert part in error
    return error


def test_list(run):
    code, out, _ = run("list")
    assert code == 0
    assert all(spec.name in out for spec in CATALOG)
    assert f"{len(CATALOG)} kernels for sm_90a" in out
    _, out, _ = run("list", "--pass", "wgrad")
    assert [name for name in (spec.name for spec in CATALOG) if name in out] == [
        spec.name for spec in CATALOG if spec.kernel is Pass.WGRAD
    ]
    _, out, _ = run("list", "--activation", "swiglu")
    assert f"{sum(spec.activation == 'swiglu' for spec in CATALOG)} kernels" in out


@pytest.mark.parametrize(
    ("name", "recipe", "numerics"),
    [("NVFP4BlockScaling", cgm.NVFP4BlockScaling, "bf16"), ("MXFP8", cgm.MXFP8BlockScaling, "bf16"),
     ("fp16", cgm.HighPrecision, "fp16")],
)  # fmt: skip
def test_list_of_a_recipe(run, name, recipe, numerics):
    catalog = recipe_catalog(recipe(), numerics)
    code, out, error = run("list", "--recipe", name)
    assert (code, error) == (0, "")
    assert f"{len(catalog)} kernels for sm_90a" in out
    listed = [word for word in out.split() if word.startswith("sm90a_")]
    assert listed == [spec.name for spec in catalog]


def test_recipe_takes_every_class_and_its_kind():
    classes = {cls for cls in cgm.Recipe.__subclasses__() if cls is not cgm.CustomRecipe and cls.__module__ == recipes}
    assert {name for name, _ in RECIPES.values()} == {cls.__name__ for cls in classes}
    for cls in classes:
        assert RECIPES[cls.__name__.lower()] == RECIPES[cls.kind] == (cls.__name__, "bf16")
    assert RECIPES["fp16"] == ("HighPrecision", "fp16")


def test_a_recipe_that_cannot_be_asked_is_an_error(run, monkeypatch):
    dying = "import sys; sys.exit('Traceback ...\\nImportError: libtorch.so: no such file')"
    monkeypatch.setattr(choice, "module_command", lambda *args: [sys.executable, "-c", dying])
    fails(run("list", "--recipe", "mxfp8"), "the kernels of mxfp8 cannot be listed: ImportError: libtorch.so")


def names_in(out):
    return [word for word in out.split() if word.startswith("sm90a_")]


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in DEFAULT_ACTIVATIONS])
def test_every_activation_has_kernels_to_list(run, activation):
    code, out, _ = run("list", "--activation", activation)
    assert code == 0
    specs = [named(name) for name in names_in(out)]
    assert {spec.activation for spec in specs} == {activation}
    assert {spec.kernel for spec in specs} == {Pass.FPROP_ACT, Pass.DGRAD_ACT}
    assert len(specs) == sum(spec.activation == "swiglu" for spec in CATALOG)


def test_a_recipe_of_another_activation(run):
    _, out, _ = run("list", "--recipe", "fp16", "--activation", "silu")
    assert {(s.numerics, s.activation) for s in map(named, names_in(out))} == {("fp16", "silu")}


def test_every_pass_has_kernels_to_list(run):
    for kernel in Pass:
        code, out, _ = run("list", "--pass", kernel.value)
        assert code == 0
        assert {named(name).kernel for name in names_in(out)} == {kernel}


def test_options_that_are_repeated_are_all_honoured(run):
    _, out, _ = run("list", "--pass", "wgrad", "--pass", "bias_grad", "--pass", "reduce")
    assert {named(name).kernel for name in names_in(out)} == {Pass.WGRAD, Pass.BIAS_GRAD, Pass.REDUCE}
    _, out, _ = run("list", "--recipe", "fp16", "--recipe", "bf16", "--activation", "silu", "--activation", "srelu")
    found = {(s.numerics, s.activation) for s in map(named, names_in(out))}
    assert found == {(n, a) for n in ("bf16", "fp16") for a in ("silu", "srelu")}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("build", "--out", "a", "--out", "b"), "--out is given 2 times"),
        (("list", "--arch", "sm_90a", "--arch", "sm_100a"), "--arch is given 2 times"),
        (("build", "--out", "a", "-j", "1", "--jobs", "2"), "--jobs is given 2 times"),
        (("generate", "--out", "a", "--out", "b"), "--out is given 2 times"),
        (
            ("build", "--out", "a", "--variant", "x", "--recipe", "mxfp8", "--pass", "wgrad"),
            "--recipe and --pass beside --variant",
        ),
        (("build", "--out", "a", "--variant", "x", "--activation", "silu"), "--activation beside --variant"),
    ],
)
def test_options_that_conflict_are_refused(run, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    fails(run(*arguments), part, code=2)
    assert not (tmp_path / "a").exists()


def test_names_that_are_not_valid_are_all_told_before_anything_is_written(run, tmp_path):
    bad = ("sm90a_bf16_fprop_100x128_1x1_pp", "sm90a_bf16_reduce_pfp33")
    arguments = [word for name in bad for word in ("--variant", name)]
    fails(
        run("build", "--out", tmp_path / "out", *arguments), *bad, "tile_m is 100", "near it: sm90a_bf16_reduce_pfp32"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [("list", "--arch", "sm_100a"), ("list", "--pass", "reduce", "--activation", "silu")]
)
def test_an_empty_choice_is_an_error(run, arguments):
    fails(run(*arguments), "the catalog has no such kernel", *arguments[1:3])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("list", "--pass", "fwd"), "fprop_act"),
        (("list", "--arch", "sm_90"), "sm_90a"),
        (("list", "--recipe", "mxfp4"), "is no recipe"),
        (("build",), "--out"),
        (("build", "--out", "x", "-j", "0"), "--jobs"),
        (("bogus",), "bogus"),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments, part):
    fails(run(*arguments), part, code=2)


def test_generate_and_check(run, tmp_path, monkeypatch):
    files = generated.default_files(CATALOG[:1])
    monkeypatch.setattr(generated, "default_files", lambda: files)
    out = tmp_path / "generated"
    error = fails(run("generate", "--check", "--out", out), "is stale")
    assert len(error.splitlines()) <= 2
    assert run("generate", "--out", out)[:1] == (0,)
    assert run("generate", "--check", "--out", out)[0] == 0
    (out / f"sm90/bf16/{CATALOG[0].name}.py").write_text("x = 1\n")
    code, out_text, _ = run("generate", "--check", "--out", out)
    assert code == 1
    assert "-x = 1" in out_text
    assert "+import cutlass" in out_text
    assert (out / f"sm90/bf16/{CATALOG[0].name}.py").read_text() == "x = 1\n"  # it only looks


def test_show(run):
    code, out, _ = run("show", CATALOG[0].name, "--source-only")
    assert (code, out) == (0, render(CATALOG[0]).source)
    spec = REDUCE[0]
    code, out, _ = run("show", spec.name)
    assert code == 0
    for part in (f'"kernel": "{spec.kernel.value}"', "def launch(", "spill_stores", "registers"):
        assert part in out
    assert ArtifactStore().get(spec) is not None
    code, out, _ = run("list", "--pass", "reduce")
    assert next(line for line in out.splitlines() if spec.name in line).split()[-2] == "store"
    fails(run("show", "nothing"), "there is no variant 'nothing'")


def test_build_verify_list(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    code, text, error = run("build", "--arch", "sm_90a", "--pass", "reduce", "--out", out, "-j", "2")
    assert (code, error) == (0, "")
    for part in (
        "registers",
        "spill stores",
        "smem",
        "compile s",
        str(out / "manifest.json"),
        *(s.name for s in REDUCE),
    ):
        assert part in text
    manifest = json.loads((out / "manifest.json").read_text())
    assert sorted(variant["name"] for variant in manifest["variants"]) == sorted(spec.name for spec in REDUCE)

    code, text, error = run("verify", out)
    assert (code, error) == (0, "")
    assert f"all {len(REDUCE)} kernels" in text
    _, text, _ = run("list", "--pass", "reduce", "--aot", out)
    assert text.count("folder") == len(REDUCE)
    monkeypatch.setenv("CUTE_GROUPED_MLP_AOT_DIRS", f"{tmp_path / 'absent'}:{out}")
    _, text, error = run("list", "--pass", "reduce")
    assert text.count("folder") == len(REDUCE)
    assert f"{tmp_path / 'absent'} is not a folder of compiled kernels" in error
    monkeypatch.delenv("CUTE_GROUPED_MLP_AOT_DIRS")

    name = REDUCE[0].name
    _, text, _ = run("build", "--out", out, "--variant", name, "--variant", name)
    assert re.search(rf"1/1 {name}: \d+ registers, 0 bytes of spill stores, there already\n", text)
    assert "1 kernel for sm_90a: 1 there already" in text
    assert f"{len(REDUCE)} kernels in the folder" in text

    library = out / REDUCE[0].name / "kernel.so"
    # Not cut short, and not in place: this process has mapped the library, and TVM-FFI reads it again, by its path, for
    # the backtrace of any later error; either would end in a bus error.
    other = library.with_suffix(".other")
    other.write_text("damaged")
    other.replace(library)
    result = run("verify", out)
    fails(result, f"1 of {len(REDUCE)} kernels")
    assert f"failed {REDUCE[0].name}" in result[1]
    assert "kernel.so" in result[1]
    assert f"loaded {REDUCE[1].name}" in result[1]
    assert "cutlass" not in sys.modules


def test_build_tells_each_kernel_as_it_is_done_and_what_the_warnings_mean(run, tmp_path):
    _, text, _ = run("build", "--pass", "reduce", "--out", tmp_path / "out", "-j", "1")
    lines = text.splitlines()
    for number, line in enumerate(lines[: len(REDUCE)], 1):
        assert re.fullmatch(
            rf"{number}/{len(REDUCE)} sm90a_\w+: \d+ registers, 0 bytes of spill stores, compiled in [\d.]+ s", line
        )
    assert {line.split()[1][:-1] for line in lines[: len(REDUCE)]} == {spec.name for spec in REDUCE}
    assert "C7512, C7519: how often ptxas warned that it serialised wgmma instructions" in text


def test_an_interrupted_build_tells_how_far_it_got(run, tmp_path, monkeypatch):
    real = cli.build_folder

    def interrupted(specs, out, *, jobs, progress):
        real(specs[:1], out, jobs=jobs, progress=progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_folder", interrupted)
    error = fails(
        run("build", "--pass", "reduce", "--out", tmp_path / "out"),
        f"interrupted: 1 of {len(REDUCE)} kernels are done; the same command goes on from there",
        code=130,
    )
    assert len(error.splitlines()) == 1
    assert aot.AotFolder(tmp_path / "out").names == (REDUCE[0].name,)


def test_verify_wants_a_library(run, tmp_path, monkeypatch):
    monkeypatch.setattr("cute_grouped_mlp.codegen.link.find_linker", lambda: None)
    aot.build_folder(REDUCE[:1], tmp_path / "out")
    result = run("verify", tmp_path / "out")
    fails(result, "1 of 1 kernels")
    assert "built without a C compiler" in result[1]


def test_verify_goes_on_after_a_kernel_that_cannot_be_loaded(run, tmp_path, monkeypatch):
    def load(artifact):
        if artifact.name == REDUCE[0].name:
            raise cgm.ArtifactUnreadableError("no such library")

    aot.build_folder(REDUCE[:2], tmp_path / "out")
    monkeypatch.setattr(cli, "load_callable", load)
    result = run("verify", tmp_path / "out")
    fails(result, "1 of 2 kernels")
    assert f"failed {REDUCE[0].name}: no such library" in result[1]
    assert f"loaded {REDUCE[1].name}" in result[1]


def test_build_tells_what_failed_and_keeps_the_rest(run, tmp_path, monkeypatch, small):
    broken = {REDUCE[0]: small(REDUCE[0], "THREADS = 128", "THREADS = nothing")}
    monkeypatch.setattr(compile, "render", lambda spec: broken.get(spec) or small(spec))
    monkeypatch.setattr(aot, "render", lambda spec: broken.get(spec) or small(spec))
    result = run("build", "--pass", "reduce", "--out", tmp_path / "out")
    fails(result, REDUCE[0].name, "'nothing' is not defined", "sm90/small.py.jinja:")
    assert aot.AotFolder(tmp_path / "out").names == (REDUCE[1].name,)


def test_build_by_name_takes_any_kernel_that_the_runtime_may_choose(run, tmp_path):
    name = "sm90a_fp16_reduce_pfp16"
    assert name not in {spec.name for spec in CATALOG}
    assert run("build", "--variant", name, "--out", tmp_path / "out")[0] == 0
    assert aot.AotFolder(tmp_path / "out").names == (name,)


def test_not_a_folder_of_kernels(run, tmp_path):
    fails(run("verify", tmp_path), "is not a folder of compiled kernels", "cute-grouped-mlp build")
    fails(run("list", "--aot", tmp_path), "is not a folder of compiled kernels")


def test_cache(run, tmp_path):
    code, out, _ = run("cache", "info")
    assert code == 0
    assert "0 of this toolchain" in out
    path = ArtifactStore().get_or_build(REDUCE[0]).path
    _, out, _ = run("cache", "info")
    assert str(tmp_path / "store") in out
    assert "1 of this toolchain, 1 in all" in out
    assert run("cache", "verify")[0] == 0
    (path / "kernel.o").write_text("")
    fails(run("cache", "verify"), "kernel.o", "1 of 1 entries are damaged")
    fails(run("cache", "clear"), "1 kernels in", "say so with --yes")
    assert path.exists()
    (path.parent / "notes.txt").write_text("mine")
    code, out, _ = run("cache", "clear", "--yes")
    assert (path.parent / "notes.txt").read_text() == "mine"
    assert "left alone" in out
    assert (code, "1 kernels deleted" in out) == (0, True)
    assert not path.exists()
    (tmp_path / "store").chmod(0o777)
    _, out, _ = run("cache", "info")
    assert "can be written by others" in out


def test_doctor(run):
    code, out, _ = run("doctor")
    assert code == 0
    for part in (
        "nvidia-cutlass-dsl",
        "CUDA driver",
        "GPU",
        "torch",
        "HighPrecision",
        "NVFP4BlockScaling",
        "C compiler",
    ):
        assert part in out


def test_doctor_reports_bad_values_of_variables(run, monkeypatch):
    monkeypatch.setenv("CUTE_GROUPED_MLP_JIT", "of")
    monkeypatch.setenv("CUTE_GROUPED_MLP_SM100", "maybe")
    monkeypatch.setenv("CUTE_GROUPED_MLP_CACHE_DIR", "~nobody-of-this-name/store")
    code, out, _ = run("doctor")
    assert code == 0
    for part in ("CUTE_GROUPED_MLP_JIT is 'of'", "CUTE_GROUPED_MLP_SM100 is 'maybe'", "NVFP4BlockScaling"):
        assert part in out
    assert re.search("store .*cannot be used: .*~nobody-of-this-name/store", out)
    fails(run("list"), "~nobody-of-this-name/store", "give an absolute path")


def test_doctor_survives_a_torch_that_does_not(run, monkeypatch):
    dying = "import sys; sys.exit('Traceback ...\\nImportError: libtorch.so: no such file')"
    monkeypatch.setattr(cli, "module_command", lambda *args: [sys.executable, "-c", dying])
    code, out, _ = run("doctor")
    assert code == 0
    assert "cannot be used: ImportError: libtorch.so" in out


def test_demo_hands_arguments_and_the_exit_code_on(run, monkeypatch):
    seen = []
    monkeypatch.setattr(
        cli.subprocess, "run", lambda command, env: seen.append(command) or subprocess.CompletedProcess([], 7)
    )
    assert run("demo", "--steps", "3")[0] == 7
    assert seen == [interpreter.module_command("cute_grouped_mlp.examples.train_moe", "--steps", "3")]


@pytest.fixture
def shadowed(tmp_path, monkeypatch):
    """A working directory whose modules hide the standard library's from `python -m`."""
    for name in ("json", "select", "argparse", "platform"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path)


def test_processes_import_nothing_from_the_working_directory(run, shadowed, monkeypatch):
    code, out, error = run("list", "--recipe", "fp16")
    assert (code, error) == (0, "")
    assert "sm90a_fp16_" in out
    code, out, _ = run("doctor")
    assert code == 0
    assert "cannot be used" not in out
    code, out, _ = run("demo", "--", "--help")
    assert code == 0
    assert "train_moe.py" in out
    monkeypatch.setattr(sys, "executable", "")
    fails(run("list", "--recipe", "fp16"), "the kernels of fp16 cannot be listed: sys.executable is not set")
    code, out, _ = run("doctor")
    assert code == 0
    assert "cannot be used: sys.executable is not set" in out


def test_help_names_every_command():
    out = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("list", "generate", "show", "build", "verify", "cache", "doctor", "demo"):
        assert command in out

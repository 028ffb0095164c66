"""The command ``cute-grouped-mlp``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from . import generated
from .aot import AOT_VARIABLE, MANIFEST, AotFolder, build_folder, configured_folders
from .artifacts import Artifact, ArtifactStore
from .catalog import default_catalog, use
from .choice import ActivationOption, ArchOption, Command, PassOption, RecipeOption, by_name, select
from .errors import ArtifactCorruptError, ArtifactUnreadableError, CompileError, GroupedMLPError
from .folders import CACHE_VARIABLE
from .interpreter import answer_of, environment, module_command
from .link import find_linker
from .loading import load_callable
from .render import render
from .resources import ResourceReport
from .spec import Arch, KernelSpec
from .toolchain import driver_cuda, runtime_library, toolchain
from .variants import named

app = typer.Typer(
    help="Generate, compile and inspect the kernels of grouped MLPs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache = typer.Typer(help="The on-disk store of kernels that were compiled at first use.", no_args_is_help=True)
app.add_typer(cache, name="cache")

_WARNINGS = (
    "C7512, C7519: how often ptxas warned that it serialised wgmma instructions (C7519: behind an injected "
    "warpgroup.arrive); should be 0"
)


def main() -> None:
    """Run the command; an error that we raise on purpose, or the system's, is one line and exit code 1."""
    try:
        app()
    except (GroupedMLPError, OSError) as error:
        _console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


@app.command("list", cls=Command)
def list_(
    arch: ArchOption = Arch.SM90A,
    recipe: RecipeOption = None,
    pass_: PassOption = None,
    activation: ActivationOption = None,
    aot: Annotated[
        list[Path] | None, typer.Option(help="Also look into this folder made by `build`; may be repeated.")
    ] = None,
) -> None:
    """List the default catalog, or a recipe's: what each kernel is for, and whether it is built.

    Built is what lies in a folder of --aot or of CUTE_GROUPED_MLP_AOT_DIRS, or in the store.
    """
    specs = select(arch, recipe, pass_, activation)
    places: list[tuple[str, AotFolder | ArtifactStore]] = [("folder", AotFolder(path)) for path in aot or ()]
    for path in configured_folders():
        try:
            places.append(("folder", AotFolder(path)))
        except GroupedMLPError as error:  # as at run time: said, and passed over
            _console(stderr=True).print(f"{AOT_VARIABLE}: {escape(str(error))}", highlight=False)
    places.append(("store", ArtifactStore()))
    table = Table("variant", "for", "built", title=f"{len(specs)} kernels for {arch.value}")
    for spec in specs:
        built = dict.fromkeys(name for name, place in places if place.get(spec))
        table.add_row(spec.name, use(spec), ", ".join(built) or "-")
    _console().print(table)


@app.command(cls=Command)
def generate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 with a diff if it is stale.")] = False,
    out: Annotated[Path, typer.Option(help="Folder to write or check.")] = generated.GENERATED,
) -> None:
    """Render the default kernels' sources into generated/."""
    files = generated.default_files()
    console = _console()
    if not check:
        changed, kept = generated.write(files, out)
        for path in changed:
            console.print(path, highlight=False)
        for path in kept:
            console.print(f"{path} is no longer generated, and stays: it was edited", highlight=False)
        console.print(f"{len(changed)} of {len(files)} files changed in {out}", highlight=False)
        return
    difference = generated.diff(files, out)
    if difference:
        sys.stdout.write(difference)
        raise GroupedMLPError(f"{out} is stale: run `cute-grouped-mlp generate` and commit what it writes")
    console.print(f"{out} is up to date: {len(files)} files", highlight=False)


@app.command(cls=Command)
def show(
    variant: Annotated[str, typer.Argument(help="Variant name, as `list` prints it; any valid tile config.")],
    source_only: Annotated[bool, typer.Option("--source-only", help="Print the source and nothing else.")] = False,
) -> None:
    """Show a kernel: its spec, its source and, compiled now if need be, the resources it uses."""
    spec = named(variant)
    source = render(spec).source
    if source_only:
        sys.stdout.write(source)
        return
    console = _console()
    console.print_json(spec.to_json())
    console.print(Syntax(source, "python", line_numbers=True, word_wrap=False))
    artifact = ArtifactStore().get_or_build(spec)
    table = Table("resource", "value", title=spec.name, caption=_WARNINGS, caption_justify="left")
    for name, value in artifact.report.to_dict().items():
        table.add_row(name, "\n".join(value) if isinstance(value, list) else str(value))
    console.print(table)
    console.print(f"{use(spec)}; in {artifact.path}", highlight=False)


@app.command(cls=Command)
def build(
    out: Annotated[Path, typer.Option("--out", help="Folder to build into, made if missing.")],
    arch: ArchOption = Arch.SM90A,
    recipe: RecipeOption = None,
    pass_: PassOption = None,
    activation: ActivationOption = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="This kernel, with any valid tile config; may be repeated.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="Compilations at a time; default: cores.")
    ] = None,
) -> None:
    """Compile kernels ahead of time, on a machine with or without a GPU.

    Prints a line for each kernel that is done where the output is no terminal, and a table of what each uses. C7512
    and C7519 count ptxas' warnings that wgmma instructions were serialised, so that loads and products do not overlap
    (C7519: behind an injected warpgroup.arrive): both should be 0. A build that was interrupted goes on when it is
    started again.
    """
    specs = by_name(variant, arch, recipe, pass_, activation) if variant else select(arch, recipe, pass_, activation)
    console = _console()
    if find_linker() is None:
        console.print("no C compiler (cc, gcc or clang): kernels get no kernel.so, and loading them imports the DSL")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    finished, fresh = 0, set[KernelSpec]()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(specs))

        def advance(spec: KernelSpec, result: Artifact | CompileError, compiled: bool) -> None:
            nonlocal finished
            finished += 1
            fresh.update([spec] if compiled else [])
            progress.update(task, advance=1, description=spec.name)
            if not console.is_terminal:  # a log or a pipe: whoever reads it sees that something happens
                print(f"{finished}/{len(specs)} {spec.name}: {_outcome(result, compiled)}", flush=True)

        try:
            results = build_folder(specs, out, jobs=jobs, progress=advance)
        except KeyboardInterrupt:
            progress.stop()
            _console(stderr=True).print(
                f"interrupted: {finished} of {len(specs)} kernels are done; the same command goes on from there",
                highlight=False,
            )
            raise typer.Exit(130) from None
    columns_ = ("registers", "spill stores", "smem", "C7512", "C7519", "compile s")
    failed = {spec: result for spec, result in results.items() if isinstance(result, CompileError)}
    counts = {"compiled": len(fresh), "there already": len(specs) - len(fresh) - len(failed), "failed": len(failed)}
    title = f"{_kernels(len(specs))} for {arch.value}: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    table = Table("variant", *columns_, title=title, caption=_WARNINGS, caption_justify="left")
    for spec, result in results.items():
        cells = ("failed",) if isinstance(result, CompileError) else _cells(result.report)
        table.add_row(spec.name, *cells)
    console.print(table)
    held, use_ = _kernels(len(AotFolder(out).names)), f"{AOT_VARIABLE}={shlex.quote(str(out))}"
    console.print(f"{out / MANIFEST}: {held} in the folder; use it with {use_}", highlight=False)
    if failed:
        raise GroupedMLPError("\n".join(str(error) for error in failed.values()))


@app.command(cls=Command)
def verify(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder made by `build`.")]) -> None:
    """Load every kernel of a built folder in this process; needs no GPU and imports no compiler."""
    aot = AotFolder(folder)
    failures = 0
    console = _console()
    for name in aot.names:
        try:
            artifact = aot.read(name)
            if artifact.library_path is None:
                raise ArtifactCorruptError("it has no kernel.so: it was built without a C compiler")
            load_callable(artifact)
        except (ArtifactCorruptError, ArtifactUnreadableError) as error:
            failures += 1
            console.print(f"[red]failed[/] {name}: {escape(str(error))}", highlight=False)
        else:
            console.print(f"[green]loaded[/] {name}", highlight=False)
    if "cutlass" in sys.modules:
        raise GroupedMLPError("loading imported the DSL")
    if failures:
        raise GroupedMLPError(f"{failures} of {len(aot.names)} kernels in {folder} cannot be used")
    console.print(f"all {len(aot.names)} kernels in {folder} load", highlight=False)


@cache.command("info", cls=Command)
def cache_info() -> None:
    """Show where the store is, whether it is used, and what it holds."""
    store = ArtifactStore()
    entries = list(store.entries())
    size = sum(file.stat().st_size for entry in entries for file in entry.iterdir())
    table = Table(show_header=False)
    table.add_row("folder", str(store.root))
    table.add_row("set by", f"${CACHE_VARIABLE}" if CACHE_VARIABLE in os.environ else "the platform's default")
    table.add_row("toolchain", toolchain().folder)
    table.add_row(
        "kernels", f"{sum(e.parent == store.folder for e in entries)} of this toolchain, {len(entries)} in all"
    )
    table.add_row("size", f"{size / 1e6:.1f} MB")
    table.add_row("used", f"no: {store.refusal()}" if store.refusal() else "yes")
    _console().print(table)


@cache.command("clear", cls=Command)
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete every kernel of the store, and nothing else that lies there."""
    store = ArtifactStore()
    count = sum(1 for _ in store.entries())
    if not yes:
        if not sys.stdin.isatty():
            raise GroupedMLPError(f"{count} kernels in {store.root} would be deleted: say so with --yes")
        typer.confirm(f"delete {count} kernels in {store.root}?", abort=True)
    deleted, others = store.clear()
    _console().print(f"{deleted} kernels deleted from {store.root}", highlight=False)
    if others:
        _console().print(f"left alone, as it was not written by this package: {', '.join(map(str, others))}")


@cache.command("verify", cls=Command)
def cache_verify() -> None:
    """Check every entry of the store against its checksums; exit 1 if one is damaged."""
    store = ArtifactStore()
    results = store.verify()
    damaged = [problem for problem in results.values() if problem is not None]
    if damaged:
        raise GroupedMLPError("\n".join([*damaged, f"{len(damaged)} of {len(results)} entries are damaged"]))
    _console().print(f"all {len(results)} entries in {store.root} are intact", highlight=False)


@app.command(cls=Command)
def doctor() -> None:
    """Show versions, GPU and driver, and what runs natively here, what does not, and why."""
    tools = toolchain()
    rows = [*tools.versions, ("C compiler", find_linker() or "none: kernels are loaded through the DSL")]
    driver = driver_cuda()
    rows.append(("CUDA driver", "none" if driver is None else f"supports CUDA {driver}"))
    try:
        rows.append(("DSL runtime", str(runtime_library())))
    except GroupedMLPError as error:
        rows.append(("DSL runtime", str(error)))
    try:
        store = ArtifactStore()
    except GroupedMLPError as error:
        rows.append(("store", f"cannot be used: {error}"))
    else:
        rows.append(("store", f"{store.root}{'' if store.refusal() is None else f', not used: {store.refusal()}'}"))
    # In a process of its own: a torch or a driver that crashes is a finding.
    found: dict[str, Any] = {}
    try:
        found = json.loads(answer_of(module_command("cute_grouped_mlp.doctor")))
    except GroupedMLPError as error:
        rows.append(("torch", f"cannot be used: {error}"))
    else:
        rows += [("setting", f"not valid: {problem}") for problem in found["settings"]]
        rows.append(("Python", found["python"]))
        build_ = f"built for CUDA {found['torch_cuda']}" if found["torch_cuda"] else "CPU build"
        rows.append(("torch", f"{found['torch']}, {build_}"))
        for index, gpu in enumerate(found["devices"]):
            text = "{name}, compute capability {capability}, {multiprocessors} multiprocessors, {memory_gib} GiB"
            rows.append((f"GPU {index}", text.format(**gpu)))
        if not found["devices"]:
            rows.append(("GPU", f"none: {found['cuda_problem'] or 'torch sees no CUDA device'}"))
    table = Table(show_header=False, title="this machine")
    for name, value in rows:
        table.add_row(name, escape(value))
    console = _console()
    console.print(table)
    table = Table("recipe", "type", "runs", "why", title="what runs here")
    for row in found.get("recipes", ()):
        runs = "unfused, in plain torch" if row["status"] == "unfused" else row["status"]
        table.add_row(row["recipe"], row["dtype"], runs, escape(row["why"]))
    if table.rows:
        console.print(table)
    console.print(
        f"kernels can be compiled here for {Arch.SM90A.value}: {len(default_catalog(Arch.SM90A))} in the catalog"
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Train a small MoE language model next to plain torch; arguments are the example's (--help after --)."""
    command = module_command("cute_grouped_mlp.examples.train_moe", *context.args)
    raise typer.Exit(subprocess.run(command, env=environment()).returncode)


def _console(*, stderr: bool = False) -> Console:
    """Return a console; output that goes to a file or a pipe is not folded."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200, soft_wrap=stderr)


def _cells(report: ResourceReport) -> tuple[str, ...]:
    """Cells of a row of `build`'s table."""
    smem = "?" if report.smem is None else str(report.smem)
    warnings = str(report.c7512), str(report.c7519)
    return str(report.registers), str(report.spill_stores), smem, *warnings, f"{report.seconds:.1f}"


def _outcome(result: Artifact | CompileError, compiled: bool) -> str:
    """Say in a line how a compilation ended."""
    if isinstance(result, CompileError):
        return "failed"
    report = result.report
    how = f"compiled in {report.seconds:.1f} s" if compiled else "there already"
    return f"{report.registers} registers, {report.spill_stores} bytes of spill stores, {how}"


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"

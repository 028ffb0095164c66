"""The documentation says what is there: links, settings, commands, tests, and the first example runs."""

import re
from pathlib import Path

import pytest
import typer

from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.cli import app
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.config import PREFIX, SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"})


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    named = re.findall(
        r"`((?:codegen|runtime|templates|tests|examples|benchmarks|docs)/[\w./-]*\w\.(?:py|sh|md|jinja))`",
        page.read_text(),
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_setting_is_in_the_table(readme):
    documented = re.findall(rf"^\| `{PREFIX}(\w+)` \| `(\w+)` \|", readme, re.MULTILINE)
    # sm100 will allow kernels that do not exist yet.
    assert sorted(name for _, name in documented) == sorted(SETTINGS.keys() - {"sm100"})
    assert all(variable == name.upper() for variable, name in documented)


def test_the_catalog_has_the_size_that_the_readme_says(readme):
    assert f"The catalog's {len(default_catalog(Arch.SM90A))} kernels" in readme


def test_commands_of_the_readme_exist(readme):
    group = typer.main.get_command(app)
    used = re.findall(r"^ +cute-grouped-mlp (.*?)(?: +#.*)?$", readme, re.MULTILINE)
    assert used
    for line in used:
        name, *words = line.split()
        command = group.commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_first_example_runs_without_a_gpu(readme, capsys):
    code = re.search(r"```python\n(import torch.*?)```", readme, re.DOTALL)[1]
    names = {}
    exec(code.replace('"cuda"', '"cpu"').replace("4096", "64").replace("512, device", "8, device"), names)
    assert names["y"].shape == (64, 1024)
    assert names["x"].grad is not None
    assert names["probs"].grad is not None
    assert "kernels need a CUDA device" in capsys.readouterr().out


def test_acceptance_names_no_test_that_is_not_there():
    """A test carries the ids of its rows in its name; the page lists the files."""
    text = (ROOT / "docs" / "acceptance.md").read_text()
    listed = {
        row: set(re.findall(r"`(\w+/test_\w+\.py)`", tests))
        for row, tests in re.findall(r"^\| ([A-Z]\d+) \| [^|]* \| ([^|]*) \|", text, re.MULTILINE)
    }
    there = {row: set() for row in listed}
    for path in (ROOT / "tests").glob("*/test_*.py"):
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE):
            for row in re.findall(r"(?<=_)([a-ehjkmn]\d{1,2})(?=_|$)", name):
                there[row.upper()].add(f"{path.parent.name}/{path.name}")
    assert {row: files - there[row] for row, files in listed.items() if files - there[row]} == {}

"""The documentation says what is there: links, settings, reasons, files and functions."""

from __future__ import annotations

import argparse
import ast
import re
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import closing
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from roost import bench
from roost.cli import build_parser
from roost.dataflow.schema import resolve
from roost.model.records import Reason
from roost.model.schemas import DEAD_SCHEMA, request_schema
from roost.model.settings import KEYS, RunConfig, load_config
from roost.predicate import check, parse
from roost.runtime.report import build_report
from roost.storage.store import Store
from roost.testing import InProcessPipeline

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "roost"
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

ATTRIBUTES = pa.schema(
    [
        ("fare", pa.float64()),
        ("base", pa.string()),
        ("shared", pa.bool_()),
        ("note", pa.string()),
        ("picked_at", pa.timestamp("us", "UTC")),
        ("drop off zone", pa.string()),
        ("tip", pa.float64()),
        ("ride_id", pa.int64()),
        ("dropoff_at", pa.timestamp("us", "UTC")),
        ("pickup_zone", pa.string()),
        ("dropoff_zone", pa.string()),
    ]
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a page, as rows of cells, without the line of dashes."""
    found = re.findall(r"(?:^\|.*\|$\n?)+", prose(text), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in (re.sub(r"^\|[-|]+\|$\n", "", table, flags=re.MULTILINE) for table in found)
    ]


def table_under(text: str, *head: str) -> list[list[str]]:
    """Rows of the one table that has this first line."""
    (rows,) = [rows for rows in tables(text) if rows[0][: len(head)] == list(head)]
    assert all(len(row) == len(rows[0]) for row in rows)
    return rows[1:]


def code(cell: str) -> str:
    match = re.match(r"`([^`]+)`", cell)
    assert match is not None, cell
    return match[1]


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_relative_to(ROOT) and path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


def test_every_page_is_linked_from_the_readme() -> None:
    readme = text_of("README.md")
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        assert page.name == "README.md" or f"({named(page)})" in readme, page
    assert "(docs/design)" in readme


def public_names(path: Path) -> set[str]:
    """Classes, functions, methods and constants of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_named_files_and_functions_exist(page: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    for name, member in re.findall(r"`((?:\w+/)*\w+\.py)(?:: ([\w.]+))?`", text):
        candidates = [root / name for root in (SOURCE, ROOT) if (root / name).is_file()]
        assert candidates, name
        assert not member or member in public_names(candidates[0]), f"{name}: {member}"
    for member in re.findall(r"`(Pipeline\.\w+)`", text):
        inherited = f"Base{member}" in public_names(SOURCE / "runtime" / "pipeline.py")
        assert inherited or member in public_names(SOURCE / "engine" / "pipeline.py"), member


def shown(default: object) -> str:
    """A default as the table of settings writes it."""
    if default is None:
        return "none"
    if isinstance(default, Mapping) and not default:
        return "empty"
    if default == ():
        return "empty"
    if isinstance(default, tuple):
        return "`" + "x".join(map(str, default)) + "`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default.value if isinstance(default, Enum) else default}`"


def run_flags() -> list[argparse.Action]:
    """Flags of ``roost run``; ``dest`` is the key that a flag sets."""
    (commands,) = [a for a in build_parser()._actions if a.dest == "command"]
    choices: Any = commands.choices
    return [action for action in choices["run"]._actions if action.option_strings]


def test_every_setting_is_in_the_table() -> None:
    head = ("key", "flag", "default", "meaning")
    rows = table_under(text_of("docs/configuration.md"), *head)
    flags = {action.dest: action.option_strings[0] for action in run_flags()}
    defaults = RunConfig()
    expected = [
        [
            f"`{key}`",
            f"`{flags[key]}`" if key in flags else "",
            shown(attrgetter(key)(defaults)),
        ]
        for key in KEYS
    ]
    assert [row[:3] for row in rows] == expected
    assert all(row[3] for row in rows)


def test_flags_of_run_are_documented() -> None:
    flags = {flag for action in run_flags() for flag in action.option_strings}
    page = text_of("docs/configuration.md")
    assert not {flag for flag in flags - {"-h", "--help"} if f"`{flag}`" not in page}


def test_the_settings_example_is_valid(tmp_path: Path) -> None:
    (example,) = blocks(text_of("docs/configuration.md"), "toml")
    assert tomllib.loads(example)
    path = tmp_path / "roost.toml"
    path.write_text(example)
    assert load_config(path) != RunConfig()


def test_the_python_example_of_settings_runs(capsys) -> None:
    (example,) = blocks(text_of("docs/configuration.md"), "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out == "4 parquet\n"
    assert names["wider"].engine.machines == 8
    assert names["plain"].engine == RunConfig().engine


def test_the_python_examples_of_synopses_run(capsys) -> None:
    """The blocks build on each other."""
    example = "\n".join(blocks(text_of("docs/synopsis.md"), "python"))
    exec(compile(example, "docs/synopsis.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert promised and capsys.readouterr().out.splitlines() == promised


def test_the_python_examples_of_dataflows_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks build on each other; the pipeline runs in this process instead of on Spark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roost.Pipeline", InProcessPipeline, raising=False)
    code = "\n".join(blocks(text_of("docs/dataflow.md"), "python"))
    names: dict[str, Any] = {"__name__": "dataflow"}
    exec(compile(code, "docs/dataflow.md", "exec"), names)
    promised = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert promised and capsys.readouterr().out.splitlines() == promised
    assert names["results"].num_rows > 0
    for flow in (names["seconds"].flow, names["flow"]):
        resolve(flow.name, flow.operators)


def test_every_reason_is_documented() -> None:
    rows = table_under(text_of("docs/queries.md"), "reason", "points", "requests")
    assert [code(row[0]) for row in rows] == [reason.value for reason in Reason]
    assert all(row[1] or row[2] for row in rows)


def test_columns_of_dead_letters_and_requests_are_documented() -> None:
    page = text_of("docs/queries.md")
    dead = [code(row[0]) for row in table_under(page, "column", "meaning")]
    assert dead == DEAD_SCHEMA.names
    cells = [code(row[0]) for row in table_under(page, "field", "for", "meaning")]
    fields = [name for cell in cells for name in cell.split(", ")]
    asked = request_schema(pa.string(), pa.int64()).names
    assert sorted(fields) == sorted(["seq", *asked])


def test_predicates_in_the_documentation_hold() -> None:
    (example,) = blocks(text_of("docs/queries.md"), "predicate")
    lines = example.splitlines()
    assert len(lines) > 10
    for line in lines:
        check(parse(line), ATTRIBUTES)


def test_the_report_is_documented() -> None:
    rows = table_under(text_of("docs/operations.md"), "key", "meaning")
    with tempfile.TemporaryDirectory() as name, closing(Store(Path(name))) as store:
        assert [code(row[0]) for row in rows] == list(build_report(store))


def test_the_steps_of_a_batch_are_documented() -> None:
    rows = table_under(text_of("docs/architecture.md"), "step", "what happens")
    source = (SOURCE / "runtime" / "loop.py").read_text(encoding="utf-8")
    assert [code(row[0]) for row in rows] == re.findall(r'on_step\("(\w+)"', source)


def test_every_package_is_in_the_architecture_in_the_order_of_the_layers() -> None:
    rows = table_under(text_of("docs/architecture.md"), "package")
    packages = [code(row[0]).rstrip("/").removesuffix(".py") for row in rows]
    contract = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]
    layers = [layer.removeprefix("roost.") for layer in reversed(contract["layers"])]
    assert sorted(packages) == sorted(layers)
    elsewhere = ("storage", "queries")  # the data path and the imports disagree about these
    ordered = [[name for name in names if name not in elsewhere] for names in (packages, layers)]
    assert ordered[0] == ordered[1]


def test_papers_name_modules_and_tests_that_exist() -> None:
    rows = table_under(text_of("docs/papers.md"), "part", "module", "test", "bench")
    assert len(rows) >= 5
    for part, module, test, measured in rows:
        assert re.match(r"\d{3} §\d", part)
        folders = ((module, "src/roost/"), (test, "tests/"), (measured, "src/roost/bench/"))
        for cell, folder in folders:
            paths = re.findall(r"`([\w/]+\.py)`", cell)
            assert paths or cell is measured, part
            assert all(path.startswith(folder) and (ROOT / path).is_file() for path in paths), cell


def test_benches_in_the_documentation_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`roost bench (\w+)", page.read_text(encoding="utf-8")):
            assert name in bench.NAMES, page


def test_pictures_are_well_formed() -> None:
    pictures = list((DOCS / "images").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_every_example_says_how_to_run_it() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert words is not None and f"python examples/{path.name}" in words

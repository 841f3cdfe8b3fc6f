"""Run one synopsis query on a state directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from roost.commands.snapshot import write_result
from roost.errors import ConfigError
from roost.synopsis.bounds import SynopsisResult
from roost.synopsis.pictures import Picture, draw
from roost.synopsis.queries import check_query, read_query, result_json, result_table, scopes_of
from roost.synopsis.reader import BatchResult, Explained, SynopsisReader
from roost.synopsis.standing import items_of


def run_query(state: Path, data: Mapping[str, Any]) -> BatchResult:
    """Run a query in JSON, see :func:`roost.synopsis.queries.read_query`."""
    name, arguments = read_query(data)
    with closing(SynopsisReader(state)) as reader:
        return reader.query(name, **arguments)


def explain_query(state: Path, data: Mapping[str, Any]) -> Explained:
    """Return which files a query reads."""
    name, arguments = read_query(data)
    check_query(name, arguments)
    with closing(SynopsisReader(state)) as reader:
        return reader.explain(*scopes_of(arguments))


def query_json(text: str, pairs: Sequence[str], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the query of the command line: a name with ``NAME=VALUE`` pairs, or JSON.

    Values are JSON, or else text.
    """
    given = {name: value for name, value in scope.items() if value is not None}
    if text.startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError("QUERY", text, f"a JSON object ({error})") from None
        if pairs or given:
            raise ConfigError("QUERY", text, "no other arguments beside a query in JSON")
        return dict(data)
    data = {"query": text}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (name and separator):
            raise ConfigError("argument", pair, "NAME=VALUE, such as feature=temp_c")
        data[name] = _value(value)
    return data | ({"scope": given} if given else {})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def outcome_json(found: BatchResult) -> dict[str, Any]:
    """Return a result and its batch as JSON data."""
    return {"batch": found.batch_id, "result": result_json(found.result)}


def outcome_rows(found: BatchResult) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the values with bounds of a result, one per row, and what else it has by name."""
    rows = [
        ({} if item is None else {"item": item}) | result_json(result)
        for item, result in items_of(found.result)
    ]
    named = result_json(found.result) if is_dataclass(found.result) else {}
    more = {name: item for name, item in named.items() if isinstance(item, str | int | float)}
    return rows, {} if isinstance(found.result, SynopsisResult) else more


def save_result(found: BatchResult, path: Path) -> None:
    """Draw a chart or map as PNG, or write the rows of a table."""
    table = result_table(found.result)
    if table is not None:
        write_result(table, path)
    elif isinstance(found.result, Picture):
        try:
            draw(found.result, path)
        except OSError as error:
            raise ConfigError(
                "--out", str(path), f"a file that can be written ({error})"
            ) from error
    else:
        expected = "the queries chart, map, select and synthesize only"
        raise ConfigError("--out", str(path), expected)


def has_file(found: BatchResult) -> str | None:
    """Return the suffix of the file for a result that is too large for a terminal."""
    if isinstance(found.result, Picture):
        return ".png"
    return None if result_table(found.result) is None else ".parquet"

"""``roost snapshot``: one question about the window of a state directory, on the terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from rich.table import Table

from roost.engine.session import make_session
from roost.engine.snapshot import Answer, Snapshots
from roost.errors import ConfigError
from roost.model import Circle
from roost.state.columns import record_json
from roost.state.operations import (
    plain_console,
    read_instant,
    read_numbers,
    read_shape,
    rules_of,
)
from roost.state.snapshot import Question
from roost.state.store import Store
from roost.window import parse_aggregates

Write = Callable[[pa.Table, Path], None]


def _write_csv(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)


def _write_json(table: pa.Table, path: Path) -> None:
    lines = (record_json(row) for row in table.to_pylist())
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


WRITERS: dict[str, Write] = {
    ".parquet": pq.write_table,
    ".csv": _write_csv,
    ".jsonl": _write_json,
}


def write_answer(table: pa.Table, path: Path) -> None:
    """Write an answer to a file, in the form that its name ends with.

    Raises
    ------
    ConfigError
        If there is no such form, the columns do not fit it, or the file cannot be written.
    """
    write = WRITERS.get(path.suffix)
    if write is None:
        raise ConfigError("--out", str(path), f"a name that ends with {', '.join(WRITERS)}")
    try:
        write(table, path)
    except OSError as error:
        raise ConfigError("--out", str(path), f"a file that can be written ({error})") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        takes = f"another form than {path.suffix}, which does not take these columns ({error})"
        raise ConfigError("--out", str(path), takes) from error


def question_of(arguments: argparse.Namespace) -> Question:
    """Make a question of flags."""
    shape = read_shape(arguments)
    if arguments.at is not None:
        x, y = read_numbers(arguments.at, 2, "--at", "x,y")
        shape = Circle(x, y, math.inf)
    if arguments.at is not None and arguments.nearest is None:
        raise ConfigError("--at", arguments.at, "--nearest K, too")
    with closing(Store(arguments.state, durable=False)) as store:
        rules = rules_of(store)
    return Question(
        shape,
        arguments.where,
        read_instant(arguments.since, rules, "--since"),
        read_instant(arguments.until, rules, "--until"),
        None if arguments.aggregate is None else parse_aggregates(arguments.aggregate),
        arguments.nearest,
    )


def snapshot_command(arguments: argparse.Namespace) -> int:
    """Ask, and print or write the answer."""
    if arguments.out is not None and arguments.out.suffix not in WRITERS:
        write_answer(pa.table({}), arguments.out)  # says what it takes, before Spark is started
    if not (arguments.state / "state.db").exists():
        takes = "a state directory: it has no state.db"
        raise ConfigError("STATE_DIR", str(arguments.state), takes)
    question = question_of(arguments)
    spark = make_session(arguments.master, {}, encrypt=arguments.encrypt)
    with closing(Snapshots(arguments.state, spark)) as snapshots:
        answer = snapshots.ask(question)
        if arguments.out is not None:
            write_answer(answer.table, arguments.out)
            print(f"{_summary(answer)}, in {arguments.out}", file=sys.stderr)
        else:
            _show(answer, arguments.limit)
    return 0


def _summary(answer: Answer) -> str:
    return f"{answer.table.num_rows:,} rows, true at batch {answer.batch_id}"


def _show(answer: Answer, limit: int) -> None:
    table = answer.table.select(answer.table.column_names[1:])  # the first is the batch
    shown = Table(*table.column_names)
    for row in table.slice(0, limit).to_pylist():
        shown.add_row(*(_text(value) for value in row.values()))
    console = plain_console()
    console.print(shown)
    left = table.num_rows - limit
    more = f" ({left:,} more; see --limit and --out)" if left > 0 else ""
    console.print(f"{_summary(answer)}{more}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)

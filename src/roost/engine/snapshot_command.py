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
from roost.model import Box, Circle, Polygon
from roost.state.columns import record_json
from roost.state.operations import instant, numbers, plain_console, rules_of
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


def question_of(arguments: argparse.Namespace) -> Question:
    """Make a question of flags."""
    shape: Box | Circle | Polygon | None = None
    if arguments.box is not None:
        shape = Box(*numbers(arguments.box, 4, "--box", "x0,y0,x1,y1"))
    elif arguments.circle is not None:
        shape = Circle(*numbers(arguments.circle, 3, "--circle", "cx,cy,radius"))
    elif arguments.at is not None:
        x, y = numbers(arguments.at, 2, "--at", "x,y")
        shape = Circle(x, y, math.inf)
    elif arguments.polygon is not None:
        shape = Polygon(arguments.polygon)
    if arguments.at is not None and arguments.nearest is None:
        raise ConfigError("--at", arguments.at, "--nearest K, too")
    with closing(Store(arguments.state, durable=False)) as store:
        rules = rules_of(store)
    return Question(
        shape,
        arguments.where,
        instant(arguments.since, rules, "--since"),
        instant(arguments.until, rules, "--until"),
        None if arguments.aggregate is None else parse_aggregates(arguments.aggregate),
        arguments.nearest,
    )


def snapshot_command(arguments: argparse.Namespace) -> int:
    """Ask, and print or write the answer."""
    write: Write | None = None
    if arguments.out is not None:
        write = WRITERS.get(arguments.out.suffix)
        if write is None:
            takes = f"a name that ends with {', '.join(WRITERS)}"
            raise ConfigError("--out", str(arguments.out), takes)
    if not (arguments.state / "state.db").exists():
        takes = "a state directory: it has no state.db"
        raise ConfigError("STATE_DIR", str(arguments.state), takes)
    question = question_of(arguments)
    spark = make_session(arguments.master, {})
    with closing(Snapshots(arguments.state, spark)) as snapshots:
        answer = snapshots.ask(question)
        if write is not None:
            try:
                write(answer.table, arguments.out)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ConfigError("--out", str(arguments.out), f".parquet ({error})") from error
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

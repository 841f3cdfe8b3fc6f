"""Run one snapshot query on the window of a state directory, and write its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from roost.errors import ConfigError
from roost.model.columns import record_json
from roost.window.snapshot import SnapshotQuery

if TYPE_CHECKING:
    from roost.engine.snapshot import SnapshotResult


def run_snapshot(
    state: Path, snapshot: SnapshotQuery, master: str, *, encrypt: bool = False
) -> SnapshotResult:
    """Run a snapshot query in a Spark session of its own."""
    from roost.engine.session import make_session
    from roost.engine.snapshot import Snapshots

    spark = make_session(master, {}, encrypt=encrypt)
    with closing(Snapshots(state, spark)) as snapshots:
        return snapshots.run(snapshot)


def _write_json(table: pa.Table, path: Path) -> None:
    lines = (record_json(row) for row in table.to_pylist())
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    ".parquet": pq.write_table,
    ".csv": pyarrow.csv.write_csv,
    ".jsonl": _write_json,
}


def check_format(path: Path) -> None:
    """Raise :class:`ConfigError` unless the suffix of a file names a format."""
    if path.suffix not in WRITERS:
        raise ConfigError("--out", str(path), f"a name that ends with {', '.join(WRITERS)}")


def write_result(table: pa.Table, path: Path) -> None:
    """Write a result to a file, in the format of its suffix.

    Raises :class:`ConfigError` if the format is unknown or does not accept the columns, or the file
    cannot be written.
    """
    check_format(path)
    try:
        WRITERS[path.suffix](table, path)
    except OSError as error:
        raise ConfigError("--out", str(path), f"a file that can be written ({error})") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        takes = f"another format than {path.suffix}, which does not accept these columns ({error})"
        raise ConfigError("--out", str(path), takes) from error

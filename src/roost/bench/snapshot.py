"""``roost bench snapshot``: questions about a window of a million points, from ask to answer.

A stream has filled a window by count. Contenders are asked the same boxes and the same nearest
points, one question at a time, until the whole answer is in the client's hands as Arrow. ``roost``
asks for Arrow; ``roost_job`` does, too, but has even the smallest question answered by a Spark
job; ``roost_frame`` asks for a DataFrame and collects it. Spark SQL runs in the same session, and
DuckDB in this process with as many threads, both over Parquet in two layouts
(:mod:`roost.bench.snapshot_cases`). Large answers of Roost are mapped files, which counts as being
in the client's hands: they are in memory, and nothing is copied when they are read.

A question goes to all contenders, in an order drawn anew, before the next one is asked: whatever
else the machine does hits them alike. A comparison of speed is void if answers differ, so each
answer is compared with the others', and a difference ends the benchmark. Writing the window and
the Parquet files is not part of an answer's time. Nothing here measures questions that come while
batches run.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from roost.bench.cases import Bounds, data_dir, load_pickups
from roost.bench.common import environment, save_bars_plot, write_json
from roost.bench.rivals.protocol import CORES
from roost.bench.snapshot_cases import (
    SMALL,
    draw_questions,
    sql_of,
    windowed_points,
    write_layouts,
)
from roost.engine.pipeline import Pipeline
from roost.engine.snapshot import Snapshots
from roost.errors import RoostError
from roost.model.choices import WindowKind
from roost.model.settings import RunConfig
from roost.model.space import Rect
from roost.window.snapshot import Question

if TYPE_CHECKING:
    import duckdb

POINTS = 1_000_000
BATCH_ROWS = 50_000
QUESTIONS, QUESTIONS_QUICK = 40, 8
WARM, WARM_QUICK = 10, 2
SEED = 20140401
# Engines have sines of their own: a distance may differ in its last digits.
DISTANCE_TOLERANCE_M = 1e-6

Row = dict[str, Any]


class UnequalAnswers(RoostError):
    """Two contenders gave different answers to the same question."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Who is asked.

    Parameters
    ----------
    name
        Its name in the rows.
    answer
        Answers a question; what is timed.
    tidy
        Clears up after an answer; not timed.
    """

    name: str
    answer: Callable[[Question], pa.Table]
    tidy: Callable[[], None] = lambda: None


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    described = environment()
    pickups = load_pickups(data_dir())
    points, bounds = windowed_points(pickups, POINTS), pickups.bounds
    rng = np.random.default_rng(SEED)
    warm = draw_questions(points, bounds, WARM_QUICK if quick else WARM, rng)
    asked = draw_questions(points, bounds, QUESTIONS_QUICK if quick else QUESTIONS, rng)
    with tempfile.TemporaryDirectory(prefix="roost-snapshot-") as name, ExitStack() as stack:
        folder = Path(name)
        contenders, fill_s = _contenders(points, bounds, folder, stack)
        measure(contenders, warm, rng)
        rows = measure(contenders, asked, rng)
    window = {"points": POINTS, "batch_rows": BATCH_ROWS, "data": pickups.source, "fill_s": fill_s}
    result = {
        "bench": "snapshot",
        "rows": rows,
        "window": window,
        "environment": described,
        "summary": summarise(rows),
    }
    write_json(json_path, result)
    title = "from a question to its whole answer (ms)"
    save_bars_plot(json_path.with_suffix(".png"), title, _panels(rows))
    Console(stderr=True).print(_table(rows))
    return result


def _contenders(
    points: pa.Table, bounds: Bounds, folder: Path, stack: ExitStack
) -> tuple[list[Contender], float]:
    """Fill the window and open the files; also says how long the window took."""
    path = folder / "points.parquet"
    pq.write_table(points, path, row_group_size=BATCH_ROWS, compression="none")
    config = RunConfig(
        points={"path": str(path)},
        space={"bounds": Rect(*bounds)},
        window={"kind": WindowKind.COUNT, "length": points.num_rows},
        engine={"batch_rows": BATCH_ROWS, "master": f"local[{CORES}]", "available_now": True},
        out={"sink": "count", "dir": folder / "roost"},
    )
    own = stack.enter_context(Pipeline(config))
    own.spark  # noqa: B018  (the session starts before the clock does)
    started = time.perf_counter()
    own.run()
    fill_s = time.perf_counter() - started
    jobs = stack.enter_context(closing(Snapshots(own.store.folder, own.spark, points_here=0)))
    contenders = [
        _asking("roost", own.snapshots, own),
        _asking("roost_job", jobs, own),
        _collecting("roost_frame", own),
    ]
    layouts = write_layouts(points, BATCH_ROWS, folder / "parquet")
    contenders += [_spark_sql(own, name, where) for name, where in layouts.items()]
    connection = stack.enter_context(open_duckdb())
    contenders += [duckdb_contender(connection, name, where) for name, where in layouts.items()]
    return contenders, fill_s


def _asking(name: str, snapshots: Snapshots, pipeline: Pipeline) -> Contender:
    return Contender(name, lambda asked: snapshots.ask(asked).table, _forgetting(pipeline))


def _collecting(name: str, pipeline: Pipeline) -> Contender:
    return Contender(
        name, lambda asked: pipeline.snapshots.frame(asked).toArrow(), _forgetting(pipeline)
    )


def _forgetting(pipeline: Pipeline) -> Callable[[], None]:
    # Large answers stay on disk until the pipeline is closed: hundreds of them are gigabytes.
    answers = pipeline.store.folder / "answers"
    return lambda: shutil.rmtree(answers, ignore_errors=True)


def _spark_sql(pipeline: Pipeline, layout: str, folder: Path) -> Contender:
    view = f"points_{layout}"
    pipeline.spark.read.parquet(str(folder)).createOrReplaceTempView(view)
    return Contender(
        f"spark_sql_{layout}", lambda asked: pipeline.spark.sql(sql_of(asked, view)).toArrow()
    )


@contextmanager
def open_duckdb() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database on as many threads as Spark has, while the block lasts."""
    try:
        import duckdb
    except ImportError as error:
        raise RoostError("this benchmark needs DuckDB: install roost[bench]") from error
    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {CORES}")
        connection.execute("SET parquet_metadata_cache = true")
        yield connection


def duckdb_contender(connection: duckdb.DuckDBPyConnection, layout: str, folder: Path) -> Contender:
    """Ask DuckDB about a layout of Parquet files."""
    view = f"points_{layout}"
    connection.execute(f"CREATE VIEW {view} AS SELECT * FROM read_parquet('{folder}/*.parquet')")
    return Contender(
        f"duckdb_{layout}", lambda asked: connection.sql(sql_of(asked, view)).to_arrow_table()
    )


def measure(
    contenders: Sequence[Contender],
    cases: Mapping[str, Sequence[Question]],
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Ask everybody everything.

    Parameters
    ----------
    contenders
        Who is asked.
    cases
        Case, then its questions.
    rng
        Draws the order in which contenders are asked.
    clock
        Seconds, rising.

    Returns
    -------
    list
        A row for each case and contender; ``rows`` is the mean size of an answer.

    Raises
    ------
    UnequalAnswers
        If two answers to a question differ.
    """
    found = []
    for case, questions in cases.items():
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        sizes = []
        for number, question in enumerate(questions):
            answers = {}
            for at in rng.permutation(len(contenders)):
                contender = contenders[at]
                started = clock()
                answers[contender.name] = contender.answer(question)
                seconds[contender.name].append(clock() - started)
                contender.tidy()
            sizes.append(check_same(f"{case}, question {number}", answers))
        found += [row_of(case, name, taken, sizes) for name, taken in seconds.items()]
    return found


def row_of(case: str, contender: str, seconds: Sequence[float], sizes: Sequence[int]) -> Row:
    """Put one contender's times on one case into a row."""
    p50, p95 = np.percentile(np.array(seconds) * 1e3, [50, 95])
    return {
        "case": case,
        "contender": contender,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "rows": float(np.mean(sizes)),
        "questions": len(seconds),
    }


def check_same(asked: str, answers: Mapping[str, pa.Table]) -> int:
    """Return how many rows the answers have; raise where two of them differ.

    Answers about places must have the same identifiers, those about the nearest points the same
    distances: which of several points at one distance is the last one is anybody's choice.
    """
    names = iter(answers)
    first = next(names)
    expected = answers[first]
    column = "distance" if "distance" in expected.column_names else "id"
    wanted = np.sort(expected[column].to_numpy())
    for name in names:
        values = np.sort(answers[name][column].to_numpy())
        same = values.size == wanted.size and (
            np.allclose(values, wanted, rtol=0.0, atol=DISTANCE_TOLERANCE_M)
            if column == "distance"
            else np.array_equal(values, wanted)
        )
        if not same:
            raise UnequalAnswers(
                f"{asked}: {first} has {wanted.size} rows, {name} has {values.size}, "
                f"and not the same {column}"
            )
    return int(wanted.size)


def summarise(rows: Iterable[Row]) -> dict[str, float]:
    """Return how many times as long others take on the small ranges, at p50.

    The figure is the geometric mean over the small ranges. Of a rival with two layouts of its
    files the faster one counts, for each range.
    """
    p50 = {(row["case"], row["contender"]): row["p50_ms"] for row in rows}

    def ratio(rival: str, own: str) -> float:
        over = [
            min(p50[case, f"{rival}_{layout}"] for layout in ("plain", "sorted")) / p50[case, own]
            for case in SMALL
        ]
        return float(np.exp(np.mean(np.log(over))))

    return {
        "ratio_vs_spark_sql": ratio("spark_sql", "roost"),
        "ratio_vs_duckdb": ratio("duckdb", "roost"),
        "job_ratio_vs_spark_sql": ratio("spark_sql", "roost_job"),
        "frame_ratio_vs_spark_sql": ratio("spark_sql", "roost_frame"),
    }


def _panels(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    panels: dict[str, dict[str, dict[str, float]]] = {"p50": {}, "p95": {}}
    for row in rows:
        for panel, groups in panels.items():
            groups.setdefault(row["case"], {})[row["contender"]] = row[f"{panel}_ms"]
    return panels


def _table(rows: Iterable[Row]) -> Table:
    table = Table("case", "contender", "p50 ms", "p95 ms", "rows")
    for row in rows:
        figures = (f"{row['p50_ms']:,.1f}", f"{row['p95_ms']:,.1f}", f"{row['rows']:,.0f}")
        table.add_row(row["case"], row["contender"], *figures)
    return table

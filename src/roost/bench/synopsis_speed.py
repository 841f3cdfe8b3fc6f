"""Times of ``roost bench synopsis``: queries against DuckDB and Spark SQL, clients, pictures.

Queries go through a reader of a state directory, as ``pipeline.synopsis.query`` does, and every one
is new. DuckDB has the rows in memory, and a rollup of the synopsis' groups; Spark SQL has the rows
cached in memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.common import CORES, Plot, Row
from roost.bench.synopsis_cases import FEATURES, HOUR_US, Draw, Oracle, RandomQuery, Weather, served
from roost.engine.session import make_session
from roost.model.arrays import Floats, frozen
from roost.synopsis import Scope, Synopsis, record_batches, select
from roost.synopsis.pictures import draw
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.spec import SynopsisSpec, run_keys, split_group_keys

SEED = 2024
SITE = ("lon", "lat")
SETS = ("contains", "cardinality", "frequency")
LOOKUPS = ("mean", "stddev", "correlation", "quantiles", "density")
TIMED, TIMED_QUICK = 200, 40
BLOCKS = 4  # of queries of one system, before the next system has its turn
SPARK_TIMED, SPARK_TIMED_QUICK = 15, 3
#: Kilometres of circles; None is the country.
RADII: tuple[tuple[float, float] | None, ...] = ((5, 25), (25, 100), (100, 400), None)
TABLE_2, TABLE_2_QUICK = 40, 8  # queries of each type and radius
CLIENTS, CLIENTS_QUICK = (1, 2, 4, 8), (1, 2)
CLIENT_S, CLIENT_S_QUICK = 4.0, 0.5
CLIENT_QUERIES = 4_000
PICTURES, PICTURES_QUICK = 5, 1
NamedQuery = tuple[str, dict[str, Any]]
Add = Callable[[str, str, Callable[[], Any]], None]  # times a call of a type and a system


def timed_ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call."""
    started = time.perf_counter()
    call()
    return 1000.0 * (time.perf_counter() - started)


@contextmanager
def opened(weather: Weather, synopsis: Synopsis) -> Iterator[Oracle]:
    """Open DuckDB with the rows, and a rollup of the groups of a synopsis."""
    with duckdb.connect() as connection:
        connection.execute(f"set threads = {CORES}")
        oracle = Oracle(weather, connection)
        _roll_up(synopsis, weather.sites, connection)
        yield oracle


def _roll_up(synopsis: Synopsis, sites: Floats, connection: duckdb.DuckDBPyConnection) -> None:
    """Create a table with one row per group: keys, and the sums of every pair of features."""
    layout = synopsis.spec.layout
    x, y = np.ascontiguousarray(sites.T)
    keys, steps = np.empty(x.size, np.int64), np.empty(x.size, np.int64)
    run_keys(frozen(x), frozen(y), frozen(np.zeros(x.size, np.int64)), layout, keys, steps)
    prefixes = split_group_keys(keys >> synopsis.spec.rest_bits)[0]
    cells = pa.table({"site": np.arange(x.size, dtype=np.int32), "cell": prefixes})
    connection.register("cells", cells)
    columns = ["cell", f"us // {layout.bucket_us} as bucket"]
    columns.append(f"us // {layout.slot_us} % {synopsis.spec.slots} as slot")
    for a, first in enumerate(FEATURES):
        for second in FEATURES[a + 1 :]:
            both = f"filter (where {first} is not null and {second} is not null)"
            terms = {"n": "1", "x": first, "y": second, "xx": f"{first} * {first}"}
            terms |= {"yy": f"{second} * {second}", "xy": f"{first} * {second}"}
            for key, term in terms.items():
                wide = term.replace(first, f"{first}::double").replace(second, f"{second}::double")
                columns.append(f"sum({wide}) {both} as {key}_{first}_{second}")
    connection.execute(
        f"create table rollup as select {', '.join(columns)} from weather join cells using (site) "
        "group by 1, 2, 3"
    )


def rollup_sql(query: RandomQuery, spec: SynopsisSpec) -> str:
    """Return a correlation over the rollup; buckets that the range cuts count in full."""
    pair = "_".join(sorted(query.features, key=FEATURES.index))
    layout, scope = spec.layout, query.scope
    assert isinstance(scope.since, int) and isinstance(scope.until, int) and scope.hours
    start, stop = (hour * HOUR_US // layout.slot_us for hour in scope.hours)
    word = "and" if start < stop else "or"
    n, x, y, xx, yy, xy = (f"sum({key}_{pair})" for key in ("n", "x", "y", "xx", "yy", "xy"))
    cov = f"({xy} - {x} * {y} / {n})"
    var = f"sqrt(({xx} - {x} * {x} / {n}) * ({yy} - {y} * {y} / {n}))"
    return (
        f"select {cov} / {var} from rollup where bucket between {scope.since // layout.bucket_us} "
        f"and {(scope.until - 1) // layout.bucket_us} and (slot >= {start} {word} slot < {stop})"
    )


def _run_on_rollup(query: RandomQuery, spec: SynopsisSpec, oracle: Oracle) -> Any:
    return oracle.connection.execute(rollup_sql(query, spec)).fetchall()


def lookups(name: str, scope: Scope) -> list[NamedQuery]:
    """Return the statistical and density queries of a feature."""
    own = {"feature": name, "scope": scope}
    other = FEATURES[name == FEATURES[0]]
    return [
        ("mean", own),
        ("stddev", own),
        ("correlation", {"first": name, "second": other, "scope": scope}),
        ("quantiles", {**own, "ranks": [0.5]}),
        ("density", {**own, "points": [1.0], "bandwidth": 1.0}),
    ]


def set_queries(site: Sequence[float], scope: Scope) -> list[NamedQuery]:
    """Return the set queries of a place in the time range of a scope."""
    span = Scope(since=scope.since, until=scope.until)
    own = {"values": dict(zip(SITE, site, strict=True)), "scope": span}
    return [("contains", own), ("cardinality", {"columns": SITE, "scope": span}),
            ("frequency", own)]  # fmt: skip


def measure_speed(
    reader: SynopsisReader, synopsis: Synopsis, weather: Weather, oracle: Oracle, quick: bool
) -> Row:
    """Time local, country-wide and relational queries; the first of each kind is not counted."""
    random = Draw(weather, SEED + 1)
    number = TIMED_QUICK if quick else TIMED
    times: dict[str, list[float]] = {kind: [] for kind in (*LOOKUPS, *SETS, "relational")}
    for _ in range(number + 1):
        scope = random.local()
        site = random.rng.choice(weather.sites).tolist()
        for kind, given in (*lookups(random.features(1)[0], scope), *set_queries(site, scope)):
            times[kind].append(timed_ms(lambda: reader.query(kind, **given)))  # noqa: B023 - called here
    for _ in range(number + 1):
        scope = random.local()
        times["relational"].append(timed_ms(lambda: _relational(reader, scope)))  # noqa: B023
    p50 = {kind: median(values[1:]) for kind, values in times.items()}
    return {
        "p50_ms_lookup": max(p50[kind] for kind in (*LOOKUPS, *SETS)),
        **{f"p50_ms_{kind}": value for kind, value in p50.items()},
        **measure_country(reader, synopsis, weather, oracle, quick),
    }


def measure_country(
    reader: SynopsisReader, synopsis: Synopsis, weather: Weather, oracle: Oracle, quick: bool
) -> Row:
    """Time country-wide correlations against DuckDB, over the rows and over a rollup.

    Each system runs blocks of queries by itself. In turns with DuckDB, whose queries empty the
    caches, ours take longer: ``p50_ms_country_in_turns``.
    """
    random, number = Draw(weather, SEED + 8), (TIMED_QUICK if quick else TIMED) // BLOCKS
    systems: dict[str, Callable[[RandomQuery], Any]] = {
        "own": lambda query: query.run_on(reader),
        "duckdb": lambda query: oracle.value(query.sql, query.scope),
        "rollup": lambda query: _run_on_rollup(query, synopsis.spec, oracle),
    }
    times: dict[str, list[float]] = {system: [] for system in (*systems, "turns")}
    for _ in range(BLOCKS):
        queries = [random.country() for _ in range(number + 1)]
        for system, run in systems.items():
            taken = [timed_ms(partial(run, query)) for query in queries]
            times[system] += taken[1:]
        for query in (random.country() for _ in range(number)):
            systems["duckdb"](query)
            times["turns"].append(timed_ms(partial(systems["own"], query)))
    p50 = {system: median(values) for system, values in times.items()}
    return {
        "p50_ms_country": p50["own"],
        "p50_ms_country_in_turns": p50["turns"],
        "p50_ms_duckdb": p50["duckdb"],
        "p50_ms_rollup": p50["rollup"],
        "ratio_vs_duckdb": p50["duckdb"] / p50["own"],
        "ratio_vs_rollup": p50["rollup"] / p50["own"],
    }


def _relational(reader: SynopsisReader, scope: Scope) -> list[pa.RecordBatch]:
    return list(record_batches(select(reader.synopsis(scope), scope)))


def measure_table_2(
    reader: SynopsisReader, weather: Weather, oracle: Oracle, quick: bool
) -> tuple[Row, list[Row]]:
    """Time queries by type and radius, ours and those of DuckDB and Spark SQL over the rows.

    Country-wide correlations are also run over the rollup.

    Returns the ratio of Spark SQL to ours for country-wide correlations, and all times.
    """
    random = Draw(weather, SEED + 4)
    rows: list[Row] = []
    with spark_rows(oracle) as spark:
        for radius in RADII:
            times: dict[tuple[str, str], list[float]] = {}

            def add(kind: str, system: str, call: Callable[[], Any]) -> None:
                times.setdefault((kind, system), []).append(timed_ms(call))  # noqa: B023

            scopes = [
                random.country().scope if radius is None else random.local(*radius)
                for _ in range((TABLE_2_QUICK if quick else TABLE_2) + 1)
            ]
            for scope in scopes:
                _time_own(random, scope, reader, add)
            for scope in scopes:
                _time_duckdb(random, scope, reader.spec, oracle, add)
            for scope in scopes[: (SPARK_TIMED_QUICK if quick else SPARK_TIMED) + 1]:
                for kind in ("mean", "correlation"):
                    query = RandomQuery(kind, random.features(1 + (kind != "mean")), scope)
                    add(kind, "spark_sql", partial(spark, query))
            place = "country" if radius is None else f"{radius[0]:g} to {radius[1]:g} km"
            for (kind, system), values in times.items():
                found = {"radius": place, "type": kind, "system": system}
                rows.append({**found, "mean_ms": fmean(values[1:]), "p50_ms": median(values[1:])})
    p50 = {row["system"]: row["p50_ms"] for row in rows
           if (row["radius"], row["type"]) == ("country", "correlation")}  # fmt: skip
    return {"ratio_vs_spark_sql": p50["spark_sql"] / p50["roost"]}, rows


def _time_own(random: Draw, scope: Scope, reader: SynopsisReader, add: Add) -> None:
    """Time one of our queries of each type."""
    (name,) = random.features(1)
    site = random.rng.choice(random.weather.sites).tolist()
    for kind, given in (*lookups(name, scope), *set_queries(site, scope)):
        add(kind, "roost", partial(reader.query, kind, **given))
    add("relational", "roost", partial(_relational, reader, scope))
    given = {"target": name, "features": [FEATURES[name == FEATURES[0]]], "scope": scope}
    add("regress", "roost", partial(reader.query, "regress", **given))


def _time_duckdb(random: Draw, scope: Scope, spec: SynopsisSpec, oracle: Oracle, add: Add) -> None:
    """Time one query of each type over the rows, and over the rollup where it can tell."""
    for kind, number in (("mean", 1), ("stddev", 1), ("correlation", 2), ("quantile", 1)):
        query = RandomQuery(kind, random.features(number), scope)
        label = "quantiles" if kind == "quantile" else kind
        add(label, "duckdb", partial(oracle.value, query.sql, scope))
        if scope.shape is None and kind == "correlation":
            add(label, "rollup", partial(_run_on_rollup, query, spec, oracle))


@contextmanager
def spark_rows(oracle: Oracle) -> Iterator[Callable[[RandomQuery], Any]]:
    """Load the rows into Spark's memory; yields what runs a query over them."""
    spark = make_session(f"local[{CORES}]", {"spark.driver.memory": "3g"})
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "rows.parquet"))
            columns = ", ".join(("site", "us", *FEATURES))
            rows = oracle.connection.sql(f"select {columns} from weather").to_arrow_table()
            pq.write_table(rows, path, row_group_size=1 << 17)
            spark.read.parquet(path).cache().createOrReplaceTempView("weather")
            spark.sql("select count(*) from weather").collect()

            def run(query: RandomQuery) -> Any:
                condition = oracle.condition(query.scope).replace("us // ", "us div ")
                sql = query.sql.replace("favg", "avg")
                return spark.sql(f"select {sql} from weather where {condition}").collect()

            yield run
    finally:
        spark.stop()


def measure_clients(
    synopsis: Synopsis, weather: Weather, quick: bool
) -> tuple[Row, list[Row], dict[str, Plot]]:
    """Query from several processes at once, each with a reader of its own (figure 10)."""
    random, rows = Draw(weather, SEED + 5), []
    queries = []
    for _ in range(CLIENT_QUERIES // 8):
        scope, site = random.local(), random.rng.choice(weather.sites).tolist()
        queries += [*lookups(random.features(1)[0], scope), *set_queries(site, scope)]
    with served(synopsis) as reader:
        for clients in CLIENTS_QUICK if quick else CLIENTS:
            rows.append(
                _query_together(reader, queries, clients, CLIENT_S_QUICK if quick else CLIENT_S)
            )
    lines = {key: [(row["clients"], row[key]) for row in rows] for key in ("p50_ms", "p99_ms")}
    rates = {"queries/s": [(row["clients"], row["queries_per_s"]) for row in rows]}
    plot = Plot("clients", {"queries per second": rates, "latency, ms": lines}, columns=2)
    return {"askers_qps": max(row["queries_per_s"] for row in rows)}, rows, {"-clients": plot}


def _query_together(
    reader: SynopsisReader, queries: Sequence[NamedQuery], clients: int, seconds: float
) -> Row:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(clients), context.Queue()
    state = str(Path(reader.files.folder).parent)
    processes = [
        context.Process(
            target=_client, args=(state, queries, k, seconds, barrier, results), daemon=True
        )
        for k in range(clients)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120.0) for _ in processes]
    for process in processes:
        process.join()
    times = np.concatenate([own for own, _ in found])
    rate = sum(own.size / took for own, took in found)
    p50, p99 = np.quantile(times, [0.5, 0.99]).tolist()
    return {"clients": clients, "queries_per_s": rate, "mean_ms": float(times.mean()),
            "p50_ms": p50, "p99_ms": p99}  # fmt: skip


def _client(
    state: str,
    queries: Sequence[NamedQuery],
    number: int,
    seconds: float,
    barrier: Any,
    results: Any,
) -> None:
    """Query for some seconds after all clients have begun; sends latencies and the time taken."""
    with closing(SynopsisReader(Path(state))) as reader:
        for kind, given in queries[:40]:  # loads code
            reader.query(kind, **given)
        times, at = [], number * 997
        barrier.wait()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            kind, given = queries[at % len(queries)]
            times.append(timed_ms(lambda: reader.query(kind, **given)))  # noqa: B023 - called here
            at += 1
        results.put((np.array(times), time.perf_counter() - started))


def measure_pictures(reader: SynopsisReader, weather: Weather, quick: bool) -> list[Row]:
    """Time how long data and drawing of each picture take (figures 11 and 12)."""
    random = Draw(weather, SEED + 6)
    cases: Mapping[str, dict[str, Any]] = {
        "chart": {"feature": "temp_c", "bars": "precip_mm"},
        "map": {"feature": "temp_c", "bits": 16},
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, given in cases.items():
            times = []
            for _ in range((PICTURES_QUICK if quick else PICTURES) + 1):
                scope = Scope(random.circle(20.0, 100.0)) if name == "chart" else Scope()
                started = time.perf_counter()
                result = reader.query(name, **given, scope=scope).result
                retrieved = time.perf_counter()
                draw(result, Path(folder, f"{name}.png"))
                times.append((retrieved - started, time.perf_counter() - retrieved))
            retrieval, drawing = (median(own) for own in zip(*times[1:], strict=True))
            rows.append(
                {"picture": name, "retrieval_ms": 1e3 * retrieval, "drawing_ms": 1e3 * drawing}
            )
    return rows

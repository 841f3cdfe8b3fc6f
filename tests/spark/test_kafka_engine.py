"""The engine with points, requests and matches in topics of a real Kafka broker.

Tests of Spark's connector run in a separate process, which may be killed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from kafka_broker import BrokerUnavailable, KafkaBroker, produce, read_all, reading

from roost.engine import kafka_jars
from roost.engine.kafka import check_brokers
from roost.engine.session import check_java
from roost.errors import ConfigError, RoostError, SourceError
from roost.queries.kafka_log import KafkaQueryLog
from roost.queries.log import kafka_address
from roost.testing.oracle import brute_force

pytestmark = pytest.mark.spark
pytest.importorskip("confluent_kafka", reason="needs the extra roost[kafka]")


def test_a_jar_that_maven_lacks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SourceError, match="Maven Central did not provide"):
        kafka_jars.fetch_jars("nothing", ["org.apache.kafka:no-such-thing:0.0"], check_java())
    assert list((tmp_path / "roost").iterdir()) == []


def test_missing_java_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(BrokerUnavailable, match="Java 17 or newer is needed"):
        KafkaBroker().__enter__()


class Maven:
    """Replaces Ivy: provides the given revisions and records requests."""

    def __init__(self, *has: str) -> None:
        self.has = has
        self.requested: list[str] = []

    def run_ivy(self, scratch: Path, module: str, java: str) -> None:
        [revision] = re.findall(r'name="spark-sql-kafka-0-10_2.13" rev="([^"]+)"', module)
        self.requested.append(revision)
        if revision not in self.has:
            raise kafka_jars._NotFoundError(f"Maven Central did not provide {revision}")
        (scratch / "jars").mkdir()
        own = next(kafka_jars._spark_jars().glob("scala-library-*.jar")).name
        for name in (f"spark-sql-kafka-0-10_2.13-{revision}.jar", own):
            (scratch / "jars" / name).touch()


@pytest.mark.parametrize(
    ("has", "fetched", "requested"),
    [
        ([pyspark.__version__, "4.2.0"], pyspark.__version__, [pyspark.__version__]),
        (["4.2.0"], "4.2.0", [pyspark.__version__, "4.2.0"]),
    ],
)
def test_the_newest_working_connector_is_fetched_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has: list[str],
    fetched: str,
    requested: list[str],
) -> None:
    maven = Maven(*has)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kafka_jars, "_run_ivy", maven.run_ivy)
    for _ in range(2):
        settings = kafka_jars.kafka_settings({"spark.ui.enabled": "true"}, "java")
        assert list(settings) == ["spark.jars"]
        assert Path(settings["spark.jars"]).name == f"spark-sql-kafka-0-10_2.13-{fetched}.jar"
        assert maven.requested == requested


def test_a_missing_connector_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kafka_jars, "_run_ivy", Maven().run_ivy)
    with pytest.raises(SourceError, match=r"did not provide 4\.2\.0.*engine\.spark.*spark\.jars"):
        kafka_jars.kafka_settings({}, "java")


@pytest.mark.parametrize("name", ["spark.jars", "spark.jars.packages"])
def test_jars_in_the_settings_suffice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kafka_jars, "_run_ivy", None)
    assert kafka_jars.kafka_settings({name: "mine"}, "java") == {}


def test_an_unreachable_broker_is_reported_at_once() -> None:
    with pytest.raises(SourceError, match=r"no Kafka broker is reachable: 127\.0\.0\.1:1: "):
        check_brokers("127.0.0.1:1")


def test_one_reachable_broker_suffices(broker: KafkaBroker) -> None:
    check_brokers(f"127.0.0.1:1,{broker.bootstrap}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kafka://a:1/t", ("a:1", "t")),
        ("kafka://a:1,[::1]:2/t.x", ("a:1,[::1]:2", "t.x")),
        ("kafka://a:1", None),
        ("kafka://a:1/", None),
        ("kafka:///t", None),
        ("kafka://a/t", None),
        ("kafka://a:1,b/t", None),
        ("kafka:a:1/t", None),
    ],
)
def test_an_address_is_brokers_and_a_topic(text: str, parts: tuple[str, str] | None) -> None:
    if parts is not None:
        assert kafka_address(text, "points.path") == parts
        return
    with pytest.raises(ConfigError, match=r"points\.path: got .* expected kafka://HOST:PORT"):
        kafka_address(text, "points.path")


# --------------------------------------------------------------------------- the engine

CITY = (-74.1, 40.6, -73.8, 40.9)
START = dt.datetime(2014, 4, 1, tzinfo=dt.UTC)
BATCH = 100
# Messages that are not points, with the reason of their dead letter.
DEAD: list[tuple[bytes | None, str]] = [
    (None, "malformed"),
    (b"", "malformed"),
    (b" \n ", "malformed"),
    (b"null", "malformed"),
    (b"12", "malformed"),
    (b'[{"id": 1}]', "malformed"),
    (b'{"id": "cut", "lon": ', "malformed"),
    (b'{"id": "one"} {"id": "two"}', "malformed"),
    (b'{"id": "half a character \xc3"}', "malformed"),
    (b'{"id": "half a pair \\ud800"}', "malformed"),
    (b"[" * 100_000, "malformed"),
    (b'{"id":' * 50_000 + b"1" + b"}" * 50_000, "malformed"),
]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"lon": float("nan")}, "not_finite"),
    ({"lon": float("inf")}, "not_finite"),
    ({"lat": None}, "not_finite"),
    ({"lat": 90.5}, "latitude_out_of_range"),
    ({"lon": "east"}, "wrong_type"),
    ({"fare": "cheap"}, "wrong_type"),
    ({"event_time": "yesterday"}, "wrong_type"),
    ({"event_time": None}, "null_time"),
    ({"id": None}, "null_id"),
    ({"id": [1]}, "wrong_type"),
    ({"lon": None, "__roost_row": "no number"}, "not_finite"),
]


def make_points(chance: random.Random, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return points with the fields of messages."""
    x0, y0, x1, y1 = CITY
    return [
        {
            "id": f"p{first + number}",
            "lon": chance.uniform(x0, x1),
            "lat": chance.uniform(y0, y1),
            "event_time": (START + dt.timedelta(seconds=first + number)).isoformat(),
            "fare": chance.choice([None, 10, 50.0, 50.5, 99]),
        }
        for number in range(count)
    ]


def make_queries(chance: random.Random, count: int, first: int = 0) -> list[dict[str, Any]]:
    x0, y0, x1, y1 = CITY
    queries = []
    for number in range(count):
        x, y = chance.uniform(x0, x1), chance.uniform(y0, y1)
        wide, high = chance.uniform(0, 0.1), chance.uniform(0, 0.1)
        corners = f"{x} {y}, {x + wide} {y}, {x} {y + high}, {x} {y}"
        shapes: list[dict[str, Any]] = [
            {"x0": x, "y0": y, "x1": x + wide, "y1": y + high},
            {"cx": x, "cy": y, "radius": chance.uniform(0, 5_000)},
            {"wkt": f"POLYGON (({corners}))"},
        ]
        queries.append(
            {
                "op": "register",
                "query_id": f"q{first + number}",
                "user_id": "ann",
                **chance.choice(shapes),
                **chance.choice([{}, {"predicate": "fare > 50"}]),
            }
        )
    return queries


def expected(points: list[dict[str, Any]], queries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    plain = [{**point, "x": point["lon"], "y": point["lat"]} for point in points]

    def expensive(text: str, point: Mapping[str, Any]) -> bool:
        assert text == "fare > 50"
        return point["fare"] is not None and point["fare"] > 50

    return brute_force(plain, queries, lonlat=True, predicate=expensive)


def as_json(records: Iterable[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a driver and its JVM, as a crash of the host would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Driver:
    """A process that runs pipelines, see ``kafka_driver.py``."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / f"errors-{uuid.uuid4().hex}"
        command = [sys.executable, str(Path(__file__).with_name("kafka_driver.py"))]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                start_new_session=True,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(self._errors.read_text()[-3000:])

    def run(self, settings: dict[str, Any], *pauses: tuple[str, int]) -> None:
        self._send(json.dumps({"settings": settings, "pauses": pauses}))

    def resume(self) -> None:
        self._send("")

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def connector() -> None:
    try:
        kafka_jars.connector_jars(check_java())
    except RoostError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def lasting(connector: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One driver process for all runs that are not killed."""
    with Driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


def settings_of(broker: KafkaBroker, out: Path, **topics: str) -> dict[str, Any]:
    url = f"kafka://{broker.bootstrap}"
    return {
        "points.path": f"{url}/{topics['points']}",
        "points.attributes": {"fare": "double"},
        "queries.log": f"{url}/{topics['log']}",
        "out.dir": str(out),
        "engine.master": "local[2]",
        "engine.available_now": True,
        "engine.batch_rows": BATCH,
    }


STRATEGIES = ("replicated", "history")
MORE = ("uniform",)
ANY_STRATEGY = [*STRATEGIES, *(pytest.param(strategy, marks=pytest.mark.full) for strategy in MORE)]


@dataclass(frozen=True)
class Streamed:
    """One stream of points, matched once with each strategy."""

    points: list[dict[str, Any]]
    queries: list[dict[str, Any]]
    dead: list[str]
    nowhere: dict[str, Any]
    reports: dict[str, dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def streamed(
    broker: KafkaBroker, lasting: Driver, tmp_path_factory: pytest.TempPathFactory, full: bool
) -> Streamed:
    chance = random.Random(17)
    folder = tmp_path_factory.mktemp("streamed")
    points = make_points(chance, 400)
    # All of these are points.
    points[0]["id"] = "2014-04-01"
    odd = {
        **points[1],
        "note": {"any": ["thing", 1]},
        "event_time": "2014-04-01 02:00:01.000123+02",
    }
    faulty = make_points(chance, len(FAULTS), 1_000)
    for point, (fault, _) in zip(faulty, FAULTS, strict=True):
        point.update(fault)
    values = [
        *as_json([points[0], odd, {**points[2], "id": 7}, *points[4:], *faulty]),
        json.dumps(points[3], indent=2).encode(),
        *(value for value, _ in DEAD),
    ]
    points[1]["event_time"] = "2014-04-01T00:00:01.000123Z"
    points[2]["id"] = "7"
    chance.shuffle(values)
    broker.create_topic("streamed-points", partitions=2)
    produce(broker, "streamed-points", *values[::2])
    produce(broker, "streamed-points", *values[1::2], partition=1)
    queries = make_queries(chance, 60)
    with closing(KafkaQueryLog(broker.bootstrap, "streamed-log")) as log:
        table = {name: [query.get(name) for query in queries[:40]] for name in QUERY_FIELDS}
        log.append(pa.table(table))
        produce(broker, "streamed-log", b"no request", *as_json(queries[40:]))
    reports = {}
    for strategy in (*STRATEGIES, *MORE) if full else STRATEGIES:
        broker.create_topic(f"streamed-{strategy}")
        settings = settings_of(
            broker, folder / strategy, points="streamed-points", log="streamed-log"
        )
        sink = f"kafka://{broker.bootstrap}/streamed-{strategy}"
        settings |= {"out.sink": "kafka", "out.topic": sink}
        settings |= {"engine.strategy": strategy, "engine.machines": 3}
        lasting.run(settings)
        reports[strategy] = lasting.receive()
    lasting.run(settings_of(broker, folder / "nowhere", points="nowhere", log="streamed-log"))
    missing = lasting.receive()
    dead = sorted([reason for _, reason in DEAD] + [reason for _, reason in FAULTS])
    return Streamed(points, queries, dead, missing, reports, folder)


QUERY_FIELDS = (
    *("op", "query_id", "user_id", "x0", "y0", "x1", "y1", "cx", "cy", "radius"),
    *("wkt", "predicate"),
)


@pytest.mark.parametrize("strategy", ANY_STRATEGY)
def test_matches_of_a_topic_equal_brute_force(
    streamed: Streamed, broker: KafkaBroker, strategy: str
) -> None:
    report = streamed.reports[strategy]
    assert report.get("error") is None
    matches = read_all(broker, f"streamed-{strategy}")
    found = [json.loads(value) for _, value in matches]
    pairs = sorted((match["query_id"], match["point_id"]) for match in found)
    assert pairs == expected(streamed.points, streamed.queries)
    assert len(pairs) > 300
    assert [key.decode() for key, _ in matches] == [match["query_id"] for match in found]
    times = {
        point["id"]: dt.datetime.fromisoformat(point["event_time"]) for point in streamed.points
    }
    for match in found:
        assert dt.datetime.fromisoformat(match["event_time"]) == times[match["point_id"]]
    assert report["points"] == len(streamed.points)
    assert len({match["batch_id"] for match in found}) == report["batches"] >= 4


@pytest.mark.parametrize("strategy", ANY_STRATEGY)
def test_invalid_points_and_requests_are_dead_letters(streamed: Streamed, strategy: str) -> None:
    dead = pq.read_table(streamed.folder / strategy / "dead").to_pylist()
    points = [letter for letter in dead if letter["origin"] == "point"]
    assert sorted(letter["reason"] for letter in points) == streamed.dead
    requests = [letter for letter in dead if letter["origin"] == "request"]
    assert [letter["reason"] for letter in requests] == ["malformed"]
    assert not list((streamed.folder / strategy / "matches").glob("*.parquet"))


def test_a_sample_of_the_topic_balances_the_work(streamed: Streamed) -> None:
    for strategy, report in streamed.reports.items():
        shares = [machine["points"] for machine in report["machines"]]
        assert sum(shares) == len(streamed.points)
        # A uniform plan includes the outliers, which determine how it distributes the work.
        assert strategy == "uniform" or min(shares) > len(streamed.points) / 6, strategy


def test_the_messages_that_wait_are_known(streamed: Streamed) -> None:
    """With a delay of a batch: they follow from the progress that Spark reported last."""
    messages = len(streamed.points) + len(DEAD) + len(FAULTS)
    for report in streamed.reports.values():
        first, *later = report["waiting"]
        assert first == 0, "there was no progress"
        expected = [messages - BATCH * k for k in range(1, report["batches"])]
        # Offsets are divided between partitions, and rounded.
        assert later == pytest.approx(expected, abs=4)


def test_a_missing_topic_is_an_error(streamed: Streamed) -> None:
    assert list(streamed.nowhere) == ["error"]
    message = r"SourceError: topic nowhere cannot be read: .*UnknownTopicOrPartition.*"
    assert re.fullmatch(message, streamed.nowhere["error"])


def test_a_killed_driver_leaves_every_match_once(
    broker: KafkaBroker, lasting: Driver, topic: str, tmp_path: Path
) -> None:
    chance = random.Random(23)
    points = make_points(chance, 5 * BATCH)
    queries = make_queries(chance, 40)
    for name in ("q40", "q41"):
        box = dict(zip(("x0", "y0", "x1", "y1"), CITY, strict=True))
        queries.append({"op": "register", "query_id": name, "user_id": "ann", **box})
    broker.create_topic(f"{topic}-points")
    produce(broker, f"{topic}-points", *as_json(points))
    settings = settings_of(broker, tmp_path / "out", points=f"{topic}-points", log=f"{topic}-log")
    settings |= {"engine.strategy": "uniform", "space.bounds": CITY}
    with closing(KafkaQueryLog(broker.bootstrap, f"{topic}-log")):
        produce(broker, f"{topic}-log", *as_json(queries[:40]))
    with Driver(tmp_path) as driver:
        driver.run(settings, ("intent", 1), ("apply", 1))
        assert driver.receive() == ["intent", 1]
        produce(broker, f"{topic}-log", *as_json(queries[40:41]))
        driver.resume()
        # The intent of the batch includes the new query, which is not applied yet.
        assert driver.receive() == ["apply", 1]
    produce(broker, f"{topic}-log", *as_json(queries[41:]))
    with Driver(tmp_path) as driver:
        driver.run(settings, ("publish", 2))
        # Committed, but neither published nor in Spark's checkpoint.
        assert driver.receive() == ["publish", 2]
    lasting.run(settings)
    assert lasting.receive().get("error") is None
    expect = []
    for batch, known in enumerate((40, 41, 42, 42, 42)):
        pairs = expected(points[batch * BATCH : (batch + 1) * BATCH], queries[:known])
        expect += [(batch, query_id, point_id) for query_id, point_id in pairs]
    files = (tmp_path / "out" / "matches").glob("*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    found = sorted((row["batch_id"], row["query_id"], row["point_id"]) for row in rows)
    assert found == sorted(expect)


FLOW = """
from roost import Dataflow

flow = Dataflow("sums")
schema = {"k": "int64", "v": "int64", "t": "int64"}
rides, trips = (flow.source(name, schema, time="t") for name in ("rides", "trips"))
flow.union(rides, trips).aggregate({"v": "sum(v)"}, by="k", size=10, name="by_key").sink("sums")
"""


def test_a_dataflow_reads_two_topics_and_writes_another(
    broker: KafkaBroker, lasting: Driver, topic: str, tmp_path: Path
) -> None:
    """The second run continues where the first one ended; a run of what is there ends no window."""
    chance = random.Random(5)
    (tmp_path / "sums.py").write_text(FLOW)
    rides, trips = (
        [{"k": chance.randrange(5), "v": chance.randrange(100), "t": t} for t in range(250)]
        for _ in range(2)
    )
    for name in ("rides", "trips", "sums"):
        broker.create_topic(f"{topic}-{name}")
    url = f"kafka://{broker.bootstrap}/{topic}"
    settings = {
        "dataflow.flow": f"{tmp_path / 'sums.py'}:flow",
        "dataflow.sources": {name: f"{url}-{name}" for name in ("rides", "trips")},
        "out.dir": str(tmp_path / "out"),
        "out.sink": "kafka",
        "out.topic": f"{url}-sums",
        "engine.master": "local[2]",
        "engine.available_now": True,
        "engine.batch_rows": 100,
    }
    for part in (slice(0, 130), slice(130, None)):
        produce(broker, f"{topic}-rides", *as_json([*rides[part], {"k": 1}]))
        produce(broker, f"{topic}-trips", *as_json(trips[part]))
        lasting.run(settings)
        report = lasting.receive()
        assert report.get("error") is None
    sums: Counter[tuple[int, int]] = Counter()
    for ride in (*rides, *trips):
        sums[ride["t"] // 10, ride["k"]] += ride["v"]
    found = read_all(broker, f"{topic}-sums")
    rows = [json.loads(value) for _, value in found]
    closed = {key: total for key, total in sums.items() if 10 * (key[0] + 1) <= 249}
    assert sorted((row["k"], row["v"]) for row in rows) == sorted(
        (k, total) for (_, k), total in closed.items()
    )
    assert {key for key, _ in found} == {b"sums"} and len({row["batch_id"] for row in rows}) > 2
    assert report["dataflow"]["dead"] == {"rides": {"null_time": 2}}
    assert not list((tmp_path / "out" / "sums").glob("*.parquet"))


def test_handwritten_requests_take_effect_with_the_next_batch(
    broker: KafkaBroker, connector: None, topic: str, tmp_path: Path
) -> None:
    chance = random.Random(29)
    everywhere = {"op": "register", "query_id": "all", "user_id": "ann"}
    everywhere |= {"cx": -74, "cy": 40.75, "radius": 100_000}
    west = {"op": "register", "query_id": "west", "user_id": "bob"}
    west |= dict(zip(("x0", "y0", "x1", "y1"), (-75, 40, -73.95, 41), strict=True))
    west_ends = {"op": "terminate", "query_id": "west", "user_id": "bob"}
    groups = [make_points(chance, 30, 100 * number) for number in range(3)]
    for name in ("points", "matches"):
        broker.create_topic(f"{topic}-{name}")
    url = f"kafka://{broker.bootstrap}/{topic}"
    command = [sys.executable, "-m", "roost", "run", "--points", f"{url}-points"]
    command += ["--query-log", f"{url}-log", "--sink", "kafka", "--topic", f"{url}-matches"]
    command += ["--out", str(tmp_path / "out"), "--bounds", ",".join(map(str, CITY))]
    command += ["--strategy", "uniform", "--machines", "2", "--master", "local[2]"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    found: list[tuple[str, str]] = []
    with (
        closing(KafkaQueryLog(broker.bootstrap, f"{topic}-log")),
        reading(broker, f"{topic}-matches") as get,
    ):
        try:
            # Every point matches the first query: the last match completes a batch.
            for requests, points in zip(
                ([everywhere], [west, {"op": "register"}], [west_ends]), groups, strict=True
            ):
                produce(broker, f"{topic}-log", *as_json(requests))
                produce(broker, f"{topic}-points", *as_json(points))
                waited = len(points)
                while waited:
                    match = json.loads(get())
                    found.append((match["query_id"], match["point_id"]))
                    waited -= match["query_id"] == "all"
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
        finally:
            end_group(process)
    found += [
        (match["query_id"], match["point_id"])
        for _, value in read_all(broker, f"{topic}-matches")[len(found) :]
        for match in [json.loads(value)]
    ]
    assert process.returncode == 0, said
    expect = [("all", point["id"]) for points in groups for point in points]
    expect += [("west", point["id"]) for point in groups[1] if point["lon"] <= -73.95]
    assert sorted(found) == sorted(expect)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["points"], report["dead_requests"]) == (90, 1)

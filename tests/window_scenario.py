"""A stream with a window, standing queries and a join, with expected results by brute force.

Expected results come from lists of points, without Roost's windows.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pytest import approx

from roost import Box, Circle, Pipeline, Query, RunConfig
from roost.model.records import Request, Terminate
from roost.model.settings import with_settings
from roost.runtime import records
from roost.testing.oracle import covers

Record = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("event_time", pa.int64()),
        ("fare", pa.float64()),
        ("kind", pa.string()),
    ]
)
BATCH_ROWS = 60
BATCHES = 12


@dataclass
class Standing:
    """A query with the batches in which it is live."""

    query: Query
    first: int
    last: int | None = None  # first batch in which it is no longer live

    def live_in(self, batch: int) -> bool:
        return self.first <= batch and (self.last is None or batch < self.last)


@dataclass
class WindowScenario:
    """Points in order, requests by batch, and the settings of the window."""

    seed: int
    kind: str
    length: float
    tumbling: bool = False
    lateness: float | None = None
    points: list[Record] = field(default_factory=list)
    requests: dict[int, list[Request]] = field(default_factory=dict)
    standing: list[Standing] = field(default_factory=list)
    join: Record = field(default_factory=lambda: {"distance": 4.0, "within": 12.0})

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        for number in range(BATCHES * BATCH_ROWS):
            batch = number // BATCH_ROWS
            hot = (10 + 7 * batch) % 100
            x = rng.gauss(hot, 4) if rng.random() < 0.7 else rng.uniform(0, 100)
            time = 10 * batch + rng.randrange(-25, 12)
            fare = rng.choice([None, round(rng.uniform(0, 50), 2)])
            kind = rng.choice(["taxi", "rider"])
            place = {"x": round(x, 2), "y": round(rng.uniform(0, 100), 2)}
            self.points.append(
                {"id": number, **place, "event_time": time, "fare": fare, "kind": kind}
            )
        self._draw_requests(rng)

    def _draw_requests(self, rng: random.Random) -> None:
        aggregates = ["count, avg(fare), max(fare)", "sum(fare), stddev(fare), min(id)", "count"]
        for number in range(24):
            first = rng.randrange(6)
            x, y = rng.uniform(0, 90), rng.uniform(0, 90)
            name = f"q{number}"
            if number % 3 == 0:
                circle = Circle(x, y, rng.uniform(5, 60))
                query = Query(name, circle, nearest=rng.randint(1, 4))
            else:
                box = Box(x, y, x + rng.uniform(5, 60), y + rng.uniform(5, 60))
                predicate = rng.choice([None, "fare > 20"])
                expires = rng.choice([None, 70])
                aggregate = rng.choice(aggregates)
                query = Query(
                    name, box, predicate=predicate, expires_at=expires, aggregate=aggregate
                )
            last = rng.choice([None, None, first + rng.randint(1, 5)])
            self.standing.append(Standing(query, first, last))
            self.requests.setdefault(first, []).append(query)
            if last is not None:
                self.requests.setdefault(last, []).append(Terminate(name))
                if number % 2:  # a new query of the same name starts empty
                    again = Query(name, Box(0, 0, 100, 100), aggregate="count")
                    self.standing.append(Standing(again, last + 1))
                    self.requests.setdefault(last + 1, []).append(again)
        for number in range(10):
            x, y = rng.uniform(0, 90), rng.uniform(0, 90)
            self.requests.setdefault(0, []).append(Query(f"m{number}", Box(x, y, x + 30, y + 30)))

    def feed(self, folder: Path, number: int) -> None:
        """Add the points of a batch; files present together are replayed by event time."""
        path = folder / "points" / f"{number:03d}.parquet"
        if number < BATCHES and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.with_suffix(".partial")
            pq.write_table(pa.Table.from_pylist(self.batch(number), SCHEMA), whole)
            whole.rename(path)

    def prepare(self, folder: Path, pipeline: Pipeline) -> None:
        """Send the requests of the next batch, unless a crashed run has sent them."""
        last = records.last_commit(pipeline.store)
        number = 0 if last is None else last.batch_id + 1
        self.feed(folder, number)
        sent = folder / f"sent-{number}"
        if not sent.exists():
            pipeline.request(*self.requests.get(number, []))
            sent.touch()

    def config(self, folder: Path, **settings: Any) -> RunConfig:
        path = folder / "points"
        self.feed(folder, 0)
        own: Record = {
            "points.path": str(path),
            "space.bounds": [0, 0, 100, 100],
            "space.grid": [40, 40],
            "engine.batch_rows": BATCH_ROWS,
            "engine.available_now": True,
            "engine.machines": 3,
            "balance.round": 20.0,
            "window.kind": self.kind,
            "window.length": self.length,
            "window.tumbling": self.tumbling,
            "join.left": "kind = 'taxi'",
            "join.right": "kind = 'rider'",
            "join.distance": self.join["distance"],
            "join.within": self.join["within"],
            "out.dir": str(folder / "out"),
        }
        if self.lateness is not None:
            own["window.lateness"] = self.lateness
        return with_settings(RunConfig(), {**own, **settings})

    # -- expected results

    def batch(self, number: int) -> list[Record]:
        return self.points[number * BATCH_ROWS : (number + 1) * BATCH_ROWS]

    def accepted(self, upto: int) -> tuple[list[tuple[int, Record]], list[int]]:
        """Return the points that were in time, with their batches, and the ids of late points."""
        in_time: list[tuple[int, Record]] = []
        late: list[int] = []
        reached: int | None = None
        for number in range(upto + 1):
            limit = None
            if self.kind == "time" and reached is not None:
                limit = reached - (self.length if self.lateness is None else self.lateness)
            fine = [p for p in self.batch(number) if limit is None or p["event_time"] >= limit]
            late += [p["id"] for p in self.batch(number) if p not in fine]
            in_time += [(number, p) for p in fine]
            newest = max(p["event_time"] for p in fine)
            reached = newest if reached is None else max(reached, newest)
        return in_time, late

    def late(self) -> list[int]:
        return sorted(self.accepted(BATCHES - 1)[1])

    def window(self, upto: int) -> list[tuple[int, Record]]:
        in_time, _ = self.accepted(upto)
        if self.kind == "time":
            now = max(p["event_time"] for _, p in in_time)
            if self.tumbling:
                start = now // self.length * self.length
                return [(b, p) for b, p in in_time if p["event_time"] >= start]
            return [(b, p) for b, p in in_time if p["event_time"] > now - self.length]
        ordered = sorted(in_time, key=lambda bp: (bp[0], bp[1]["event_time"], bp[1]["id"]))
        count = int(self.length)
        if self.tumbling:
            count = (len(ordered) - 1) % count + 1
        return ordered[-count:]

    def seen_by(self, standing: Standing, upto: int) -> list[Record]:
        query = standing.query
        shape = {name: getattr(query.shape, name) for name in type(query.shape).__slots__}
        return [
            p
            for batch, p in self.window(upto)
            if standing.live_in(batch)
            and covers(shape, p["x"], p["y"], False)
            and (query.predicate is None or (p["fare"] is not None and p["fare"] > 20))
            and (query.expires_at is None or p["event_time"] < query.expires_at)
        ]

    def live(self, upto: int) -> list[Standing]:
        in_time, _ = self.accepted(upto)
        now = max(p["event_time"] for _, p in in_time)
        return [
            s
            for s in self.standing
            if s.live_in(upto) and (s.query.expires_at is None or now < s.query.expires_at)
        ]

    def aggregates(self, upto: int) -> dict[tuple[str, str], float | None]:
        found: dict[tuple[str, str], float | None] = {}
        for standing in self.live(upto):
            if standing.query.aggregate is None:
                continue
            points = self.seen_by(standing, upto)
            fares = [p["fare"] for p in points if p["fare"] is not None]
            ids = [p["id"] for p in points]
            values = {
                "count": len(points),
                "avg(fare)": statistics.fmean(fares) if fares else None,
                "max(fare)": max(fares, default=None),
                "sum(fare)": math.fsum(fares) if fares else None,
                "stddev(fare)": statistics.stdev(fares) if len(fares) > 1 else None,
                "min(id)": min(ids, default=None),
            }
            for name in standing.query.aggregate.split(", "):
                found[str(standing.query.query_id), name] = values[name]
        return found

    def nearest(self, upto: int) -> dict[str, list[tuple[int, int]]]:
        found = {}
        for standing in self.live(upto):
            query = standing.query
            if query.nearest is None:
                continue
            assert isinstance(query.shape, Circle)
            centre = (query.shape.cx, query.shape.cy)
            ranked = sorted(
                (math.dist(centre, (p["x"], p["y"])), p["id"]) for p in self.seen_by(standing, upto)
            )
            rows = [(rank, number) for rank, (_, number) in enumerate(ranked[: query.nearest], 1)]
            if rows:
                found[str(query.query_id)] = rows
        return found

    def pairs(self, upto: int) -> set[tuple[int, int]]:
        """Return the pairs of a batch: both points in its window, at least one of them new."""
        window = self.window(upto)
        return {
            (p["id"], q["id"])
            for b, p in window
            for c, q in window
            if upto in (b, c)
            and (p["kind"], q["kind"]) == ("taxi", "rider")
            and math.dist((p["x"], p["y"]), (q["x"], q["y"])) <= self.join["distance"]
            and abs(p["event_time"] - q["event_time"]) <= self.join["within"]
        }


# --------------------------------------------------------------------------- results of a run


def rows_of(out: Path, kind: str) -> dict[int, list[Record]]:
    found = defaultdict(list)
    for path in sorted((out / kind).glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            found[row["batch_id"]].append(row)
    return found


def check_outputs(scenario: WindowScenario, out: Path) -> None:
    aggregates, nearest = rows_of(out, "aggregates"), rows_of(out, "nearest")
    pairs, dead = rows_of(out, "pairs"), rows_of(out, "dead")
    late = [row for rows in dead.values() for row in rows if row["reason"] == "late"]
    assert sorted(json.loads(row["record"])["id"] for row in late) == scenario.late()
    for batch in range(BATCHES):
        expected = scenario.aggregates(batch)
        found = {(row["query_id"], row["name"]): row["number"] for row in aggregates[batch]}
        assert len(found) == len(aggregates[batch])
        assert found.keys() == expected.keys(), batch
        for key, value in expected.items():
            assert found[key] == (None if value is None else approx(value)), (batch, key)
        near: dict[str, list[Any]] = defaultdict(list)
        for row in nearest[batch]:
            near[row["query_id"]].append((row["rank"], row["point_id"]))
        assert {name: sorted(rows) for name, rows in near.items()} == scenario.nearest(batch)
        joined = [(row["left_id"], row["right_id"]) for row in pairs[batch]]
        assert len(joined) == len(set(joined))
        assert set(joined) == scenario.pairs(batch), batch

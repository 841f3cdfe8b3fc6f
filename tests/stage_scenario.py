"""A small run with the toy stages, restarted whenever its driver dies, and its oracles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import RunConfig
from roost.model.settings import with_settings
from roost.model.space import Coordinates, Rect
from roost.runtime import records
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import InProcessExecutor
from roost.runtime.jobs import JOBS
from roost.runtime.loop import staging
from roost.runtime.part import Item
from roost.stages.contract import Report, Stage, Task
from roost.storage.store import Fact, Store
from roost.testing import InProcessPipeline, brute_force
from toy_stage import NO_KEY, KeyCheck, KeyTotals, PartialCounts, read_totals

SIDE, CELLS = 8.0, 8
ROWS, BATCHES = 40, 6
BEFORE_COMMIT = ["intent", "apply", "run", "after", "deliver", "commit"]
AFTER_COMMIT = ["publish", "cleanup", "round", "end"]
STEPS = [*BEFORE_COMMIT, *AFTER_COMMIT]
Row = dict[str, Any]


class Killed(BaseException):
    """Simulates the death of the driver: files on the disk stay as they are."""


def random_points(seed: int, rows: int = ROWS * BATCHES) -> pa.Table:
    """Return points with a key; some have no coordinates, some no key."""
    rng = np.random.default_rng(seed)
    x, y = SIDE * rng.random(rows) ** 2, SIDE * rng.random(rows) ** 2
    x[rng.random(rows) < 0.05] = np.nan
    zones = [None if rng.random() < 0.1 else int(rng.integers(-20, 40) ** 3) for _ in range(rows)]
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "x": x,
            "y": y,
            "event_time": pa.array(range(rows), pa.int64()),
            "zone": pa.array(zones, pa.int64()),
        }
    )


def random_queries(seed: int, count: int = 12) -> list[Row]:
    rng = np.random.default_rng(seed)
    corners = 4 * rng.random((count, 2))
    return [
        {"query_id": number, "x0": x, "y0": y, "x1": x + 3.0, "y1": y + 3.0}
        for number, (x, y) in enumerate(corners.tolist())
    ]


class FaultyExecutor(InProcessExecutor):
    """Calls a function before each level, and changes what the level sends.

    Parameters
    ----------
    before_level
        Called with the number of the batch and the level; with the number of levels at the end.
    change
        Replaces the items that a level sends: number of the batch, level, items by part.
    """

    def __init__(
        self,
        before_level: Callable[[int, int], None] = lambda number, level: None,
        change: Callable[[int, int, list[list[Item]]], list[list[Item]]] = lambda n, k, sent: sent,
    ) -> None:
        super().__init__()
        self.number = -1
        self._before_level = before_level
        self._change = change

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        self.number = tasks["reading"].number  # type: ignore[attr-defined]
        reports = super().run(inputs, chain, tasks, placement)
        self._before_level(self.number, chain.levels)
        return reports

    def run_level(
        self,
        chain: Chain,
        tasks: Mapping[str, Task],
        level: int,
        items: Sequence[Sequence[Item]],
    ) -> list[list[Item]]:
        self._before_level(self.number, level)
        return self._change(self.number, level, super().run_level(chain, tasks, level, items))


@dataclass
class Scenario:
    """One state directory, and any number of drivers that run on it, one after the other.

    Parameters
    ----------
    folder
        Where points, output and state are.
    settings
        Settings that differ from those below.
    machines
        Number of machines of the totals, in each epoch of their routing.
    three_levels
        Whether the check runs behind the totals.
    executor
        Creates the executor of a driver.
    more_queries
        Requests beside the boxes of the brute-force oracle.
    on_step, on_record
        Called before each step of a batch, and after each transaction.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    machines: tuple[int, ...] = (3,)
    three_levels: bool = False
    executor: Callable[[], InProcessExecutor] = FaultyExecutor
    more_queries: Sequence[Row] = ()
    points: pa.Table = field(default_factory=lambda: random_points(1))
    on_step: Callable[[str, int], None] = field(default_factory=lambda: _ignore)
    on_record: Callable[[tuple[Fact, ...]], None] = field(default_factory=lambda: _ignore)
    transactions: list[tuple[Fact, ...]] = field(default_factory=list)
    checked: int = 0
    totals: KeyTotals = field(init=False)
    pipeline: InProcessPipeline = field(init=False)

    def __post_init__(self) -> None:
        self.queries = random_queries(2)
        self.folder.mkdir(exist_ok=True)
        pq.write_table(self.points, self.folder / "points.parquet", row_group_size=16)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def config(self) -> RunConfig:
        config = RunConfig(
            points={"path": str(self.folder / "points.parquet"), "id": "id"},
            space={
                "bounds": Rect(0.0, 0.0, SIDE, SIDE),
                "grid": (CELLS, CELLS),
                "coordinates": Coordinates.PLANE,
            },
            engine={"machines": 3, "batch_rows": ROWS, "available_now": True},
            queries={"id_type": "int"},
            balance={"round": ROWS - 1.0},
            out={"dir": self.out},
        )
        return with_settings(config, dict(self.settings))

    def stages(self) -> list[Stage]:
        """Return new stages, as a new driver process would have them."""
        config = self.config()
        output = staging(config.out.dir.absolute(), "totals")
        folder = config.out.state_dir.absolute() / "key-totals"
        self.totals = KeyTotals(folder, output, self.machines)
        more = [KeyCheck()] if self.three_levels else []
        return [PartialCounts("zone"), self.totals, *more]

    def live(self) -> None:
        """Run from where the state is, to the end or the driver's death."""

        def on_step(step: str, number: int) -> None:
            self.checked += step in ("publish", "end")
            self.on_step(step, number)

        def on_record(facts: tuple[Fact, ...]) -> None:
            self.transactions.append(facts)
            self.on_record(facts)

        pipeline = self.pipeline = InProcessPipeline(
            self.config(),
            executor=self.executor(),
            more_stages=self.stages(),
            on_step=on_step,
            seed=1,
        )
        with pipeline:
            state = self.config().out.state_dir
            pipeline._store = Store(state, durable=False, on_record=on_record)
            pipeline.log.append(self.requests(), tag="before")
            pipeline.run()

    def requests(self) -> pa.Table:
        rows = [
            {"op": "register", "user_id": "ann", **query}
            for query in [*self.queries, *self.more_queries]
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def to_the_end(self) -> int:
        """Restart the driver until the points end; returns how often it died."""
        deaths = 0
        while True:
            try:
                self.live()
                return deaths
            except Killed:
                deaths += 1

    # ----------------------------------------------------------------------- oracles

    def valid(self) -> list[Row]:
        """Return the points that have coordinates, from the source table alone."""
        return [row for row in self.points.to_pylist() if row["x"] == row["x"]]

    def expected_totals(self, batches: int | None = None) -> Counter[int]:
        rows = self.valid() if batches is None else self.valid_of(range(batches))
        return Counter(NO_KEY if row["zone"] is None else row["zone"] for row in rows)

    def valid_of(self, batches: Sequence[int]) -> list[Row]:
        return [row for row in self.valid() if row["id"] // ROWS in batches]

    def expected_matches(self) -> list[tuple[int, int]]:
        points = [{**row, "time": row["event_time"]} for row in self.valid()]
        return brute_force(points, self.queries, lonlat=False)

    # ----------------------------------------------------------------------- results

    def store(self) -> Store:
        return Store(self.config().out.state_dir)

    def stored_totals(self) -> Counter[int]:
        """Return the totals of the listed files."""
        with closing(self.store()) as store:
            names = store.get(KeyTotals.table, "files") or []
        return read_totals(self.totals.files, names)

    def published(self, kind: str) -> list[Path]:
        return sorted((self.out / kind).glob("*.parquet"))

    def published_totals(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for path in self.published("totals"):
            for row in pq.ParquetFile(path).read().to_pylist():
                found[row["key"]] += row["rows"]
        return found

    def published_matches(self) -> list[tuple[int, int]]:
        found = []
        for path in self.published("matches"):
            table = pq.ParquetFile(path).read()
            columns = table["query_id"].to_pylist(), table["point_id"].to_pylist()
            found += list(zip(*columns, strict=True))
        return sorted(found)

    def committed(self) -> list[int]:
        """Return the numbers of the committed batches."""
        with closing(self.store()) as store:
            return [commit.batch_id for commit in records.commits(store)]

    def resume(self) -> None:
        """Run what is left, without faults."""
        self.executor, self.on_step, self.on_record = FaultyExecutor, _ignore, _ignore
        self.live()

    def check(self) -> None:
        """Check the results of all batches; a restart adds nothing and leaves nothing unlisted."""
        self.resume()
        expected = self.expected_totals()
        assert self.committed() == list(range(-(-self.points.num_rows // ROWS)))
        assert self.stored_totals() == expected
        assert self.published_totals() == expected
        assert self.published_matches() == self.expected_matches()
        with closing(self.store()) as store:
            assert store.get(KeyTotals.table, "rows") == expected.total()
            for commit in records.commits(store):
                valid = len(self.valid_of([commit.batch_id]))
                assert commit.figures["counted"] == valid == commit.figures["points"]
                if self.three_levels:
                    assert commit.figures["checked_rows"] == valid
            listed = store.get(KeyTotals.table, "files")
            assert store.items(JOBS) == []
        assert self.totals.files.names() == sorted(listed)
        assert not any(path.is_file() for path in self.out.glob("*/_staging/*"))


def _ignore(*values: Any) -> None:
    """Do nothing."""

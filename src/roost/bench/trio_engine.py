"""What TrioStat's statistics cost in the engine as it runs, of ``roost bench trio``.

The engine's own loop and task code run ``swarm`` on emulated machines, with a share of the queries
replaced before every batch, so that statistics, their files and the changes of queries are all
included. Times are processor times of single runs, not minima.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from roost.bench.cases import Pickups, boxes_of, user_of
from roost.bench.cluster import EmulatedCluster
from roost.bench.common import Row
from roost.bench.moving import MovingLoad, Step
from roost.bench.streams import admit
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.queries.versions import version_at
from roost.stages.contract import Report
from roost.stages.matching import MatchingStage
from roost.stages.statistics import STATISTICS

REPLACED = 100  # one query in so many, before each batch
ROUND_BATCHES = 5
WARM = 3  # batches in which machines count their queries for the first time


class RenewedLoad(MovingLoad):
    """A day of the city in which users replace some of their queries before every batch."""

    def step(self, number: int) -> Step:
        """Make one batch."""
        made = super().step(number)
        count = self.queries // REPLACED
        boxes = boxes_of(self.pickups, count, np.random.default_rng([self.queries, number]))
        old = np.arange(number * count, (number + 1) * count)
        requests = [_requests("terminate", old, None), _requests("register", old, boxes)]
        return made._replace(requests=pa.concat_tables(requests) if number else None)


def _requests(op: str, ids: np.ndarray, boxes: Floats | None) -> pa.Table:
    nothing = pa.nulls(ids.size, pa.float64())
    places = {
        name: nothing if boxes is None else pa.array(boxes[:, k])
        for k, name in enumerate(("x0", "y0", "x1", "y1"))
    }
    users = [user_of(number) for number in ids.tolist()]
    known = {"op": pa.array([op] * ids.size), "query_id": ids, "user_id": users}
    return pa.table({**known, **places})


def engine_row(pickups: Pickups, queries: int, machines: int, batch: int, batches: int) -> Row:
    """Measure the statistics of a run, per point and as a share of the time of its machines."""
    load = RenewedLoad(pickups, queries, WARM + batches, batch)
    seconds: dict[str, float] = defaultdict(float)

    def noted(report: Report) -> Report:
        seconds[report.stage] += report.seconds
        # Plans do not depend on the speed of this host.
        return replace(report, seconds=1.0)

    spent = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        admit(base, load.space, load.standing())
        rounds = {"balance.round": ROUND_BATCHES * load.round_s - 1}
        with closing(
            EmulatedCluster(
                Path(name) / "run", base, Strategy.SWARM, machines, load, rounds, work=noted
            )
        ) as cluster:
            for number in range(load.rounds):
                seconds.clear()
                cluster.run(load.step(number))
                version = version_at(cluster.store)
                assert version is not None and not version.refused, "a request was refused"
                busy = seconds[STATISTICS] + seconds[MatchingStage.name]
                spent.append((seconds[STATISTICS] / batch, seconds[STATISTICS] / busy))
    per_point, share = np.mean(spent[WARM:], axis=0).tolist()
    return {
        "case": "engine",
        "system": "trio",
        "machines": machines,
        "batch": batch,
        "queries": queries,
        "us_per_point": 1e6 * per_point,
        "busy_share": share,
    }

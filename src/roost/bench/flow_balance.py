"""Balancing of keyed state: the workload of figure 20 of StreamCloud, and a hot key.

An Aggregate by 10,000 callers runs on 15 emulated machines while the distribution of the callers
changes. Stages, rounds, bucket maps and moves are the engine's. The work of a machine is the tuples
that it received: on a shared host, differences of a few milliseconds between tasks are lost in
noise. Ratios of deviations do not depend on what a tuple costs. The greedy algorithm does, because
it begins at a certain utilisation, so tuples cost as much as gives ``UTILISATION`` on average, the
target of the paper.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.common import Line, Row
from roost.bench.flow_cluster import MemorySlice
from roost.dataflow.buckets import BUCKETS, bucket_of
from roost.dataflow.flow import Dataflow
from roost.model.arrays import Floats, Ints, as_arrow, as_numpy
from roost.model.columns import one_array
from roost.model.settings import RunConfig
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import InProcessExecutor, SliceInputs
from roost.runtime.flow import flow_rounds, flow_stages
from roost.runtime.flow_balancing import BALANCING
from roost.runtime.flow_rounds import FLOW_ROUNDS, FlowPolicy
from roost.runtime.loop import BatchLoop
from roost.runtime.records import last_round
from roost.stages.contract import Report, Task
from roost.stages.flow_routing import stage_of
from roost.stages.flow_subquery import HOT_KEYS
from roost.stages.slices import Slice
from roost.storage.store import Store

MACHINES = 15
KEYS = 10_000
UTILISATION = 0.6
MEANS, DEVIATIONS = (2_000, 4_000, 6_000, 8_000), (100, 75, 50, 25)
MIDDLE = 5_000  # mean while the deviation changes
HOT_SHARE = 0.3
OFF, GREEDY, PLANNER = POLICIES = ("off", "greedy", "planner")
UNIFORM = "uniform"
NODE, SOURCE, OUT = "durations", "calls", "out"
TIME = pa.timestamp("us", "UTC")
WINDOW_S = 5
# Estimates are not aggregated before an exchange, so every tuple reaches its machine.
WHOLE = {"calls": "count", "kinds": "distinct(seconds)"}
MERGED = {"calls": "count", "longest": "max(seconds)"}
# Batches of a period, and tuples of a batch. A batch is one second, and a round.
FULL, QUICK = (10, 600_000), (6, 150_000)


class LoadPeriod(NamedTuple):
    """Batches in which the callers have the same distribution."""

    name: str
    weights: Floats


def periods() -> list[LoadPeriod]:
    """Return the periods of both parts of figure 20."""
    found = [LoadPeriod(UNIFORM, np.full(KEYS, 1.0 / KEYS))]
    found += [LoadPeriod(f"mean {mean}", normal(mean, 100)) for mean in MEANS]
    found += [LoadPeriod(f"deviation {one}", normal(MIDDLE, one)) for one in DEVIATIONS]
    return found


def normal(mean: float, deviation: float) -> Floats:
    """Return the probability of each key under a normal distribution."""
    weights = np.exp(-0.5 * ((np.arange(KEYS) - mean) / deviation) ** 2)
    return np.asarray(weights / weights.sum(), np.float64)


def hot_key(name: str = "hot key") -> LoadPeriod:
    """Return a period in which one key has several machines' share of the tuples."""
    weights = np.full(KEYS, (1.0 - HOT_SHARE) / (KEYS - 1))
    weights[MIDDLE] = HOT_SHARE
    return LoadPeriod(name, weights)


WHOLE_KEY, MERGED_KEY = hot_key(), hot_key("hot key, merged")


class CountingExecutor(InProcessExecutor):
    """Times each machine of the subquery by the tuples that it received."""

    def __init__(self, seconds_per_tuple: float) -> None:
        super().__init__(2, lambda one: replace(one, seconds=one.rows_in * seconds_per_tuple))
        self.busy: Floats = np.zeros(MACHINES)

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run the batch."""
        found = super().run(inputs, chain, tasks, placement)
        for report in found[stage_of(NODE)]:
            self.busy[report.machine] = report.seconds
        return found


@dataclass(frozen=True)
class BalanceRound:
    """One batch, which is a round: utilisation of each machine, and what moved after it."""

    period: str
    utilisation: Floats
    moved_buckets: int
    moved_share: float  # of the state's bytes
    other_keys: bool = False  # whether other keys are aggregated before the exchange

    @property
    def deviation(self) -> float:
        """Standard deviation of the utilisation, with 1/n."""
        return float(self.utilisation.std())


@dataclass(frozen=True)
class PolicyRun:
    """All rounds of a policy, what its last round showed, and how its results differ."""

    rounds: list[BalanceRound]
    last: Row
    lost: int
    doubled: int


class CallerFlow:
    """An Aggregate by caller on emulated machines; a batch is one second, and a round."""

    def __init__(
        self,
        folder: Path,
        executor: Any,  # one, or what times one
        window: tuple[int, int] = (WINDOW_S, WINDOW_S),  # size and advance in seconds
        policies: Sequence[FlowPolicy] = (),
        functions: Mapping[str, str] = WHOLE,
        **settings: Any,
    ) -> None:
        flow = Dataflow("balance")
        columns = {"src": "int64", "seconds": "int64", "start": TIME}
        calls = flow.source(SOURCE, columns, time="start")
        size, advance = window
        calls.aggregate(functions, by="src", size=size, advance=advance, name=NODE).sink(OUT)
        config = RunConfig(out={"dir": folder}, dataflow={"round": 0, **settings})
        self.store = Store(folder / "state")
        self._folder, self.number, self._read = folder, 0, 0
        stages = flow_stages(config, self.store, executor, flow, {}, lambda: float(self.number))
        rounds = flow_rounds(config, self.store, stages, policies)
        self._loop = BatchLoop(self.store, None, None, stages, executor, folder, rounds=rounds)

    def close(self) -> None:
        """Close the state."""
        self.store.close()

    def batch(self, keys: Ints, ended: bool) -> None:
        """Run a batch of one second of event time."""
        times = self.number * 1_000_000 + np.arange(keys.size) * 1_000_000 // keys.size
        columns = [as_arrow(keys), as_arrow(keys * 7919 % 600), as_arrow(times).cast(TIME)]
        rows = pa.Table.from_arrays(columns, ["src", "seconds", "start"])
        source, end = stage_of(SOURCE), self._read + keys.size
        slices: dict[str, list[Slice]] = {source: [MemorySlice(0, keys.size, rows, self._read)]}
        self._loop.run(
            self.number, {source: [self._read, end]}, SliceInputs(slices), [SOURCE] * ended
        )
        self.number, self._read = self.number + 1, end

    def results(self) -> tuple[Ints, Ints]:
        """Return window and key of each result, as one number, and its calls."""
        table = pa.concat_tables(
            pq.read_table(file) for file in sorted((self._folder / OUT).glob("*.parquet"))
        )
        starts = as_numpy(one_array(table["start"].cast(pa.int64()))) // 1_000_000
        keys = as_numpy(one_array(table["src"]))
        return starts * KEYS + keys, as_numpy(one_array(table["calls"]))


class BalancedFlow(CallerFlow):
    """The query under one policy."""

    def __init__(
        self, folder: Path, policy: str, tuples: int, functions: Mapping[str, str]
    ) -> None:
        self._hot: list[int] | None = None
        self._executor = CountingExecutor(UTILISATION * MACHINES / tuples)
        super().__init__(
            folder,
            self._executor,
            functions=functions,
            balance=policy,
            machines=MACHINES,
            layout="operator_set",  # aggregates nothing before an exchange, unless a key is hot
        )

    def run(self, period: str, keys: Ints, ended: bool) -> BalanceRound:
        """Run a batch, and return what it showed."""
        self._executor.busy[:] = 0.0
        self.batch(keys, ended)
        shown: Row = (last_round(self.store, FLOW_ROUNDS) or {}).get(f"balance {NODE}") or {}
        moved, state = shown.get("moved_bytes", 0.0), shown.get("state_bytes", 0.0)
        hot, self._hot = self._hot, self.store.get(HOT_KEYS, NODE)
        return BalanceRound(
            period,
            self._executor.busy.copy(),
            shown.get("moved_buckets", 0),
            moved / state if state else 0.0,
            hot != self._hot,
        )


def run_policy(
    policy: str,
    load: Sequence[LoadPeriod],
    batches: int,
    tuples: int,
    functions: Mapping[str, str] = WHOLE,
) -> PolicyRun:
    """Run all periods under one policy, and count its results by brute force."""
    random = np.random.default_rng(20)
    names = [period for period in load for _ in range(batches)]
    rounds, expected = [], np.zeros((len(names), KEYS), np.int64)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(BalancedFlow(Path(folder), policy, tuples, functions)) as flow,
    ):
        for number, period in enumerate(names):
            keys = random.choice(KEYS, tuples, p=period.weights)
            window = number // WINDOW_S * WINDOW_S
            expected[window] += np.bincount(keys, minlength=KEYS)
            rounds.append(flow.run(period.name, keys, number + 1 == len(names)))
        found, calls = flow.results()
        shown = flow.store.get(BALANCING, NODE) or {}
    right = np.flatnonzero(expected)
    distinct, counts = np.unique(found[calls == expected.reshape(-1)[found]], return_counts=True)
    lost = right.size - distinct.size
    return PolicyRun(rounds, shown, lost, int((counts - 1).sum()) + found.size - int(counts.sum()))


def settled_from(rounds: Sequence[BalanceRound]) -> int:
    """Return the first round of a period after its last change, at most the last one."""
    changes = [number for number, one in enumerate(rounds) if one.moved_buckets or one.other_keys]
    return min(changes[-1] + 1 if changes else 0, len(rounds) - 1)


def limits(period: LoadPeriod, machines: int = MACHINES) -> Row:
    """Return what the buckets allow: their heaviest, and the least deviation of a packing.

    A bucket is a fair share at most, or its machine cannot be balanced. Below that, heaviest-first
    packing shows what whole buckets can reach.
    """
    buckets = bucket_of([as_arrow(np.arange(KEYS))], KEYS, BUCKETS)
    loads = np.bincount(buckets, period.weights, BUCKETS)
    packed = np.zeros(machines)
    for load in -np.sort(-loads):
        packed[packed.argmin()] += load
    return {
        "heaviest_key": float(period.weights.max() * machines),  # in fair shares
        "heaviest_bucket": float(loads.max() * machines),
        "packed_deviation": float(packed.std() * machines * UTILISATION),
    }


def compared(period: LoadPeriod, policy: str, mine: PolicyRun, off: PolicyRun) -> Row:
    """Return the metrics of a policy in a period; rounds until the last move are transient."""
    rounds = [one for one in mine.rounds if one.period == period.name]
    without = [one for one in off.rounds if one.period == period.name]
    first = settled_from(rounds)
    alone = float(np.mean([one.deviation for one in without[first:]]))
    settled = float(np.mean([one.deviation for one in rounds[first:]]))
    return {
        "period": period.name,
        "policy": policy,
        "mean_utilisation": float(np.mean([one.utilisation.mean() for one in rounds])),
        "deviation_off": alone,
        "deviation": settled,
        "ratio": settled / alone,
        "transient_rounds": first,
        "transient_deviation": float(np.mean([one.deviation for one in rounds[:first] or rounds])),
        "changes": sum(one.moved_buckets > 0 for one in rounds),
        "moved_buckets": sum(one.moved_buckets for one in rounds),
        "moved_share": sum(one.moved_share for one in rounds),
        **limits(period),
    }


class Balancing(NamedTuple):
    """Rows and summary of the part, and lines for plots."""

    rows: list[Row]
    summary: Row
    lines: Mapping[str, Line]


def measure(quick: bool) -> Balancing:
    """Compare the policies with each other and with none."""
    batches, tuples = QUICK if quick else FULL
    load = periods()
    runs = {policy: run_policy(policy, load, batches, tuples) for policy in POLICIES}
    hot, merged = (
        {policy: run_policy(policy, [period], batches, tuples, functions) for policy in POLICIES}
        for period, functions in ((WHOLE_KEY, WHOLE), (MERGED_KEY, MERGED))
    )
    rows = [
        compared(period, policy, found[policy], found[OFF])
        for found, shown in ((runs, load), (hot, [WHOLE_KEY]), (merged, [MERGED_KEY]))
        for period in shown
        for policy in (GREEDY, PLANNER)
    ]
    apart = (UNIFORM, WHOLE_KEY.name, MERGED_KEY.name)
    skewed = [row for row in rows if row["period"] not in apart]
    summary: Row = {}
    for policy in (PLANNER, GREEDY):
        mine = [row for row in skewed if row["policy"] == policy]
        deviation = sum(row["deviation"] for row in mine)
        suffix = "" if policy == PLANNER else f"_{policy}"
        summary[f"stddev_ratio{suffix}"] = deviation / sum(row["deviation_off"] for row in mine)
        summary[f"stddev_ratio_worst{suffix}"] = max(row["ratio"] for row in mine)
    every = [*runs.values(), *hot.values(), *merged.values()]
    keys: list[Any] = hot[PLANNER].last.get("hot_keys", [])
    (remedied,) = (
        row["ratio"] for row in rows if (row["period"], row["policy"]) == (MERGED_KEY.name, PLANNER)
    )
    summary |= {
        "stddev_ratio_hot_key": remedied,
        "lost": sum(one.lost for one in every),
        "doubled": sum(one.doubled for one in every),
        "hot_key_share": max((key["share"] for key in keys), default=None),
        "hot_key_remedy": keys[0]["remedy"] if keys else None,
    }
    lines = {
        policy: [(float(number), one.deviation) for number, one in enumerate(found.rounds)]
        for policy, found in runs.items()
    }
    return Balancing(rows, summary, lines)

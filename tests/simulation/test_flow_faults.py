"""Random dataflows on a simulated cluster that loses tasks, executors and drivers.

Buckets move by both protocols, hot keys are aggregated before their exchange, and the results are
the interpreter's, each once.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from flow_runs import FlowRun, RandomMoves, run_case, usable
from roost.model.choices import LayoutName
from roost.runtime.chain import Chain
from roost.runtime.flow_rounds import FLOW_ROUNDS
from roost.runtime.part import Item, run_part
from roost.stages.contract import Report, Task
from roost.storage.cache import WorkerCache
from roost.storage.store import Store
from roost.testing import InProcessExecutor

EXECUTORS = 3
COVERED = {
    "task failed", "executor lost", "task ran twice", "driver killed", "state moves",
    "window moves", "moves with open windows", "other number of machines", "hot keys changed",
    "out-of-order", "late", "diamond", "aggregate of aggregate", "join", "product", "self-join",
    "tuple window", "tuple join", "forever",
}  # fmt: skip


class FaultyExecutor(InProcessExecutor):
    """A cluster of some executors, each with a cache of its own.

    A task may fail after some of its output, which a task on another executor then repeats, and may
    run twice, where either output counts. An executor may be lost after a level: its tasks run
    again elsewhere, and receive their blocks in another order.
    """

    def __init__(self, chance: random.Random, covered: Counter[str]) -> None:
        super().__init__(EXECUTORS, self._noisy)
        self._chance, self._covered = chance, covered
        self._caches = [WorkerCache() for _ in range(EXECUTORS)]

    def _noisy(self, report: Report) -> Report:
        """Return a report with times that have little to do with its tuples."""
        return replace(report, seconds=self._chance.random() * (1 + report.rows_in))

    def _happens(self, share: float, name: str) -> bool:
        found = self._chance.random() < share
        self._covered[name] += found
        return found

    def run_level(
        self, chain: Chain, tasks: Mapping[str, Task], level: int, items: Sequence[Sequence[Item]]
    ) -> list[list[Item]]:
        chance = self._chance
        places = [chance.randrange(EXECUTORS) for _ in items]
        made = [self._task(chain, tasks, level, k, items[k], places[k]) for k in range(len(items))]
        if self._happens(0.2, "executor lost"):
            lost = chance.randrange(EXECUTORS)
            self._caches[lost] = WorkerCache()
            for k in [k for k, place in enumerate(places) if place == lost]:
                other = (lost + 1) % EXECUTORS
                made[k] = self._task(chain, tasks, level, k, items[k], other)
        count = 1 if level + 1 == chain.levels else len(chain.parts[level + 1])
        following: list[list[Item]] = [[] for _ in range(count)]
        for target, item in (one for mine in made for one in mine):
            following[target].append(pickle.loads(pickle.dumps(item)))
        return following

    def _task(
        self,
        chain: Chain,
        tasks: Mapping[str, Task],
        level: int,
        part: int,
        items: Sequence[Item],
        place: int,
    ) -> list[tuple[int, Item]]:
        given = self._chance.sample(list(items), len(items))
        if self._happens(0.15, "task failed"):
            attempt = run_part(chain, tasks, level, part, given, self._caches[place])
            list(islice(attempt, self._chance.randrange(4)))
            place = (place + 1) % EXECUTORS
        if self._happens(0.15, "task ran twice"):
            list(run_part(chain, tasks, level, part, given, self._caches[place]))
            given.reverse()
        return list(run_part(chain, tasks, level, part, given, self._caches[place]))


def run_with_faults(seed: int, folder: Path) -> Counter[str]:
    """Run a case; returns what it covered."""
    case, chance = usable(seed, slow=True), random.Random(seed)
    covered, moves = Counter(case.features), RandomMoves(chance, 4)
    layout = chance.choice(list(LayoutName)).value
    run = FlowRun(case.flow, folder, policies=moves.policies(case.flow), layout=lambda _: layout)
    run.settings = {"round": 0, "balance": chance.choice(["planner", "greedy"])}
    run.executor = lambda: FaultyExecutor(chance, covered)
    kill = run._on_step

    def killed(step: str, number: int) -> None:
        covered["driver killed"] += step == run._kill
        kill(step, number)

    run._on_step = killed  # type: ignore[method-assign]
    run_case(case, run, chance, kills=1)
    with closing(Store(folder / "state")) as store:
        verdicts = [v for _, row in store.items(FLOW_ROUNDS) for v in row["verdicts"]]
    hot = [v["reason"] for v in verdicts if v["policy"].startswith("hot keys")]
    covered["hot keys changed"] += sum(reason != "no other key is hot" for reason in hot)
    return covered + moves.covered


@pytest.mark.sweep([], 2, 1000)
def test_faults_change_no_result(seed: int, tmp_path: Path) -> None:
    run_with_faults(seed, tmp_path)


def test_random_dataflows_with_faults(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(602, 612):
        found += run_with_faults(seed, tmp_path / str(seed))
    assert not (missing := COVERED - set(found)), missing
    assert found["moves with open windows"] >= 20 and found["hot keys changed"] >= 4, found

"""Attacks and crowds on the whole pipeline, whose tasks run in this process.

``test_guard_scenarios.py`` has many more of them on a simulated cluster, and
``tests/spark/test_guard.py`` a few on Spark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from balance_checks import InProcessCounted
from guard_scenario import GuardScenario, blocked_users, worked_by_pairs
from roost import Box, Query
from roost.errors import RequestError
from roost.model.choices import Strategy
from roost.model.records import TIME_MIN
from roost.queries.guard_state import decisions
from roost.runtime import records
from roost.runtime.records import Commit
from roost.testing import InProcessPipeline

STEPS = ("intent", "apply", "run", "deliver", "commit", "publish", "cleanup", "round", "end")
SHORT = ("apply", "commit", "round", "end")


class SimulatedCrash(BaseException):
    """A crash of the driver: files stay as they are."""


@dataclass
class Summary:
    """State after a run."""

    log: list[dict[str, Any]]
    live: list[tuple[str, int]]
    positions: int
    counted: int
    refused: dict[str, int]
    out: Path = field(default_factory=Path)

    @property
    def blocked(self) -> list[str]:
        return blocked_users(self.log)


class GuardRun:
    """A run in one state directory, whose driver restarts after each crash."""

    def __init__(
        self,
        folder: Path,
        scenario: GuardScenario,
        strategy: Strategy = Strategy.GLOBAL,
        **more: Any,
    ) -> None:
        self.folder, self.scenario = folder, scenario
        scenario.write(folder)
        self.config = scenario.config(folder, strategy, **more)
        self.crashes: list[tuple[int, str]] = []
        self.batches_max = scenario.batches

    def run(self) -> Summary:
        """Run to the end, with the crashes of the test."""
        while True:
            try:
                return self._run_driver()
            except SimulatedCrash:
                continue

    def _run_driver(self) -> Summary:
        blocks = self.scenario.blocks

        def on_batch(commit: Commit) -> None:
            following = commit.batch_id + 1
            if following < len(blocks):
                pipeline.log.append(blocks[following], tag=f"before-{following}")
            if following >= self.batches_max:
                pipeline.stop()
            self.after_batch(pipeline, commit)

        def on_step(step: str, batch_id: int) -> None:
            if (batch_id, step) in self.crashes:
                self.crashes.remove((batch_id, step))
                raise SimulatedCrash

        with InProcessPipeline(
            self.config,
            executor=InProcessCounted(worked_by_pairs),
            on_batch=on_batch,
            on_step=on_step,
            seed=1,
        ) as pipeline:
            pipeline.log.append(blocks[0], tag="before-0")
            done = len(records.commits(pipeline.store))
            for number in range(1, min(done, len(blocks) - 1) + 1):
                pipeline.log.append(blocks[number], tag=f"before-{number}")
            pipeline.run()
            return self._summary(pipeline)

    def after_batch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
        """Observe the pipeline after each batch."""

    def _summary(self, pipeline: InProcessPipeline) -> Summary:
        assert pipeline._loop is not None and pipeline._loop.guard is not None
        guard, queries = pipeline._loop.guard.guard, pipeline._loop.queries
        live = [
            (segment.users[slot].as_py(), int(segment.created_position[slot]))
            for _, segment, ended in queries.segments
            for slot in range(segment.size)
            if ended.get(slot, 1) != TIME_MIN and segment.created_position is not None
        ]
        listing = guard.listing()["blocked"]
        return Summary(
            decisions(pipeline.store),
            live,
            queries.version.rows,
            guard.gate.counted,
            {item["user"]: item["refused"] for item in listing},
            self.config.out.dir,
        )


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    scenario = GuardScenario("attack", batches=24)
    return GuardRun(tmp_path_factory.mktemp("attack"), scenario).run()


def test_exactly_the_attackers_are_blocked(attacked: Summary) -> None:
    assert sorted(attacked.blocked) == sorted(GuardScenario("attack").malicious)
    found = [row for row in attacked.log if row["decision"] in ("suspect", "block")]
    assert found[0]["decision"] == "suspect"
    block = found[-1]
    assert block["evidence"]["splits"] and block["evidence"]["share"] > 0.2
    assert block["reason"] == "found again in hotspots of their making"


def test_no_request_of_a_blocked_user_reaches_an_index(attacked: Summary) -> None:
    (block,) = [row for row in attacked.log if row["decision"] == "block"]
    blocked = [position for user, position in attacked.live if user in block["users"]]
    assert blocked and max(blocked) <= block["position"]
    others = [position for user, position in attacked.live if user not in block["users"]]
    assert max(others) > block["position"]
    assert all(attacked.refused[user] > 100 for user in block["users"])


def test_refused_requests_are_dead_letters_with_their_position(attacked: Summary) -> None:
    rows = [
        row
        for path in (attacked.out / "dead").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
        if row["reason"] == "blocked"
    ]
    counts: dict[str, int] = dict.fromkeys(attacked.refused, 0)
    for row in rows:
        (user,) = [name for name in counts if f"'{name}'" in row["detail"]]
        counts[user] += int(row["detail"].split(": ")[-1].split(" ")[0])
    assert counts == attacked.refused
    assert len(rows) < sum(counts.values()) / 10


# A crowd leaves after batch 30; the others have placed their queries by batch 8.
@pytest.mark.parametrize(("party", "batches"), [("crowd", 40), ("newcomer", 26), ("mover", 26)])
def test_crowds_newcomers_and_movers_are_not_blocked(
    tmp_path: Path, party: str, batches: int
) -> None:
    assert GuardRun(tmp_path, GuardScenario(party, batches=batches)).run().blocked == []


KNOWN = range(2, 8)


@pytest.mark.full
@pytest.mark.sweep(KNOWN, 0, 4)
@pytest.mark.parametrize("strategy", [Strategy.GLOBAL, Strategy.SWARM])
@pytest.mark.parametrize("party", ["attack", "one attacker", "crowd", "newcomer", "mover"])
def test_many_scenarios(tmp_path: Path, party: str, seed: int, strategy: Strategy) -> None:
    scenario = GuardScenario(party, seed)
    blocked = GuardRun(tmp_path, scenario, strategy).run().blocked
    assert set(blocked) <= scenario.malicious
    # docs/guard.md: one attack in twenty is not blocked in time, so only known seeds are checked.
    if strategy is Strategy.GLOBAL and seed in KNOWN:
        assert set(blocked) == scenario.malicious


def test_one_attacker_under_swarm(tmp_path: Path) -> None:
    run = GuardRun(tmp_path, GuardScenario("one attacker", 0, batches=16), Strategy.SWARM)
    assert run.run().blocked == ["attacker-0"]


def test_queries_of_blocked_users_can_be_terminated(tmp_path: Path) -> None:
    scenario = GuardScenario("attack", batches=16)
    summary = GuardRun(tmp_path, scenario, **{"guard.evict": True}).run()
    assert set(summary.blocked) == scenario.malicious
    assert not {user for user, _ in summary.live} & scenario.malicious
    assert len(summary.live) >= 2_500


@pytest.mark.parametrize("strategy", [Strategy.GLOBAL, Strategy.SWARM])
def test_quarantine_hides_what_suspects_register_and_nothing_else(
    tmp_path: Path, strategy: Strategy
) -> None:
    scenario = GuardScenario("attack", batches=24)
    hidden: dict[int, int] = {}

    class Observed(GuardRun):
        def after_batch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
            last = records.last_round(pipeline.store)
            assert last is not None
            if last["quarantined"]:
                hidden[last["batch_id"]] = last["quarantined"]
                assert last["quarantined"] <= 900

    summary = Observed(tmp_path / "with", scenario, strategy, **{"guard.quarantine": True}).run()
    assert set(summary.blocked) == scenario.malicious
    first = next(row["round"] for row in summary.log if row["decision"] == "suspect")
    block = next(row["round"] for row in summary.log if row["decision"] == "block")
    # Rounds of two batches: queries are hidden only between suspicion and block.
    assert hidden and min(hidden) > 2 * first and max(hidden) <= 2 * (block + 1) + 1
    if strategy is Strategy.SWARM:  # the fixture `attacked` runs `global` without quarantine
        without = GuardRun(tmp_path / "without", scenario, strategy).run()
        assert set(without.blocked) == scenario.malicious


@pytest.mark.parametrize(
    "step", [pytest.param(s, marks=() if s in SHORT else pytest.mark.full) for s in STEPS]
)
def test_the_guard_survives_a_crash_at_every_step(tmp_path: Path, step: str) -> None:
    """Crash when the attack begins, is suspected and is blocked."""
    scenario = GuardScenario("attack", batches=15)
    run = GuardRun(tmp_path, scenario)
    run.crashes = [(number, step) for number in (4, 6, 9, 11)]
    summary = run.run()
    assert run.crashes == []
    assert sorted(summary.blocked) == sorted(scenario.malicious)
    assert summary.positions == summary.counted == sum(block.num_rows for block in scenario.blocks)
    (block,) = [row for row in summary.log if row["decision"] == "block"]
    assert max(p for user, p in summary.live if user in scenario.malicious) <= block["position"]


def test_the_pipeline_refuses_a_blocked_user_with_the_reason(tmp_path: Path) -> None:
    refusals: list[str] = []

    class Requesting(GuardRun):
        def after_batch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
            end = pipeline.log.end()
            name = f"mine-{commit.batch_id}"
            try:
                pipeline.request(Query(name, Box(0.0, 0.0, 0.1, 0.1), "attacker-1"))
            except RequestError as refusal:
                assert refusal.reason == "blocked" and pipeline.log.end() == end
                refusals.append(str(refusal))

    summary = Requesting(tmp_path, GuardScenario("attack", batches=14)).run()
    assert "attacker-1" in summary.blocked
    assert refusals and "attack on the balancer" in refusals[0]


def test_a_disabled_guard_still_refuses_blocked_users(tmp_path: Path) -> None:
    scenario = GuardScenario("attack", batches=16)
    run = GuardRun(tmp_path, scenario)
    run.batches_max = 12
    first = run.run()
    assert set(first.blocked) == scenario.malicious
    run.batches_max = scenario.batches
    run.config = scenario.config(tmp_path, Strategy.GLOBAL, **{"guard.enabled": False})
    again = run.run()
    assert again.log == first.log
    assert sum(again.refused.values()) > sum(first.refused.values())

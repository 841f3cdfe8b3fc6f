"""Attacks and crowds before the whole pipeline, with its tasks run in this process.

``test_guard_scenarios.py`` has many more of them on a simulated cluster, and
``tests/spark/test_guard.py`` a few on Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from balance_checks import InProcessCounted
from guard_story import GuardStory, blocked_users, worked_by_pairs
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


class Died(BaseException):
    """Stands for the death of the driver: whatever is on the disk stays as it is."""


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.storage.files.os.fsync", lambda descriptor: None)
        patch.setattr("roost.runtime.assembly.release_memory", lambda: None)
        yield


@dataclass
class Ran:
    """What a run left."""

    log: list[dict[str, Any]]
    live: list[tuple[str, int]]
    positions: int
    counted: int
    refused: dict[str, int]
    out: Path = field(default_factory=Path)

    @property
    def blocked(self) -> list[str]:
        return blocked_users(self.log)


class Scene:
    """One state directory, and as many lives of the driver as a test wants."""

    def __init__(
        self, folder: Path, story: GuardStory, strategy: Strategy = Strategy.GLOBAL, **more: Any
    ) -> None:
        self.folder, self.story = folder, story
        story.write(folder)
        self.config = story.config(folder, strategy, **more)
        self.deaths: list[tuple[int, str]] = []
        self.upto = story.batches

    def run(self) -> Ran:
        """Run to the end, dying wherever it was asked for."""
        while True:
            try:
                return self._live()
            except Died:
                continue

    def _live(self) -> Ran:
        blocks = self.story.blocks

        def on_batch(commit: Commit) -> None:
            following = commit.batch_id + 1
            if following < len(blocks):
                pipeline.log.append(blocks[following], tag=f"before-{following}")
            if following >= self.upto:
                pipeline.stop()
            self.watch(pipeline, commit)

        def on_step(step: str, batch_id: int) -> None:
            if (batch_id, step) in self.deaths:
                self.deaths.remove((batch_id, step))
                raise Died

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
            return self._look(pipeline)

    def watch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
        """Look on after each batch."""

    def _look(self, pipeline: InProcessPipeline) -> Ran:
        assert pipeline._loop is not None and pipeline._loop.guard is not None
        guard, queries = pipeline._loop.guard.guard, pipeline._loop.queries
        live = [
            (segment.users[slot].as_py(), int(segment.created_position[slot]))
            for _, segment, ended in queries.segments
            for slot in range(segment.size)
            if ended.get(slot, 1) != TIME_MIN and segment.created_position is not None
        ]
        listing = guard.listing()["blocked"]
        return Ran(
            decisions(pipeline.store),
            live,
            queries.version.rows,
            guard.gate.counted,
            {item["user"]: item["refused"] for item in listing},
            self.config.out.dir,
        )


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Scene(tmp_path_factory.mktemp("attack"), GuardStory("attack")).run()


def test_exactly_the_attackers_are_blocked(attacked: Ran) -> None:
    assert sorted(attacked.blocked) == sorted(GuardStory("attack").malicious)
    found = [row for row in attacked.log if row["decision"] in ("suspect", "block")]
    assert found[0]["decision"] == "suspect"
    block = found[-1]
    assert block["evidence"]["splits"] and block["evidence"]["share"] > 0.2
    assert block["reason"] == "found again in hotspots of their making"


def test_after_the_block_no_request_of_theirs_reaches_an_index(attacked: Ran) -> None:
    (block,) = [row for row in attacked.log if row["decision"] == "block"]
    born = [place for user, place in attacked.live if user in block["users"]]
    assert born and max(born) <= block["position"]
    others = [place for user, place in attacked.live if user not in block["users"]]
    assert max(others) > block["position"]
    assert all(attacked.refused[user] > 100 for user in block["users"])


def test_refused_requests_are_dead_letters_with_their_position(attacked: Ran) -> None:
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


@pytest.mark.parametrize("party", ["crowd", "newcomer", "mover"])
def test_crowds_newcomers_and_movers_are_not_blocked(tmp_path: Path, party: str) -> None:
    assert Scene(tmp_path, GuardStory(party)).run().blocked == []


KNOWN = range(2, 8)


@pytest.mark.full
@pytest.mark.sweep(KNOWN, 0, 4)
@pytest.mark.parametrize("strategy", [Strategy.GLOBAL, Strategy.SWARM])
@pytest.mark.parametrize("party", ["attack", "one attacker", "crowd", "newcomer", "mover"])
def test_many_scenarios(tmp_path: Path, party: str, seed: int, strategy: Strategy) -> None:
    story = GuardStory(party, seed)
    blocked = Scene(tmp_path, story, strategy).run().blocked
    assert set(blocked) <= story.malicious
    # docs/guard.md: one attack in twenty is not blocked in time, so only known seeds must be.
    if strategy is Strategy.GLOBAL and seed in KNOWN:
        assert set(blocked) == story.malicious


def test_one_attacker_under_swarm(tmp_path: Path) -> None:
    scene = Scene(tmp_path, GuardStory("one attacker", 0, batches=16), Strategy.SWARM)
    assert scene.run().blocked == ["attacker-0"]


def test_queries_of_blocked_users_can_be_terminated(tmp_path: Path) -> None:
    story = GuardStory("attack", batches=16)
    ran = Scene(tmp_path, story, **{"guard.evict": True}).run()
    assert set(ran.blocked) == story.malicious
    assert not {user for user, _ in ran.live} & story.malicious
    assert len(ran.live) >= 2_500


@pytest.mark.parametrize("strategy", [Strategy.GLOBAL, Strategy.SWARM])
def test_quarantine_hides_what_suspects_register_and_nothing_else(
    tmp_path: Path, strategy: Strategy
) -> None:
    story = GuardStory("attack", batches=16)
    hidden: dict[int, int] = {}

    class Watching(Scene):
        def watch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
            last = records.last_round(pipeline.store)
            assert last is not None
            if last["quarantined"]:
                hidden[last["batch_id"]] = last["quarantined"]
                assert last["quarantined"] <= 900

    ran = Watching(tmp_path / "with", story, strategy, **{"guard.quarantine": True}).run()
    assert set(ran.blocked) == story.malicious
    first = next(row["round"] for row in ran.log if row["decision"] == "suspect")
    block = next(row["round"] for row in ran.log if row["decision"] == "block")
    # Rounds of two batches: hidden between suspicion and block, and then no more.
    assert hidden and min(hidden) > 2 * first and max(hidden) <= 2 * (block + 1) + 1
    without = Scene(tmp_path / "without", story, strategy).run()
    assert set(without.blocked) == story.malicious


@pytest.mark.parametrize(
    "step", [pytest.param(s, marks=() if s in SHORT else pytest.mark.full) for s in STEPS]
)
def test_the_guard_survives_a_death_at_every_step(tmp_path: Path, step: str) -> None:
    """As the attack begins, when it is suspected, and when it is blocked."""
    story = GuardStory("attack", batches=20)
    scene = Scene(tmp_path, story)
    scene.deaths = [(number, step) for number in (4, 6, 9, 11)]
    ran = scene.run()
    assert scene.deaths == []
    assert sorted(ran.blocked) == sorted(story.malicious)
    assert ran.positions == ran.counted == sum(block.num_rows for block in story.blocks)
    (block,) = [row for row in ran.log if row["decision"] == "block"]
    assert max(p for user, p in ran.live if user in story.malicious) <= block["position"]


def test_the_pipeline_refuses_a_blocked_user_with_the_reason(tmp_path: Path) -> None:
    answers: list[str] = []

    class Asking(Scene):
        def watch(self, pipeline: InProcessPipeline, commit: Commit) -> None:
            end = pipeline.log.end()
            name = f"mine-{commit.batch_id}"
            try:
                pipeline.request(Query(name, Box(0.0, 0.0, 0.1, 0.1), "attacker-1"))
            except RequestError as refusal:
                assert refusal.reason == "blocked" and pipeline.log.end() == end
                answers.append(str(refusal))

    ran = Asking(tmp_path, GuardStory("attack", batches=14)).run()
    assert "attacker-1" in ran.blocked
    assert answers and "attack on the balancer" in answers[0]


def test_a_disabled_guard_still_refuses_blocked_users(tmp_path: Path) -> None:
    story = GuardStory("attack", batches=16)
    scene = Scene(tmp_path, story)
    scene.upto = 12
    first = scene.run()
    assert set(first.blocked) == story.malicious
    scene.upto = story.batches
    scene.config = story.config(tmp_path, Strategy.GLOBAL, **{"guard.enabled": False})
    again = scene.run()
    assert again.log == first.log
    assert sum(again.refused.values()) > sum(first.refused.values())

"""A synopsis that needs memory gets executors, or coarsens early where there are none."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_synopsis_stage import SCOPES, TABLE, check_state, config, run
from test_synopsis_tree_changes import write_points

from roost.model.settings import ElasticSettings, RunConfig, with_settings
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.runtime.prefix_rounds import PREFIX_ROUNDS
from roost.stages.synopsis import TREES
from roost.storage.store import Store
from roost.synopsis import count
from roost.synopsis.catalogue import FileKind, read_catalogue
from roost.synopsis.reader import SynopsisReader
from roost.testing import FakeAllocator, InProcessExecutor, InProcessPipeline
from synopsis_tables import Rows

MEMORY = 170_000


def scaled(folder: Path, **more: Any) -> RunConfig:
    given = {"prefix_bits": 8, "fold_files": 2, "memory": MEMORY, "exchange": True, "scaling": True}
    rules = {"scaling_observations": 2, "scaling_stabilisation": 1, "study": 3}
    rules["interval_days"] = 7  # of a bucket: no totals
    path = write_points(folder, TABLE.num_rows)
    return config(folder, path, batch_rows=100, **given, **rules, **more)


def base_bytes(settings: RunConfig) -> tuple[int, set[int]]:
    """Return the bytes of the largest base, and the levels of all."""
    with closing(Store(settings.out.state_dir)) as store:
        bases = read_catalogue(store).of_kind(FileKind.BASE)
    return max(base.nbytes for base in bases), {p.level for base in bases for p in base.parts}


def refusals(settings: RunConfig) -> list[str]:
    with closing(Store(settings.out.state_dir)) as store:
        rounds = [row for _, row in store.items(PREFIX_ROUNDS)]
    reasons = [verdict["reason"] for row in rounds for verdict in row["verdicts"]]
    return [reason for reason in reasons if "cannot add machines" in reason]


def test_a_fixed_cluster_coarsens_early(tmp_path: Path) -> None:
    """Nothing can add machines, so old rows are coarsened before the budget is reached."""
    settings = scaled(tmp_path, machines=1)
    run(settings)
    nbytes, levels = base_bytes(settings)
    reasons = refusals(settings)
    assert reasons and all("there are 1 at most" in reason for reason in reasons)
    assert levels > {0} and nbytes < 0.6 * MEMORY
    rows = Rows(TABLE)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        found = reader.synopsis()
        assert found.count == TABLE.num_rows
        for scope in SCOPES[:3]:
            counted = count(found, scope)
            assert counted.low <= rows.inside(scope).sum() <= counted.high


def test_without_scaling_nothing_is_coarsened_before_the_budget(tmp_path: Path) -> None:
    settings = with_settings(scaled(tmp_path, machines=1), {"synopsis.scaling": False})
    run(settings)
    nbytes, levels = base_bytes(settings)
    assert levels == {0} and 0.6 * MEMORY < nbytes < MEMORY


@pytest.mark.parametrize(("most", "available"), [(4, 4), (1, 1), (4, 1)])
def test_a_synopsis_gets_executors_or_coarsens(most: int, available: int, tmp_path: Path) -> None:
    """The load is low throughout: the executors come, and stay, for memory only."""
    settings = scaled(tmp_path, machines=1)
    settings = replace(settings, engine=replace(settings.engine, machines=None))
    elastic = ElasticSettings(max=most, round=3.0, batch_seconds=1e6)
    settings = replace(settings, elastic=elastic)
    now = 1_000.0

    def on_step(step: str, number: int) -> None:
        nonlocal now
        # The manager waits for a minute before it gives up executors that do not arrive.
        now += (1 if available == most else 10) * (step == "intent")

    executor = InProcessExecutor(1)
    executor.allocator = FakeAllocator(lambda: now, 1, 2.0, 0.5, available)
    clock = {"clock": lambda: now, "wall_clock": lambda: now}
    with InProcessPipeline(settings, executor=executor, on_step=on_step, **clock) as pipeline:
        pipeline.run()
    with closing(Store(settings.out.state_dir)) as store:
        rounds = [row for _, row in store.items(GROUP_ROUNDS)]
        machines = store.last(TREES)[1]["machines"]
    kinds = {row["decision"] for row in rounds}
    needed = [row for row in rounds if row["required"]]
    assert needed and "Release" not in kinds
    if available == 1:
        cannot = [row["reason"] for row in rounds if row["decision"] == "Cannot"]
        if most == 1:
            assert len(cannot) == 1 and "synopsis needs" in cannot[0]
            assert "of at most 1" in cannot[0]
        else:
            assert "executors did not arrive" in cannot[0]
        assert refusals(settings) and base_bytes(settings)[1] > {0}
        return
    (first, *_) = [row for row in rounds if row["decision"] == "Provision"]
    assert "synopsis needs" in first["reason"] and first["load"] < 0.1
    assert rounds[-1]["planned"] >= machines >= 2
    assert not refusals(settings)
    check_state(settings.out.state_dir)

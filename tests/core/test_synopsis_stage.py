"""The synopsis of a run equals the one of its rows, whatever happens to the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_runs import RepeatingExecutor
from properties import examples
from roost import Box, Circle, RunConfig
from roost.errors import ConfigError, StateError
from roost.runtime.executor import InProcessExecutor
from roost.runtime.jobs import JOBS
from roost.runtime.prefix_rounds import PrefixRounds
from roost.runtime.records import INTENTS
from roost.stages.synopsis import (
    HEAD_BYTES,
    PREFIXES,
    TREES,
    PrefixTable,
    SynopsisStage,
    SynopsisTask,
    SynopsisWork,
    fold_items,
)
from roost.storage.store import Leases, Store
from roost.synopsis import Scope, Synopsis, SynopsisResult, build, correlation, count, mean, stddev
from roost.synopsis.bands import Sketch
from roost.synopsis.catalogue import TABLE as TABLE_OF_FILES
from roost.synopsis.catalogue import (
    Catalogue,
    FileKind,
    SketchFile,
    SketchPart,
    read_catalogue,
    sketch_files,
)
from roost.synopsis.reader import LEASE_S, SynopsisReader
from roost.synopsis.spec import SynopsisSpec, locate
from roost.synopsis.tree import PrefixTree
from roost.testing import InProcessPipeline
from synopsis_tables import FEATURES, NUMBERS, START_US, Rows, make_table

TABLE = make_table(3, 3_000)
STEPS = ("intent", "apply", "run", "after", "commit", "publish", "cleanup", "round", "end")
SCOPES = [
    Scope(),
    Scope(Circle(10.2, 50.0, 60_000.0)),
    Scope(Box(9.0, 48.0, 10.5, 51.0), since=START_US + 5 * 86_400_000_000, hours=(6, 18)),
    Scope(predicate="temp > 15 and kind = 'sun'", until=START_US + 20 * 86_400_000_000),
]


class Killed(Exception):
    pass


def config(folder: Path, points: Path, **synopsis: Any) -> RunConfig:
    given = {"features": FEATURES, "bins": 16, "place_bits": 16, "bucket_days": 7, "slots": 4}
    machines = synopsis.pop("machines", 2)
    return RunConfig(
        points={"path": str(points)},
        space={"bounds": (-180, -90, 180, 90)},
        engine={
            "machines": machines,
            "available_now": True,
            "batch_rows": synopsis.pop("batch_rows", 200),
            "strategy": synopsis.pop("strategy", "replicated"),
        },
        synopsis={**given, "learn_rows": 500, "fold_files": 4, "interval_days": 1, **synopsis},
        out={"dir": folder / "out", "sink": "count"},
    )


def run(settings: RunConfig, **hooks: Any) -> None:
    executor = InProcessExecutor(settings.engine.machines or 1)
    with InProcessPipeline(settings, executor=executor, **hooks) as pipeline:
        pipeline.run()


def survives(settings: RunConfig, steps: int, **hooks: Any) -> bool:
    """Run, and kill the driver after some steps; returns whether the run ended before."""
    left = steps

    def maybe_kill(step: str, number: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    try:
        run(settings, on_step=maybe_kill, **hooks)
    except Killed:
        return False
    return True


def results(synopsis: Sketch, scope: Scope) -> list[SynopsisResult]:
    found = [count(synopsis, scope)]
    for name in NUMBERS[:3]:
        found += [mean(synopsis, name, scope), stddev(synopsis, name, scope)]
    return [*found, correlation(synopsis, "temp", "wind", scope)]


def check_same(found: Sketch, expected: Synopsis) -> None:
    assert found.count == expected.count
    for scope in SCOPES:
        for a, b in zip(results(found, scope), results(expected, scope), strict=True):
            for name in ("value", "low", "high"):
                x, y = getattr(a, name), getattr(b, name)
                assert x is y is None or x == pytest.approx(y, rel=1e-9, abs=1e-9)


def check_state(state: Path, table: pa.Table = TABLE) -> None:
    """Compare the state with the synopsis of all rows, with the same bins."""
    with closing(SynopsisReader(state)) as reader:
        found = reader.synopsis()
        check_same(found, build(table, reader.spec, found.bins))


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.parquet"
    pq.write_table(TABLE.append_column("id", pa.array(np.arange(TABLE.num_rows))), path)
    return path


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("strategy", ["replicated", "uniform"])
@pytest.mark.parametrize("machines", [1, 3])
def test_the_synopsis_of_a_run_is_that_of_its_rows(
    exchange: bool, strategy: str, machines: int, tmp_path: Path, points: Path
) -> None:
    settings = config(tmp_path, points, exchange=exchange, strategy=strategy, machines=machines)
    run(settings)
    run(settings)  # abandons a fold that the end of the first run interrupted
    check_state(settings.out.state_dir)
    with closing(Store(settings.out.state_dir)) as store:
        sketch = read_catalogue(store)
        assert sketch.of_kind(FileKind.BASE) and not sketch.of_kind(FileKind.ROWS)
        owners = {part.owner for file in sketch.files for part in file.parts}
        assert owners == set(range(machines)), "the tree divides the rows"
        assert sketch.rows == TABLE.num_rows
        listed = sorted(file.name for file in sketch.files)
        assert store.files("synopsis").names() == listed, "no other file is left"


def test_rows_are_stored_until_there_are_enough_to_choose_bins(
    tmp_path: Path, points: Path
) -> None:
    settings = config(tmp_path, points, learn_rows=1_000_000)
    run(settings)
    check_state(settings.out.state_dir)
    with closing(Store(settings.out.state_dir)) as store:
        sketch = read_catalogue(store)
        assert sketch.bins is None and {file.kind for file in sketch.files} == {FileKind.ROWS}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [2, 6])
def test_a_killed_batch_counts_once(step: str, number: int, tmp_path: Path, points: Path) -> None:
    """Batch 2 chooses the bins; the job begins to fold after batch 6."""
    settings = config(tmp_path, points, machines=2)

    def kill(at: str, batch: int) -> None:
        if (at, batch) == (step, number):
            raise Killed

    with pytest.raises(Killed):
        run(settings, on_step=kill)
    run(settings)
    check_state(settings.out.state_dir)


class TwiceExecutor(RepeatingExecutor):
    """Also runs every item of a job twice, as Spark may if an executor is lost."""

    def map(self, call: Any, items: Sequence[Any], places: Sequence[str | None] = ()) -> list[Any]:
        super().map(call, items, places)
        return super().map(call, items, places)


@pytest.mark.parametrize("exchange", [False, True])
def test_tasks_that_run_twice_count_once(exchange: bool, tmp_path: Path, points: Path) -> None:
    """Files of the first attempts are not listed, and deleted."""
    settings = config(tmp_path, points, exchange=exchange, strategy="uniform", machines=3)
    for _ in range(2):  # the second abandons a fold that the end of the first interrupted
        with InProcessPipeline(settings, executor=TwiceExecutor(5)) as pipeline:
            pipeline.run()
    check_state(settings.out.state_dir)
    with closing(Store(settings.out.state_dir)) as store:
        sketch = read_catalogue(store)
        assert sketch.rows == TABLE.num_rows and sketch.of_kind(FileKind.BASE)
        listed = sorted(file.name for file in sketch.files)
        assert store.files("synopsis").names() == listed


@examples(10)
@given(st.integers(0, 2**32))
def test_random_runs_give_the_synopsis_of_their_rows(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Runs are killed, and continue with other machines, batches and exchanges."""
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("run")
    path = folder / "points.parquet"
    table = TABLE.slice(0, 1_200)
    pq.write_table(table.append_column("id", pa.array(np.arange(table.num_rows))), path)
    while True:
        settings = config(
            folder,
            path,
            machines=int(rng.integers(1, 5)),
            batch_rows=int(rng.integers(80, 400)),
            exchange=bool(rng.integers(2)),
            fold_files=int(rng.integers(2, 6)),
            strategy=str(rng.choice(["replicated", "uniform"])),
        )
        if survives(settings, int(rng.integers(5, 60))):
            break
    check_state(settings.out.state_dir, table)


def test_a_reader_sees_each_batch_while_the_run_goes_on(tmp_path: Path, points: Path) -> None:
    """Files are folded and deleted meanwhile; the reader's lease protects what it reads."""
    settings = config(tmp_path, points)
    readers: list[SynopsisReader] = []
    seen = []

    def read(step: str, number: int) -> None:
        if step != "end":
            return
        if not readers:
            readers.append(SynopsisReader(settings.out.state_dir))
        found = readers[0].query("count")
        assert found.batch_id == number
        assert found.result.value == min(200 * (number + 1), TABLE.num_rows)
        seen.append(number)

    run(settings, on_step=read)
    assert len(seen) == 15
    readers[0].close()


def test_a_lease_protects_the_files_of_a_reader(tmp_path: Path, points: Path) -> None:
    settings = config(tmp_path, points)
    readers: list[SynopsisReader] = []
    pinned: set[str] = set()

    def pin(step: str, number: int) -> None:
        if (step, number) == ("end", 3):
            readers.append(SynopsisReader(settings.out.state_dir))
            pinned.update(readers[0].explain().read)

    run(settings, on_step=pin)
    with closing(Store(settings.out.state_dir)) as store:
        listed = {file.name for file in read_catalogue(store).files}
        assert pinned and not pinned & listed, "all files were folded since"
        assert pinned <= set(store.files("synopsis").names())
        readers[0].close()
        run(settings)  # cleans up
        assert not pinned & set(store.files("synopsis").names())


def test_a_reader_pins_once_for_a_batch_and_before_its_lease_ends(
    tmp_path: Path, points: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, take, taken = config(tmp_path, points), Leases.take, list[float]()

    def counted(leases: Leases, value: int, until: float) -> int:
        taken.append(until)
        return take(leases, value, until)

    run(settings)
    monkeypatch.setattr(Leases, "take", counted)
    now = 1_000.0
    with closing(SynopsisReader(settings.out.state_dir, lambda: now)) as reader:
        for scope in (*SCOPES, *SCOPES):
            reader.query("count", scope=scope)
        assert taken == [now + LEASE_S]
        now += LEASE_S * 0.75
        reader.query("count")
    assert taken == [1_000.0 + LEASE_S, now + LEASE_S]


def test_a_part_overlaps_a_scope_up_to_its_edges() -> None:
    spec = SynopsisSpec.of(TABLE.schema, FEATURES)
    part = SketchPart(0, 5, (10.0, 20.0, 11.0, 21.0), 1_000, 2_000)
    catalogue = Catalogue(files=(SketchFile("a", FileKind.BASE, 10, (part,)),))

    def overlaps(scope: Scope) -> bool:
        return bool(catalogue.needed([scope], spec))

    for since, until, expected in ((2_000, None, True), (2_001, None, False), (0, 1_000, False)):
        assert overlaps(Scope(since=since, until=until)) is expected
    assert overlaps(Scope(until=1_001))
    assert overlaps(Scope(Box(11.0, 21.0, 12.0, 22.0)))
    assert not overlaps(Scope(Box(11.1, 21.0, 12.0, 22.0)))
    empty = Catalogue(files=(SketchFile("a", FileKind.BASE, 10, (replace(part, rows=0),)),))
    assert not empty.needed([Scope()], spec)


def test_the_budget_holds_and_so_do_the_bounds(tmp_path: Path, points: Path) -> None:
    """Old points become coarser; no bound is broken, and no point is lost."""
    memory, fold_files = 1 << 16, 3
    settings = config(tmp_path, points, memory=memory, study=3, machines=1, fold_files=fold_files)
    levels: Counter[int] = Counter()

    def check(step: str, number: int) -> None:
        if step == "end":
            with closing(Store(settings.out.state_dir, durable=False)) as store:
                known, stored = read_catalogue(store), sketch_files(store).names("")
            for file in known.of_kind(FileKind.BASE):
                assert file.nbytes <= memory + HEAD_BYTES
                levels.update(part.level for part in file.parts)
            # A fold takes the deltas of before it began, so those of two folds may be there.
            assert len(known.of_kind(FileKind.DELTA)) <= 2 * fold_files + 1
            # The disk has these files, what a fold writes, and what the last one replaced.
            assert len(set(stored) - {file.name for file in known.files}) <= 2 * fold_files + 2

    run(settings, on_step=check)
    assert len(levels) > 2, "several levels of coarsening"
    rows = Rows(TABLE)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        found = reader.synopsis()
        assert found.count == TABLE.num_rows
        for scope in SCOPES[:3]:
            inside = rows.inside(scope)
            counted = count(found, scope)
            assert counted.low <= inside.sum() <= counted.high
            for name in NUMBERS[:3]:
                values = rows.column(name)[inside]
                average = mean(found, name, scope)
                assert average.low <= np.nanmean(values) <= average.high


def test_new_bins_are_chosen_after_a_drift(tmp_path: Path) -> None:
    """The second half of the rows is far from the first; bounds of both hold."""
    rows = TABLE.num_rows
    far = np.arange(rows) >= rows // 2
    temp = pc.add(TABLE["temp"], pa.array(np.where(far, 500.0, 0.0), pa.float32()))
    table = TABLE.set_column(TABLE.column_names.index("temp"), "temp", temp)
    path = tmp_path / "points.parquet"
    pq.write_table(table, path)
    settings = config(tmp_path, path, learn_rows=200, fold_files=4)
    chosen = []

    def record(step: str, number: int) -> None:
        if step == "end":
            with closing(Store(settings.out.state_dir, durable=False)) as store:
                bins = read_catalogue(store).bins
                if bins is not None:
                    chosen.append(bins.edges[FEATURES.index("temp")].tolist())

    run(settings, on_step=record)
    assert max(chosen[0]) < 100.0 < max(chosen[-1])
    values = Rows(table).column("temp")
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        for predicate, holds in (("temp > 515", values > 515.0), ("temp < 15", values < 15.0)):
            found = reader.query("count", scope=Scope(predicate=predicate)).result
            assert found.low <= holds.sum() <= found.high
        assert reader.query("count").result.value == rows
        average = reader.query("mean", feature="temp").result
        assert average.value == pytest.approx(np.nanmean(values), rel=1e-6)


def test_points_leave_after_the_retention(tmp_path: Path, points: Path) -> None:
    settings = config(tmp_path, points, study=2, retention=15, fold_files=2, bucket_days=1)
    run(settings)
    time = Rows(TABLE).column("event_time")
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        left = reader.query("count").result.value
        young = np.sort(time)[-1] - 15 * 86_400_000_000
        old = Scope(until=START_US + 10 * 86_400_000_000)
        assert (time >= young).sum() <= left < TABLE.num_rows
        assert reader.query("count", scope=old).result.value == 0.0


def test_only_owners_with_deltas_are_folded() -> None:
    def file(name: str, kind: FileKind, *owners: int) -> SketchFile:
        parts = tuple(SketchPart(owner, 1, (0.0,) * 4, 0, 0) for owner in owners)
        return SketchFile(name, kind, 10, parts)

    files = (
        file("a", FileKind.DELTA, 0, 2),
        file("b", FileKind.BASE, 0),
        file("c", FileKind.BASE, 1),
    )
    assert fold_items(Catalogue(3, 4, files=files)) == [
        (0, ((("a", 0), 0), (("b", 0), 0))),
        (2, ((("a", 1), 0),)),
    ]


def test_files_outside_the_scope_are_not_opened(
    tmp_path: Path, points: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, points, machines=3, fold_files=2)
    run(settings)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        near = Scope(Circle(179.9, 0.2, 1_000.0))
        explained = reader.explain(near)
        assert explained.pruned and explained.read
        assert set(explained.read) < set(reader.explain().read)
        opened: list[str] = []
        original = type(reader.files).map
        monkeypatch.setattr(
            type(reader.files),
            "map",
            lambda files, name: opened.append(name) or original(files, name),
        )
        expected = count(build(TABLE, reader.spec, reader.synopsis().bins), near).value
        opened.clear()
        with closing(SynopsisReader(settings.out.state_dir)) as other:
            assert other.query("count", scope=near).result.value == expected
        bases = [name for name in opened if name.endswith(".base")]
        assert set(bases) <= set(explained.read) and not set(bases) & set(explained.pruned)
        nothing = Scope(until=START_US)
        assert reader.explain(nothing).read == ()
        assert reader.query("count", scope=nothing).result.value == 0.0


def test_a_run_must_have_the_same_synopsis(tmp_path: Path, points: Path) -> None:
    settings = config(tmp_path, points)
    run(settings)
    other = replace(settings, synopsis=replace(settings.synopsis, bins=20))
    with pytest.raises(StateError, match="synopsis"):
        run(other)
    with pytest.raises(ConfigError, match=r"synopsis.bins: got 20.*synopsis.features, too"):
        RunConfig(synopsis={"bins": 20})
    with pytest.raises(ConfigError, match=r"got 'tmp'.*one of"):
        run(config(tmp_path / "other", points, features=["tmp"]))


def test_a_run_without_a_synopsis_has_no_part_of_it(
    tmp_path: Path, points: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stage, task, routing, fact or file; queries on the state say what is missing."""

    def refuse(*_: object) -> None:
        raise AssertionError("a part of the synopsis in a run without one")

    for part in (SynopsisStage, SynopsisTask, SynopsisWork, PrefixTable, PrefixRounds):
        monkeypatch.setattr(part, "__init__", refuse)
    settings = RunConfig(
        points={"path": str(points)},
        engine={"available_now": True},
        out={"dir": tmp_path / "out", "sink": "count"},
    )
    run(settings)
    with closing(Store(settings.out.state_dir)) as store:
        facts = [*store.items(TABLE_OF_FILES), *store.items(TREES), *store.items(JOBS)]
        routings = {name for _, row in store.items(INTENTS) for name in row["epochs"]}
        assert facts == [] and PREFIXES not in routings
    assert not (settings.out.state_dir / "synopsis").exists()
    with pytest.raises(StateError, match=r"no synopsis; set synopsis\.features"):
        SynopsisReader(settings.out.state_dir)


@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_trees_own_every_place_once(seed: int, machines: int, sampled: bool) -> None:
    """The owner is the one of the longest prefix; a sample is divided evenly."""
    rng = np.random.default_rng(seed)
    bits = 12
    places = rng.integers(0, 1 << bits, 3_000) if sampled else None
    tree = PrefixTree.even(machines, bits, places)
    assert PrefixTree.from_json(tree.to_json()) == tree
    every = np.arange(1 << bits)
    texts = [format(place, f"0{bits}b") for place in every.tolist()]
    expected = [
        tree.owners[max((p for p in tree.owners if t.startswith(p)), key=len)] for t in texts
    ]
    assert tree.owners_of(every, bits).tolist() == expected
    shares = np.bincount(
        tree.owners_of(every if places is None else places, bits), minlength=machines
    )
    assert shares.max() <= 1.3 * shares.mean() + 1


def test_a_child_takes_over_a_part_of_its_parent() -> None:
    tree = PrefixTree(3, {"": 0, "1": 1, "1011": 2})
    spec = SynopsisSpec.of(TABLE.schema, FEATURES, place_bits=4, prefix_bits=2)
    assert tree.owners_of(np.array([0, 7, 8, 11, 12]), 4).tolist() == [0, 0, 1, 2, 1]
    assert locate(np.array([-180.0, 179.9]), np.array([-90.0, 89.9]), spec).tolist() == [0, 15]
    with pytest.raises(ValueError, match="root"):
        PrefixTree(2, {"1": 0})
    with pytest.raises(ValueError, match="not possible"):
        PrefixTree(2, {"": 0, "2": 1})

"""The synopsis of a run equals the one of its rows while its prefix tree changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import count as numbers
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_synopsis_stage import TABLE, Killed, check_same, check_state, config, run, survives

from properties import examples
from roost.errors import ConfigError
from roost.model.settings import RunConfig
from roost.runtime import prefix_rounds
from roost.runtime.prefix_rounds import PREFIX_ROUNDS, Scaling
from roost.runtime.rounds import Verdict
from roost.stages.contract import Reports
from roost.stages.synopsis import TREES, fold_items
from roost.storage.store import Fact, Store
from roost.synopsis import SynopsisSpec, build
from roost.synopsis.ageing import Band, bands_of
from roost.synopsis.catalogue import Catalogue, FileKind, SketchFile, SketchPart, read_catalogue
from roost.synopsis.handover import count_rows, divide
from roost.synopsis.prefix_loads import (
    cell_bits,
    count_cells,
    divide_rows,
    stored_bytes,
    transfers,
)
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.scaling import SketchletSnapshot, Transfer
from roost.synopsis.spec import locate
from roost.synopsis.tree import PrefixTree
from synopsis_tables import FEATURES

ROWS = 600


def write_points(folder: Path, rows: int) -> Path:
    path = folder / "points.parquet"
    table = TABLE.slice(0, rows)
    pq.write_table(table.append_column("id", pa.array(np.arange(rows))), path)
    return path


def move_at_random(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the policy by one that changes the tree after most batches."""

    def observe(
        self: Scaling, seen: SketchletSnapshot
    ) -> tuple[Sequence[Verdict], SketchletSnapshot]:
        tree = seen.tree
        for _ in range(int(rng.integers(3))):
            prefix = format(int(rng.integers(1 << 12)), "012b")[: rng.integers(9)]
            if prefix and rng.integers(4) == 0:
                tree = tree.taken_back(prefix)
            else:
                tree = tree.moved(prefix, int(rng.integers(tree.machines)))
        return [], SketchletSnapshot(tree, seen.machines, seen.loads)

    monkeypatch.setattr(Scaling, "observe", observe)


@examples(8)
@given(st.integers(0, 2**32))
def test_random_trees_give_the_synopsis_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Runs are killed, and continue with other machines, batches and exchanges."""
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("run")
    path = write_points(folder, ROWS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        move_at_random(rng, monkeypatch)
        for attempt in numbers():
            exchange = attempt == 0 or bool(rng.integers(3))
            settings = config(
                folder,
                path,
                machines=int(rng.integers(2, 5)),
                batch_rows=int(rng.integers(60, 250)),
                exchange=exchange,
                scaling=exchange,
                fold_files=int(rng.integers(2, 6)),
            )
            if survives(settings, int(rng.integers(5, 80))):
                break
    check_state(settings.out.state_dir, TABLE.slice(0, ROWS))


@pytest.mark.parametrize("step", ("round", "end"))
def test_a_killed_round_changes_the_tree_once(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree is there with its round or not at all, and no batch changes its tree."""
    path = write_points(tmp_path, 1_600)
    move_at_random(np.random.default_rng(1), monkeypatch)
    settings = config(tmp_path, path, exchange=True, scaling=True, machines=3)

    def kill(at: str, batch: int) -> None:
        if (at, batch) == (step, 6):
            raise Killed

    with pytest.raises(Killed):
        run(settings, on_step=kill)
    check_epochs(settings)
    run(settings)
    check_epochs(settings)
    check_state(settings.out.state_dir, TABLE.slice(0, 1_600))


def check_epochs(settings: RunConfig) -> None:
    with closing(Store(settings.out.state_dir)) as store:
        epochs = [epoch for epoch, _ in store.items(TREES)]
        rounds = [row["next_epoch"] for _, row in store.items(PREFIX_ROUNDS)]
        changed = [epoch for epoch in rounds if epoch is not None]
        assert changed and epochs == [0, *changed] == list(range(len(epochs)))


@examples(30)
@given(st.integers(0, 2**32))
def test_folds_pass_whole_groups_on(seed: int) -> None:
    """Each group goes to the only owner of its places; one with several owners stays."""
    rng = np.random.default_rng(seed)
    table = TABLE.slice(int(rng.integers(2_000)), int(rng.integers(1, 1_000)))
    bits = {"place_bits": 12, "prefix_bits": int(rng.integers(0, 9))}
    bits |= {"bucket_days": int(rng.choice([1, 30])), "slots": int(rng.choice([1, 4]))}
    spec = SynopsisSpec.of(table.schema, FEATURES, bins=8, **bits)
    whole = build(table, spec)
    x, y = table["lon"].to_numpy(), table["lat"].to_numpy()
    prefixes = locate(x, y, spec) >> spec.rest_bits
    tree = PrefixTree(3, {"": 0})
    for _ in range(int(rng.integers(8))):
        place = format(int(rng.choice(locate(x, y, spec))), "012b")
        tree = tree.moved(place[: rng.integers(12)], int(rng.integers(3)))
    owned = tree.owners_of(np.arange(1 << 12), 12).reshape(1 << spec.prefix_bits, -1)
    single = (owned == owned[:, :1]).all(axis=1)
    expected = np.where(single[prefixes], owned[prefixes, 0], 1)
    found = list(divide([Band(0, whole)], 1, tree))
    assert {owner: band.synopsis.count for owner, band in found} == Counter(expected.tolist())
    for owner, band in found:
        mine = Counter(prefixes[expected == owner].tolist())
        width = spec.prefix_bits
        texts = {format(p, f"0{width}b") if width else "": n for p, n in mine.items()}
        assert count_rows(band.synopsis) == texts
    check_same(bands_of([band for _, band in found]), whole)


def test_a_machine_without_deltas_passes_its_rows_on() -> None:
    def file(name: str, kind: FileKind, owner: int, **prefixes: int) -> SketchFile:
        counted = {prefix.removeprefix("p"): rows for prefix, rows in prefixes.items()}
        rows = sum(counted.values())
        part = SketchPart(owner, rows, (0.0,) * 4, 0, 0, prefixes=counted)
        return SketchFile(name, kind, rows * 10, (part,))

    tree = PrefixTree(3, {"": 0, "01": 1, "1011": 2})
    files = (
        file("a", FileKind.BASE, 0, p00=5, p01=3, p10=2, p11=1),
        file("b", FileKind.BASE, 1, p01=3),
        file("c", FileKind.BASE, 7, p11=4),  # of a run with more machines
    )
    found = Catalogue(3, 4, files=files)
    assert transfers(found, tree) == (Transfer(0, 1, 30.0),)
    # 10 has two owners, so its groups stay where they are.
    assert sorted(stored_bytes(found, tree)) == [
        *(("00", 50.0), ("01", 30.0), ("01", 30.0), ("11", 10.0), ("11", 40.0))
    ]
    assert [owner for owner, _ in fold_items(found, tree)] == [0, 7]
    assert fold_items(found) == []


@given(st.integers(0, 2**32))
def test_rows_are_divided_by_owner(seed: int) -> None:
    """Compared with counting each place; the heaviest prefixes are divided further."""
    rng = np.random.default_rng(seed)
    bits, tree = 12, PrefixTree(3, {"": 0})
    for _ in range(int(rng.integers(6))):
        prefix = format(int(rng.integers(1 << 10)), "010b")[: rng.integers(11)]
        tree = tree.moved(prefix, int(rng.integers(3)))
    places = (rng.integers(0, 1 << bits, 500) >> rng.integers(4)) & ~rng.integers(2)
    length = cell_bits(tree, bits)
    cells, counts = count_cells(places, bits, length)
    found = divide_rows(tree, cells, counts.astype(float), bits, parts=20)
    texts = [format(place, f"0{bits}b") for place in places.tolist()]
    owned = tree.owners_of(places, bits)
    for prefix, rows in found.items():
        inside = np.array([text.startswith(prefix) for text in texts])
        assert rows == inside.sum() and set(owned[inside].tolist()) == {tree.owner(prefix)}
    assert sum(found.values()) == places.size
    assert len(found) >= min(15, np.unique(places >> bits - length).size)


def begin_with_one_owner(settings: RunConfig) -> None:
    """Run a batch, and give all to machine 0."""
    with pytest.raises(Killed):
        run(settings, on_step=kill_at("end", 0))
    with closing(Store(settings.out.state_dir)) as store:
        store.record(Fact(TREES, 0, PrefixTree(3, {"": 0}).to_json()))


def changes(settings: RunConfig) -> list[str]:
    """Return the reasons in the rounds that changed the tree."""
    with closing(Store(settings.out.state_dir)) as store:
        rounds = [row for _, row in store.items(PREFIX_ROUNDS) if row["next_epoch"] is not None]
        reasons = [verdict["reason"] for row in rounds for verdict in row["verdicts"]]
    return [reason for reason in reasons if reason.startswith(("backlog", "memory"))]


def test_backlog_makes_a_machine_scale_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes a millisecond, and every 0.08 s there is a batch of 100 rows."""

    def seconds(reports: Reports, stage: str) -> dict[int, float]:
        return {report.machine: report.rows_in / 1_000.0 for report in reports[stage]}

    monkeypatch.setattr(prefix_rounds, "task_seconds", seconds)
    path, batches = write_points(tmp_path, 1_200), 0
    given = {"scaling_observations": 2, "machines": 3, "batch_rows": 100}
    settings = config(tmp_path, path, exchange=True, scaling=True, **given)
    begin_with_one_owner(settings)

    def note(step: str, number: int) -> None:
        nonlocal batches
        batches = number

    run(settings, on_step=note, clock=lambda: 0.08 * batches)
    found = changes(settings)
    assert len(found) == 1 and found[0].startswith("backlog for 2 observations")
    with closing(Store(settings.out.state_dir)) as store:
        tree = PrefixTree.from_json(store.last(TREES)[1])
    table = TABLE.slice(0, 1_200)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        places = locate(table["lon"].to_numpy(), table["lat"].to_numpy(), reader.spec)
        shares = np.bincount(tree.owners_of(places, reader.spec.place_bits)) / places.size
    assert shares[1:].sum() > 0.2 and shares[0] < 0.75, "of 1250 rows/s, 800 stay at most"
    check_state(settings.out.state_dir, table)


def test_memory_makes_a_machine_scale_out(tmp_path: Path) -> None:
    """Bases of other owners appear when folds pass groups on."""
    path = write_points(tmp_path, TABLE.num_rows)
    given = {"prefix_bits": 8, "fold_files": 2, "machines": 3, "memory": 1 << 18}
    rules = {"scaling_observations": 2, "scaling_stabilisation": 1}
    settings = config(tmp_path, path, batch_rows=100, exchange=True, scaling=True, **given, **rules)
    begin_with_one_owner(settings)
    run(settings)
    assert any(reason.startswith("memory") for reason in changes(settings))
    with closing(Store(settings.out.state_dir)) as store:
        bases = read_catalogue(store).of_kind(FileKind.BASE)
        assert {part.owner for file in bases for part in file.parts} > {0}
    check_state(settings.out.state_dir)


def kill_at(step: str, number: int) -> Any:
    def kill(at: str, batch: int) -> None:
        if (at, batch) == (step, number):
            raise Killed

    return kill


def test_scaling_needs_an_exchange(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"synopsis.scaling.*synopsis.exchange, too"):
        config(tmp_path, tmp_path, scaling=True)
    with pytest.raises(ConfigError, match=r"scaling_memory_lower: got 0.5.*at most"):
        config(tmp_path, tmp_path, scaling_memory_lower=0.5)

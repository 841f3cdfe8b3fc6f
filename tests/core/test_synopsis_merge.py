"""Any split into tables and any order of merging give the results of one synopsis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError, StateError
from roost.storage.files import write_arrays
from roost.synopsis import (
    Synopsis,
    SynopsisResult,
    build,
    correlation,
    count,
    density,
    learn_bins,
    mean,
    merge,
    quantiles,
    stddev,
)
from synopsis_tables import NUMBERS, Rows, draw_scope, make_spec, make_table

TABLE = make_table(2, 2_500)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)
WHOLE = build(TABLE, SPEC, BINS)
scopes = draw_scope(Rows(TABLE))


def results(synopsis: Synopsis, scope: Any, name: str, other: str) -> list[SynopsisResult]:
    return [
        count(synopsis, scope),
        mean(synopsis, name, scope),
        stddev(synopsis, name, scope),
        correlation(synopsis, name, other, scope),
        *quantiles(synopsis, name, [0.1, 0.9], scope),
        *density(synopsis, name, [12.0], scope, 2.0),
    ]


def same(a: SynopsisResult, b: SynopsisResult) -> bool:
    assert a.records == b.records
    pairs = ((a.value, b.value), (a.low, b.low), (a.high, b.high))
    return all(
        x is y if x is None or y is None else x == pytest.approx(y, rel=1e-9, abs=1e-12)
        for x, y in pairs
    )


def split_and_merge(seed: int, parts: int, contiguous: bool) -> Synopsis:
    """Merge random parts of the rows in a random order, some merges before others."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, parts, TABLE.num_rows)
    if contiguous:
        owner.sort()  # as batches are
    pieces = [build(TABLE.filter(pa.array(owner == k)), SPEC, BINS) for k in range(parts)]
    while len(pieces) > 1:
        chosen = rng.permutation(len(pieces))[: rng.integers(2, len(pieces) + 1)]
        rest = [piece for k, piece in enumerate(pieces) if k not in chosen]
        pieces = [*rest, merge([pieces[k] for k in chosen])]
    return pieces[0]


@given(
    st.integers(0, 2**32),
    st.integers(2, 6),
    st.booleans(),
    st.lists(scopes, min_size=3, max_size=3),
    st.sampled_from(NUMBERS[:4]),
)
def test_any_split_and_order_give_the_same_results(
    seed: int, parts: int, contiguous: bool, drawn: list[Any], name: str
) -> None:
    merged = split_and_merge(seed, parts, contiguous)
    for scope, _ in drawn:
        pairs = zip(
            results(merged, scope, name, "wind"), results(WHOLE, scope, name, "wind"), strict=True
        )
        for a, b in pairs:
            assert same(a, b), (a, b)
    for a, b in zip(merged.leaves, WHOLE.leaves, strict=True):
        assert np.array_equal(a, b)
    assert merged.groups.keys.tolist() == WHOLE.groups.keys.tolist()
    assert np.sort(merged.rows.time).tolist() == np.sort(WHOLE.rows.time).tolist()


@given(scopes)
def test_a_saved_synopsis_has_the_same_results(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any
) -> None:
    path = tmp_path_factory.mktemp("synopsis") / "saved.synopsis"
    size = WHOLE.save(path)
    assert size == path.stat().st_size
    opened = Synopsis.open(path)
    assert results(opened, drawn[0], "temp", "wind") == results(WHOLE, drawn[0], "temp", "wind")
    assert opened.nbytes == WHOLE.nbytes
    assert not opened.leaves.words.flags.writeable
    assert merge([opened, build(TABLE, SPEC, opened.bins)]).count == 2 * TABLE.num_rows


def test_another_process_opens_the_file(tmp_path: Path) -> None:
    path = tmp_path / "saved.synopsis"
    WHOLE.save(path)
    code = (
        "import sys; from pathlib import Path; from roost.synopsis import Synopsis, mean;"
        "print(repr(mean(Synopsis.open(Path(sys.argv[1])), 'temp').value))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == mean(WHOLE, "temp").value


def test_groups_grow_from_rows_to_records() -> None:
    first = build(TABLE.slice(0, 60), SPEC, BINS)
    assert first.rows.x.size > 40
    grown = merge([build(TABLE.slice(k, 60), SPEC, BINS) for k in range(0, 2_500, 60)])
    assert grown.groups.keys.tolist() == WHOLE.groups.keys.tolist()
    assert grown.rows.x.size == WHOLE.rows.x.size


def test_refused_merges_name_the_difference() -> None:
    other = make_spec(TABLE, slots=8)
    with pytest.raises(ConfigError, match="slots=8"):
        merge([WHOLE, build(TABLE, other, BINS)])
    bins = learn_bins(TABLE.slice(0, 500), SPEC)
    with pytest.raises(ConfigError, match="other bins of temp"):
        merge([WHOLE, build(TABLE, SPEC, bins)])
    with pytest.raises(ConfigError, match="at least one synopsis"):
        merge([])


def test_refused_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "other"
    write_arrays(path, {"x": np.zeros(1)})
    with pytest.raises(StateError, match="other is not a synopsis"):
        Synopsis.open(path)
    with pytest.raises(StateError, match="missing"):
        Synopsis.open(tmp_path / "missing")

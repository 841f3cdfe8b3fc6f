"""Recommend items that have many fans in common, kept up to date while ratings arrive.

A fan of an item rated it above 3. Two items are as similar as they have mutual fans, and each item
has a list of the ten most similar ones. Every 60 seconds the lists that changed are emitted.

- *fans* has one tuple for each user and item. A user who rates an item again makes it emit the same
  tuple again, and the Filter behind passes a fan only in the minute of the first such rating.
- *pairs* joins each new fan with all items of the same user, each pair of items once. It is
  compiled and handles a user with thousands of items like thousands of users with one pair.
- *mutual fans* counts the pairs, and *similar* ranks the items beside each one. A pair whose count
  did not change is not emitted again, so *similar* remembers its leaders, and no other item.

Run it with ``python examples/recommendations.py [FOLDER]``, or with
``roost run --flow examples/recommendations.py:flow``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost import Dataflow, Pipeline, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RATINGS = "generate:ratings,rows=20000,rate=50,seed=7,users=1000,items=300"
TIME = "timestamp[us, tz=UTC]"
FAN_ABOVE = 3
EVERY_S = 60
TICK_S = 1e-6  # later operators follow at once, one tick (a microsecond) after those before them
ALWAYS_S = 3_000_000_000  # a window of 95 years
TOP = 10
SIMILAR = pa.schema([("item", pa.int64()), ("other", pa.int64()), ("fans", pa.int64())])
RANKED = pa.schema([("rank", pa.int64()), ("other", pa.int64()), ("fans", pa.int64())])
LISTED = pa.schema([SIMILAR.field("item"), *RANKED])


def both_ways(pairs: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make a row of each direction of a pair; returns the rows and the input row of each."""
    rows = np.repeat(np.arange(pairs.num_rows), 2)
    sides = [pairs[name].to_numpy() for name in ("left_item", "right_item")]
    items = np.stack(sides, axis=1).reshape(-1)
    others = np.stack(sides[::-1], axis=1).reshape(-1)
    columns = [pa.array(items), pa.array(others), pairs["fans"].take(pa.array(rows))]
    return pa.RecordBatch.from_arrays(columns, schema=SIMILAR), rows


class MostSimilar:
    """The items with most mutual fans, ties by number; of an item, its largest count holds."""

    columns = ("other", "fans")
    type = pa.list_(pa.struct(RANKED))

    def partial(self, other: pa.Array, fans: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the leaders of some counts."""
        return self._leaders(other.to_numpy(), fans.to_numpy())

    def merge(self, states: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the leaders of several sets of leaders."""
        others, fans = (np.concatenate(column) for column in zip(*states, strict=True))
        return self._leaders(others, fans)

    def _leaders(self, others: np.ndarray, fans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Each item once, with its largest count: that is where it occurs first.
        first: dict[int, int] = {}
        for row in np.lexsort((others, -fans)):
            first.setdefault(others[row], row)
            if len(first) == TOP:
                break
        best = list(first.values())
        return others[best], fans[best]

    def finish(self, state: tuple[np.ndarray, np.ndarray]) -> list[dict[str, int]]:
        """Return the leaders as rows, with their ranks."""
        ranks = range(1, len(state[0]) + 1)
        rows = zip(ranks, state[0].tolist(), state[1].tolist(), strict=True)
        return [dict(zip(RANKED.names, row, strict=True)) for row in rows]


def ranks(lists: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make a row of each entry of a list; returns the rows and the input row of each."""
    found = lists["similar"].flatten()
    rows = np.repeat(np.arange(lists.num_rows), np.asarray(lists["similar"].value_lengths()))
    columns = [lists["item"].take(pa.array(rows)), *(found.field(name) for name in RANKED.names)]
    return pa.RecordBatch.from_arrays(columns, schema=LISTED), rows


flow = Dataflow("recommendations")
ratings = flow.source(
    "ratings",
    {"user": "int64", "item": "int64", "rating": "int64", "at": TIME},
    time="at",
    path=RATINGS,
)
fans = ratings.filter(f"rating > {FAN_ABOVE}", name="liked").aggregate(
    {"first": "min(at)"}, by=["user", "item"], window="forever", advance=EVERY_S, name="fans"
)
fresh = fans.filter(f"at - first <= {EVERY_S}", name="new fans")
pairs = fresh.join(
    fresh, "left.user = right.user and left.item < right.item", size=ALWAYS_S, name="pairs"
)
items = pairs.map({name: pc.field(name) for name in ("left_item", "right_item")}, name="items")
mutual = items.aggregate(
    {"fans": "count"},
    by=["left_item", "right_item"],
    window="forever",
    advance=TICK_S,
    name="mutual fans",
)
similar = mutual.map(both_ways, schema=SIMILAR, name="both ways").aggregate(
    {"similar": MostSimilar()}, by="item", window="forever", advance=TICK_S, name="similar"
)
similar.map(ranks, schema=LISTED, name="ranks").sink("recommendations")


def latest(found: pa.Table) -> dict[int, list[tuple[int, int]]]:
    """Return the newest list of each item: other items and mutual fans, most similar first."""
    newest = {
        row["item"]: row["at_max"]
        for row in found.group_by("item").aggregate([("at", "max")]).to_pylist()
    }
    lists: dict[int, list[tuple[int, int]]] = {}
    for row in found.sort_by([("item", "ascending"), ("rank", "ascending")]).to_pylist():
        if row["at"] == newest[row["item"]]:
            lists.setdefault(row["item"], []).append((row["other"], row["fans"]))
    return lists


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of items that have a list."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": 5_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    lists = latest(pq.read_table(out / "recommendations"))
    for item, others in list(lists.items())[:5]:
        print(f"{item}: " + ", ".join(f"{other} ({fans} fans)" for other, fans in others[:5]))
    return len(lists)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/recommendations"))

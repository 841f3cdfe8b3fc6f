"""Top-N topics and recommendations, compared with batch jobs over all rows so far."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_flow_applications import SECOND, generated, load, run

from roost import Dataflow, RunConfig
from roost.runtime.records import commits
from roost.stages.flow_routing import stage_of
from roost.storage.store import Store
from roost.testing import InProcessPipeline

EVERY_TOPICS = 10 * SECOND
EVERY_LISTS = 60 * SECOND


def by_time(table: pa.Table) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each event time, by rank."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in table.sort_by([("at", "ascending"), ("rank", "ascending")]).to_pylist():
        found[row["at"]].append(row)
    return dict(found)


@pytest.mark.parametrize(
    ("stream", "batch_rows", "machines"),
    [
        ("rows=6000,rate=100,seed=3,topics=5000", 1_300, 3),
        ("rows=4000,rate=130,seed=4,topics=40,most=6,skew=zipf:1.2", 4_000, 2),
        ("rows=500,rate=9,seed=5,topics=5,most=1,skew=uniform", 60, 1),  # many ties
    ],
)
def test_topics_are_ranked_by_mentions_since_the_start(
    stream: str, batch_rows: int, machines: int, tmp_path: Path
) -> None:
    path = f"generate:tweets,{stream}"
    found = by_time(run("top_topics", path, tmp_path, batch_rows, machines))
    tweets = generated(path, ["text", "at"]).to_pylist()
    start, stop = tweets[0]["at"], tweets[-1]["at"]
    ends = range(start + EVERY_TOPICS, stop + EVERY_TOPICS + 1, EVERY_TOPICS)
    assert sorted(found) == [end + 1 for end in ends], "every 10 seconds, one tick later"
    for end in ends:
        texts = (tweet["text"] for tweet in tweets if tweet["at"] < end)
        counts = Counter(tag.removeprefix("#") for text in texts for tag in text.split())
        top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]
        rows = found[end + 1]
        assert [(row["topic"], row["mentions"]) for row in rows] == top
        assert [row["rank"] for row in rows] == list(range(1, len(top) + 1))


def batch_job(ratings: Iterable[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    """Compute all lists from all ratings, in the three rounds of the thesis's appendix A.

    Unlike the printed program, pairs are unordered, a fan counts once, and ties go by number.
    """
    liked: dict[int, set[int]] = defaultdict(set)
    for rating in ratings:
        if rating["rating"] > 3:
            liked[rating["user"]].add(rating["item"])
    mutual: Counter[tuple[int, int]] = Counter()
    for items in liked.values():
        mutual.update(itertools.combinations(sorted(items), 2))
    similar: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (one, other), fans in mutual.items():
        similar[one].append((other, fans))
        similar[other].append((one, fans))
    return {
        item: sorted(others, key=lambda pair: (-pair[1], pair[0]))[:10]
        for item, others in similar.items()
    }


@pytest.mark.parametrize(
    ("stream", "batch_rows", "machines"),
    [
        ("rows=2400,rate=20,seed=3,users=150,items=60", 450, 2),
        ("rows=2000,rate=13,seed=4,users=30,items=25,skew=zipf:1.1", 2_000, 2),  # rated again
        ("rows=800,rate=2,seed=5,users=300,items=12,skew=uniform,activity=uniform", 90, 1),
    ],
)
def test_lists_equal_those_of_a_batch_job(
    stream: str, batch_rows: int, machines: int, tmp_path: Path
) -> None:
    """At the end, and at each minute: the newest list of each item."""
    path = f"generate:ratings,{stream}"
    table = run("recommendations", path, tmp_path, batch_rows, machines)
    example = load("recommendations")
    ratings = generated(path, ["user", "item", "rating", "at"]).to_pylist()
    assert example.latest(table) == batch_job(ratings)
    found = by_time(table)
    start, stop = ratings[0]["at"], ratings[-1]["at"]
    lists: dict[int, list[tuple[int, int]]] = {}
    for end in range(start + EVERY_LISTS, stop + EVERY_LISTS + 1, EVERY_LISTS):
        changed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in found.pop(end + 2, []):
            changed[row["item"]].append((row["other"], row["fans"]))
        lists |= changed
        assert lists == batch_job(rating for rating in ratings if rating["at"] < end)
    assert not found, "nothing is emitted at other times"


def test_a_user_with_thousands_of_ratings_does_not_stall_it(tmp_path: Path) -> None:
    """One user likes 2,000 items, which are two million pairs; then 20 more, with 40,000 pairs."""
    items, more, others = 2_000, 20, 500
    first = [(0, item) for item in range(items)] + [(k, k % 7) for k in range(1, others)]
    second = [(0, items + k) for k in range(more)] + [(k, 8 + k % 5) for k in range(1, others)]
    folder = tmp_path / "ratings"
    folder.mkdir()
    minute = 1_700_000_040 * SECOND  # a multiple of 60 seconds
    for number, rows in enumerate([first, second]):
        users, rated = zip(*rows, strict=True)
        at = [minute + number * EVERY_LISTS + k * 1_000 for k in range(len(rows))]
        columns = {"user": users, "item": rated, "rating": [5] * len(rows)}
        stamps = pa.array(at, pa.timestamp("us", "UTC"))
        pq.write_table(pa.table({**columns, "at": stamps}), folder / f"{number}.parquet")
    example = load("recommendations")
    source, *rest = example.flow.operators
    flow = Dataflow(example.flow.name, [replace(source, path=str(folder)), *rest])
    used = []
    config = RunConfig(
        out={"dir": tmp_path / "out"},
        engine={"batch_rows": len(first), "available_now": True},
        dataflow={"machines": 2},
    )

    def on_step(step: str, number: int) -> None:
        if step in ("intent", "commit"):
            used.append(time.process_time())

    with InProcessPipeline(config, flow=flow, on_step=on_step) as pipeline:
        pipeline.run()
        # A third minute closes the second one.
        pq.write_table(
            pa.table({"user": [1], "item": [0], "rating": [1],
                      "at": pa.array([minute + 3 * EVERY_LISTS], pa.timestamp("us", "UTC"))}),
            folder / "2.parquet",
        )  # fmt: skip
    with InProcessPipeline(config, flow=flow, on_step=on_step) as pipeline:
        pipeline.run()
    lists = example.latest(pq.read_table(tmp_path / "out" / "recommendations"))
    rated = [{"user": user, "item": item, "rating": 5} for user, item in first + second]
    assert lists == batch_job(rated)
    seconds = [b - a for a, b in zip(used[::2], used[1::2], strict=True)]
    assert len(seconds) == 3 and seconds[2] < min(seconds[1], 5.0), seconds
    with closing(Store(config.out.state_dir)) as store:
        _, second, third = (c.figures["stages"][stage_of("pairs")] for c in commits(store))
    # The second batch closes the minute with two million pairs, the third one that with few.
    assert second["rows_out"] == items * (items - 1) // 2
    assert items * more <= third["rows_out"] < 2 * items * more
    assert third["seconds"] < second["seconds"] / 10

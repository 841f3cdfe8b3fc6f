"""Rank the topics of tweets: every 10 seconds, the ten most frequent ones since the start.

A Map extracts the hashtags of each tweet, an Aggregate counts each topic, and a second Aggregate
ranks them. Both have windows ``forever``: they emit what changed at each multiple of 10 seconds.

A count that did not change is not emitted again, so the ranking must remember the leaders. It needs
no other topic: one that is not among them comes back with its whole count when it is mentioned
again. Hence ``Leaders`` retains ten topics, whatever their number.

Run it with ``python examples/top_topics.py [FOLDER]``, or with
``roost run --flow examples/top_topics.py:flow``.
"""

from __future__ import annotations

import itertools
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

# 60 seconds of tweets with one to five topics of 5,000; topic k has a share of k ** -0.5.
TWEETS = "generate:tweets,rows=30000,rate=500,seed=7,topics=5000,skew=zipf:0.5,most=5"
TIME = "timestamp[us, tz=UTC]"
EVERY_S = 10
# The ranking follows the counts at once: one tick (a microsecond) after them.
TICK_S = 1e-6
TOP = 10
TOPIC = pa.schema([("topic", pa.string())])
RANKED = pa.schema([("rank", pa.int64()), ("topic", pa.string()), ("mentions", pa.int64())])


def topics(tweets: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make a row of each hashtag; returns the rows and the input row of each."""
    words = pc.split_pattern(tweets["text"], " ")
    rows = np.repeat(np.arange(len(words)), np.asarray(words.value_lengths()))
    found = words.flatten()
    tags = pc.starts_with(found, "#")
    topic = pc.utf8_slice_codeunits(found.filter(tags), 1)
    return pa.RecordBatch.from_arrays([topic], schema=TOPIC), rows[np.asarray(tags)]


class Leaders:
    """The topics with most mentions, ties by name; of a topic, its largest count holds."""

    columns = ("topic", "mentions")
    type = pa.list_(pa.struct(RANKED))

    def partial(self, topic: pa.Array, mentions: pa.Array) -> list[tuple[str, int]]:
        """Return the leaders of some counts."""
        return self.merge([list(zip(topic.to_pylist(), mentions.to_pylist(), strict=True))])

    def merge(self, states: list[list[tuple[str, int]]]) -> list[tuple[str, int]]:
        """Return the leaders of several sets of leaders."""
        best: dict[str, int] = {}
        for topic, count in itertools.chain.from_iterable(states):
            best[topic] = max(best.get(topic, 0), count)
        return sorted(best.items(), key=lambda item: (-item[1], item[0]))[:TOP]

    def finish(self, state: list[tuple[str, int]]) -> list[dict[str, object]]:
        """Return the leaders as rows, with their ranks."""
        return [
            {"rank": rank, "topic": topic, "mentions": count}
            for rank, (topic, count) in enumerate(state, start=1)
        ]


def ranks(rankings: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make a row of each topic in a ranking; returns the rows and the input row of each."""
    lists = rankings["leaders"]
    found = lists.flatten()
    rows = np.repeat(np.arange(len(lists)), np.asarray(lists.value_lengths()))
    columns = [found.field(name) for name in RANKED.names]
    return pa.RecordBatch.from_arrays(columns, schema=RANKED), rows


flow = Dataflow("top topics")
tweets = flow.source("tweets", {"text": "string", "at": TIME}, time="at", path=TWEETS)
mentions = tweets.map(topics, schema=TOPIC, name="extract")
counts = mentions.aggregate(
    {"mentions": "count"}, by="topic", window="forever", advance=EVERY_S, name="count"
)
leaders = counts.aggregate({"leaders": Leaders()}, window="forever", advance=TICK_S, name="rank")
leaders.map(ranks, schema=RANKED, name="ranks").sink("top_topics")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of rankings."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": 6_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    found = pq.read_table(out / "top_topics").sort_by([("at", "descending"), ("rank", "ascending")])
    for row in found.slice(0, 5).to_pylist():
        print(f"{row['at']:%H:%M:%S}  {row['rank']}. {row['topic']}: {row['mentions']} mentions")
    return len(set(found["at"].to_pylist()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/top_topics"))

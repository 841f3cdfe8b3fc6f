"""The oracle of top-N topics: the interpreter on the generated tweets."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from roost.bench.dodo_cluster import top_topics
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.schema import resolve
from roost.stages.sources import parse_generator
from roost.storage.cache import WorkerCache


def expected_rankings(path: str, rows: int) -> list[dict[str, Any]]:
    """Return the rankings after some tweets; times are microseconds.

    The last one is not among them: it waits for a newer tweet.
    """
    flow = top_topics(path, costly=False)
    (item,) = parse_generator(path, lambda: 0.0).again(0, rows)
    read = item.read(["text", "at"], WorkerCache())
    given = read.select(["text"]).append_column("at", read["at"].cast(pa.int64())).to_pylist()
    oracle = Interpreter(resolve(flow.name, flow.operators))
    oracle.batch({"tweets": given}, 0.0)
    return oracle.results["top_topics"]

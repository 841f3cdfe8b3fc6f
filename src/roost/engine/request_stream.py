"""Requests from a streaming DataFrame: checked and counted by Spark, then appended to the log.

The guard's gate (:mod:`roost.queries.guard_state`) checks every request in the log on the driver.
For requests that come through Spark, the executors share this work: of each micro-batch they drop
the requests of blocked users, and count all requests by user. The driver receives the remaining
requests and one row per user, and appends both under a tag, so that a repeated micro-batch is in
the log once.

The driver checks again when it applies the log, because only log positions order a request and a
block; it also subtracts requests that admission rejects from the counts. A log that other processes
write to does not store tallies or tags: there, everything is appended, the driver checks and
counts, and a repeated micro-batch is in the log twice.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from roost.guard.tally import COLUMNS
from roost.model.schemas import TIMESTAMP, request_schema
from roost.queries.guard_state import GuardState
from roost.queries.log import QueryLog

FIELDS = frozenset(request_schema(pa.string(), TIMESTAMP).names)
_BLOCKED = "roost_blocked"


def _tally(requests: DataFrame) -> DataFrame:
    """Count marked requests by user: ``user_id, registers, terminates, refused``."""
    blocked = F.col(_BLOCKED)

    def passed(operation: str) -> Column:
        return ~blocked & F.coalesce(F.col("op") == operation, F.lit(False))

    conditions = (passed("register"), passed("terminate"), blocked)
    columns = [
        F.sum(F.when(condition, 1).otherwise(0)).alias(name)
        for name, condition in zip(COLUMNS, conditions, strict=True)
    ]
    return requests.where(F.col("user_id").isNotNull()).groupBy("user_id").agg(*columns)


def append_batch(requests: DataFrame, log: QueryLog, state: GuardState | None, tag: str) -> int:
    """Append a micro-batch, once if the log stores tags; returns the log position after it."""
    known = [name for name in requests.columns if name in FIELDS]
    requests = requests.select(*known).withColumn("user_id", F.col("user_id").cast("string"))
    if state is None or not log.private:
        return log.append(_valid(requests.toArrow()), tag=tag)
    names = sorted(state.guard.blocked)  # read once: a batch may block another user meanwhile
    blocked = F.col("user_id").isin(names) if names else F.lit(False)
    marked = requests.withColumn(_BLOCKED, F.coalesce(blocked, F.lit(False))).persist()
    try:
        passed = marked.where(~F.col(_BLOCKED)).drop(_BLOCKED).toArrow()
        counts = _tally(marked).toArrow()
    finally:
        marked.unpersist()
    valid = _valid(passed)
    # Invalid text hides the users of a micro-batch: the driver counts what is left.
    return log.append(valid, tag=tag, tally=counts if valid is passed else None)


def _valid(requests: pa.Table) -> pa.Table:
    """Return the requests, or one malformed record if they contain invalid text."""
    try:
        requests.validate(full=True)
    except pa.ArrowInvalid as error:
        text = f"{requests.num_rows} requests of a stream: {error}"
        return pa.table({"malformed": [text]})
    return requests

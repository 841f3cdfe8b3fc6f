"""Requests that come as a stream: judged and counted by Spark, and only then put into the log.

The gate of the fold (:mod:`roost.queries.guard_state`) sees every request that is in the log. Where
requests come through Spark anyway, its executors can do that work. Of each micro-batch they refuse
what blocked users sent, which then never reaches the driver, and count the rest by user. The driver
gets what passed and a row a user, and appends both with a name of their own: a micro-batch that
Spark runs again is in the log once.

The fold judges again, because it alone knows positions: who is blocked between the two is refused
there, and what admission finds wrong is taken back from the counts. A log that others write to
cannot be trusted with tallies: there everything is appended, the driver judges and counts, and a
micro-batch that is repeated is in the log twice.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from roost.guard import Guard
from roost.guard.tally import COLUMNS
from roost.model.schemas import TIMESTAMP, request_schema
from roost.queries.guard_state import GuardState
from roost.queries.log import QueryLog

FIELDS = frozenset(request_schema(pa.string(), TIMESTAMP).names)
_BLOCKED = "roost_blocked"


def _is(operation: str) -> Column:
    return f.coalesce(f.col("op") == operation, f.lit(False))


def _number(condition: Column) -> Column:
    return f.sum(f.when(condition, 1).otherwise(0))


def judged(requests: DataFrame, guard: Guard) -> DataFrame:
    """Mark the requests of users who are blocked now."""
    names = sorted(guard.blocked)  # once: a batch may block somebody meanwhile
    blocked = f.col("user_id").isin(names) if names else f.lit(False)
    return requests.withColumn(_BLOCKED, f.coalesce(blocked, f.lit(False)))


def tally(requests: DataFrame) -> DataFrame:
    """Count marked requests by user: ``user_id, registers, terminates, refused``."""
    passing = ~f.col(_BLOCKED)
    counts = dict(
        zip(
            COLUMNS,
            (passing & _is("register"), passing & _is("terminate"), f.col(_BLOCKED)),
            strict=True,
        )
    )
    known = requests.where(f.col("user_id").isNotNull())
    columns = [_number(condition).alias(name) for name, condition in counts.items()]
    return known.groupBy("user_id").agg(*columns)


def append_batch(requests: DataFrame, log: QueryLog, keeper: GuardState | None, tag: str) -> int:
    """Put a micro-batch into the log, once where the log keeps tags; returns the position."""
    known = [name for name in requests.columns if name in FIELDS]
    requests = requests.select(*known).withColumn("user_id", f.col("user_id").cast("string"))
    if keeper is None or not log.private:
        return log.append(_readable(requests.toArrow()), tag=tag)
    marked = judged(requests, keeper.guard)
    marked.persist()
    try:
        passed = marked.where(~f.col(_BLOCKED)).drop(_BLOCKED).toArrow()
        counts = tally(marked).toArrow()
    finally:
        marked.unpersist()
    readable = _readable(passed)
    # Where some of it is no text, whose it was cannot be told: the fold counts what is left.
    return log.append(readable, tag=tag, tally=counts if readable is passed else None)


def _readable(requests: pa.Table) -> pa.Table:
    """Return requests as they are, or a record that says that they are not text."""
    try:
        requests.validate(full=True)
    except pa.ArrowInvalid as error:
        text = f"{requests.num_rows} requests of a stream: {error}"
        return pa.table({"malformed": [text]})
    return requests

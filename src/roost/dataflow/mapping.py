"""Map: pyarrow expressions, or a function of the user over record batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.blocks import ORDER, Rejected, stamped, times_of
from roost.dataflow.expressions import project
from roost.dataflow.operators import Map
from roost.dataflow.order import integer_bytes, made_order
from roost.dataflow.schema import Node
from roost.errors import DataflowError
from roost.model.arrays import as_arrow
from roost.model.columns import one_array
from roost.model.records import Reason

Rows = NDArray[np.int64]


def apply_map(node: Node, table: pa.Table, rejected: list[Rejected]) -> pa.Table | None:
    """Compute the tuples of a Map; rows for which it raises are rejected, one by one."""
    assert node.output is not None
    results: list[pa.Table] = []
    sources: list[Rows] = []
    for result, rows in _results(node, table.select(node.inputs[0].columns.names), rejected):
        results.append(result)
        sources.append(rows)
    if not results:
        return None
    rows = np.concatenate(sources)
    columns = pa.concat_tables(results)
    order = None
    if ORDER in table.column_names:
        index = np.arange(rows.size) - np.searchsorted(rows, rows)
        parts = [one_array(table[ORDER]).take(as_arrow(rows)), integer_bytes(index)]
        order = made_order(node.number, parts, rows.size)
    values = [one_array(columns[name]) for name in columns.column_names]
    return stamped(node.output, times_of(table)[rows], values, order) if rows.size else None


def _results(
    node: Node, table: pa.Table, rejected: list[Rejected]
) -> Iterator[tuple[pa.Table, Rows]]:
    """Yield results with the rows that they were made from; the rows ascend."""
    try:
        yield _call(node, table)
        return
    except DataflowError:
        raise
    except Exception as error:
        single = error
    for row in range(table.num_rows):
        try:
            result, rows = _call(node, table.slice(row, 1))
        except DataflowError:
            raise
        except Exception as error:
            single = error
            problem = f"{type(single).__name__}: {single}"
            one = table.slice(row, 1)
            rejected.append(Rejected(node.name, Reason.FUNCTION_FAILED, problem, one))
            continue
        yield result, rows + row


def _call(node: Node, table: pa.Table) -> tuple[pa.Table, Rows]:
    assert isinstance(node.operator, Map)
    if node.operator.function is None:
        return project(table, node.operator.columns), np.arange(table.num_rows)
    batch = table.combine_chunks().to_batches()
    returned: Any = node.operator.function(batch[0]) if batch else table.slice(0, 0)
    result, rows = returned if isinstance(returned, tuple) else (returned, None)
    schema = node.operator.schema
    assert schema is not None
    if not isinstance(result, pa.RecordBatch | pa.Table) or not result.schema.equals(schema):
        got = result.schema if hasattr(result, "schema") else type(result).__name__
        problem = f"the function returned {got}; expected a record batch of {schema}"
        raise DataflowError(node.name, problem)
    made = np.arange(table.num_rows) if rows is None else np.asarray(rows, np.int64)
    ascending = bool((np.diff(made) >= 0).all())
    inside = not made.size or (made[0] >= 0 and made[-1] < table.num_rows)
    if made.size != result.num_rows or not ascending or not inside:
        problem = (
            f"the function returned {result.num_rows} rows made from {made.size} rows; expected "
            "one number of an input row, in ascending order, for each row"
        )
        raise DataflowError(node.name, problem)
    return pa.Table.from_batches([result]) if isinstance(result, pa.RecordBatch) else result, made

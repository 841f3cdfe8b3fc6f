"""Columns computed by pyarrow expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from roost.errors import DataflowError

_NARROW = (pa.float16(), pa.float32())
_CAST = re.compile(r"to_type=(half)?float\b")  # in the text of an expression


def project(table: pa.Table, columns: Mapping[str, pc.Expression]) -> pa.Table:
    """Compute expressions; the rows stay in order."""
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration(
                "project", acero.ProjectNodeOptions(list(columns.values()), list(columns))
            ),
        ]
    )
    return plan.to_table(use_threads=False)


def expression_schema(
    operator: str, columns: Mapping[str, pc.Expression], schema: pa.Schema
) -> pa.Schema:
    """Return the columns that expressions compute.

    Raises :class:`DataflowError` with the column if an expression does not fit the schema.
    """
    if not columns:
        raise DataflowError(operator, "expected expressions by column, or a function")
    fields = []
    for name, expression in columns.items():
        if not isinstance(expression, pc.Expression):
            problem = f"expected a pyarrow expression, got {type(expression).__name__}"
            raise DataflowError(operator, problem, name)
        try:
            found = project(schema.empty_table(), {name: expression})
        except (pa.ArrowException, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            if unknown := re.match(r"No match for FieldRef\.Name\((.*?)\)", reason):
                reason = f"unknown column {unknown[1]!r} (known: {', '.join(schema.names)})"
            problem = f"expression {expression}: {reason}"
            raise DataflowError(operator, problem, name) from None
        type_ = found.schema.field(name).type
        if _is_narrowed(expression, type_, schema):
            problem = (
                f"expression {expression} has type {type_}, because pyarrow narrows a literal such "
                "as 0.5 beside integers; cast the integers to double, or the result to float"
            )
            raise DataflowError(operator, problem, name)
        fields.append(found.schema.field(name))
    return pa.schema(fields)


def _is_narrowed(expression: pc.Expression, type_: pa.DataType, schema: pa.Schema) -> bool:
    """Return whether a result has fewer digits than anything that the user named.

    A literal that float32 can hold becomes float32, so 0.5 would round large integers and 0.1 not.
    """
    if type_ not in _NARROW or any(field.type in _NARROW for field in schema):
        return False
    return _CAST.search(str(expression)) is None

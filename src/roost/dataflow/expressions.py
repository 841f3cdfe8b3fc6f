"""Columns computed by pyarrow expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from roost.errors import DataflowError


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
        fields.append(found.schema.field(name))
    return pa.schema(fields)

"""A small, safe language for conditions on the attributes of points.

A query may restrict the points it matches: ``fare > 50 and base in ('B02617', 'B02682')``. The
text is untrusted: it is never executed, and parsing it has a bounded cost. `parse` returns a tree
of immutable values, `check` validates the tree against the schema of the points, and a
`PredicateSet` evaluates arrays of (predicate, point) pairs, millions per second.

The language has comparisons, ``in``, ``between``, ``is null``, ``and``, ``or``, ``not``, bare
boolean attributes, and word search in strings (``note has any ('a', 'b')``). Comparisons accept
attributes, literals and arithmetic (``+ - * / %``, ``mod``, ``abs``). Nulls follow SQL's
three-valued logic. There are no other functions.

A `PairPredicate` evaluates a condition on pairs of rows of two tables, with names such as
``left.price``.
"""

from __future__ import annotations

from roost.predicate.ast import Expression
from roost.predicate.evaluate import PredicateSet
from roost.predicate.kinds import check
from roost.predicate.pairs import PairPredicate
from roost.predicate.parser import parse

__all__ = ["Expression", "PairPredicate", "PredicateSet", "check", "parse"]

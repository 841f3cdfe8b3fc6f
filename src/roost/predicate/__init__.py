"""A small, safe language of conditions on a point's attributes.

People who send queries may say which points they want: ``fare > 50 and base in ('B02617',
'B02682')``. Their text must never be run as code, must cost little to read, and must be decided
for millions of (query, point) pairs a second. So a text becomes a small tree of values
(`parse`), the tree is held against the points' schema (`check`), and a `PredicateSet` decides
whole arrays of pairs at once: predicates that differ only in their constants are one template
with an array of constants.

The language has comparisons of an attribute with a literal, ``in``, ``between``, ``is null``,
``and``, ``or``, ``not``, bare boolean attributes, and word search in text (``note has any ('a',
'b')``). Nulls follow SQL's three-valued logic. It has no arithmetic, no functions, and no
comparison of two attributes.
"""

from __future__ import annotations

from roost.predicate.ast import Expression
from roost.predicate.evaluate import PredicateSet
from roost.predicate.kinds import check
from roost.predicate.lexer import Limits
from roost.predicate.parser import parse

__all__ = ["Expression", "Limits", "PredicateSet", "check", "parse"]

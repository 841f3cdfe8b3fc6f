"""The syntax tree of a predicate: conditions joined by connectives, all immutable values.

A `Condition` is about one attribute and literals. A `Comparison` is about terms: attributes,
numbers and operations on them. ``x > 5`` is always a condition, which is faster to evaluate.

Spellings of one meaning are equal trees: ``5 < x`` is stored as ``x > 5``, and ``x not in (1)`` as
the negation of ``x in (1)``. ``erased`` is the tree without its constants, by which predicates are
grouped; ``bind`` inserts constants. Both visit constants in text order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

Value = bool | int | float | str
#: One constant, or the constants of a list of two or more.
Constant = Value | list[Value]

#: Reserved words; an attribute with such a name must be backquoted.
KEYWORDS = frozenset(
    ["all", "and", "any", "between", "false", "has", "in", "is", "not", "null", "or", "true"]
)
#: Operators of conditions that accept a list, which is one constant.
LIST_OPERATORS = frozenset(["in", "has any", "has all"])
WORD = re.compile(r"[^\W_]+")
IDENTIFIER = re.compile(r"[^\W\d]\w*")
INT64_MAX = 2**63 - 1


class Kind(enum.Enum):
    """The kind of value that a literal or an attribute has."""

    NUMBER = "number"
    STRING = "string"
    BOOLEAN = "boolean"
    TIME = "time"
    OTHER = "other"


#: What replaces a constant in an erased tree; the string is a word, so that ``has`` accepts it.
PLACEHOLDERS: dict[Kind, Value] = {Kind.NUMBER: 0, Kind.STRING: "x", Kind.BOOLEAN: False}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one attribute.

    The operator is ``= != < <= > >=``, ``between``, ``in``, ``has any``, ``has all``, ``is null``,
    or ``is true`` for a bare boolean attribute. ``has 'word'`` is ``has all`` of one word.
    """

    attribute: str
    operator: str
    kind: Kind | None = None  # of the constants; part of equality: ``true`` is not ``1``
    values: tuple[Value, ...] = ()

    def attributes(self) -> frozenset[str]:
        """Return the names of the attributes that the predicate reads."""
        return frozenset([self.attribute])

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions of the tree in text order."""
        yield self

    def bind(self, constants: Iterator[Constant]) -> Condition:
        """Return the same tree with other constants; a list of two or more is one constant.

        Raises ValueError if ``has`` would search for something other than a single word.
        """
        if not self.values:
            return self
        values: list[Value]
        if self.operator in LIST_OPERATORS:
            values = members_of(next(constants))
            if self.operator != "in" and not all(map(is_word, values)):
                raise ValueError("only single words can be searched for")
        else:
            values = [next(constants) for _ in self.values]  # type: ignore[misc]
        return Condition(self.attribute, self.operator, self.kind, tuple(values))

    @property
    def erased(self) -> Condition:
        """The tree with a placeholder for each constant; a list becomes one placeholder."""
        if self.kind is None:
            return self
        count = 1 if self.operator in LIST_OPERATORS else len(self.values)
        placeholders = (PLACEHOLDERS[self.kind],) * count
        return Condition(self.attribute, self.operator, self.kind, placeholders)


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal as a term; those of comparisons are numbers."""

    value: Any
    integer: bool  # part of equality, because ``x + 1`` and ``x + 1.0`` differ

    @classmethod
    def of(cls, value: Any) -> Literal:
        """Return the term of a literal; an integer beyond int64 counts as float64."""
        return cls(value, isinstance(value, int) and -INT64_MAX - 1 <= value <= INT64_MAX)

    def bind(self, constants: Iterator[Any]) -> Literal:
        """Return the next constant, or the array of a group's constants."""
        return Literal.of(next(constants))

    @property
    def erased(self) -> Literal:
        """The term with a placeholder of the same type."""
        return Literal(PLACEHOLDERS[Kind.NUMBER], self.integer)


@dataclass(frozen=True, slots=True)
class _Node:
    """An operator and its operands; an operand that is a string is the name of an attribute."""

    operator: str
    operands: tuple[Any, ...]

    def attributes(self) -> frozenset[str]:
        """Return the names of the attributes that the predicate reads."""
        names = [x for x in self.operands if isinstance(x, str)]
        others = [x for x in self.operands if not isinstance(x, str | Literal)]
        return frozenset(names).union(*[x.attributes() for x in others])

    def bind(self, constants: Iterator[Constant]) -> Self:
        """Return the same tree with other constants; see `Condition.bind`."""
        bound = [x if isinstance(x, str) else x.bind(constants) for x in self.operands]
        return type(self)(self.operator, tuple(bound))

    @property
    def erased(self) -> Self:
        """The tree with a placeholder for each constant."""
        erased = [x if isinstance(x, str) else x.erased for x in self.operands]
        return type(self)(self.operator, tuple(erased))


class Operation(_Node):
    """Arithmetic on terms.

    The operator is ``abs`` or ``negate`` with one operand, or one of the characters ``+ - * / %``
    for each operand after the first: ``a - b + c`` has the operator ``-+``, applied from the left.
    A chain is one node, so that only parentheses make a tree deep.
    """

    __slots__ = ()


class Comparison(_Node):
    """A comparison of terms: ``= != < <= > >=`` of two, or ``between`` of three."""

    __slots__ = ()

    def conditions(self) -> Iterator[Comparison]:
        """Yield the comparison."""
        yield self


class Connective(_Node):
    """A negation (``not``) of one operand, or ``and`` or ``or`` of two or more."""

    __slots__ = ()

    def conditions(self) -> Iterator[Condition | Comparison]:
        """Yield the conditions and comparisons of the tree in text order."""
        for operand in self.operands:
            yield from operand.conditions()


#: A value to compare: the name of an attribute, a number or arithmetic.
Term = str | Literal | Operation
#: A node of a predicate's tree.
Expression = Condition | Comparison | Connective


def is_word(value: Value) -> bool:
    """Return whether ``has`` can search for a value: a string of letters and digits only."""
    return isinstance(value, str) and WORD.fullmatch(value) is not None


def members_of(constant: Constant) -> list[Value]:
    """Return the members of a list; a single constant is a list of one."""
    return constant if isinstance(constant, list) else [constant]


def quote_name(name: str) -> str:
    """Return the name of an attribute as predicate text, backquoted if necessary."""
    if IDENTIFIER.fullmatch(name) and name.lower() not in KEYWORDS:
        return name
    return "`" + name.replace("`", "``") + "`"

"""What a predicate says, as a tree of immutable values.

Two trees are equal when they say the same in the same order, however they were spelled: the
flipped ``5 < x`` is stored as ``x > 5``, ``x not in (1)`` as the negation of ``x in (1)``. Every
node prints itself as canonical text that parses back to an equal tree. `Expression.erased` gives
the tree without its constants, by which predicates are grouped; `Expression.bind` puts constants
back. Both visit constants in the order of the text. Nothing here knows columns or rows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Value = bool | int | float | str
#: One constant, or the constants of a list of two or more.
Constant = Value | list[Value]

#: The words that have a meaning of their own; an attribute of such a name is backquoted.
KEYWORDS = frozenset(
    ["all", "and", "any", "between", "false", "has", "in", "is", "not", "null", "or", "true"]
)
WORD = re.compile(r"[^\W_]+")
IDENTIFIER = re.compile(r"[^\W\d]\w*")


class Kind(enum.Enum):
    """What sort of value a literal or an attribute has."""

    NUMBER = "number"
    TEXT = "text"
    BOOLEAN = "boolean"
    TIME = "time"
    OTHER = "other"


_ERASED: dict[Kind, Value] = {Kind.NUMBER: 0, Kind.TEXT: "x", Kind.BOOLEAN: False}


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: its kind, and the value as Python holds it.

    The kind takes part in equality, so that ``true`` is not ``1``.
    """

    kind: Kind
    value: Value

    def __str__(self) -> str:
        """Return canonical text."""
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        if isinstance(self.value, str):
            return "'" + self.value.replace("'", "''") + "'"
        return repr(self.value)

    @property
    def erased(self) -> Literal:
        """The stand-in for every literal of this kind."""
        return Literal(self.kind, _ERASED[self.kind])


class Expression:
    """A node of a predicate's tree: immutable, hashable, printable as canonical text."""

    __slots__ = ()

    def attributes(self) -> frozenset[str]:
        """Return the names of the attributes that the predicate reads."""
        return frozenset().union(*(child.attributes() for child in self.children()))

    def children(self) -> tuple[Expression, ...]:
        """Return the nodes directly below this one."""
        return ()

    def bind(self, constants: Iterator[Constant]) -> Expression:
        """Return the same tree with other constants.

        Parameters
        ----------
        constants
            The literals in the order of the text, a list of two or more as one constant.

        Raises
        ------
        ValueError
            Where a constant to search for with ``has`` is not a single word.
        """
        raise NotImplementedError

    @property
    def erased(self) -> Expression:
        """The tree with every constant replaced by its kind's stand-in."""
        raise NotImplementedError


def is_word(value: Value) -> bool:
    """Tell whether a literal can be looked for with ``has``: letters and digits only."""
    return isinstance(value, str) and WORD.fullmatch(value) is not None


def members_of(constant: Constant) -> list[Value]:
    """Return the members of a list, of which a single constant is the shortest."""
    return constant if isinstance(constant, list) else [constant]


def _single(kind: Kind, constant: Constant) -> Literal:
    assert not isinstance(constant, list), constant
    return Literal(kind, constant)


def quote_name(name: str) -> str:
    """Return an attribute's name as predicate text, backquoted where it must be."""
    if IDENTIFIER.fullmatch(name) and name.lower() not in KEYWORDS:
        return name
    return "`" + name.replace("`", "``") + "`"


def _print_list(literals: Sequence[Literal]) -> str:
    return "(" + ", ".join(map(str, literals)) + ")"


@dataclass(frozen=True, slots=True)
class Condition(Expression):
    """A condition on one attribute."""

    attribute: str

    def attributes(self) -> frozenset[str]:
        """Return the name of the one attribute."""
        return frozenset([self.attribute])


@dataclass(frozen=True, slots=True)
class Truth(Condition):
    """A bare boolean attribute: ``flag``."""

    def __str__(self) -> str:
        """Return canonical text."""
        return quote_name(self.attribute)

    def bind(self, constants: Iterator[Constant]) -> Truth:
        """Return the node itself: it has no constants."""
        return self

    @property
    def erased(self) -> Truth:
        """The node itself: it has no constants."""
        return self


@dataclass(frozen=True, slots=True)
class IsNull(Condition):
    """``attribute is null``."""

    def __str__(self) -> str:
        """Return canonical text."""
        return f"{quote_name(self.attribute)} is null"

    def bind(self, constants: Iterator[Constant]) -> IsNull:
        """Return the node itself: it has no constants."""
        return self

    @property
    def erased(self) -> IsNull:
        """The node itself: it has no constants."""
        return self


@dataclass(frozen=True, slots=True)
class Comparison(Condition):
    """``attribute operator literal``; the operator is one of ``= != < <= > >=``."""

    operator: str
    literal: Literal

    def __str__(self) -> str:
        """Return canonical text."""
        return f"{quote_name(self.attribute)} {self.operator} {self.literal}"

    def bind(self, constants: Iterator[Constant]) -> Comparison:
        """Return the comparison with the next constant."""
        literal = _single(self.literal.kind, next(constants))
        return Comparison(self.attribute, self.operator, literal)

    @property
    def erased(self) -> Comparison:
        """The comparison with its literal's stand-in."""
        return Comparison(self.attribute, self.operator, self.literal.erased)


@dataclass(frozen=True, slots=True)
class Between(Condition):
    """``attribute between low and high``, both ends included."""

    low: Literal
    high: Literal

    def __str__(self) -> str:
        """Return canonical text."""
        return f"{quote_name(self.attribute)} between {self.low} and {self.high}"

    def bind(self, constants: Iterator[Constant]) -> Between:
        """Return the range with the next two constants."""
        low = _single(self.low.kind, next(constants))
        return Between(self.attribute, low, _single(self.high.kind, next(constants)))

    @property
    def erased(self) -> Between:
        """The range with its ends' stand-ins."""
        return Between(self.attribute, self.low.erased, self.high.erased)


@dataclass(frozen=True, slots=True)
class In(Condition):
    """``attribute in (literal, ...)``; all literals are of one kind."""

    members: tuple[Literal, ...]

    def __str__(self) -> str:
        """Return canonical text."""
        return f"{quote_name(self.attribute)} in {_print_list(self.members)}"

    def bind(self, constants: Iterator[Constant]) -> In:
        """Return the membership test with the next list of constants."""
        kind = self.members[0].kind
        values = members_of(next(constants))
        return In(self.attribute, tuple([Literal(kind, value) for value in values]))

    @property
    def erased(self) -> In:
        """The membership test with one stand-in for the whole list."""
        return In(self.attribute, (self.members[0].erased,))


@dataclass(frozen=True, slots=True)
class Has(Condition):
    """``attribute has any (word, ...)`` or ``has all (...)``; ``has word`` is ``all`` of one."""

    every: bool
    words: tuple[Literal, ...]

    def __str__(self) -> str:
        """Return canonical text."""
        name = quote_name(self.attribute)
        if self.every and len(self.words) == 1:
            return f"{name} has {self.words[0]}"
        return f"{name} has {'all' if self.every else 'any'} {_print_list(self.words)}"

    def bind(self, constants: Iterator[Constant]) -> Has:
        """Return the word search with the next list of words."""
        values = members_of(next(constants))
        if not all(map(is_word, values)):
            raise ValueError("only single words can be searched for")
        words = tuple([Literal(Kind.TEXT, value) for value in values])
        return Has(self.attribute, self.every, words)

    @property
    def erased(self) -> Has:
        """The word search with one stand-in for all its words."""
        return Has(self.attribute, self.every, (self.words[0].erased,))


@dataclass(frozen=True, slots=True)
class Not(Expression):
    """The negation; of unknown it is unknown."""

    operand: Expression

    def __str__(self) -> str:
        """Return canonical text."""
        inner = self.operand
        if isinstance(inner, IsNull):
            return f"{quote_name(inner.attribute)} is not null"
        if isinstance(inner, In):
            return f"{quote_name(inner.attribute)} not in {_print_list(inner.members)}"
        return f"not ({inner})" if isinstance(inner, And | Or) else f"not {inner}"

    def children(self) -> tuple[Expression, ...]:
        """Return the negated node."""
        return (self.operand,)

    def bind(self, constants: Iterator[Constant]) -> Not:
        """Return the negation with other constants below it."""
        return Not(self.operand.bind(constants))

    @property
    def erased(self) -> Not:
        """The negation with stand-ins below it."""
        return Not(self.operand.erased)


@dataclass(frozen=True, slots=True)
class And(Expression):
    """All of two or more."""

    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        """Return canonical text."""
        wrap = And | Or
        return " and ".join(f"({x})" if isinstance(x, wrap) else str(x) for x in self.operands)

    def children(self) -> tuple[Expression, ...]:
        """Return the operands."""
        return self.operands

    def bind(self, constants: Iterator[Constant]) -> And:
        """Return the conjunction with other constants below it."""
        return And(tuple([operand.bind(constants) for operand in self.operands]))

    @property
    def erased(self) -> And:
        """The conjunction with stand-ins below it."""
        return And(tuple([operand.erased for operand in self.operands]))


@dataclass(frozen=True, slots=True)
class Or(Expression):
    """Any of two or more."""

    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        """Return canonical text."""
        return " or ".join(f"({x})" if isinstance(x, Or) else str(x) for x in self.operands)

    def children(self) -> tuple[Expression, ...]:
        """Return the operands."""
        return self.operands

    def bind(self, constants: Iterator[Constant]) -> Or:
        """Return the disjunction with other constants below it."""
        return Or(tuple([operand.bind(constants) for operand in self.operands]))

    @property
    def erased(self) -> Or:
        """The disjunction with stand-ins below it."""
        return Or(tuple([operand.erased for operand in self.operands]))

"""Conditions for the interpreter: a parser and an evaluator of their own, one tuple at a time.

The interpreter is the oracle of the engine, so it does not use :mod:`roost.predicate`. A condition
becomes a function from the values of a tuple, or of a pair of tuples, to true, false or None
(unknown), by SQL's three-valued logic. Texts are assumed to be valid: the graph was resolved.

Times, whether columns or literals, are whole nanoseconds; their difference is in seconds.
Comparisons are exact. Arithmetic on integers is exact, and unknown beyond int64; with a float it is
that of float64. The remainder has the sign of the dividend. Division by zero is unknown.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

Rows = tuple[Mapping[str, Any], ...]
"""The tuple that a predicate reads, or the left and the right one of a pair."""
Value = Callable[[Rows], Any]
"""Evaluates to a value; None is null, or an unknown truth value."""

_TOKENS = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[^\W\d]\w*)"
    r"|`(?P<quoted>(?:[^`]|``)+)`|'(?P<single>(?:[^']|'')*)'|\"(?P<double>(?:[^\"]|\"\")*)\""
    r"|(?P<operator><=|>=|<>|!=|==|[-+*/%=<>(),.]))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_WORD = re.compile(r"[^\W_]+")
_NS_OF = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def compile_condition(text: str, *schemas: pa.Schema) -> Callable[..., bool]:
    """Return a function that decides whether a condition is certainly true.

    With two schemas the condition reads ``left.`` and ``right.`` columns, and the function a left
    and a right tuple.
    """
    parser = _Parser(text, schemas)
    condition = parser.disjunction()
    assert parser.kind == "end", f"unread text in {text!r} at {parser.text!r}"
    return lambda *rows: condition(rows) is True


def _time_scale(type_: pa.DataType) -> int | None:
    """Return nanoseconds per unit of a type of times, else None."""
    if pa.types.is_timestamp(type_):
        return _NS_OF[type_.unit]
    if pa.types.is_date32(type_):
        return 86_400 * 10**9
    return 10**6 if pa.types.is_date64(type_) else None


class _Parser:
    """Recursive descent over one text; each method returns the function of what it read."""

    def __init__(self, text: str, schemas: tuple[pa.Schema, ...]) -> None:
        self._tokens = list(_TOKENS.finditer(text))
        self._schemas = schemas
        self._place = 0

    # ----------------------------------------------------------------- tokens

    @property
    def kind(self) -> str:
        """Kind of the next token."""
        if self._place == len(self._tokens):
            return "end"
        return str(self._tokens[self._place].lastgroup)

    @property
    def text(self) -> str:
        """The next token; words in lower case."""
        if self.kind in ("name", "operator"):
            return str(self._tokens[self._place][self.kind]).lower()
        return ""

    def _accept(self, *texts: str) -> str | None:
        found = self.text
        if found not in texts or not found:
            return None
        self._place += 1
        return found

    def _require(self, text: str) -> None:
        assert self._accept(text), f"expected {text!r}, got {self.text!r}"

    def _take(self) -> str:
        token = self._tokens[self._place]
        self._place += 1
        assert token.lastgroup is not None
        return str(token[token.lastgroup])

    # ----------------------------------------------------------------- connectives

    def disjunction(self) -> Value:
        """Read operands of ``or``."""
        operands = [self._conjunction()]
        while self._accept("or"):
            operands.append(self._conjunction())
        return operands[0] if len(operands) == 1 else lambda rows: _any(x(rows) for x in operands)

    def _conjunction(self) -> Value:
        operands = [self._negation()]
        while self._accept("and"):
            operands.append(self._negation())
        if len(operands) == 1:
            return operands[0]
        return lambda rows: _not(_any(_not(x(rows)) for x in operands))

    def _negation(self) -> Value:
        if self._accept("not"):
            operand = self._negation()
            return lambda rows: _not(operand(rows))
        return self._condition()

    # ----------------------------------------------------------------- conditions

    def _condition(self) -> Value:
        left = self._sum()
        comparison = self._accept(*_COMPARISONS)
        if comparison:
            return _strict(_COMPARISONS[comparison], left, self._sum())
        if self._accept("is"):
            negated = self._accept("not") is not None
            self._require("null")
            return lambda rows: (left(rows) is None) != negated
        if self._accept("has"):
            return self._has(left)
        negated = self._accept("not") is not None
        if self._accept("in"):
            members = self._list()
            found: Value = lambda rows: _any(_equal(left(rows), x(rows)) for x in members)  # noqa: E731
        elif self._accept("between"):
            low = self._sum()
            self._require("and")
            inside = (_strict(operator.ge, left, low), _strict(operator.le, left, self._sum()))
            found = lambda rows: _not(_any(_not(x(rows)) for x in inside))  # noqa: E731
        else:
            return left  # a boolean column, or the inside of parentheses
        return (lambda rows: _not(found(rows))) if negated else found

    def _has(self, left: Value) -> Value:
        every = True
        if self.text in ("any", "all"):
            every = self._accept("any", "all") == "all"
            words = self._list()
        else:
            words = [self._factor()]
        wanted = {word(()).casefold() for word in words}

        def has(text: str) -> bool:
            found = {word.casefold() for word in _WORD.findall(text)}
            return wanted <= found if every else bool(wanted & found)

        return _strict(has, left)

    def _list(self) -> list[Value]:
        self._require("(")
        members = [self._sum()]
        while self._accept(","):
            members.append(self._sum())
        self._require(")")
        return members

    # ----------------------------------------------------------------- arithmetic

    def _sum(self) -> Value:
        value = self._term()
        while symbol := self._accept("+", "-"):
            value = _strict(partial(_calculate, symbol), value, self._term())
        return value

    def _term(self) -> Value:
        value = self._factor()
        while symbol := self._accept("*", "/", "%", "mod"):
            symbol = "%" if symbol == "mod" else symbol
            value = _strict(partial(_calculate, symbol), value, self._factor())
        return value

    def _factor(self) -> Value:
        if self._accept("-"):
            return _strict(_signed(operator.neg), self._factor())
        if self._accept("+"):
            return self._factor()
        if self._accept("("):
            inner = self.disjunction()
            self._require(")")
            return inner
        if self.kind == "number":
            return _constant(_number(self._take()))
        if self.kind in ("single", "double"):
            quote = "'" if self.kind == "single" else '"'
            return _constant(self._take().replace(quote * 2, quote))
        return self._name()

    def _name(self) -> Value:
        quoted = self.kind == "quoted"
        word = self._take()
        if not quoted and word.lower() in ("true", "false"):
            return _constant(word.lower() == "true")
        if not quoted and word.lower() == "abs" and self._accept("("):
            value = self._sum()
            self._require(")")
            return _strict(_signed(abs), value)
        side = 0
        if len(self._schemas) == 2:
            if quoted:  # a whole qualified name
                name, _, word = word.partition(".")
            else:
                name = word
                self._require(".")
                quoted = self.kind == "quoted"
                word = self._take()
            side = ("left", "right").index(name.lower())
        column = word.replace("``", "`") if quoted else word
        scale = _time_scale(self._schemas[side].field(column).type)
        if scale is None:
            return lambda rows: rows[side][column]
        return _strict(_Time, lambda rows: rows[side][column], _constant(scale))


class _Time(int):
    """Nanoseconds since 1970, which compare with a text in ISO form."""

    def __new__(cls, ticks: int, scale: int = 1) -> _Time:
        return super().__new__(cls, ticks * scale)


def _constant(value: Any) -> Value:
    return lambda rows: value


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _strict(function: Callable[..., Any], *operands: Value) -> Value:
    """Return a function that is unknown if an operand is null."""

    def evaluate(rows: Rows) -> Any:
        values = [operand(rows) for operand in operands]
        if any(value is None for value in values):
            return None
        return function(*_timed(values))

    return evaluate


def _timed(values: list[Any]) -> list[Any]:
    """Read texts beside a time as times."""
    if not any(isinstance(value, _Time) for value in values):
        return values
    return [_Time(_nanoseconds(value)) if isinstance(value, str) else value for value in values]


def _nanoseconds(text: str) -> int:
    """Return the nanoseconds since 1970 of a time in ISO form, which is UTC without an offset."""
    fraction = re.search(r"\.(\d{1,9})", text)
    moment = dt.datetime.fromisoformat(text.replace(fraction[0], "") if fraction else text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return round(moment.timestamp()) * 10**9 + int(fraction[1].ljust(9, "0") if fraction else 0)


def _equal(left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    left, right = _timed([left, right])
    return bool(left == right)


def _any(truths: Any) -> bool | None:
    """Return the disjunction in three-valued logic."""
    found = list(truths)
    if any(truth is True for truth in found):
        return True
    return None if any(truth is None for truth in found) else False


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _calculate(symbol: str, left: Any, right: Any) -> Any:
    """Return the result of an operator; unknown for a divisor of zero, or beyond int64."""
    if symbol == "-" and isinstance(left, _Time):
        return (int(left) - int(right)) / 10**9  # seconds
    if symbol in "/%" and right == 0:
        return None
    if symbol == "/" or isinstance(left, float) or isinstance(right, float):
        return _calculate_floats(symbol, float(left), float(right))
    if symbol == "%":  # with the sign of the dividend
        return _integer(abs(left) % abs(right) * (-1 if left < 0 else 1))
    return _integer({"+": left + right, "-": left - right, "*": left * right}[symbol])


def _calculate_floats(symbol: str, left: float, right: float) -> float:
    match symbol:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right
    return math.nan if math.isinf(left) else math.fmod(left, right)


def _integer(value: int) -> int | None:
    return value if -(2**63) <= value < 2**63 else None


def _signed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of a number that is unknown beyond int64."""

    def apply(value: Any) -> Any:
        return function(value) if isinstance(value, float) else _integer(function(value))

    return apply

"""Requested output of a standing query in place of single matches: aggregates or nearest points.

A request has a text, such as ``count, avg(fare), quantile(fare, 0.5)``, or a number of nearest
points. The text is untrusted, so it is read with the tokens and limits of predicates. Column names
follow the rules of predicates: identifiers, or any text between backquotes or double quotes.

This module only parses and prints; :mod:`roost.window.panes` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from roost.errors import ConfigError, PredicateError
from roost.predicate.lexer import TEXT_LENGTH_MAX, Token, check_text, tokenise
from roost.window.aggregate import FUNCTIONS, KEY, AggregateSpec, Function

NEAREST_MAX = 1000
NEAREST_KEY = "nearest"
CACHED_TEXTS = 1 << 14

_TAKES_RANK = "quantile"


def parse_aggregates(text: str) -> AggregateSpec:
    """Parse functions with their columns, separated by commas; names are case-insensitive.

    Raises :class:`ConfigError` with the position of the error and what is accepted there.

    Examples
    --------
    >>> parse_aggregates("count, AVG(fare), quantile(`end`, .5)").names
    ('count', 'avg(fare)', 'quantile(`end`, 0.5)')
    """
    try:
        check_text(text)
        tokens = list(tokenise(text))
    except PredicateError as error:
        raise ConfigError(KEY, text, f"a list of functions ({error})") from None
    spec = AggregateSpec(_Reader(tokens).functions())
    # The canonical text has more spaces, and must be parsable again.
    if len(", ".join(spec.names)) > TEXT_LENGTH_MAX:
        takes = f"a list of at most {TEXT_LENGTH_MAX} characters"
        raise ConfigError(KEY, f"{len(spec.names)} functions", takes)
    return spec


class _Reader:
    """Recursive-descent parser with one token of lookahead."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._place]

    def functions(self) -> tuple[Function, ...]:
        functions = [self._function()]
        while self._accept(","):
            functions.append(self._function())
        if self._next.kind != "end":
            raise self._expected("',' or the end")
        return tuple(functions)

    def _function(self) -> Function:
        name = self._next.text.lower()
        if name not in FUNCTIONS:
            raise self._expected(f"one of {', '.join(FUNCTIONS)}")
        self._place += 1
        column, rank = None, None
        if self._accept("("):
            column = self._column()
            if name == _TAKES_RANK:
                self._require(",")
                rank = self._rank()
            self._require(")")
        elif name != "count":
            raise self._expected(f"'(' and a column after {name}")
        return name, column, rank

    def _column(self) -> str:
        token = self._next
        quoted = token.kind == "literal" and token.text[0] == '"'
        if not (token.kind == "name" or quoted):
            raise self._expected("a column")
        self._place += 1
        return str(token.value)

    def _rank(self) -> float:
        value = self._next.value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0:
            self._place += 1
            return float(value)
        raise self._expected("a quantile's rank from 0 to 1")

    def _accept(self, text: str) -> bool:
        found = self._next.kind == "operator" and self._next.text == text
        self._place += found
        return found

    def _require(self, text: str) -> None:
        if not self._accept(text):
            raise self._expected(repr(text))

    def _expected(self, what: str) -> ConfigError:
        token = self._next
        hint = " (backquote a keyword to use it as a name)" if token.kind == "keyword" else ""
        return ConfigError(KEY, str(token), f"{what} at position {token.place}{hint}")


@dataclass(frozen=True)
class RequestedOutput:
    """Either aggregates over the points of the window that a query matches, or the nearest of them.

    ``nearest`` is the number of points nearest to the centre of the query's circle, from 1 to
    ``NEAREST_MAX``.

    Examples
    --------
    >>> RequestedOutput.parse("aggregate count,avg( fare )").text
    'aggregate count, avg(fare)'
    """

    aggregate: AggregateSpec | None = None
    nearest: int | None = None

    def __post_init__(self) -> None:
        """Validate that exactly one output is requested."""
        if (self.aggregate is None) == (self.nearest is None):
            raise ConfigError(KEY, self.text, "either aggregates or a number of nearest points")
        number = self.nearest
        if number is None:
            return
        if isinstance(number, bool) or not isinstance(number, int):
            raise ConfigError(NEAREST_KEY, number, "a whole number")
        if not 1 <= number <= NEAREST_MAX:
            raise ConfigError(NEAREST_KEY, number, f"a number from 1 to {NEAREST_MAX}")

    @property
    def text(self) -> str:
        """The canonical text, which :meth:`parse` inverts."""
        parts = []
        if self.aggregate is not None:
            parts.append(f"{KEY} {', '.join(self.aggregate.names)}")
        if self.nearest is not None:
            parts.append(f"{NEAREST_KEY} {self.nearest}")
        return " and ".join(parts)

    @staticmethod
    @lru_cache(maxsize=CACHED_TEXTS)
    def parse(text: str) -> RequestedOutput:
        """Parse ``aggregate ...`` or ``nearest ...``; raise ``ConfigError`` for other texts."""
        first, _, rest = text.strip().partition(" ")
        if first == KEY:
            return RequestedOutput(aggregate=parse_aggregates(rest))
        if first != NEAREST_KEY:
            raise ConfigError(KEY, text, f"'{KEY}' or '{NEAREST_KEY}', and what")
        number = rest.strip()
        if not (number.isascii() and number.isdecimal() and len(number) <= len(str(NEAREST_MAX))):
            raise ConfigError(NEAREST_KEY, number, f"a number from 1 to {NEAREST_MAX}")
        return RequestedOutput(nearest=int(number))

    def check(self, attributes: pa.Schema, id_type: pa.DataType) -> None:
        """Raise :class:`ConfigError` if a column does not exist or does not fit its function."""
        if self.aggregate is not None:
            self.aggregate.result_schema(attributes, id_type)

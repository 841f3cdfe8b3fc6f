r"""From text to tokens, twice: once with places for error messages, once fast.

A hundred thousand predicates arrive that are a few dozen sentences with other constants in them.
`scan` takes a text apart in a few microseconds into its *key* (the tokens, with every literal
replaced by its kind and every list of literals by one mark) and its constants; equal keys parse to
equal trees but for the constants, so the parser runs once per key. `tokenise` makes the tokens
with their places that the parser reads. Both use the same pattern and the same rules for literals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from roost.errors import PredicateError
from roost.predicate.ast import IDENTIFIER, KEYWORDS, Constant, Kind, Value


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a predicate may be.

    Parameters
    ----------
    text_length
        Characters in the text.
    depth
        Parentheses and ``not`` inside one another.
    list_length
        Members of one list.
    """

    text_length: int = 4096
    depth: int = 64
    list_length: int = 1024


DEFAULT_LIMITS = Limits()

#: The key's mark for a literal of a kind, and for a list of two or more of them.
_MARKS = {Kind.NUMBER: 0, Kind.TEXT: 1, Kind.BOOLEAN: 2}
_LIST_OFFSET = 3

# A number's token takes every letter and digit that touches it, so that `5and` is one bad number.
_TOKEN = re.compile(
    r"[^\W\d]\w*"
    r"|[-+]?\.?[0-9][\w.]*+(?:(?<=[eE])[-+][\w.]*+)?"
    r"|'[^']*+(?:''[^']*+)*+'"
    r'|"[^"]*+(?:""[^"]*+)*+"'
    r"|`[^`]*+(?:``[^`]*+)*+`"
    r"|<=|>=|<>|!=|==|[=<>(),]"
    r"|\S"
)
# A group takes part exactly where the number is not an integer.
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?")
#: An integer of so many digits is still within the range of float64.
_DIGITS_MAX = 300
_NUMBER_START = frozenset("0123456789+-.")
_OPERATORS = frozenset(["=", "==", "!=", "<>", "<", "<=", ">", ">=", "(", ")", ","])
_BOOLEANS = {"true": True, "false": False}

#: Tokens that are no literals, as they stand in keys; seen names join them while they are few.
_PIECES_MAX = 4096
_PIECE_LENGTH_MAX = 64
_pieces = {token: token for token in (*_OPERATORS, *KEYWORDS) if token not in _BOOLEANS}

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of predicate text.

    Parameters
    ----------
    kind
        ``literal``, ``name``, ``keyword``, ``operator`` or ``end``.
    text
        As it was written; keywords in lower case.
    place
        Where it starts, counted from 1.
    value
        The value of a literal, the name of an attribute.
    """

    kind: str
    text: str
    place: int
    value: Value = ""

    def __str__(self) -> str:
        """Return the token as error messages show it."""
        if self.kind == "end":
            return "the end of the text"
        return self.text if len(self.text) <= 40 else self.text[:37] + "..."


def fail(place: int, problem: str) -> PredicateError:
    """Return the error for a problem at a place of the text."""
    return PredicateError(f"position {place}: {problem}")


def check_text(text: object, limits: Limits) -> None:
    """Refuse what is not text, is too long, or cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise PredicateError(f"expected text, got {type(text).__name__}")
    if len(text) > limits.text_length:
        problem = f"expected at most {limits.text_length} characters, got {len(text)}"
        raise fail(limits.text_length + 1, problem)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise fail(error.start + 1, "expected a character, got half of one") from None


def _read_number(token: str) -> int | float | None:
    """Return a number token's value; none where it is malformed or beyond float64."""
    match = _NUMBER.fullmatch(token)
    if match is None:
        return None
    if match.lastindex is None:
        return int(token) if len(token) <= _DIGITS_MAX else None
    value = float(token)
    return value if math.isfinite(value) else None


def _unquote(token: str) -> str:
    mark = token[0]
    inner = token[1:-1]
    return inner.replace(mark + mark, mark) if mark in inner else inner


def _literal(token: str) -> tuple[Kind, Value] | None:
    """Return a token's kind and value; none where it is no literal or a malformed one."""
    first = token[0]
    if first in "'\"":
        return (Kind.TEXT, _unquote(token)) if len(token) > 1 else None
    if first in _NUMBER_START:
        number = _read_number(token)
        return None if number is None else (Kind.NUMBER, number)
    boolean = _BOOLEANS.get(token.lower())
    return None if boolean is None else (Kind.BOOLEAN, boolean)


def scan(text: str) -> tuple[Key, list[Constant]]:
    """Take a text apart into its key and its constants.

    Malformed pieces stay in the key as they are, so that no text that parses has the same key.

    Parameters
    ----------
    text
        A text that passed `check_text`.

    Returns
    -------
    key, constants
        A list of two or more literals is one list of constants; any other literal a constant.
    """
    key: list[str | int] = []
    constants: list[Constant] = []
    for token in _TOKEN.findall(text):
        piece = _pieces.get(token)
        if piece is not None:
            key.append(piece)
            continue
        literal = _literal(token)
        if literal is None:
            key.append(_piece(token))
            continue
        kind, value = literal
        mark = _MARKS[kind]
        if len(key) > 1 and key[-1] == "," and key[-2] in (mark, mark + _LIST_OFFSET):
            _extend(key, constants, mark, value)
        else:
            key.append(mark)
            constants.append(value)
    return tuple(key), constants


def _extend(key: list[str | int], constants: list[Constant], mark: int, value: Value) -> None:
    """Add a literal after a comma to the literal or the list before the comma."""
    key.pop()
    last = constants[-1]
    if isinstance(last, list):
        last.append(value)
    else:
        key[-1] = mark + _LIST_OFFSET
        constants[-1] = [last, value]


def _piece(token: str) -> str:
    lower = token.lower()
    piece = lower if lower in KEYWORDS else token
    if len(_pieces) < _PIECES_MAX and len(token) <= _PIECE_LENGTH_MAX:
        _pieces[token] = piece
    return piece


def tokenise(text: str) -> Iterator[Token]:
    """Yield the tokens of a text with their places, and last the end."""
    for match in _TOKEN.finditer(text):
        yield _token(match.group(), match.start() + 1)
    yield Token("end", "", len(text) + 1)


def _token(text: str, place: int) -> Token:
    literal = _literal(text)
    if literal is not None:
        return Token("literal", text, place, literal[1])
    if text[0] == "`" and len(text) > 1:
        return Token("name", text, place, _unquote(text))
    if text.lower() in KEYWORDS:
        return Token("keyword", text.lower(), place)
    if text in _OPERATORS:
        return Token("operator", text, place)
    if IDENTIFIER.fullmatch(text):
        return Token("name", text, place, text)
    raise fail(place, _describe_malformed(text))


def _describe_malformed(text: str) -> str:
    first = text[0]
    if first in "'\"":
        return f"expected a closing {first} for the text that starts here"
    if first == "`":
        return "expected a closing ` for the name that starts here"
    if len(text) > 1:
        return f"expected a number within the range of float64, got {text[:40]}"
    return f"expected an attribute, a literal or an operator, got {text!r}"

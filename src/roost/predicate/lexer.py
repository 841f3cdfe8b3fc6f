"""Tokens of a predicate text, in two forms: with positions for the parser, and as a fast key.

Among a hundred thousand predicates, few differ in more than their constants. `scan` splits a text
into its *key* (the tokens, with one mark for each literal or list of literals) and its constants,
at about 1 µs per token. Texts with equal keys parse to equal trees except for the constants, so
the parser runs once per key. `tokenise` yields the tokens with positions for error messages. Both
use the same pattern and the same rules for literals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roost.errors import PredicateError
from roost.predicate.ast import (
    IDENTIFIER,
    KEYWORDS,
    PLACEHOLDERS,
    Constant,
    Kind,
    Value,
    members_of,
)

#: Limits of a predicate: characters, levels of parentheses and ``not``, members of one list.
TEXT_LENGTH_MAX = 4096
DEPTH_MAX = 64
LIST_LENGTH_MAX = 1024

# A number consumes all adjacent letters and digits, so that `5and` is one malformed number. `--` is
# malformed, because it starts a comment in SQL.
_TOKEN = re.compile(
    r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+"
    r"|[-+]?\.?[0-9][\w.]*+(?:(?<=[eE])[-+][\w.]*+)?"
    r"|'[^']*+(?:''[^']*+)*+'"
    r'|"[^"]*+(?:""[^"]*+)*+"'
    r"|`[^`]*+(?:``[^`]*+)*+`"
    r"|<=|>=|<>|!=|==|--"
    r"|\S"
)
# A group matches if and only if the number is not an integer.
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?")
#: An integer with this many digits is within the range of float64.
_DIGITS_MAX = 300
_LITERAL_START = frozenset("'\"0123456789+-.")
_SIGNS = frozenset("+-")
_OPERATORS = frozenset(["=", "==", "!=", "<>", "<", "<=", ">", ">=", *"(),+-*/%"])
_BOOLEANS = {"true": True, "false": False}
_FIXED = {token: token for token in (*_OPERATORS, *KEYWORDS)}

#: A key has a token's text or, for a literal, its kind's index; for a list, the index plus three.
Key = tuple[str | int, ...]
_MARKS = {bool: 0, int: 1, float: 1, str: 2}
_PLACEHOLDERS = [PLACEHOLDERS[kind] for kind in (Kind.BOOLEAN, Kind.NUMBER, Kind.STRING)]
_LIST_OFFSET = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A token of predicate text."""

    kind: str  # "literal", "name", "keyword", "operator" or "end"
    text: str  # as written; keywords in lower case
    place: int  # position of the first character, counted from 1
    value: Value = ""  # of a literal; the name of an attribute

    def __str__(self) -> str:
        """Return the token as error messages show it."""
        if self.kind == "end":
            return "the end of the text"
        return self.text if len(self.text) <= 40 else self.text[:37] + "..."


def error_at(place: int, problem: str) -> PredicateError:
    """Return the error for a problem at a position of the text."""
    return PredicateError(f"position {place}: {problem}")


def check_text(text: object) -> None:
    """Raise `PredicateError` for a value that is not a string, is too long or is not Unicode."""
    if not isinstance(text, str):
        raise PredicateError(f"expected a string, got {type(text).__name__}")
    if len(text) > TEXT_LENGTH_MAX:
        problem = f"expected at most {TEXT_LENGTH_MAX} characters, got {len(text)}"
        raise error_at(TEXT_LENGTH_MAX + 1, problem)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise error_at(error.start + 1, "expected Unicode, got a lone surrogate") from None


def lists_fit(constants: Sequence[Constant]) -> bool:
    """Return whether all lists are within the limit, which a key does not determine."""
    return all([len(members_of(constant)) <= LIST_LENGTH_MAX for constant in constants])


def scan(text: str) -> tuple[Key, list[Constant]]:
    """Split a text that passed `check_text` into its key and its constants.

    Two or more literals in a list are one constant. Malformed tokens are part of the key as they
    are, so that no valid text has the same key.
    """
    key: list[str | int] = []
    constants: list[Constant] = []
    for token in _TOKEN.findall(text):
        if token[0] in _LITERAL_START:
            if _is_signed(token) and key and _ends_operand(key[-1]):
                key.append(token[0])
                token = token[1:]
            value = _read_literal(token)
            item = token
        else:
            item = _FIXED.get(token) or _normalise(token)
            value = _BOOLEANS.get(item)
        if value is None:
            key.append(item)
            continue
        mark = _MARKS[type(value)]
        if len(key) > 1 and key[-1] == "," and key[-2] in (mark, mark + _LIST_OFFSET):
            _extend_list(key, constants, mark, value)
        else:
            key.append(mark)
            constants.append(value)
    return tuple(key), constants


def _is_signed(token: str) -> bool:
    return token[0] in _SIGNS and token[1:] not in ("", "-")


def _ends_operand(item: str | int) -> bool:
    """Return whether a sign after this item of a key is an operator, not part of a number."""
    return isinstance(item, int) or item == ")" or item not in _FIXED


def _extend_list(key: list[str | int], constants: list[Constant], mark: int, value: Value) -> None:
    """Add the literal after a comma to the literal or list before the comma."""
    key.pop()
    last = constants[-1]
    if isinstance(last, list):
        last.append(value)
    else:
        key[-1] = mark + _LIST_OFFSET
        constants[-1] = [last, value]


def _normalise(word: str) -> str:
    """Return a keyword in lower case, another word as it is."""
    lower = word.lower()
    return lower if lower in KEYWORDS else word


def _read_literal(token: str) -> Value | None:
    """Return the value of a number or a quoted string; none if it is malformed."""
    quote = token[0]
    if quote in "'\"":
        return token[1:-1].replace(quote * 2, quote) if len(token) > 1 else None
    match = _NUMBER.fullmatch(token)
    if match is None:
        return None
    if match.lastindex is None:
        return int(token) if len(token) <= _DIGITS_MAX else None
    number = float(token)
    return number if math.isfinite(number) else None


def tokenise(text: str) -> Iterator[Token]:
    """Yield the tokens of a text with their positions, and finally the end."""
    operand = False  # whether the previous token can end an operand; see `_ends_operand`
    for match in _TOKEN.finditer(text):
        word, place = match.group(), match.start() + 1
        if operand and _is_signed(word):
            yield _read_token(word[0], place)
            word, place = word[1:], place + 1
        token = _read_token(word, place)
        operand = token.kind in ("name", "literal") or token.text == ")"
        yield token
    yield Token("end", "", len(text) + 1)


def tokenise_key(key: Key) -> Iterator[Token]:
    """Yield the tokens of a key, with placeholders for its constants and without positions."""
    for item in key:
        if isinstance(item, str):
            yield _read_token(item, 0)
            continue
        literal = Token("literal", "", 0, _PLACEHOLDERS[item % _LIST_OFFSET])
        yield from [literal, Token("operator", ",", 0), literal][: 3 if item >= _LIST_OFFSET else 1]
    yield Token("end", "", 0)


def _read_token(text: str, place: int) -> Token:
    first, word = text[0], _normalise(text)
    value = _read_literal(text) if first in _LITERAL_START else _BOOLEANS.get(word)
    if value is not None:
        return Token("literal", text, place, value)
    if first == "`" and len(text) > 1:
        return Token("name", text, place, text[1:-1].replace("``", "`"))
    if word in KEYWORDS:
        return Token("keyword", word, place)
    if text in _OPERATORS:
        return Token("operator", text, place)
    if IDENTIFIER.match(text):  # possibly qualified
        return Token("name", text, place, text)
    raise error_at(place, _describe_malformed(text))


def _describe_malformed(text: str) -> str:
    if text in "'\"`":
        return f"expected a closing {text} for the {'name' if text == '`' else 'string'} here"
    if len(text) > 1 and text != "--":
        return f"expected a number within the range of float64, got {text[:40]}"
    return f"expected an attribute, a literal or an operator, got {text!r}"

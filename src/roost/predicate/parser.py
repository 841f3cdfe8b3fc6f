"""Recursive-descent parser for predicates.

::

    expression  = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | "(" expression ")" | condition
    condition   = attribute [ comparison literal
                            | [ "not" ] "in" list
                            | [ "not" ] "between" literal "and" literal
                            | "is" [ "not" ] "null"
                            | "has" ( literal | ( "any" | "all" ) list ) ]
                | literal comparison attribute
    list        = "(" literal { "," literal } ")"

A text is untrusted: its length, nesting and lists are bounded, and every error gives the position,
what was found and what is accepted. Trees are cached by the key of the text (see
`roost.predicate.lexer`), so a text that differs from an earlier one only in its constants is not
parsed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from roost.errors import PredicateError
from roost.predicate.ast import Condition, Connective, Expression, Kind, Value, is_word
from roost.predicate.lexer import (
    DEPTH_MAX,
    LIST_LENGTH_MAX,
    Key,
    Token,
    check_text,
    error_at,
    lists_fit,
    scan,
    tokenise,
    tokenise_key,
)

#: From the weakest to the strongest.
_CONNECTIVES = ("or", "and")
#: Each comparison as stored, and as stored if the literal is on its left.
_COMPARISONS = {
    "=": ("=", "="), "==": ("=", "="), "!=": ("!=", "!="), "<>": ("!=", "!="),
    "<": ("<", ">"), "<=": ("<=", ">="), ">": (">", "<"), ">=": (">=", "<="),
}  # fmt: skip
_KIND_OF = {bool: Kind.BOOLEAN, int: Kind.NUMBER, float: Kind.NUMBER, str: Kind.STRING}
_LITERALS = {
    Kind.NUMBER: "a number",
    Kind.STRING: "a string in quotes",
    Kind.BOOLEAN: "true or false",
}
_ANY_LITERAL = "a number, a string in quotes, true or false"
_AFTER_ATTRIBUTE = "a comparison, 'in', 'between', 'is', 'has', 'and', 'or' or the end"

#: Only short keys are cached: the cache of an untrusted text must not exhaust the memory.
_CACHED_TOKENS = 64
_CACHED_KEYS = 1024


def parse(text: str) -> Expression:
    """Return the tree of a predicate text, such as ``fare > 50 and not shared``.

    Raises `PredicateError` with the position, what was found and what is accepted if the text is
    not a predicate or is too large.

    Examples
    --------
    >>> tree = parse("5 < fare AND base not in ('a', 'b')")
    >>> tree == parse("fare > 5 and not base in ('a', 'b')")
    True
    >>> sorted(tree.attributes())
    ['base', 'fare']
    """
    check_text(text)
    key, constants = scan(text)
    if len(key) <= _CACHED_TOKENS and lists_fit(constants):
        try:
            return _parse_key(key).bind(iter(constants))
        except (PredicateError, ValueError):
            pass  # A key has no positions: the parser below reports the error.
    return _Parser(tokenise(text)).parse()


@lru_cache(maxsize=_CACHED_KEYS)
def _parse_key(key: Key) -> Expression:
    """Return the tree that all texts with a key share, without their constants."""
    return _Parser(tokenise_key(key)).parse().erased


class _Parser:
    """One pass over the tokens of one text, with one token of lookahead."""

    def __init__(self, tokens: Iterator[Token]) -> None:
        self._tokens = tokens
        self._depth = 0
        self._next = next(tokens)

    def parse(self) -> Expression:
        expression = self._expression()
        if self._next.kind != "end":
            raise self._expected("'and', 'or' or the end")
        return expression

    def _expression(self, level: int = 0) -> Expression:
        """Parse the connective of a level of precedence, and those that bind stronger."""
        if level == len(_CONNECTIVES):
            return self._negation()
        operator = _CONNECTIVES[level]
        operands = [self._expression(level + 1)]
        while self._accept(operator):
            operands.append(self._expression(level + 1))
        return Connective(operator, tuple(operands)) if len(operands) > 1 else operands[0]

    def _negation(self) -> Expression:
        start = self._next
        if not (self._accept("not") or self._accept("(")):
            return self._condition()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise error_at(start.place, f"expected at most {DEPTH_MAX} levels of nesting")
        if start.text == "not":
            inner: Expression = Connective("not", (self._negation(),))
        else:
            inner = self._expression()
            self._require(")", "'and', 'or' or ')'")
        self._depth -= 1
        return inner

    def _condition(self) -> Expression:
        if self._next.kind == "literal":
            values = [self._literal()]
            operator = self._comparison()[1]
            return _build(self._attribute("an attribute"), operator, values)
        attribute = self._attribute("an attribute, a literal, 'not' or '('")
        if self._next.text in _COMPARISONS and self._next.kind == "operator":
            return _build(attribute, self._comparison()[0], [self._literal()])
        if self._accept("is"):
            negated = self._accept("not")
            self._require("null", "'null'" if negated else "'null' or 'not null'")
            condition = Condition(attribute, "is null")
        elif self._accept("has"):
            return self._has(attribute)
        else:
            negated = self._accept("not")
            if self._accept("in"):
                condition = _build(attribute, "in", self._list())
            elif self._accept("between"):
                low = self._literal()
                self._require("and", "'and' and the upper bound")
                condition = _build(attribute, "between", [low, self._literal(low)])
            elif negated:
                raise self._expected("'in' or 'between'")
            elif self._next.kind in ("name", "literal"):
                raise self._expected(_AFTER_ATTRIBUTE)
            else:
                return Condition(attribute, "is true")
        return Connective("not", (condition,)) if negated else condition

    def _has(self, attribute: str) -> Expression:
        for quantifier in ("any", "all"):
            if self._accept(quantifier):
                return _build(attribute, f"has {quantifier}", self._list(words=True))
        if self._next.kind != "literal":
            raise self._expected("a word in quotes, 'any' or 'all'")
        return _build(attribute, "has all", [self._word()])

    def _list(self, words: bool = False) -> list[Value]:
        self._require("(", "'(' and a list of literals")
        members = [self._word() if words else self._literal()]
        while self._accept(","):
            if len(members) == LIST_LENGTH_MAX:
                problem = f"expected at most {LIST_LENGTH_MAX} members in a list"
                raise error_at(self._next.place, problem)
            members.append(self._word() if words else self._literal(members[0]))
        self._require(")", "',' or ')'")
        return members

    def _word(self) -> Value:
        if not is_word(self._next.value) or self._next.kind != "literal":
            raise self._expected("one word of letters and digits, in quotes")
        return self._literal()

    def _literal(self, first: Value | None = None) -> Value:
        """Consume a literal, of the same kind as the first of a list or range."""
        token = self._next
        kind = None if first is None else _KIND_OF[type(first)]
        accepted = _ANY_LITERAL if kind is None else _LITERALS[kind]
        if token.kind != "literal":
            hint = " (to test for null, use 'is null')" if token.text == "null" else ""
            raise self._expected(accepted + hint)
        if kind is not None and _KIND_OF[type(token.value)] is not kind:
            raise self._expected(f"{accepted}, like the first literal")
        self._advance()
        return token.value

    def _attribute(self, expected: str) -> str:
        token = self._next
        if token.kind != "name":
            raise self._expected(expected)
        self._advance()
        return str(token.value)

    def _comparison(self) -> tuple[str, str]:
        operators = _COMPARISONS.get(self._next.text)
        if operators is None or self._next.kind != "operator":
            raise self._expected("a comparison (= != < <= > >=)")
        self._advance()
        return operators

    def _accept(self, text: str) -> bool:
        """Consume the next token if it is this keyword or operator."""
        if self._next.text != text or self._next.kind not in ("keyword", "operator"):
            return False
        self._advance()
        return True

    def _require(self, text: str, expected: str) -> None:
        if not self._accept(text):
            raise self._expected(expected)

    def _advance(self) -> None:
        self._next = next(self._tokens)

    def _expected(self, what: str) -> PredicateError:
        token = self._next
        hint = " (backquote a keyword to use it as a name)" if token.kind == "keyword" else ""
        return error_at(token.place, f"expected {what}, got {token}{hint}")


def _build(attribute: str, operator: str, values: list[Value]) -> Condition:
    return Condition(attribute, operator, _KIND_OF[type(values[0])], tuple(values))

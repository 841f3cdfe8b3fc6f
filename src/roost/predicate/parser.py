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
                | term ( comparison term | [ "not" ] "between" term "and" term )
    list        = "(" literal { "," literal } ")"
    term        = product { ( "+" | "-" ) product }
    product     = factor { ( "*" | "/" | "%" | "mod" ) factor }
    factor      = number | attribute | "-" factor | "abs" "(" term ")" | "(" term ")"

A parenthesis at the start of a condition opens an expression or a term. The parser reads its
content as either and decides at the end of the content, so it never goes back. ``mod`` and ``abs``
are not reserved: ``mod`` is an operator only after a factor, and ``abs`` a function only before a
parenthesis, where no attribute can stand.

A text is untrusted: its length, nesting and lists are bounded, and every error gives the position,
what was found and what is accepted. Trees are cached by the key of the text (see
`roost.predicate.lexer`), so a text that differs from an earlier one only in its constants is not
parsed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard

from roost.errors import PredicateError
from roost.predicate.ast import (
    Comparison,
    Condition,
    Connective,
    Expression,
    Kind,
    Literal,
    Operation,
    Term,
    Value,
    is_word,
)
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
_COMPARISON = "a comparison (= != < <= > >=)"
_TERM = "a number, an attribute, '-', 'abs' or '('"
_ANY_TERM = "a number, a string in quotes, true, false, an attribute, '-', 'abs' or '('"
#: Operators of terms by precedence, each as stored.
_ARITHMETIC = ({"+": "+", "-": "-"}, {"*": "*", "/": "/", "%": "%", "mod": "%"})

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
        expression = self._truth(self._expression())
        if self._next.kind != "end":
            raise self._expected("'and', 'or' or the end")
        return expression

    def _expression(self, level: int = 0) -> Expression | Term:
        """Parse the connective of a level of precedence, and those that bind stronger.

        The result is a term if there is no connective and no comparison: a boolean attribute, or
        the content of a parenthesis before an operator.
        """
        if level == len(_CONNECTIVES):
            return self._negation()
        operator = _CONNECTIVES[level]
        first = self._expression(level + 1)
        if not self._follows(operator):
            return first
        operands = [self._truth(first)]
        while self._accept(operator):
            operands.append(self._truth(self._expression(level + 1)))
        return Connective(operator, tuple(operands))

    def _negation(self) -> Expression | Term:
        start = self._next
        if self._accept("not"):
            self._enter(start)
            negation = Connective("not", (self._truth(self._negation()),))
            self._depth -= 1
            return negation
        if not self._accept("("):
            return self._condition()
        self._enter(start)
        inner = self._expression()
        accepted = "an operator" if isinstance(inner, Term) else "'and', 'or'"
        self._require(")", f"{accepted} or ')'")
        self._depth -= 1
        return self._condition(inner) if isinstance(inner, Term) else inner

    def _truth(self, parsed: Expression | Term) -> Expression:
        """Return an expression; a boolean attribute is one."""
        if isinstance(parsed, str):
            return Condition(parsed, "is true")
        if isinstance(parsed, Literal | Operation):
            raise self._expected(_COMPARISON)
        return parsed

    def _enter(self, start: Token) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise error_at(start.place, f"expected at most {DEPTH_MAX} levels of nesting")

    def _condition(self, first: Term | None = None) -> Expression | Term:
        """Parse a condition, after its first factor if that was in parentheses."""
        left = self._term("an attribute, a literal, 'not' or '('", text=True, first=first)
        if _is_text(left) or (self._next.text in _COMPARISONS and self._next.kind == "operator"):
            return self._compare(left, self._comparison())
        negated = self._accept("not")
        if self._accept("between"):
            condition: Expression = self._between(left)
        elif not isinstance(left, str):
            if negated or self._next.kind in ("name", "literal", "keyword"):
                raise self._expected("'between'" if negated else f"{_COMPARISON} or 'between'")
            return left
        elif self._accept("in"):
            condition = _build(left, "in", self._list())
        elif negated:
            raise self._expected("'in' or 'between'")
        elif self._accept("has"):
            return self._has(left)
        elif self._accept("is"):
            negated = self._accept("not")
            self._require("null", "'null'" if negated else "'null' or 'not null'")
            condition = Condition(left, "is null")
        elif self._next.kind in ("name", "literal"):
            raise self._expected(_AFTER_ATTRIBUTE)
        else:
            return left
        return Connective("not", (condition,)) if negated else condition

    def _compare(self, left: Term, operators: tuple[str, str]) -> Expression:
        start, text = self._next, isinstance(left, str)
        right = self._term(_ANY_TERM if text else _TERM, text)
        if isinstance(left, str) and isinstance(right, Literal):
            return _build(left, operators[0], [right.value])
        if isinstance(left, Literal) and isinstance(right, str):
            return _build(right, operators[1], [left.value])
        comparison = Comparison(operators[0], (left, right))
        if _is_text(left) or not comparison.attributes():
            raise error_at(start.place, f"expected an attribute, got {start}")
        return comparison

    def _between(self, left: Term) -> Expression:
        start, text = self._next, isinstance(left, str)
        low = self._term(_ANY_TERM if text else _TERM, text)
        self._require("and", "'and' and the upper bound")
        high = Literal.of(self._literal(low.value)) if _is_text(low) else self._term(_TERM)
        if isinstance(left, str) and isinstance(low, Literal) and isinstance(high, Literal):
            return _build(left, "between", [low.value, high.value])
        comparison = Comparison("between", (left, low, high))
        if not comparison.attributes():
            raise error_at(start.place, f"expected an attribute, got {start}")
        return comparison

    def _term(
        self, expected: str, text: bool = False, level: int = 0, first: Term | None = None
    ) -> Term:
        """Parse the operators of a level of precedence, and those that bind stronger.

        With ``text``, the term may be a string or a boolean.
        """
        if level == len(_ARITHMETIC):
            return self._factor(expected, text) if first is None else first
        operands = [self._term(expected, text, level + 1, first)]
        applied = ""
        while self._next.kind in ("operator", "name") and not _is_text(operands[0]):
            operator = _ARITHMETIC[level].get(self._next.text.lower())
            if operator is None:
                break
            self._advance()
            applied += operator
            operands.append(self._term(_TERM, level=level + 1))
        return Operation(applied, tuple(operands)) if applied else operands[0]

    def _factor(self, expected: str, text: bool = False) -> Term:
        start = self._next
        if start.kind == "literal" and (text or type(start.value) in (int, float)):
            return Literal.of(self._literal())
        if start.kind == "name":
            name = self._attribute(expected)
            if start.text.lower() == "abs" and self._follows("("):
                return Operation("abs", (self._factor(expected),))
            return name
        if self._accept("-"):
            self._enter(start)
            inner: Term = Operation("negate", (self._factor(_TERM),))
        elif self._accept("("):
            self._enter(start)
            inner = self._term(_TERM)
            self._require(")", "an operator or ')'")
        else:
            raise self._expected(expected)
        self._depth -= 1
        return inner

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
            raise self._expected(accepted)
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
            raise self._expected(_COMPARISON)
        self._advance()
        return operators

    def _follows(self, text: str) -> bool:
        """Return whether the next token is this keyword or operator."""
        return self._next.text == text and self._next.kind in ("keyword", "operator")

    def _accept(self, text: str) -> bool:
        """Consume the next token if it is this keyword or operator."""
        if not self._follows(text):
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
        hint = ""
        if token.kind == "keyword":
            null = "to test for null, use 'is null'; " if token.text == "null" else ""
            hint = f" ({null}backquote a keyword to use it as a name)"
        return error_at(token.place, f"expected {what}, got {token}{hint}")


def _is_text(term: Term) -> TypeGuard[Literal]:
    return isinstance(term, Literal) and type(term.value) in (str, bool)


def _build(attribute: str, operator: str, values: list[Value]) -> Condition:
    return Condition(attribute, operator, _KIND_OF[type(values[0])], tuple(values))

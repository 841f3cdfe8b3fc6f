"""From text to tree: recursive descent over a grammar of one screen.

::

    expression  = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | "(" expression ")" | test
    test        = attribute [ comparison literal
                            | [ "not" ] "in" list
                            | [ "not" ] "between" literal "and" literal
                            | "is" [ "not" ] "null"
                            | "has" ( literal | ( "any" | "all" ) list ) ]
                | literal comparison attribute
    list        = "(" literal { "," literal } ")"

A text is untrusted: its length, nesting and lists are bounded, and every refusal says where and
what was expected. Trees are kept by the text's key (see `roost.predicate.lexer`), so a text that
differs from an earlier one only in its constants is not parsed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from roost.errors import PredicateError
from roost.predicate.ast import (
    And,
    Between,
    Comparison,
    Constant,
    Expression,
    Has,
    In,
    IsNull,
    Kind,
    Literal,
    Not,
    Or,
    Truth,
    Value,
    is_word,
    members_of,
)
from roost.predicate.lexer import DEFAULT_LIMITS, Key, Limits, check_text, fail, scan, tokenise

_OPERATORS = {
    "=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip
_FLIPPED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_NAMES = {
    Kind.NUMBER: "a number",
    Kind.TEXT: "a text in quotes",
    Kind.BOOLEAN: "true or false",
}
_AFTER_ATTRIBUTE = "a comparison, 'in', 'between', 'is', 'has', 'and', 'or' or the end"

#: Keys are kept while they are short and few, so that no sender can fill the memory with them.
_KEPT_TOKENS = 64
_KEPT_KEYS = 1024
_kept: dict[Key, tuple[Expression, int]] = {}


def parse(text: str, limits: Limits = DEFAULT_LIMITS) -> Expression:
    """Return the tree of a predicate text.

    Parameters
    ----------
    text
        The predicate, such as ``fare > 50 and not shared``.
    limits
        How large it may be.

    Raises
    ------
    PredicateError
        Where the text is not a predicate or is too large; says where and what was expected.

    Examples
    --------
    >>> tree = parse("5 < fare AND base not in ('a', 'b')")
    >>> str(tree)
    "fare > 5 and base not in ('a', 'b')"
    >>> sorted(tree.attributes())
    ['base', 'fare']
    """
    check_text(text, limits)
    key, constants = scan(text)
    pattern, depth = _kept.get(key, (None, 0))
    if pattern is not None and depth <= limits.depth and lists_fit(constants, limits):
        try:
            return pattern.bind(iter(constants))
        except ValueError:
            pass  # The parser below says what is wrong with the constant, and where.
    parser = _Parser(text, limits)
    expression = parser.parse()
    if len(key) <= _KEPT_TOKENS:
        if len(_kept) >= _KEPT_KEYS:
            _kept.clear()
        _kept[key] = expression.erased, parser.deepest
    return expression


def lists_fit(constants: Sequence[Constant], limits: Limits) -> bool:
    """Tell whether no list is longer than allowed; a text's key does not say that."""
    return all([len(members_of(constant)) <= limits.list_length for constant in constants])


class _Parser:
    """One pass over the tokens of one text, always looking at the next token."""

    def __init__(self, text: str, limits: Limits) -> None:
        self._tokens = tokenise(text)
        self._limits = limits
        self._depth = 0
        self.deepest = 0
        self._next = next(self._tokens)

    def parse(self) -> Expression:
        expression = self._expression()
        if self._next.kind != "end":
            raise self._expected("'and', 'or' or the end")
        return expression

    def _expression(self) -> Expression:
        operands = [self._conjunction()]
        while self._accept("or"):
            operands.append(self._conjunction())
        return Or(tuple(operands)) if len(operands) > 1 else operands[0]

    def _conjunction(self) -> Expression:
        operands = [self._negation()]
        while self._accept("and"):
            operands.append(self._negation())
        return And(tuple(operands)) if len(operands) > 1 else operands[0]

    def _negation(self) -> Expression:
        start = self._next
        if not (self._accept("not") or self._accept("(")):
            return self._test()
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        if self._depth > self._limits.depth:
            raise fail(start.place, f"expected at most {self._limits.depth} levels of nesting")
        if start.text == "not":
            inner: Expression = Not(self._negation())
        else:
            inner = self._expression()
            self._require(")", "'and', 'or' or ')'")
        self._depth -= 1
        return inner

    def _test(self) -> Expression:
        if self._next.kind == "literal":
            return self._flipped_comparison()
        attribute = self._attribute("an attribute, a literal, 'not' or '('")
        if self._next.text in _OPERATORS and self._next.kind == "operator":
            return Comparison(attribute, self._operator(), self._literal())
        if self._accept("is"):
            negated = self._accept("not")
            self._require("null", "'null'" if negated else "'null' or 'not null'")
            return self._negate(IsNull(attribute), negated)
        if self._accept("has"):
            return self._has(attribute)
        if self._accept("not"):
            return Not(self._in_or_between(attribute, "'in' or 'between'"))
        if self._next.text in ("in", "between") and self._next.kind == "keyword":
            return self._in_or_between(attribute, "")
        if self._next.kind in ("name", "literal"):
            raise self._expected(_AFTER_ATTRIBUTE)
        return Truth(attribute)

    def _flipped_comparison(self) -> Expression:
        literal = self._literal()
        operator = _FLIPPED[self._operator()]
        return Comparison(self._attribute("an attribute"), operator, literal)

    def _in_or_between(self, attribute: str, expected: str) -> Expression:
        if self._accept("in"):
            return In(attribute, self._list())
        self._require("between", expected)
        low = self._literal()
        self._require("and", "'and' and the upper end")
        return Between(attribute, low, self._literal(low.kind))

    def _has(self, attribute: str) -> Expression:
        if self._accept("any"):
            return Has(attribute, False, self._list(words=True))
        if self._accept("all"):
            return Has(attribute, True, self._list(words=True))
        if self._next.kind != "literal":
            raise self._expected("a word in quotes, 'any' or 'all'")
        return Has(attribute, True, (self._word(),))

    def _list(self, words: bool = False) -> tuple[Literal, ...]:
        self._require("(", "'(' and a list of literals")
        members = [self._word() if words else self._literal()]
        while self._accept(","):
            if len(members) == self._limits.list_length:
                problem = f"expected at most {self._limits.list_length} members in a list"
                raise fail(self._next.place, problem)
            members.append(self._word() if words else self._literal(members[0].kind))
        self._require(")", "',' or ')'")
        return tuple(members)

    def _word(self) -> Literal:
        if not is_word(self._next.value) or self._next.kind != "literal":
            raise self._expected("one word of letters and digits, in quotes")
        return self._literal(Kind.TEXT)

    def _literal(self, kind: Kind | None = None) -> Literal:
        token = self._next
        if token.kind != "literal":
            wanted = "a number, a text in quotes, true or false" if kind is None else _NAMES[kind]
            hint = " (for null: 'is null')" if token.text == "null" else ""
            raise self._expected(wanted + hint)
        literal = Literal(_kind(token.value), token.value)
        if kind is not None and literal.kind is not kind:
            raise self._expected(f"{_NAMES[kind]}, as before")
        self._advance()
        return literal

    def _attribute(self, expected: str) -> str:
        token = self._next
        if token.kind != "name":
            raise self._expected(expected)
        self._advance()
        return str(token.value)

    def _operator(self) -> str:
        operator = _OPERATORS.get(self._next.text)
        if operator is None or self._next.kind != "operator":
            raise self._expected("a comparison (= != < <= > >=)")
        self._advance()
        return operator

    def _accept(self, text: str) -> bool:
        """Step over the next token if it is this keyword or operator."""
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
        return fail(token.place, f"expected {what}, got {token}{hint}")

    @staticmethod
    def _negate(expression: Expression, negated: bool) -> Expression:
        return Not(expression) if negated else expression


def _kind(value: Value) -> Kind:
    if isinstance(value, bool):
        return Kind.BOOLEAN
    return Kind.TEXT if isinstance(value, str) else Kind.NUMBER

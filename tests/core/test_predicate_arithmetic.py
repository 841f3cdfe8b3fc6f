"""Arithmetic and comparisons of attributes, compared with an interpreter of one row at a time.

The interpreter follows ``docs/queries.md`` with Python's integers and floats, which are exact and
compare exactly. It shares no code with the predicates.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickle
import time
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import PredicateError
from roost.predicate import PairPredicate, PredicateSet, check, pairs, parse, parser
from roost.predicate.ast import Condition, Connective, Kind
from roost.predicate.lexer import tokenise

NS = 10**9
UNITS_NS = {"s": NS, "ms": 10**6, "us": 10**3, "ns": 1}

# --------------------------------------------------------------------------- columns


def near(*numbers: int) -> st.SearchStrategy[int]:
    """Draw integers close to those at which rounding and overflow occur."""
    return st.one_of(*(st.integers(n - 2, n + 2) for n in numbers))


LONGS = near(0, 0, 0, 2**31, 2**53, -(2**53), 2**62, 2**63 - 3, -(2**63) + 2)
SPECIAL = [math.inf, -math.inf, math.nan, -0.0, 2.0**53, -(2.0**63), 2.0**63, 1e308, 5e-324]
FLOATS = st.sampled_from([0.0, 0.5, -2.5, 3.0, 7.0, *SPECIAL])
NUMBERS = {
    "tiny": (pa.int8(), st.integers(-128, 127)),
    "a": (pa.int64(), LONGS),
    "b": (pa.int64(), LONGS),
    "mod": (pa.dictionary(pa.int8(), pa.int32()), st.integers(-3, 3)),
    "big": (pa.uint64(), near(2, 2**53, 2**63, 2**64 - 3)),
    "f": (pa.float64(), FLOATS),
    "abs": (pa.float32(), st.sampled_from([0.0, 0.5, -1.5, math.inf, math.nan])),
}
SCHEMA = pa.schema([(name, type_) for name, (type_, _) in NUMBERS.items()])


def to_arrow(values: list[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(type_):
        return pa.array(values, type_.value_type).dictionary_encode().cast(type_)
    return pa.array(values, type_)


# --------------------------------------------------------------------------- the oracle

Tree = tuple[Any, ...]
COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def int64(value: int) -> int | None:
    return value if -(2**63) <= value < 2**63 else None


def fmod(x: float, y: float) -> float:
    return math.nan if math.isinf(x) or math.isnan(x) or math.isnan(y) else math.fmod(x, y)


def value_of(tree: Tree, row: dict[str, Any]) -> Any:
    """Return the value of a term; None is unknown."""
    tag, *rest = tree
    if tag == "name":
        return row[rest[0]]
    if tag == "number":
        is_long = isinstance(rest[0], int) and int64(rest[0]) is None
        return float(rest[0]) if is_long else rest[0]
    values = [value_of(x, row) for x in rest]
    if None in values:
        return None
    if tag == "/" or any(isinstance(x, float) for x in values):
        return real([float(x) for x in values], tag)
    return None if None in map(int64, values) else whole(values, tag)


def whole(values: list[int], tag: str) -> int | None:
    x, y = (*values, 0)[:2]
    if tag in ("negate", "abs"):
        return int64(-x if tag == "negate" else abs(x))
    if tag == "%":
        return None if y == 0 else int(math.copysign(1, x)) * (abs(x) % abs(y))
    return int64({"+": x + y, "-": x - y, "*": x * y}[tag])


def real(values: list[float], tag: str) -> float | None:
    x, y = (*values, 0.0)[:2]
    if tag in "/%" and y == 0:
        return None
    if tag in ("negate", "abs"):
        return -x if tag == "negate" else abs(x)
    if tag in "/%":
        return x / y if tag == "/" else fmod(x, y)
    return float({"+": x + y, "-": x - y, "*": x * y}[tag])


def holds(tree: Tree, row: dict[str, Any]) -> bool | None:
    """Return the truth of a condition; None is unknown."""
    tag, *rest = tree
    if tag == "not":
        inner = holds(rest[0], row)
        return None if inner is None else not inner
    if tag in ("and", "or"):
        results = [holds(x, row) for x in rest]
        decisive = tag == "or"
        if decisive in results:
            return decisive
        return None if None in results else not decisive
    if tag == "between":
        x, low, high = rest
        return holds(("and", (">=", x, low), ("<=", x, high)), row)
    left, right = [value_of(x, row) for x in rest]
    return None if left is None or right is None else COMPARE[tag](left, right)


# --------------------------------------------------------------------------- random trees

NAMES = st.sampled_from(list(NUMBERS)).map(lambda name: ("name", name))
LITERALS = st.one_of(
    st.integers(-9, 9),
    near(2**53, 2**63, -(2**63), 2**64),
    st.sampled_from([0.0, 0.5, 2.5, -7.0, 2.0**53, 2.0**63, 1e300]),
).map(lambda value: ("number", value))


@cache
def terms() -> st.SearchStrategy[Tree]:
    return st.recursive(
        st.one_of(NAMES, NAMES, LITERALS),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from("+-*/%"), inner, inner),
            st.tuples(st.sampled_from(["negate", "abs"]), inner),
        ),
        max_leaves=5,
    )


@cache
def conditions() -> st.SearchStrategy[Tree]:
    compared = st.one_of(
        st.tuples(st.sampled_from(list(COMPARE)), terms(), terms()),
        st.tuples(st.just("between"), terms(), terms(), terms()),
    ).filter(lambda tree: "name" in str(tree))
    return st.recursive(
        compared,
        lambda inner: st.one_of(
            st.tuples(st.just("not"), inner),
            st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        ),
        max_leaves=3,
    )


LEVEL = {"+": 0, "-": 0, "*": 1, "/": 1, "%": 1, "negate": 2, "abs": 3, "name": 3, "number": 3}


def show(tree: Tree, draw: Any) -> str:
    """Print a term with only the parentheses that precedence requires, sometimes more."""
    tag, *rest = tree
    if tag == "name":
        return str(rest[0])
    if tag == "number":
        return str(rest[0])
    if tag == "abs":
        return f"ABS ({show(rest[0], draw)})"
    level = LEVEL[tag]
    # Only the left operand may have the same precedence: operators associate to the left.
    parts = [wrap(x, level + (k > 0), draw) for k, x in enumerate(rest)]
    if tag == "negate":
        return "- " + parts[0]
    space = draw(st.sampled_from(["", " "]))
    if parts[1].startswith(("+", "-")):
        space = " "
    if tag == "%" and draw(st.booleans()):
        return f"{parts[0]} {draw(st.sampled_from(['mod', 'MOD']))} {parts[1]}"
    return f"{parts[0]}{space}{tag}{space}{parts[1]}"


def wrap(tree: Tree, level: int, draw: Any) -> str:
    text = show(tree, draw)
    return f"({text})" if LEVEL[tree[0]] < level or draw(st.integers(0, 5)) == 0 else text


def show_condition(tree: Tree, draw: Any) -> str:
    tag, *rest = tree
    if tag == "not":
        return f"not ({show_condition(rest[0], draw)})"
    if tag in ("and", "or"):
        return f" {tag} ".join(f"({show_condition(x, draw)})" for x in rest)
    parts = [wrap(x, 0, draw) for x in rest]
    if tag == "between":
        return f"{parts[0]} between {parts[1]} and {parts[2]}"
    return f"{parts[0]} {tag} {parts[1]}"


@examples(200)
@given(data=st.data())
def test_random_comparisons_agree_with_the_row_interpreter(data: st.DataObject) -> None:
    forest = data.draw(st.lists(conditions(), min_size=1, max_size=3))
    texts = [show_condition(tree, data.draw) for tree in forest]
    count = data.draw(st.integers(1, 6))
    values = {
        name: data.draw(
            st.lists(st.one_of(st.none(), drawn, drawn), min_size=count, max_size=count)
        )
        for name, (_, drawn) in NUMBERS.items()
    }
    columns = {name: to_arrow(column, NUMBERS[name][0]) for name, column in values.items()}
    ids, rows = np.divmod(np.arange(len(texts) * count), count)
    results = PredicateSet(texts, SCHEMA).evaluate(ids, rows, columns)
    for number, row, result in zip(ids, rows, results, strict=True):
        known = {name: column[row] for name, column in values.items()}
        assert result == (holds(forest[number], known) is True), (texts[number], known)
    for text in texts:
        assert parser._Parser(tokenise(text)).parse() == parse(text), "the cached tree differs"


@examples(100)
@given(data=st.data())
def test_random_pairs_agree_with_the_row_interpreter(data: st.DataObject) -> None:
    tree = data.draw(conditions())
    sides = {name: data.draw(st.sampled_from(["left", "right"])) for name in NUMBERS}
    text = show_condition(qualify(tree, sides), data.draw)
    counts = {side: data.draw(st.integers(0, 5)) for side in ("left", "right")}
    tables, rows = {}, {}
    for side, count in counts.items():
        rows[side] = {
            name: data.draw(st.lists(st.one_of(st.none(), drawn), min_size=count, max_size=count))
            for name, (_, drawn) in NUMBERS.items()
        }
        arrays = [to_arrow(rows[side][name], NUMBERS[name][0]) for name in NUMBERS]
        tables[side] = pa.table(arrays, SCHEMA)
    expected = np.zeros((counts["left"], counts["right"]), dtype=bool)
    for left, right in np.ndindex(expected.shape):
        at = {"left": left, "right": right}
        row = {name: rows[side][name][at[side]] for name, side in sides.items()}
        expected[left, right] = holds(tree, row) is True
    predicate = PairPredicate(text, SCHEMA, SCHEMA)
    assert predicate.product(tables["left"], tables["right"]).tolist() == expected.tolist(), text
    picked = np.indices(expected.shape).reshape(2, -1)
    got = predicate.evaluate(tables["left"], tables["right"], *picked)
    assert got.tolist() == expected.ravel().tolist()


def qualify(tree: Tree, sides: dict[str, str]) -> Tree:
    if tree[0] == "name":
        return ("name", f"{sides[tree[1]]}.{tree[1]}")
    return (tree[0], *(qualify(x, sides) if isinstance(x, tuple) else x for x in tree[1:]))


def test_interpreter_detects_wrong_results() -> None:
    x, seven = ("name", "a"), ("number", 7)
    assert value_of(("%", x, seven), {"a": -9}) == -2
    assert value_of(("+", x, seven), {"a": 2**63 - 1}) is None
    assert holds(("<", x, seven), {"a": 7}) is False
    assert holds(("not", ("<", x, seven)), {"a": None}) is None


# --------------------------------------------------------------------------- single rows


def matches(text: str, schema: pa.Schema = SCHEMA, /, **row: Any) -> bool:
    columns = {name: to_arrow([value], schema.field(name).type) for name, value in row.items()}
    zero = np.zeros(1, dtype=np.int32)
    return bool(PredicateSet([text], schema).evaluate(zero, zero, columns)[0])


SINGLE = [
    ("a + 1 > b", {"a": 2**63 - 1, "b": 0}, False),  # overflow is unknown
    ("not a + 1 > b", {"a": 2**63 - 1, "b": 0}, False),
    ("a - 1 < 0 or not a - 1 < 0", {"a": -(2**63)}, False),
    ("a * b = 0", {"a": 2**32, "b": 2**32}, False),
    ("not a * b = 0", {"a": 2**32, "b": 2**32}, False),
    ("a * b < 0", {"a": 2**31, "b": -(2**32)}, True),
    ("a * b = -9223372036854775808", {"a": 2**31, "b": -(2**32)}, True),
    ("abs(a) > 0 or not abs(a) > 0", {"a": -(2**63)}, False),
    ("-a > 0 or not -a > 0", {"a": -(2**63)}, False),
    ("a + 0 = -9223372036854775808", {"a": -(2**63)}, True),
    ("a / b = 0 or not a / b = 0", {"a": 1, "b": 0}, False),
    ("a mod b = 0 or not a mod b = 0", {"a": 1, "b": 0}, False),
    ("f mod 0.0 = 0 or f / 0 > 0 or not f / 0 > 0", {"f": 1.5}, False),
    ("a mod b = 0", {"a": -(2**63), "b": -1}, True),
    ("a / b = 0.5", {"a": 1, "b": 2}, True),
    ("a mod 3 = -1", {"a": -7}, True),
    ("a mod -3 = 1", {"a": 7}, True),
    ("a mod - 3 = 1", {"a": 7}, True),
    ("a % 3 = 1", {"a": 7}, True),
    ("f % 2 = -1.5", {"f": -3.5}, True),
    ("a > f", {"a": 2**53 + 1, "f": 2.0**53}, True),
    ("a = f", {"a": 2**53 + 1, "f": 2.0**53}, False),
    ("f < a", {"a": 2**53 + 1, "f": 2.0**53}, True),
    ("a < f", {"a": 2**63 - 1, "f": 2.0**63}, True),
    ("a >= f", {"a": -(2**63), "f": -(2.0**63)}, True),
    ("big = f", {"big": 2**64 - 1, "f": 2.0**64}, False),
    ("big > a", {"big": 2**63, "a": -1}, True),
    ("big > a", {"big": 2**64 - 1, "a": 2**63 - 1}, True),
    ("big + 0 > 0 or not big + 0 > 0", {"big": 2**63}, False),
    ("a + 1 = 9007199254740993.0", {"a": 2**53}, False),
    ("a + 1 > 9007199254740992.0", {"a": 2**53}, True),
    ("a + 1.0 = 9007199254740992", {"a": 2**53}, True),
    ("a + 9223372036854775808 = 9223372036854775808", {"a": 1}, True),  # float64
    ("f = f", {"f": math.nan}, False),
    ("f != f", {"f": math.nan}, True),
    ("not f < f + 1", {"f": math.nan}, True),
    ("f * 2 = f", {"f": math.inf}, True),
    ("a + b > 0 or a is null", {"a": None, "b": 1}, True),
    ("not a = b", {"a": None, "b": 1}, False),
    ("a not between b and 3", {"a": 5, "b": None}, True),  # false and unknown is false
    ("a between b and 3", {"a": 2, "b": None}, False),
    ("a between b - 1 and b + 1", {"a": 5, "b": 4}, True),
    ("a + 1 not between 2 and 5", {"a": 5}, True),
    ("5 between a and b", {"a": 5, "b": 5}, True),
    ("a - b - 1 = 2", {"a": 5, "b": 2}, True),
    ("a - (b - 1) = 4", {"a": 5, "b": 2}, True),
    ("a / b / 2 = 2", {"a": 8, "b": 2}, True),
    ("a + b * 2 = 9", {"a": 5, "b": 2}, True),
    ("(a + b) * 2 = 14", {"a": 5, "b": 2}, True),
    ("((a + b)) * (2) = (14)", {"a": 5, "b": 2}, True),
    ("-a mod 3 = -2", {"a": 5}, True),
    ("- -a = 5", {"a": 5}, True),
    ("a-1=4 and a -1 = 4 and a- 1 = 4 and a+-1=4", {"a": 5}, True),
    ("2-1 = a", {"a": 1}, True),
    ("a = 2 * 3 - 1", {"a": 5}, True),
    ("mod mod mod = 0", {"mod": 3}, True),
    ("mod -1 = 2", {"mod": 3}, True),
    ("abs(abs) > abs", {"abs": -1.5}, True),
    ("abs > 1 and mod = 3", {"abs": 1.5, "mod": 3}, True),
    ("tiny * tiny * tiny = -2097152", {"tiny": -128}, True),  # computed in int64
]


@pytest.mark.parametrize(("text", "row", "expected"), SINGLE)
def test_arithmetic_of_one_row(text: str, row: dict[str, Any], expected: bool) -> None:
    assert matches(text, **row) == expected


TYPED = pa.schema(
    [
        ("s", pa.timestamp("s")),
        ("us", pa.timestamp("us", "UTC")),
        ("ns", pa.timestamp("ns")),
        ("day", pa.date32()),
        ("price", pa.decimal128(9, 2)),
        ("cost", pa.decimal128(38, 4)),
        ("n", pa.int64()),
        ("yes", pa.bool_()),
        ("no", pa.bool_()),
        ("text", pa.string()),
        ("code", pa.dictionary(pa.int8(), pa.string())),
    ]
)
KINDS = [
    ("us = s", {"us": 3 * 10**6, "s": 3}, True),
    ("us > s", {"us": 3 * 10**6 + 1, "s": 3}, True),
    ("us - s = 0.000001", {"us": 3 * 10**6 + 1, "s": 3}, True),
    ("us - s between 0.1 and 0.1", {"us": 3_100_000, "s": 3}, True),
    ("s - us < 0 and abs(s - us) <= 60", {"us": 63 * 10**6, "s": 3}, True),
    ("us - s - 1 = 0", {"us": 4 * 10**6, "s": 3}, True),
    ("s > ns", {"s": 2**40, "ns": 2**62}, True),  # beyond int64 in nanoseconds
    ("s - ns > 1e12", {"s": 2**40, "ns": 0}, True),
    ("day < us and us - day = 0.5", {"day": 1, "us": 86_400_500_000}, True),
    ("day - day = 0 and day = day", {"day": 7}, True),
    ("us between s and s", {"us": 3 * 10**6, "s": 3}, True),
    ("us = s", {"us": None, "s": 3}, False),
    ("price = cost", {"price": Decimal("1.10"), "cost": Decimal("1.1000")}, True),
    ("price < cost", {"price": Decimal("1.10"), "cost": Decimal("1.1001")}, True),
    ("price > n", {"price": Decimal("3.01"), "n": 3}, True),
    ("yes = no", {"yes": True, "no": True}, True),
    ("yes != no", {"yes": True, "no": False}, True),
    ("text = code", {"text": "a", "code": "a"}, True),
    ("text < code", {"text": "Z", "code": "a"}, True),
    ("text != code", {"text": "a", "code": None}, False),
    ("text > code", {"text": "\U0001f600", "code": "\uffee"}, True),
    ("text between code and text", {"text": "b", "code": "a"}, True),
]


@pytest.mark.parametrize(("text", "row", "expected"), KINDS)
def test_times_decimals_booleans_and_strings(
    text: str, row: dict[str, Any], expected: bool
) -> None:
    assert matches(text, TYPED, **row) == expected


@pytest.mark.parametrize("compared", list(COMPARE))
def test_strings_of_two_columns_compare_by_code_points(compared: str) -> None:
    rng = np.random.default_rng(4)
    words = ["", "a", "A", "ab", "é", "\uffee", "\U0001f600", None]
    texts = [words[n] for n in rng.integers(0, len(words), 300)]
    codes = [words[n] for n in rng.integers(0, len(words), 300)]
    chunked = pa.chunked_array([pa.array(texts[:7]), pa.array(texts[7:])])
    encoded = pa.DictionaryArray.from_arrays(  # a dictionary with a null and duplicates
        pa.array([words.index(x) + 8 * (k % 2) for k, x in enumerate(codes)], pa.int8()),
        pa.array(words * 2),
    )
    expected = [
        x is not None and y is not None and COMPARE[compared](x.encode(), y.encode())
        for x, y in zip(texts, codes, strict=True)
    ]
    columns = {"text": chunked, "code": encoded}
    predicates = PredicateSet([f"text {compared} code"], TYPED)
    got = predicates.evaluate(np.zeros(300, int), np.arange(300), columns)
    assert got.tolist() == expected
    few = np.array([5, 250, 7])
    assert predicates.evaluate(np.zeros(3, int), few, columns).tolist() == [
        expected[row] for row in few
    ]


@pytest.mark.parametrize("units", list(itertools.product(UNITS_NS, UNITS_NS)))
def test_times_of_two_units_compare_exactly(units: tuple[str, str]) -> None:
    limits = [2**63 - 1, -(2**63) + 1, 0, 1, -1, 1_700_000_000, 10**18]
    schema = pa.schema([(f"t{k}", pa.timestamp(unit)) for k, unit in enumerate(units)])
    first, second = zip(*itertools.product(limits, limits), strict=True)
    columns = {
        f"t{k}": pa.array(values, pa.int64()).cast(pa.timestamp(unit))
        for k, (values, unit) in enumerate(zip((first, second), units, strict=True))
    }
    scaled = [
        (x * UNITS_NS[units[0]], y * UNITS_NS[units[1]]) for x, y in zip(first, second, strict=True)
    ]
    everything = np.arange(len(first))
    for symbol, function in COMPARE.items():
        got = PredicateSet([f"t0 {symbol} t1"], schema).evaluate(
            np.zeros(len(first), int), everything, columns
        )
        assert got.tolist() == [function(x, y) for x, y in scaled]


# --------------------------------------------------------------------------- groups


def test_predicates_that_differ_in_constants_share_a_group() -> None:
    texts = [f"a * {n} + 1 > b - {n}" for n in range(1, 40)]
    predicates = PredicateSet(texts, SCHEMA)
    assert len(predicates._nodes) == 1
    columns = {"a": pa.array(range(-20, 20)), "b": pa.array(range(40))}
    ids, rows = np.divmod(np.arange(len(texts) * 40), 40)
    expected = [(r - 20) * (n + 1) + 1 > r - (n + 1) for n, r in zip(ids, rows, strict=True)]
    assert predicates.evaluate(ids, rows, columns).tolist() == expected
    again = pickle.loads(pickle.dumps(predicates))
    assert again.evaluate(ids, rows, columns).tolist() == expected


def test_integers_and_floats_are_different_groups_of_one_form() -> None:
    texts = ["a + 1 = 9007199254740993", "a + 1.0 = 9007199254740993"] * 3
    texts += ["a between 1 and b", "a between 1.5 and b", "a between 2 and b"]
    predicates = PredicateSet(texts, SCHEMA)
    assert len(predicates._nodes) == 4
    columns = {"a": pa.array([2**53, 1]), "b": pa.array([0, 1])}
    got = predicates.evaluate(np.arange(9), np.array([0] * 6 + [1] * 3), columns)
    assert got.tolist() == [True, False] * 3 + [True, False, False]
    assert parse("a + 1 > b") != parse("a + 1.0 > b")


# --------------------------------------------------------------------------- the language


def number(attribute: str, symbol: str, *values: float) -> Condition:
    return Condition(attribute, symbol, Kind.NUMBER, values)


UNCHANGED = [
    ("abs > 5", number("abs", ">", 5)),
    ("mod = 3", number("mod", "=", 3)),
    ("3 >= mod", number("mod", "<=", 3)),
    ("mod", Condition("mod", "is true")),
    ("not abs", Connective("not", (Condition("abs", "is true"),))),
    ("mod in (1, -2)", number("mod", "in", 1, -2)),
    ("abs between -1 and +2", number("abs", "between", -1, 2)),
    ("mod is null and abs has 'x'", None),
    ("mod and abs or mod", None),
    ("x>-5", number("x", ">", -5)),
    ("-5 < x", number("x", ">", -5)),
    ("(x) > (5)", number("x", ">", 5)),
    ("((5)) < ((x))", number("x", ">", 5)),
    ("(x) between (1) and 2", number("x", "between", 1, 2)),
    ("(x)", Condition("x", "is true")),
]


@pytest.mark.parametrize(("text", "tree"), UNCHANGED)
def test_an_attribute_and_literals_are_a_condition(text: str, tree: Any) -> None:
    for _ in range(2):
        assert all(isinstance(x, Condition) for x in parse(text).conditions())
        assert tree is None or parse(text) == tree


SPELLINGS = [
    ("x - 1 > y", "x -1 > y"),
    ("x-1>y", "x - 1 > y"),
    ("x+.5>y", "x + 0.5 > y"),
    ("x MOD y = 0", "x % y = 0"),
    ("Abs ( x ) = y", "abs(x)=y"),
    ("x + 1 <> y", "x + 1 != y"),
    ("x * y + z > 0", "(x * y) + z > 0"),
    ("- x > y", "-x > y"),
    ("`left.x` = right.y", "left.x = `right.y`"),
    ("not x = y and z", "(not (x = y)) and z"),
    ("x not between y and z", "not x between y and z"),
]


@pytest.mark.parametrize(("text", "same"), SPELLINGS)
def test_spellings_of_arithmetic(text: str, same: str) -> None:
    for _ in range(2):  # The second time from the cached tree.
        assert parse(text) == parse(same)


def test_qualified_names_are_attributes() -> None:
    assert parse("left.price > 5") == number("left.price", ">", 5)
    assert parse("a.b.c = d.all").attributes() == {"a.b.c", "d.all"}
    with pytest.raises(PredicateError, match=r"unknown attribute left\.a \(known: tiny, a, b"):
        PredicateSet(["left.a > 5"], SCHEMA)


MALFORMED = [
    ("x + > 5", 5, "expected a number, an attribute, '-', 'abs' or '(', got >"),
    ("x + 1", 6, "expected a comparison (= != < <= > >=), got the end"),
    ("x + 1 and y", 7, "expected a comparison (= != < <= > >=) or 'between', got and"),
    ("(x + 1) and y", 9, "expected a comparison (= != < <= > >=) or 'between', got and"),
    ("x + 1 in (1)", 7, "expected a comparison (= != < <= > >=) or 'between', got in"),
    ("x + 1 is null", 7, "expected a comparison (= != < <= > >=) or 'between', got is"),
    ("x + 1 not in (1)", 11, "expected 'between', got in"),
    ("x + 'a' > 5", 5, "expected a number, an attribute"),
    ("'a' + x > 5", 5, "expected a comparison (= != < <= > >=), got +"),
    ("x + 1 > 'a'", 9, "expected a number, an attribute"),
    ("'a' = x + 1", 7, "expected an attribute, got x"),
    ("('a') = x", 5, "expected a comparison (= != < <= > >=), got )"),
    ("x = 'a' + 1", 9, "expected 'and', 'or' or the end, got +"),
    ("x > y + true", 9, "got true"),
    ("1 + 1 = 2", 9, "expected an attribute, got 2"),
    ("1 between 0 and 2", 11, "expected an attribute, got 0"),
    ("abs() > 5", 5, "expected a number, an attribute, '-', 'abs' or '(', got )"),
    ("abs(x, y) > 5", 6, "expected an operator or ')', got ,"),
    ("abs(x > 5", 7, "expected an operator or ')', got >"),
    ("(x + 1", 7, "expected an operator or ')', got the end"),
    ("(x > 5) + 1 > 2", 9, "expected 'and', 'or' or the end, got +"),
    ("x > (y or z)", 8, "expected an operator or ')', got or"),
    ("sqrt(x) > 5", 5, "got ("),
    ("x mod", 6, "expected a number, an attribute"),
    ("x mod mod", 10, "expected a comparison"),
    ("x ** 2 > 5", 4, "got *"),
    ("x--1 > 5", 2, "got '--'"),
    ("x > +y", 5, "got +"),
    ("x < y < z", 7, "expected 'and', 'or' or the end, got <"),
    ("x between 1 and 'b'", 17, "expected a number, an attribute"),
    ("x between 'a' and y", 19, "expected a string in quotes, got y"),
    ("x -5", 5, "expected a comparison"),
    ("x in (y)", 7, "expected a number, a string in quotes, true or false, got y"),
    ("x in (1 -2)", 9, "expected ',' or ')', got -"),
    ("left. = 5", 5, "got '.'"),
    ("left.5 = 5", 5, "got .5"),
]


@pytest.mark.parametrize(("text", "place", "expected"), MALFORMED)
def test_errors_of_arithmetic_have_a_position(text: str, place: int, expected: str) -> None:
    for _ in range(2):
        with pytest.raises(PredicateError) as caught:
            parse(text)
        assert str(caught.value).startswith(f"position {place}: ")
        assert expected in str(caught.value)


ARITHMETIC_ON = "arithmetic accepts integers and floats, and the difference of two times"
MISFITS = [
    ("text + 1 > 2", rf"attribute text has type string \(string\): {ARITHMETIC_ON}"),
    ("n + yes > 2", rf"attribute yes has type bool \(boolean\): {ARITHMETIC_ON}"),
    ("abs(price) > 2", rf"attribute price has type decimal128\(9, 2\) \(number\): {ARITHMETIC_ON}"),
    ("us + s > 2", rf"attribute us has type timestamp\[us, tz=UTC\] \(time\): {ARITHMETIC_ON}"),
    ("us - 60 > s", "attribute us has type"),
    ("n - us > 5", "attribute us has type"),
    ("us - s - day > 5", "attribute day has type"),
    ("-us > s", "attribute us has type"),
    (
        "n = text",
        r"cannot compare these types: n \(int64\), text \(string\); expected numbers, str",
    ),
    ("us > n", r"n \(int64\), us \(timestamp\[us, tz=UTC\]\)"),
    ("n + 1 < text", r"n \(int64\), text \(string\)"),
    ("yes < no", r"no \(bool\), yes \(bool\); expected .* booleans with = or !="),
    ("n between text and 5", r"n \(int64\), text \(string\)"),
    ("price = n + 1", r"decimals with attributes that have decimals or integers"),
    ("price between cost and 5", r"cost \(decimal128\(38, 4\)\), price"),
    ("price > n / 2", "cannot compare"),
    ("n > missing", r"unknown attribute missing \(known: s, us, ns"),
    ("n + missing > 5", "unknown attribute missing"),
]


@pytest.mark.parametrize(("text", "message"), MISFITS)
def test_terms_that_are_invalid_for_the_schema(text: str, message: str) -> None:
    with pytest.raises(PredicateError, match=message):
        check(parse(text), TYPED)
    with pytest.raises(PredicateError, match=rf"^predicate 0 \(.*\): .*{message}"):
        PredicateSet([text], TYPED)


def test_nesting_of_terms_is_limited() -> None:
    for text, count in (("({}) > y", 64), ("y > ({})", 64), ("-{} > y", 64), ("abs({}) > y", 64)):
        opening, closing = text.split(" > ")[text.startswith("y")].split("{}")
        deep = text.replace(opening + "{}" + closing, opening * count + "x + 1" + closing * count)
        deep = deep.replace("--", "- - ").replace("--", "- -")
        assert parse(deep).attributes() == {"x", "y"}
        deeper = deep.replace("x + 1", f"{opening}x{closing}" if opening != "-" else " -x")
        with pytest.raises(PredicateError, match="at most 64 levels"):
            parse(deeper)
    mixed = "(" * 32 + "x > " + "(" * 32 + "y" + ")" * 64
    assert parse(mixed).attributes() == {"x", "y"}
    with pytest.raises(PredicateError, match="at most 64 levels"):
        parse(f"({mixed})")


HOSTILE = [
    "(" * 4096,
    "(" * 60 + "x" + ")" * 60 + " + " + "(" * 2000,
    "x" + " + x" * 1000 + " > 0",
    "x" + "*x" * 2040 + ">0",
    "- " * 2000 + "x > 0",
    " and ".join(["((((((((((x))))))))))"] * 150),
    " and ".join(["(" * 40 + "x" + ")" * 40 + " > y"] * 45),
    "x" + " mod" * 1000,
    "abs(" * 1000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_parsed_in_bounded_time(text: str) -> None:
    assert len(text) <= 4096
    begin = time.process_time()
    try:
        tree = parse(text)
    except PredicateError:
        pass
    else:
        pickle.loads(pickle.dumps(tree))
        hash(tree)
    assert time.process_time() - begin < 1.0


def test_long_chains_are_evaluated() -> None:
    assert matches("a" + " + a" * 1000 + " = 1001", a=1)
    assert matches("a" + "*a" * 2030 + " = 1", a=-1) is False
    assert matches("((" * 30 + "a" + ") + 1)" * 30 + " = 31", a=1)


# --------------------------------------------------------------------------- pairs

CALLS = pa.schema(
    [
        ("caller", pa.string()),
        ("callee", pa.dictionary(pa.int8(), pa.string())),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("paid", pa.bool_()),
    ]
)


def calls(count: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)

    def column(values: list[Any], type_: pa.DataType) -> pa.Array:
        values = [None if rng.random() < 0.05 else value for value in values]
        return to_arrow(values, type_)

    start = rng.integers(0, 1000, count)
    columns = [
        column([f"n{k}" for k in rng.integers(0, 20, count)], pa.string()),
        column([f"n{k}" for k in rng.integers(10, 30, count)], CALLS.field("callee").type),
        column(start.tolist(), pa.int64()),
        column((start + rng.integers(0, 200, count)).tolist(), pa.int64()),
        column((rng.random(count) < 0.5).tolist(), pa.bool_()),
    ]
    return pa.table(columns, CALLS)


PAIR_CONDITIONS = {
    "(left.start < right.start and right.start < left.end) or "
    "(right.start < left.start and left.start < right.end)": lambda x, y: either(
        both(less(x["start"], y["start"]), less(y["start"], x["end"])),
        both(less(y["start"], x["start"]), less(x["start"], y["end"])),
    ),
    "left.caller = right.callee": lambda x, y: same(x["caller"], y["callee"]),
    "not left.caller = right.callee": lambda x, y: negate(same(x["caller"], y["callee"])),
    "left.caller < right.caller and left.paid": lambda x, y: both(
        less(x["caller"], y["caller"]), x["paid"]
    ),
    "left.caller = 'n3' and right.paid and left.start > 100": lambda x, y: both(
        both(same(x["caller"], "n3"), y["paid"]), less(100, x["start"])
    ),
    "left.paid or right.caller in ('n1', 'n2')": lambda x, y: either(
        x["paid"], None if y["caller"] is None else y["caller"] in ("n1", "n2")
    ),
    "left.caller is null and right.end - right.start > 100": lambda x, y: both(
        x["caller"] is None,
        None if None in (y["end"], y["start"]) else y["end"] - y["start"] > 100,
    ),
    "right.callee has 'n12' and left.paid != right.paid": lambda x, y: both(
        same(y["callee"], "n12"), negate(same(x["paid"], y["paid"]))
    ),
}


def less(x: Any, y: Any) -> bool | None:
    return None if x is None or y is None else x < y


def same(x: Any, y: Any) -> bool | None:
    return None if x is None or y is None else x == y


def negate(x: bool | None) -> bool | None:
    return None if x is None else not x


def both(x: bool | None, y: bool | None) -> bool | None:
    return False if x is False or y is False else None if x is None or y is None else True


def either(x: bool | None, y: bool | None) -> bool | None:
    return negate(both(negate(x), negate(y)))


@pytest.mark.parametrize("text", PAIR_CONDITIONS)
def test_pairs_and_products(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_TILE_WIDTH", 16)
    monkeypatch.setattr(pairs, "_PAIRS_AT_ONCE", 100)
    left, right = calls(60, 1), calls(50, 2)
    expected = [
        [PAIR_CONDITIONS[text](x, y) is True for y in right.to_pylist()] for x in left.to_pylist()
    ]
    assert 0 < np.sum(expected) < 3000
    predicate = pickle.loads(pickle.dumps(PairPredicate(text, CALLS, CALLS)))
    assert predicate.product(left, right).tolist() == expected
    rng = np.random.default_rng(3)
    left_rows, right_rows = rng.integers(0, 60, 500), rng.integers(0, 50, 500)
    got = predicate.evaluate(left, right, left_rows, right_rows)
    assert got.tolist() == [expected[x][y] for x, y in zip(left_rows, right_rows, strict=True)]
    few = [slice(begin, begin + 10) for begin in range(0, 500, 10)]  # strings are not encoded
    some = [predicate.evaluate(left, right, left_rows[x], right_rows[x]) for x in few]
    assert np.concatenate(some).tolist() == got.tolist()
    for width in (0, 1, 7, 50):
        low = np.sort(rng.integers(0, 50, 60))
        high = np.minimum(np.sort(low + rng.integers(0, width + 1, 60)), 50)
        found = list(predicate.on(left, right).within(low, high))
        pairs_found = [(int(x), int(y)) for a, b in found for x, y in zip(a, b, strict=True)]
        ranges = [(x, y) for x in range(60) for y in range(low[x], high[x])]
        assert sorted(pairs_found) == [(x, y) for x, y in ranges if expected[x][y]], width


def test_products_and_pairs_of_empty_tables() -> None:
    predicate = PairPredicate("left.caller = right.caller and left.paid", CALLS, CALLS)
    empty, some = calls(0, 1), calls(3, 1)
    assert predicate.product(empty, some).shape == (0, 3)
    assert predicate.product(some, empty).shape == (3, 0)
    none = np.zeros(0, dtype=np.intp)
    assert predicate.evaluate(some, empty, none, none).tolist() == []
    with pytest.raises(ValueError, match="1 left rows for 0 right rows"):
        predicate.evaluate(some, some, np.zeros(1, dtype=np.intp), none)


def test_equalities_and_the_rest() -> None:
    text = (
        "left.start + 1 < right.end + 2 and (right.callee = left.caller and left.end = 5) "
        "and left.start = right.start and left.start = left.end and not left.caller = right.caller"
    )
    predicate = PairPredicate(text, CALLS, CALLS)
    assert predicate.equalities() == [("caller", "callee"), ("start", "start")]
    rest = predicate.without_equalities()
    assert rest is not None
    assert rest.equalities() == []
    assert predicate.attributes - rest.attributes == {"right.callee", "right.start"}
    same_rest = (
        "left.start + 1 < right.end + 2 and left.end = 5 and left.start = left.end "
        "and not left.caller = right.caller"
    )
    left, right = calls(60, 1), calls(50, 2)
    expected = PairPredicate(same_rest, CALLS, CALLS).product(left, right)
    assert rest.product(left, right).tolist() == expected.tolist()
    assert PairPredicate("left.start = right.end", CALLS, CALLS).without_equalities() is None
    some = predicate.without_equalities([("start", "start")])
    assert some is not None
    assert some.equalities() == [("caller", "callee")]
    either_side = PairPredicate("left.start = right.end or left.paid", CALLS, CALLS)
    assert either_side.equalities() == []


def test_pair_conditions_name_their_sides() -> None:
    known = r"\(known: left\.caller, .*right\.paid\)"
    with pytest.raises(PredicateError, match=rf"unknown attribute start {known}"):
        PairPredicate("start < right.start", CALLS, CALLS)
    with pytest.raises(PredicateError, match=rf"unknown attribute left\.price {known}"):
        PairPredicate("left.price < right.start", CALLS, CALLS)
    with pytest.raises(PredicateError, match=r"left\.start \(int64\), right\.caller \(string\)"):
        PairPredicate("left.start < right.caller", CALLS, CALLS)
    odd = pa.schema([("drop off", pa.int64()), ("a.b", pa.int64())])
    predicate = PairPredicate("`left.drop off` = right.a.b", odd, odd)
    assert predicate.equalities() == [("drop off", "a.b")]

"""What a standing query wants: texts that are read, written again, and refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_points import TYPES

from roost.errors import ConfigError
from roost.window import AggregateSpec
from roost.window.aggregate import FUNCTIONS
from roost.window.wants import NEAREST_MAX, Wants, parse_aggregates

SCHEMA = pa.schema(TYPES.items())


@pytest.mark.parametrize(
    ("text", "functions"),
    [
        ("count", [("count", None, None)]),
        (" COUNT ,Avg( fare )", [("count", None, None), ("avg", "fare", None)]),
        ("quantile(fare, 0.5)", [("quantile", "fare", 0.5)]),
        ("quantile(fare, 1), distinct(id)", [("quantile", "fare", 1.0), ("distinct", "id", None)]),
        ("sum(`drop off`)", [("sum", "drop off", None)]),
        ('sum("drop off"), min(`a``b`)', [("sum", "drop off", None), ("min", "a`b", None)]),
        ("max(`in`), count(Ωmega)", [("max", "in", None), ("count", "Ωmega", None)]),
        ("count(count)", [("count", "count", None)]),
    ],
)
def test_lists_are_read(text: str, functions: list[tuple[str, str | None, float | None]]) -> None:
    spec = parse_aggregates(text)
    assert spec == AggregateSpec(tuple(functions))
    assert parse_aggregates(", ".join(spec.names)) == spec


def _functions() -> st.SearchStrategy[tuple[str, str | None, float | None]]:
    columns = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["in", "fare"])
    ranks = st.floats(0.0, 1.0)
    plain = st.sampled_from([name for name in FUNCTIONS if name != "quantile"])
    return st.one_of(
        st.tuples(plain, columns, st.none()),
        st.tuples(st.just("quantile"), columns, ranks),
        st.just(("count", None, None)),
    )


@given(st.lists(_functions(), min_size=1, max_size=6, unique=True))
@settings(max_examples=200)
def test_every_list_can_be_written_and_read_again(
    functions: list[tuple[str, str | None, float | None]],
) -> None:
    wants = Wants(aggregate=AggregateSpec(tuple(functions)))
    assert Wants.parse(wants.text) == wants
    assert Wants.parse(wants.text).text == wants.text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the end of the text"),
        ("count,", "the end of the text"),
        ("median(fare)", "'median'"),
        ("count, fare", "'fare'"),
        ("count avg(fare)", "'avg'"),
        ("sum", "'sum'|after sum"),
        ("sum()", r"'\)'"),
        ("sum(fare", "the end of the text"),
        ("sum(fare, 0.5)", "','"),
        ("sum('fare')", "'fare'"),
        ("sum(3)", "'3'"),
        ("sum(in)", "'in'.*backquote"),
        ("sum(true)", "'true'"),
        ("quantile(fare)", r"'\)'"),
        ("quantile(fare, 1.5)", "'1.5'"),
        ("quantile(fare, true)", "'true'"),
        ("quantile(fare, '0.5')", "0.5"),
        ("count(*)", r"\*"),
        ("count; drop", ";"),
        ("sum(`fare)", "closing `"),
        ("count, count", "different"),
        ("count," * 1000, "4096"),
        (",".join(f"sum(c{n})" for n in range(400)), "400 functions"),
    ],
)
def test_what_is_no_list_is_refused_and_the_wrong_part_is_named(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as refused:
        parse_aggregates(text)
    assert refused.value.key == "aggregate"


def test_nearest_is_a_number() -> None:
    assert Wants.parse("nearest 5") == Wants(nearest=5)
    assert Wants.parse(f" nearest  {NEAREST_MAX} ").text == f"nearest {NEAREST_MAX}"
    for text in ("nearest", "nearest 0", "nearest -1", "nearest 1001", "nearest ٣", "nearest 1.0"):
        with pytest.raises(ConfigError, match="nearest"):
            Wants.parse(text)
    for number in (0, NEAREST_MAX + 1, True, 2.0):
        with pytest.raises(ConfigError, match="nearest"):
            Wants(nearest=number)  # type: ignore[arg-type]


def test_exactly_one_thing_is_wanted() -> None:
    with pytest.raises(ConfigError, match="either"):
        Wants()
    with pytest.raises(ConfigError, match="either"):
        Wants(parse_aggregates("count"), 5)
    with pytest.raises(ConfigError, match="'aggregate' or 'nearest'"):
        Wants.parse("count")


def test_columns_are_held_against_the_points() -> None:
    Wants.parse("aggregate sum(fare), min(base), distinct(id), max(x)").check(SCHEMA, pa.int64())
    Wants(nearest=3).check(SCHEMA, pa.int64())
    for text in ("sum(lost)", "sum(base)", "avg(ok)", "quantile(seen, 0.5)"):
        with pytest.raises(ConfigError) as refused:
            Wants.parse(f"aggregate {text}").check(SCHEMA, pa.int64())
        assert text in str(refused.value)

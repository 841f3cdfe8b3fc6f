"""Requested output of standing queries: parsing, printing and validation."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_points import TYPES

from properties import examples
from roost.errors import ConfigError
from roost.window.aggregate import FUNCTIONS, AggregateSpec
from roost.window.output import NEAREST_MAX, RequestedOutput, parse_aggregates

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
def test_lists_are_parsed(text: str, functions: list[tuple[str, str | None, float | None]]) -> None:
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
@examples(200)
def test_lists_round_trip_through_their_text(
    functions: list[tuple[str, str | None, float | None]],
) -> None:
    output = RequestedOutput(aggregate=AggregateSpec(tuple(functions)))
    assert RequestedOutput.parse(output.text) == output
    assert RequestedOutput.parse(output.text).text == output.text


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
def test_an_invalid_list_is_refused_with_its_invalid_part(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as refused:
        parse_aggregates(text)
    assert refused.value.key == "aggregate"


def test_nearest_is_a_number() -> None:
    assert RequestedOutput.parse("nearest 5") == RequestedOutput(nearest=5)
    assert RequestedOutput.parse(f" nearest  {NEAREST_MAX} ").text == f"nearest {NEAREST_MAX}"
    for text in ("nearest", "nearest 0", "nearest -1", "nearest 1001", "nearest ٣", "nearest 1.0"):
        with pytest.raises(ConfigError, match="nearest"):
            RequestedOutput.parse(text)
    for number in (0, NEAREST_MAX + 1, True, 2.0):
        with pytest.raises(ConfigError, match="nearest"):
            RequestedOutput(nearest=number)  # type: ignore[arg-type]


def test_exactly_one_output_is_required() -> None:
    with pytest.raises(ConfigError, match="either"):
        RequestedOutput()
    with pytest.raises(ConfigError, match="either"):
        RequestedOutput(parse_aggregates("count"), 5)
    with pytest.raises(ConfigError, match="'aggregate' or 'nearest'"):
        RequestedOutput.parse("count")


def test_columns_are_checked_against_the_schema() -> None:
    RequestedOutput.parse("aggregate sum(fare), min(base), distinct(id), max(x)").check(
        SCHEMA, pa.int64()
    )
    RequestedOutput(nearest=3).check(SCHEMA, pa.int64())
    for text in ("sum(lost)", "sum(base)", "avg(ok)", "quantile(seen, 0.5)"):
        with pytest.raises(ConfigError) as refused:
            RequestedOutput.parse(f"aggregate {text}").check(SCHEMA, pa.int64())
        assert text in str(refused.value)

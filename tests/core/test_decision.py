"""The five stages of the decision mechanism, step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.balance.decision import Stages


def run(rates: list[float], beta: int = 20) -> list[Stages]:
    seen, stages = [], Stages()
    for rate in rates:
        stages = stages.after(rate, beta)
        seen.append(stages)
    return seen


def test_stages_start_in_the_middle_without_rebalancing() -> None:
    assert Stages() == Stages(2, False, 0, None)
    assert run([5.0])[-1] == Stages(2, False, 1, 5.0), "the first rate is compared with nothing"


def test_two_rounds_without_a_rise_flip_the_decision_and_two_more_flip_it_back() -> None:
    seen = run([9.0, 8.0, 8.0, 7.0, 7.0])
    assert [s.pointer for s in seen] == [2, 1, 2, 1, 2]
    assert [s.rebalance for s in seen] == [False, False, True, True, False]


def test_rises_keep_the_decision_and_never_go_past_the_right_end() -> None:
    seen = run([1.0, 2.0, 3.0, 4.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert [s.pointer for s in seen] == [2, 3, 4, 4, 4, 3, 2, 1, 2]
    assert [s.rebalance for s in seen] == [False] * 8 + [True]


def test_the_noise_of_a_steady_rate_keeps_no_decision() -> None:
    """A rate that rises in every other round by chance does not prevent a rebalancing."""
    stages = Stages()
    published = Stages()
    for number in range(10):
        rate = 100.0 + (-1) ** number
        stages, published = stages.after(rate), published.after(rate, rise=0.0)
        assert not published.rebalance, "as published, the decision is kept until it is forced"
        if stages.rebalance:
            break
    assert stages.rebalance and number == 2


def test_a_successful_decision_is_repeated() -> None:
    seen = run([9.0, 8.0, 7.0, 8.0, 9.0, 10.0])
    assert [s.rebalance for s in seen] == [False, False, True, True, True, True]


@pytest.mark.parametrize("beta", [1, 3, 20])
def test_the_same_decision_is_flipped_after_beta_rounds(beta: int) -> None:
    rates = [float(n % 2) for n in range(3 * beta + 1)]
    seen = [s.rebalance for s in run(rates, beta)]
    if beta > 1:
        assert seen == [False] * beta + [True] * beta + [False] * beta + [True]
    else:
        assert seen == [False, True, False, True]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=80), st.integers(1, 25))
def test_the_pointer_stays_in_range_and_a_decision_lasts_at_most_beta_rounds(
    rates: list[float], beta: int
) -> None:
    seen = run(rates, beta)
    assert all(1 <= s.pointer <= 4 and 1 <= s.repeats <= beta for s in seen)
    for before, now in pairwise(seen):
        flipped = before.rebalance != now.rebalance
        assert now.repeats == (1 if flipped else before.repeats + 1)

"""Counting: tries of prompts, crashes and starts of leases, strikes of places, dead prompts of the run."""

import pytest

from hsray.budget import LeaseCounts, PlaceStanding, PromptTries, RunBudget
from hsray.config import BudgetConfig


def test_a_prompt_is_spent_after_its_tries_and_earlier_drivers_tries_count():
    tries = PromptTries(3, {7: 2})

    assert not tries.is_spent(7)
    assert tries.fail(7) == 3
    assert tries.is_spent(7)
    assert tries.fail(8) == 1
    assert not tries.is_spent(8)


def test_recorded_tries_are_adopted_only_where_they_are_more():
    tries = PromptTries(3, {1: 2, 2: 1})

    tries.adopt({1: 1, 2: 2, 3: 1})

    assert tries.of([1, 2, 3, 4]) == {1: 2, 2: 2, 3: 1}


def test_finished_rows_are_forgotten():
    tries = PromptTries(3, {1: 2, 2: 1})

    tries.forget([1, 5])

    assert tries.of([1, 2]) == {2: 1}


def test_a_lease_is_exhausted_by_crashes_and_says_how_many():
    counts = LeaseCounts(BudgetConfig(lease_crashes=2), {})

    counts.crash("000001", alone=True)
    assert counts.crashes("000001") == 1
    assert counts.exhaustion("000001") is None
    counts.crash("000001", alone=True)

    exhausted = counts.exhaustion("000001")
    assert exhausted is not None
    assert exhausted[0] == 2
    assert "2 replicas died" in exhausted[1]
    assert counts.exhaustion("000002") is None
    assert counts.crashes("000002") == 0


def test_deaths_beside_another_lease_do_not_condemn_a_lease():
    counts = LeaseCounts(BudgetConfig(lease_crashes=2), {})

    for _ in range(3):
        counts.crash("000001", alone=False)
    assert counts.exhaustion("000001") is None
    counts.crash("000001", alone=True)

    assert counts.exhaustion("000001") is not None


def test_starts_of_earlier_drivers_exhaust_a_lease():
    counts = LeaseCounts(BudgetConfig(lease_starts=3), {"000001": 2})

    assert counts.may_start("000001")
    assert counts.start("000001") == 3
    assert not counts.may_start("000001")
    exhausted = counts.exhaustion("000001")

    assert exhausted is not None
    assert exhausted[0] == 3
    assert "started 3 times" in exhausted[1]


def test_a_start_without_blame_gives_its_number_back():
    counts = LeaseCounts(BudgetConfig(lease_starts=3), {})

    numbers = []
    for _ in range(10):
        numbers.append(counts.start("000001"))
        counts.give_back_start("000001")

    assert numbers == [1] * 10
    assert counts.exhaustion("000001") is None


def test_a_resolved_lease_is_forgotten():
    counts = LeaseCounts(BudgetConfig(lease_crashes=1), {"000001": 10})
    counts.crash("000001", alone=True)
    assert counts.exhaustion("000001") is not None

    counts.forget("000001")

    assert counts.exhaustion("000001") is None
    counts.crash("000001", alone=False)
    assert counts.exhaustion("000001") is None


def test_a_place_is_spent_after_failures_in_a_row_and_a_delivery_clears_them():
    place = PlaceStanding(limit=3)

    place.strike()
    place.strike(["000001"])
    assert place.is_in_doubt
    place.delivered()
    assert not place.is_in_doubt
    place.strike(["000001"])
    place.strike(["000002"])
    assert not place.is_spent
    place.strike()

    assert place.is_spent


def test_deaths_under_the_same_lease_count_once_against_the_place():
    place = PlaceStanding(limit=2)

    place.strike(["000001", "000002"])
    for _ in range(5):
        place.strike(["000001"])
    place.strike(["000002"])

    assert place.strikes == 1
    place.strike(["000003"])
    assert place.is_spent


def test_the_pause_before_a_restart_doubles_up_to_a_minute():
    place = PlaceStanding(limit=1000)

    pauses = [place.backoff_seconds]
    for _ in range(12):
        place.strike()
        pauses.append(place.backoff_seconds)

    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60, 60]


def run_budget(*, committed: int = 0, dead: int = 0, **budgets: float) -> RunBudget:
    return RunBudget(BudgetConfig.model_validate(budgets), already_committed=committed, already_dead=dead)


def test_dead_prompts_do_not_stop_the_run_before_200_are_finished():
    run = run_budget(max_dead_fraction=0.01)

    run.count(committed=100, dead=99)
    assert run.overrun() is None
    run.count(committed=1, dead=0)

    overrun = run.overrun()
    assert overrun is not None
    assert overrun[0] == "too_many_dead"
    assert "99 of 200" in overrun[1]


@pytest.mark.parametrize(
    ("finished", "dead", "stops"),
    [(200, 1, False), (200, 3, False), (200, 4, True), (100_000, 459, False), (100_000, 461, True)],
)
def test_bad_luck_early_does_not_stop_the_run_but_a_high_rate_does(finished, dead, stops):
    run = run_budget(max_dead_fraction=0.004)

    run.count(committed=finished - dead, dead=dead)

    assert (run.overrun() is not None) == stops


def test_with_no_dead_prompts_allowed_one_stops_the_run():
    run = run_budget(max_dead_fraction=0)

    run.count(committed=200, dead=0)
    assert run.overrun() is None
    run.count(committed=0, dead=1)

    assert run.overrun() is not None


def test_prompts_of_earlier_drivers_count_towards_the_dead_fraction():
    run = run_budget(committed=9_900, dead=100, max_dead_fraction=0.001)

    overrun = run.overrun()

    assert overrun is not None
    assert overrun[0] == "too_many_dead"


def test_the_run_stops_when_the_first_prompts_all_die():
    run = run_budget(first_prompts_all_fail=3, max_dead_fraction=1)

    run.count(committed=0, dead=2)
    assert run.overrun() is None
    run.count(committed=0, dead=1)

    overrun = run.overrun()
    assert overrun is not None
    assert overrun[0] == "first_prompts_all_fail"


@pytest.mark.parametrize("earlier", [{"committed": 1}, {"dead": 50}], ids=["one was committed", "a resumed run"])
def test_dead_first_prompts_are_judged_by_what_this_driver_saw(earlier):
    run = run_budget(first_prompts_all_fail=3, max_dead_fraction=1, **earlier)

    run.count(committed=0, dead=2)
    assert run.overrun() is None
    run.count(committed=0, dead=1)

    assert (run.overrun() is None) == ("committed" in earlier)

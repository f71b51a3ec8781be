import itertools

import pytest

from hsray.history import History, Point, points_from_json


def point(time: float, tokens: int = 0, spool: float = 0.0, in_flight: int = 0) -> Point:
    return Point(time, tokens, 2 * tokens, tokens // 10, spool, spool, in_flight, 1)


@pytest.mark.parametrize("seconds", [10, 5_000, 60_000])
def test_a_history_is_bounded_and_keeps_both_ends_and_every_total(seconds: int) -> None:
    history = History(limit=64)
    for second in range(seconds):
        history.add(point(1000.0 + second, tokens=7 * second))

    points = [*history]

    assert len(points) <= 65
    assert (points[0].time, points[0].tokens) == (1000.0, 0)
    assert (points[-1].time, points[-1].tokens) == (999.0 + seconds, 7 * (seconds - 1))
    # Whatever was thinned, the rate between any two points is the true one.
    for a, b in itertools.pairwise(points):
        assert (b.tokens - a.tokens) / (b.time - a.time) == pytest.approx(7)


def test_the_fullest_moment_survives_thinning() -> None:
    history = History(limit=16)
    for second in range(10_000):
        spike = second == 1234
        history.add(point(float(second), spool=1.0 if spike else 0.25, in_flight=99 if spike else 3))

    points = [*history]

    assert max(p.spool_max for p in points) == 1.0
    assert max(p.in_flight for p in points) == 99
    assert min(p.spool_max for p in points) == 0.25
    assert sorted(p.spool_mean for p in points)[len(points) // 2] == pytest.approx(0.25)


def test_a_loop_that_turns_a_thousand_times_a_second_costs_no_memory() -> None:
    history = History(limit=16)
    for turn in range(20_000):
        history.add(point(turn / 1000, tokens=turn))

    assert len(history._pending) <= 65
    assert [*history][-1].tokens == 19_999


def test_a_history_comes_back_from_json() -> None:
    history = History()
    for second in range(5):
        history.add(point(float(second), tokens=second * 10, spool=0.5))

    assert points_from_json(history.to_json()) == [*history]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("tokens"),
        lambda d: d["tokens"].pop(),
        lambda d: d["time"].__setitem__(0, float("nan")),
        lambda d: d.__setitem__("time", None),
    ],
)
def test_a_damaged_history_is_refused(damage: "object") -> None:
    history = History()
    history.add(point(1.0))
    data = history.to_json()
    damage(data)  # type: ignore[operator]

    with pytest.raises((KeyError, TypeError, ValueError)):
        points_from_json(data)


def test_a_history_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="shows nothing"):
        History(limit=2)

"""Whole runs under everything at once (tests/protocol.py): 5,000 schedules, and mistakes that must be seen."""

import functools
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

from hsray.ledger import Ledger
from hsray.records import Lease, LeaseOutcome, Resolution
from hsray.scheduler import Scheduler
from hsray.schema import LEASES_PREFIX
from tests.protocol import EXPECTED, Violation, run_many, run_seeds

NUM_SEEDS = 5000


@functools.cache
def run_everything() -> Counter[str]:
    provoked: Counter[str] = Counter()
    for _, counted, violations in run_many(NUM_SEEDS):
        assert not violations, violations
        provoked += counted
    return provoked


@pytest.mark.timeout(1200)  # the first of the two runs all schedules
def test_every_prompt_ends_exactly_once_whatever_happens():
    provoked = run_everything()

    # Random crashes may legitimately use up the budget of an innocent prompt, rarely.
    assert provoked["innocent dead"] <= 0.01 * provoked["innocent committed"] + 2, provoked


def test_where_only_bad_prompts_crash_replicas_every_other_prompt_is_committed():
    provoked = run_seeds(range(300), only_poison=True)

    assert provoked["innocent dead"] == 0
    assert provoked["innocent committed"] > 0


@pytest.mark.timeout(1200)  # the first of the two runs all schedules
def test_the_simulation_provokes_what_it_claims_to():
    provoked = run_everything()

    assert not {what for what in EXPECTED if not provoked[what]}, provoked


# Every one of these is a plausible mistake; the simulation must see each.


class LastWriterWins(Ledger):
    """Overwrites instead of creating once."""

    def resolve(self, resolution: Resolution) -> tuple[Resolution, bool]:
        key = f"{LEASES_PREFIX}{resolution.lease_id}.json"
        self._store.put(key, json.dumps(resolution.to_json()).encode())
        return resolution, True


class KeyPerKind(Ledger):
    """Creates once, but commit, split and dead have keys of their own."""

    def resolve(self, resolution: Resolution) -> tuple[Resolution, bool]:
        if resolution.kind == "commit":
            return super().resolve(resolution)
        elsewhere = replace(resolution, lease_id=f"{resolution.lease_id}-{resolution.kind}")
        standing, ours = super().resolve(elsewhere)
        return replace(standing, lease_id=resolution.lease_id), ours

    def resolutions(self) -> dict[str, Resolution]:
        merged: dict[str, Resolution] = {}
        for key, resolution in sorted(super().resolutions().items()):
            lease_id = key.split("-")[0]
            merged.setdefault(lease_id, replace(resolution, lease_id=lease_id))
        return merged


class TidiesUpAfterZombies(Scheduler):
    """Takes the shards of every attempt it does not know for garbage."""

    def _on_lease_done(self, name: str, outcome: LeaseOutcome) -> None:
        if outcome.attempt not in self._attempts:
            self._discard([shard.key for shard in outcome.shards])
        super()._on_lease_done(name, outcome)


class BelievesItself(Scheduler):
    """Goes on from its own proposal instead of from the record that stands."""

    def _propose(self, resolution: Resolution) -> None:
        self.__dict__.setdefault("mine", {})[resolution.lease_id] = resolution
        super()._propose(resolution)

    def _on_resolved(self, standing: Resolution, ours: bool) -> None:
        super()._on_resolved(self.__dict__["mine"].get(standing.lease_id, standing), ours)


class ForgetsRemainders(Scheduler):
    """Takes a partial commit for a whole one."""

    def _open_lease(self, lease: Lease, order: int, avoid: Collection[str]) -> None:
        if not lease.lease_id.endswith(".r"):
            super()._open_lease(lease, order, avoid)


class NeverBisects(Scheduler):
    """Tries a lease that kills replicas again and again."""

    def _condemn(self, lease, times: int, why: str) -> None:
        self._queue.add_returned(lease)


@pytest.mark.parametrize(
    ("mistake", "symptom"),
    [
        ({"make_ledger": LastWriterWins}, "changed after it was read"),
        ({"make_ledger": KeyPerKind}, "changed after it was read"),
        ({"make_scheduler": TidiesUpAfterZombies}, "the bytes of .* are not there"),
        ({"make_scheduler": BelievesItself}, "outside the lease tree|says complete while|not in that lease"),
        ({"make_scheduler": ForgetsRemainders}, "says complete while"),
        ({"make_scheduler": NeverBisects}, "still going"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_mistake_in_the_protocol_is_caught(mistake, symptom):
    with pytest.raises(Violation, match=symptom):
        run_seeds(range(200), **mistake)

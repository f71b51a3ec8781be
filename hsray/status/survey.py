"""How a run stands, from storage alone: `Survey(store).look()`.

What is done is counted from the resolutions, so a driver that is gone, or two of them, change nothing. What is
happening now (rates, fill, replicas) is the last word of the drivers, with its age.
"""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from hsray.config import BudgetConfig
from hsray.errors import ConfigError, ExitCode
from hsray.ledger import Ledger
from hsray.records import DeadPrompt, JsonDict, Reopened
from hsray.schema import LEASES_PREFIX, RUN_KEY
from hsray.status.document import DriverStatus, ReplicaRow, read_documents
from hsray.status.heads import ResolutionHead, read_heads
from hsray.store import Store

MAX_DEAD_EXAMPLES = 200
# Dead prompts are grouped by the first line of their message; all others are one more group.
_MAX_REASONS = 200
_REASON_CHARS = 160

State = Literal["complete", "running", "stopped", "silent", "unknown"]


@dataclass(slots=True)
class ReplicaTally:
    """What one incarnation of a replica delivered, over all drivers (names may repeat)."""

    leases: int = 0
    prompts: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class SiteTally:
    """The mean norm of a site over `tokens`, and the lowest and highest mean of one lease."""

    tokens: int = 0
    weighted: float = 0.0
    lowest: float = float("inf")
    highest: float = 0.0

    @property
    def mean(self) -> float:
        return self.weighted / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Outcomes:
    """The resolutions, added up. `leases` are those that committed something, in no order, and the arrays theirs."""

    records: int = 0
    splits: int = 0
    prompts: int = 0
    dead: int = 0
    tokens: int = 0
    nbytes: int = 0
    shards: int = 0
    spool_peak: int = 0
    newest: float = 0.0
    replicas: dict[str, ReplicaTally] = field(default_factory=dict)
    sites: dict[str, SiteTally] = field(default_factory=dict)
    dead_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    dead_examples: list[DeadPrompt] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    ended: "array[float]" = field(default_factory=lambda: array("d"))
    ended_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    ended_nbytes: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, head: ResolutionHead) -> None:
        figures = head.figures
        self.records += 1
        self.splits += head.kind == "split"
        self.newest = max(self.newest, figures.ended)
        for dead in head.dead:
            self._add_dead(dead)
        if not head.num_shards:
            return
        self.prompts += head.prompts
        self.tokens += head.tokens
        self.nbytes += head.nbytes
        self.shards += head.num_shards
        self.spool_peak = max(self.spool_peak, figures.spool_peak)
        self.leases.append(head.lease_id)
        self.ended.append(figures.ended)
        self.ended_tokens.append(head.tokens)
        self.ended_nbytes.append(head.nbytes)
        tally = self.replicas.setdefault(head.replica, ReplicaTally())
        tally.leases += 1
        tally.prompts += head.prompts
        tally.tokens += head.tokens
        tally.nbytes += head.nbytes
        tally.seconds += figures.seconds
        tally.last = max(tally.last, figures.ended)
        for site, norm in figures.mean_norms.items():
            seen = self.sites.setdefault(site, SiteTally())
            seen.tokens += head.tokens
            seen.weighted += norm * head.tokens
            seen.lowest = min(seen.lowest, norm)
            seen.highest = max(seen.highest, norm)

    def _add_dead(self, dead: DeadPrompt) -> None:
        self.dead += 1
        first_line = (dead.message.splitlines() or [""])[0][:_REASON_CHARS]
        reason = (dead.failure_class, first_line)
        if reason not in self.dead_reasons and len(self.dead_reasons) >= _MAX_REASONS:
            reason = (dead.failure_class, "(other reasons)")
        self.dead_reasons[reason] += 1
        if len(self.dead_examples) < MAX_DEAD_EXAMPLES:
            self.dead_examples.append(dead)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One look at a run. `committed + rejected + dead + left == rows`.

    Attributes:
        url: where it lies.
        record: its `hsray.json`.
        state: `complete`; `running` (a driver was heard of within two minutes); `stopped` (the last driver said how
            it ended); `silent` (the last driver has said nothing for longer: killed, or cut off from the store);
            `unknown` (no driver ever said anything).
        now: when, Unix seconds.
        outcomes: what the resolutions say.
        drivers: last words of the drivers, oldest first.
        last_exit: how the last driver that ended did.
        success: `_SUCCESS`, if it is there.
    """

    url: str
    record: JsonDict
    state: State
    now: float
    outcomes: Outcomes
    drivers: tuple[DriverStatus, ...]
    last_exit: JsonDict | None
    success: JsonDict | None

    @property
    def rows(self) -> int:
        return int(self.record["plan"]["num_rows"])

    @property
    def rejected(self) -> int:
        return int(self.record["plan"]["num_rejects"])

    @property
    def left(self) -> int:
        return max(0, int(self.record["plan"]["num_prompts"]) - self.outcomes.prompts - self.outcomes.dead)

    @property
    def driver(self) -> DriverStatus | None:
        """Who spoke last: that counts for the present."""
        return max(self.drivers, key=lambda d: d.updated, default=None)

    @property
    def num_living(self) -> int:
        """Drivers that are at work. One that was killed has not spoken since the next one started."""
        last = self.driver
        if last is None or last.exit is not None or last.is_silent(self.now):
            return 0
        others = (d for d in self.drivers if d is not last and d.exit is None and not d.is_silent(self.now))
        return 1 + sum(d.updated > last.started for d in others)

    @property
    def heard_seconds_ago(self) -> float | None:
        """Age of the last word of any driver."""
        return None if self.driver is None else max(0.0, self.now - self.driver.updated)

    @property
    def eta_seconds(self) -> float | None:
        """Until no prompt is left, at the driver's rate of the last minute."""
        driver = self.driver
        if self.state != "running" or driver is None or driver.prompts_per_second <= 0:
            return None
        return self.left / driver.prompts_per_second

    @property
    def exit_code(self) -> ExitCode:
        """0: complete, or under way. 3: complete, with more dead or rejected rows than allowed. 75: not complete and
        nobody works on it. Else how the last driver ended."""
        if self.state == "complete":
            said = (self.last_exit or {}).get("exit_code")
            return ExitCode(said) if said in (ExitCode.COMPLETE, ExitCode.INCOMPLETE) else self._judge()
        if self.state == "running":
            return ExitCode.COMPLETE
        if self.state == "stopped":
            code = self._last_code()
            return ExitCode.INTERRUPTED if code in (None, ExitCode.COMPLETE) else ExitCode(code)
        return ExitCode.INTERRUPTED

    def _last_code(self) -> int | None:
        known = {int(code) for code in ExitCode}
        if self.driver is not None and self.driver.exit is not None:
            code: int | None = self.driver.exit.exit_code
        else:
            code = (self.last_exit or {}).get("exit_code")
        return code if code is None or code in known else int(ExitCode.FAILED)

    def _judge(self) -> ExitCode:
        budgets = BudgetConfig.model_validate(self.record.get("config", {}).get("budgets", {}))
        dead = self.outcomes.dead / max(1, self.outcomes.prompts + self.outcomes.dead)
        rejected = self.rejected / max(1, self.rows)
        over = dead > budgets.max_dead_fraction or rejected > budgets.max_rejected_fraction
        return ExitCode.INCOMPLETE if over else ExitCode.COMPLETE

    def replica_rows(self) -> list[tuple[str, ReplicaRow | None, ReplicaTally]]:
        """(name, what it is doing now, what it delivered): living ones first, then by what they delivered."""
        living = {} if self.driver is None or self.state != "running" else {r.replica: r for r in self.driver.replicas}
        names = {*living, *self.outcomes.replicas}
        rows = [(name, living.get(name), self.outcomes.replicas.get(name, ReplicaTally())) for name in names]
        return sorted(rows, key=lambda row: (row[1] is None, -row[2].tokens, row[0]))

    def to_json(self) -> JsonDict:
        """For programs: counts, rates, replicas, reasons, last words."""
        driver = self.driver
        return {
            "url": self.url,
            "run_id": self.record["run_id"],
            "state": self.state,
            "exit_code": int(self.exit_code),
            "time": self.now,
            "rows": self.rows,
            "committed": self.outcomes.prompts,
            "rejected": self.rejected,
            "dead": self.outcomes.dead,
            "left": self.left,
            "tokens": self.outcomes.tokens,
            "stored_bytes": self.outcomes.nbytes,
            "shards": self.outcomes.shards,
            "records": self.outcomes.records,
            "eta_seconds": self.eta_seconds,
            "heard_seconds_ago": self.heard_seconds_ago,
            "reject_reasons": dict(self.record["plan"]["reject_reasons"]),
            "dead_reasons": [
                {"failure_class": kind, "message": message, "prompts": count}
                for (kind, message), count in self.outcomes.dead_reasons.most_common()
            ],
            "replicas": [
                {"replica": name, "delivered": asdict(tally), "now": None if row is None else row.model_dump()}
                for name, row, tally in self.replica_rows()
            ],
            "mean_norms": {site: tally.mean for site, tally in self.outcomes.sites.items()},
            "driver": None if driver is None else driver.model_dump(mode="json", exclude={"history", "replicas"}),
            "last_exit": self.last_exit,
        }


class Survey:
    """Looks at one run, again and again at little cost: records do not change, so only new ones are read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._record: JsonDict | None = None
        self._reopened = Reopened()
        self._outcomes = Outcomes()
        self._seen: set[str] = set()

    def look(self, now: float, *, finishing: bool = False) -> RunStatus:
        """How the run stands at `now`, Unix seconds.

        Args:
            finishing: take the run for complete: the caller is its driver, about to write `_SUCCESS`.

        Raises:
            ConfigError: there is no run.
            HsrayError: a record that is none.
            StoreError: the store refuses or does not answer.
        """
        record = self._read_record()
        ledger = Ledger(self._store, record["run_id"])
        drivers = tuple(read_documents(self._store, record["run_id"]))
        self._count(ledger)
        success = ledger.read_success()
        last_exit = ledger.read_last_exit()
        complete = finishing or (success is not None and success.get("generation", 0) == self._reopened.generation)
        state = "complete" if complete else _state(drivers, last_exit, now)
        return RunStatus(self._store.url, record, state, now, self._outcomes, drivers, last_exit, success)

    def _read_record(self) -> JsonDict:
        if self._record is None:
            record = Ledger(self._store).read_run()
            if record is None:
                raise ConfigError(
                    f"there is no run at {self._store.url}: it has no {RUN_KEY}. Give the output.url of an extraction; "
                    "one that still plans its prompts has none yet"
                )
            self._record = record
        return self._record

    def _count(self, ledger: Ledger) -> None:
        # The generations first, as `Ledger.account` does.
        reopened = ledger.reopened()
        if reopened.generation != self._reopened.generation:
            self._outcomes, self._seen, self._reopened = Outcomes(), set(), reopened
        new = [info for info in self._store.list(LEASES_PREFIX) if info.key not in self._seen]
        for head in read_heads(self._store, new, reopened):
            self._outcomes.add(head)
        self._seen.update(info.key for info in new)


def _state(drivers: tuple[DriverStatus, ...], last_exit: Mapping[str, Any] | None, now: float) -> State:
    latest = max(drivers, key=lambda d: d.updated, default=None)
    if latest is None:
        return "unknown" if last_exit is None else "stopped"
    if latest.exit is None and not latest.is_silent(now) and _seconds(last_exit) <= latest.updated:
        return "running"
    # A driver whose last document was lost may still have left its exit code.
    return "stopped" if latest.exit is not None or _seconds(last_exit) > latest.updated else "silent"


def _seconds(last_exit: Mapping[str, Any] | None) -> float:
    try:
        return datetime.fromisoformat(str((last_exit or {})["time"])).timestamp()
    except (KeyError, ValueError):
        return 0.0

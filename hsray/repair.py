"""Store damaged rows anew: `python -m hsray.repair URL [--dry-run] [key=value ...]`.

Reads every byte of a run, as `verify --full` does, and extracts the rows again that are not what was written: those
of a damaged payload, and every row of a shard that is missing, cut, or damaged outside its payloads. Nothing that
stands is changed: the rows are re-opened by one record, as a new generation, and committed in shards of their own;
readers then see those. Token ids come from the run's plan, so the prompt files are not needed.

The run's own configuration is used; `key=value` changes it (`cluster.replicas=2`), as it does for `hsray.extract`.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hsray.checkpoint import model_fingerprint, read_facts
from hsray.config import Config, restore_config
from hsray.errors import ConfigError, ExitCode, FingerprintMismatch, HsrayError
from hsray.finish import finish_run
from hsray.ledger import Ledger
from hsray.log import configure_logging
from hsray.plan import Plan, load_plan
from hsray.ranges import RETRY_SECONDS
from hsray.records import JsonDict
from hsray.schema import RUN_KEY
from hsray.sites import resolve_sites
from hsray.store import Store, open_store
from hsray.verify import Problem, verify_run
from hsray.verify.__main__ import parse_options

log = logging.getLogger("hsray.repair")  # also when run as __main__

# What the end of a run writes anew from the resolutions.
_DERIVED = ("index", "success")
# Nothing can be made of a run without these. Parity is of the engine, not of the storage.
_FUNDAMENTAL = ("record", "plan", "rejects", "resolutions", "accounting")
_SHOWN_ROWS = 8


@dataclass(frozen=True, slots=True)
class Damage:
    """What is to be done about a run.

    Attributes:
        shards: key -> rows of it that are damaged.
        leases: the same rows, by the lease that committed them.
        tokens: of these rows.
        problems: what verify said, at most 200 of a kind.
        derived: whether index or `_SUCCESS` are wrong. The end of a run writes them.
        open_again: rows that an earlier repair or `retry_dead` re-opened and nobody has done yet.
        open: rows that the extraction itself has not done yet.
    """

    shards: Mapping[str, Sequence[int]] = field(default_factory=dict)
    leases: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tokens: int = 0
    problems: Sequence[Problem] = ()
    derived: bool = False
    open_again: int = 0
    open: int = 0

    @property
    def rows(self) -> list[int]:
        return sorted(row for rows in self.leases.values() for row in rows)

    def to_json(self) -> JsonDict:
        return {
            "rows": len(self.rows),
            "tokens": self.tokens,
            "shards": {key: list(rows) for key, rows in self.shards.items()},
            "derived": self.derived,
            "open_again": self.open_again,
            "open": self.open,
        }


def find_damage(url: str, storage_options: Mapping[str, Any] | None = None) -> Damage:
    """Which rows of a run are not what was written. Reads every byte and changes nothing.

    Raises:
        HsrayError: there is no run, or its own records are damaged: then nothing is known of its rows.
        StoreError: the store refuses or does not answer.
    """
    report = verify_run(url, storage_options, full=True)
    if broken := [problem for problem in report.problems if problem.check in _FUNDAMENTAL]:
        raise HsrayError(
            f"{url} cannot be repaired, because its own records are damaged: {broken[0]}. Restore this object from a "
            "version or a copy of the bucket"
        )
    _, ledger, _, plan = _open(url, storage_options)
    found, accounting = ledger.account(plan.leases)
    home = {key: lease_id for lease_id, summary in found.items() for key in summary.shards}
    shards: dict[str, list[int]] = {}
    leases: dict[str, list[int]] = {}
    for resolution in ledger.standing({home[key] for key in report.damage if key in home}, accounting):
        for shard in resolution.shards:
            damaged = report.damage.get(shard.key, set())
            rows = [row for row in shard.rows if damaged is None or row in damaged]
            if rows:
                shards[shard.key] = rows
                leases.setdefault(resolution.lease_id, []).extend(rows)
    tokens = {row: n for lease in plan.leases for row, n in zip(lease.rows, lease.num_tokens, strict=True)}
    again = sum(len(lease.rows) for lease in accounting.open if ".g" in lease.lease_id)
    is_unfinished = bool(accounting.open) or not ledger.is_complete()
    return Damage(
        shards=shards,
        leases=leases,
        tokens=sum(tokens[row] for rows in leases.values() for row in rows),
        problems=tuple(problem for problem in report.problems if problem.check != "success" or not is_unfinished),
        derived=not is_unfinished and any(report.found[check] for check in _DERIVED),
        open_again=again,
        open=sum(len(lease.rows) for lease in accounting.open) - again,
    )


def repair(
    url: str,
    damage: Damage,
    storage_options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    engine_class: str = "hsray.engine:SGLangEngine",
) -> ExitCode:
    """Mend what `find_damage` found.

    Args:
        overrides: `dotted.key=value` changes of the run's stored configuration.
        engine_class: for tests, as in `hsray.extract`.

    Raises:
        ConfigError: the run was not extracted but converted, or its configuration does not work here.
        FingerprintMismatch: the model is not the one the run was made with.
        HsrayError: as `hsray.extract`.
    """
    store, ledger, record, plan = _open(url, storage_options)
    if damage.derived and not damage.rows and not damage.open_again:
        found, accounting = ledger.account(plan.leases)
        finish_run(store, ledger, record, accounting, found)
        _say("index.parquet, README.md and _SUCCESS are written anew")
        return ExitCode.COMPLETE
    if not damage.rows and not damage.open_again:
        return ExitCode.COMPLETE
    # Known to work before anything is opened that readers would then miss.
    config = _configuration(record, url, storage_options, overrides)
    job = _job(config, store, ledger, record, plan)
    if damage.rows:
        generation = ledger.reopen(damage.leases).generation
        _say(f"open again, as generation {generation}: {_count(len(damage.rows), 'row')}")
    if damage.open:
        _say(f"{damage.open:,} prompts of the run are not done yet either. The command that started it does both")
        return ExitCode.INTERRUPTED
    from hsray.extract import resume

    return resume(job, engine_class)


def _open(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Store, Ledger, JsonDict, Plan]:
    store = open_store(url, storage_options, retry_seconds=RETRY_SECONDS)
    record = Ledger(store).read_run()
    if record is None:
        raise HsrayError(f"there is no run at {store.url}: it has no {RUN_KEY}. Give the output.url of an extraction")
    return store, Ledger(store, record["run_id"]), record, load_plan(store, record["plan"])


def _configuration(
    record: JsonDict, url: str, storage_options: Mapping[str, Any] | None, overrides: Sequence[str]
) -> Config:
    if "imported" in record:
        raise ConfigError(
            f"{url} was converted from {record['imported']['source']}: there is no engine to extract it again with. "
            "Convert the files again, to another URL"
        )
    stored = {**record["config"], "output": {**record["config"]["output"], "url": url}}
    if storage_options:
        stored["output"]["storage_options"] = dict(storage_options)
    return restore_config(stored, overrides)


def _job(config: Config, store: Store, ledger: Ledger, record: JsonDict, plan: Plan) -> Any:
    from hsray.driver import Job

    facts = read_facts(config.model.path)
    stored, mine = record["fingerprint"]["parts"], model_fingerprint(config.model.path)
    if differing := [key for key, value in mine.items() if stored.get(key) != value]:
        raise FingerprintMismatch(
            f"{config.model.path} is not the model of the run ({', '.join(differing)} differ). "
            "Say where it is: model.path=DIRECTORY"
        )
    sites = resolve_sites([site["name"] for site in record["sites"]], facts.num_layers)
    return Job(config, store, ledger, record, plan, facts, sites, config.model.path)


def show(damage: Damage) -> str:
    """What there is to repair, in lines."""
    lines = [f"PROBLEM {problem}" for problem in damage.problems]
    for key, rows in damage.shards.items():
        more = f", ... {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
        lines.append(f"  {key}: rows {', '.join(map(str, rows[:_SHOWN_ROWS]))}{more}")
    if damage.rows:
        where = _count(len(damage.shards), "shard")
        lines.append(f"{_count(len(damage.rows), 'row')} ({damage.tokens:,} tokens) of {where} to store anew")
    if damage.open_again:
        lines.append(f"opened again before and not done yet: {_count(damage.open_again, 'row')}")
    if damage.derived:
        lines.append("index.parquet and _SUCCESS to write anew")
    return "\n".join(lines) or "nothing to repair"


def main(argv: Sequence[str] | None = None, *, engine_class: str = "hsray.engine:SGLangEngine") -> int:
    """Returns the exit code: 0 nothing is (left) to repair, 3 a dry run found something, others as `hsray.extract`."""
    parser = argparse.ArgumentParser(prog="python -m hsray.repair", description="Store damaged rows anew.")
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example cluster.replicas=2")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be stored anew")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        options = parse_options(args.storage_option)
        damage = find_damage(args.url, options)
        _say(json.dumps(damage.to_json()) if args.json else show(damage))
        if args.dry_run:
            return int(ExitCode.INCOMPLETE if damage.rows or damage.open_again or damage.derived else ExitCode.COMPLETE)
        return int(repair(args.url, damage, options, args.overrides, engine_class=engine_class))
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's output


if __name__ == "__main__":
    sys.exit(main())

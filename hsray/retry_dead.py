"""Give dead prompts another chance: `python -m hsray.retry_dead URL`.

Writes one record that re-opens them, as a new generation; nothing that is committed is touched, and no record is
changed. The command that made the run then does them, with tries counted from nought.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hsray.errors import HsrayError
from hsray.ledger import Accounting, Ledger
from hsray.log import configure_logging
from hsray.plan import load_plan
from hsray.records import DeadPrompt, Resolution, ResolutionSummary
from hsray.schema import RUN_KEY
from hsray.store import Store, open_store
from hsray.verify.__main__ import parse_options

log = logging.getLogger(__name__)

RETRY_SECONDS = 300.0


def retry_dead(store: Store, classes: Collection[str] = ()) -> tuple[int, list[DeadPrompt]]:
    """Re-open the dead prompts of a run.

    Args:
        classes: only those of these failure classes (`crash`, `prompt_transient`, ...); default: all.

    Returns:
        The generation they are in, and the prompts; no generation is made for none.

    Raises:
        HsrayError: there is no run, or its records contradict each other.
    """
    run = Ledger(store).read_run()
    if run is None:
        raise HsrayError(f"there is no run at {store.url}: it has no {RUN_KEY}. Give the output.url of an extraction")
    ledger = Ledger(store, run["run_id"])
    found, accounting = ledger.account(load_plan(store, run["plan"]).leases)
    chosen = [prompt for prompt in accounting.dead.values() if not classes or prompt.failure_class in classes]
    if not chosen:
        return accounting.generation, []
    return ledger.reopen(dead_by_lease(found, accounting, {prompt.row for prompt in chosen})).generation, chosen


def dead_by_lease(
    found: Mapping[str, Resolution | ResolutionSummary], accounting: Accounting, rows: Collection[int]
) -> dict[str, set[int]]:
    """Dead rows by the lease that gave them up last: a prompt that died again is dead in its `.g1`, and re-opened
    before."""
    last: dict[int, str] = {}
    for lease_id in sorted(found.keys() - accounting.superseded, key=len):
        last |= dict.fromkeys(found[lease_id].dead_rows.intersection(rows), lease_id)
    chosen: dict[str, set[int]] = {}
    for row, lease_id in last.items():
        chosen.setdefault(lease_id, set()).add(row)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hsray.retry_dead", description=__doc__)
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("--class", dest="classes", action="append", default=[], help="only this failure class")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        options: dict[str, Any] = parse_options(args.storage_option)
        generation, prompts = retry_dead(open_store(args.url, options, retry_seconds=RETRY_SECONDS), args.classes)
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    if not prompts:
        print("no dead prompts to try again")  # noqa: T201
        return 0
    counted = ", ".join(f"{n} {name}" for name, n in Counter(p.failure_class for p in prompts).most_common())
    print(f"{len(prompts)} dead prompts ({counted}) are open again, generation {generation}. The command that made")  # noqa: T201
    print("the run does them.")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Do the records of a run agree with each other? `hsray.json`, plan, rejects, resolutions, index, `_SUCCESS`."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hsray.errors import HsrayError, StoreError
from hsray.index import index_table, read_index
from hsray.ledger import Ledger
from hsray.plan import Plan, load_plan
from hsray.records import JsonDict, Lease, Reopened, Resolution, ResolutionKind
from hsray.schema import FORMAT_VERSION, INDEX_KEY, ITEMSIZE, LEASES_PREFIX, RUN_KEY, SUCCESS_KEY
from hsray.site_storage import recorded_storage, stored_selections
from hsray.store import Store
from hsray.verify.report import Report

_THREADS = 32


def read_record(store: Store, report: Report) -> JsonDict | None:
    """`hsray.json`; None if it is missing or cannot be used, which is then reported."""
    report.count("record")
    try:
        record: JsonDict = json.loads(store.get(RUN_KEY))
        if record["format_version"] != FORMAT_VERSION:
            version = record["format_version"]
            report.add("record", f"format version {version}; this hsray knows {FORMAT_VERSION}", key=RUN_KEY)
            return None
        _ = [site["name"] for site in record["sites"]], record["model"]["hidden_size"], ITEMSIZE[record["dtype"]]
        _ = record["run_id"], record["plan"]["leases"], record["plan"]["rejects"]
    except FileNotFoundError:
        report.add("record", "there is no run here: the object is missing", key=RUN_KEY)
        return None
    except (KeyError, TypeError, ValueError) as err:
        report.add("record", f"cannot be understood: {err!r}", key=RUN_KEY)
        return None
    try:
        recorded_storage(record["sites"], store.url)
    except HsrayError as err:
        report.add("record", str(err), key=RUN_KEY)
        return None
    return record


def read_plan(store: Store, record: JsonDict, report: Report) -> Plan | None:
    """The plan, checked together with the reject files; None if it cannot be read, which is then reported."""
    section = record["plan"]
    try:
        plan = load_plan(store, section)
    except (pa.ArrowException, OSError, KeyError, ValueError) as err:
        report.add("plan", f"cannot be read: {err}", key=section["leases"])
        return None
    rows = Counter(row for lease in plan.leases for row in lease.rows)
    report.count("plan", len(plan.leases))
    for row in (row for row, n in rows.items() if n > 1):
        report.add("plan", "is in more than one root lease", key=section["leases"], row=row)
    tokens = sum(lease.total_tokens for lease in plan.leases)
    for name, counted, said in (("prompts", len(rows), plan.num_prompts), ("tokens", tokens, plan.num_tokens)):
        if counted != said:
            report.add("plan", f"{RUN_KEY} says {said} {name}, the root leases hold {counted}", key=section["leases"])
    rejected: set[int] = set()
    for key in section["rejects"]:
        try:
            table = pq.read_table(pa.BufferReader(store.get(key)), columns=["row"])
        except (pa.ArrowException, OSError, KeyError) as err:
            report.add("rejects", f"cannot be read: {err}", key=key)
            continue
        report.count("rejects", table.num_rows)
        for row in table["row"].to_pylist():
            if row in rows or row in rejected:
                report.add("rejects", "has another outcome as well", key=key, row=row)
            rejected.add(row)
    if len(rejected) != plan.num_rejects:
        report.add("rejects", f"{RUN_KEY} says {plan.num_rejects} rejected rows, the files hold {len(rejected)}")
    report.counts |= {"rows": plan.num_rows, "rejected": len(rejected)}
    return plan


class RecordAudit:
    """Follows the lease tree from the plan's roots.

    After `run`, `standing` holds for each root lease the resolutions that count, in the order of the tree, and
    `reopened` the rows whose outcome by these does not.
    """

    def __init__(self, store: Store, record: JsonDict, plan: Plan, report: Report) -> None:
        self.store = store
        self.plan = plan
        self.report = report
        self.sites = [site["name"] for site in record["sites"]]
        self.selections = stored_selections(recorded_storage(record["sites"], store.url))
        self.run_id: str = record["run_id"]
        self.standing: dict[str, list[Resolution]] = {}
        self.reopened = Reopened()

    def run(self) -> None:
        committed, dead, open_rows = self._walk(self._read_resolutions())
        counts = self.report.counts
        counts |= {"committed": committed, "dead": dead, "open": open_rows}
        if committed + dead + open_rows + counts["rejected"] != self.plan.num_rows:
            self.report.add(
                "accounting",
                f"{committed} committed + {counts['rejected']} rejected + {dead} dead + {open_rows} open are not the "
                f"{self.plan.num_rows} input rows",
            )
        self._check_success(open_rows)

    def _read_resolutions(self) -> dict[str, Resolution]:
        def read(key: str) -> tuple[str, Resolution] | None:
            self.report.count("resolutions")
            lease_id = key.removeprefix(LEASES_PREFIX).removesuffix(".json")
            try:
                stored = json.loads(self.store.get(key))
                resolution = Resolution.from_json(stored)
                if resolution.lease_id != lease_id or resolution.kind not in get_args(ResolutionKind):
                    raise ValueError(f"it is a {resolution.kind} of lease {resolution.lease_id}")
                if stored.get("run_id", "") not in ("", self.run_id):
                    raise ValueError(f"it is of another run, {stored['run_id']}")
            except (KeyError, TypeError, ValueError, AttributeError) as err:
                self.report.add("resolutions", f"cannot be understood: {err!r}", key=key)
                return None
            return lease_id, resolution

        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(read, sorted(info.key for info in self.store.list(LEASES_PREFIX)))
            return dict(item for item in found if item is not None)

    def _walk(self, resolutions: Mapping[str, Resolution]) -> tuple[int, int, int]:
        """Follow the lease tree. Returns the numbers of committed, dead and open rows."""
        self.reopened = Ledger(self.store, self.run_id).reopened()
        outcome: dict[int, str] = {}
        numbers: Counter[str] = Counter()
        reached: set[str] = set()
        leases = list(reversed(self.plan.leases))
        while leases:
            lease = leases.pop()
            resolution = resolutions.get(lease.lease_id)
            if resolution is None:
                numbers["open"] += len(lease.rows)
                continue
            reached.add(lease.lease_id)
            self.standing.setdefault(lease.root_id, []).append(resolution)
            self._check_claims(lease, resolution, self.reopened.of(lease.lease_id), outcome, numbers)
            leases += reversed(self.reopened.children(lease))
            try:
                leases += reversed(resolution.children(lease))
            except ValueError as err:
                self._resolution_problem(lease, f"a split of a lease that cannot be split: {err}")
        self.report.count("accounting", len(outcome) + numbers["open"])
        self.report.counts["superseded_records"] = len(resolutions.keys() - reached)
        return numbers["committed"], numbers["dead"], numbers["open"]

    def _check_claims(
        self,
        lease: Lease,
        resolution: Resolution,
        again: frozenset[int],
        outcome: dict[int, str],
        numbers: Counter[str],
    ) -> None:
        claims = [(row, "committed", f"shard {shard.key}") for shard in resolution.shards for row in shard.rows]
        claims += [(dead.row, "dead", "its list of dead prompts") for dead in resolution.dead]
        claims = [claim for claim in claims if claim[0] not in again]
        for row, kind, where in claims:
            if row in outcome:
                self._resolution_problem(lease, f"{kind} by {where}, but it has an outcome in {outcome[row]}", row)
            elif row not in lease.rows:
                self._resolution_problem(lease, f"{kind} by {where}, but it is not a row of the lease", row)
            else:
                outcome[row] = f"lease {lease.lease_id}, {where}"
                numbers[kind] += 1

    def _resolution_problem(self, lease: Lease, message: str, row: int | None = None) -> None:
        self.report.add("accounting", message, key=f"{LEASES_PREFIX}{lease.lease_id}.json", row=row)

    def _check_success(self, open_rows: int) -> None:
        self.report.count("success")
        try:
            success = json.loads(self.store.get(SUCCESS_KEY))
            said = {name: success[name] for name in ("rows", "committed", "rejected", "dead")}
        except FileNotFoundError:
            self.report.add(
                "success", f"the run is not finished: {open_rows} prompts are open. The command that started it resumes"
            )
            return
        except (KeyError, TypeError, ValueError) as err:
            self.report.add("success", f"cannot be understood: {err!r}", key=SUCCESS_KEY)
            said = {}
        if open_rows:
            self.report.add("success", f"is there, but {open_rows} prompts are open", key=SUCCESS_KEY)
        for name, number in said.items():
            if number != self.report.counts[name]:
                message = f"says {number} {name}, there are {self.report.counts[name]}"
                self.report.add("success", message, key=SUCCESS_KEY)
        self._check_index()

    def _check_index(self) -> None:
        try:
            counting = (r.without(self.reopened.of(r.lease_id)) for rs in self.standing.values() for r in rs)
            shards = (shard for resolution in counting for shard in resolution.shards)
            expected = index_table(shards, self.sites, self.selections)
        except HsrayError as err:
            self.report.add("index", f"cannot be rebuilt from the resolutions: {err}", key=INDEX_KEY)
            return
        try:
            stored = read_index(self.store, self.sites, self.selections)
        except FileNotFoundError:
            self.report.add("index", "is missing", key=INDEX_KEY)
            return
        except StoreError:
            raise
        except HsrayError as err:
            self.report.add("index", str(err), key=INDEX_KEY)
            return
        self.report.count("index", stored.num_rows)
        for message, row, prompt_id in _differences(expected, stored):
            self.report.add("index", message, key=INDEX_KEY, row=row, prompt_id=prompt_id)


def _differences(expected: pa.Table, stored: pa.Table) -> Iterator[tuple[str, int, str]]:
    """(what, row, prompt_id) of every segment that is not the same in two indexes."""
    columns = [name for name in expected.column_names if name not in ("row", "segment")]
    # Dictionaries may number the same keys in another order.
    ours = {name: expected[name].cast(pa.string()) if name == "shard" else expected[name] for name in columns}
    theirs = {name: stored[name].cast(pa.string()) if name == "shard" else stored[name] for name in columns}
    ids, stored_ids = expected["prompt_id"].to_pylist(), stored["prompt_id"].to_pylist()
    places, stored_places = _places(expected), _places(stored)
    for (row, segment), found in stored_places.items():
        if (row, segment) not in places:
            yield f"segment {segment} is in no resolution", row, stored_ids[found[0]]
        elif len(found) > 1:
            yield f"segment {segment} is in it {len(found)} times", row, stored_ids[found[0]]
    for (row, segment), found in places.items():
        if (row, segment) not in stored_places:
            yield f"segment {segment} is missing", row, ids[found[0]]
    common = [key for key in places if key in stored_places]
    take = pa.array([places[key][0] for key in common], pa.int64())
    take_stored = pa.array([stored_places[key][0] for key in common], pa.int64())
    differing: dict[int, list[str]] = {}
    for name in columns:
        same = pc.equal(ours[name].take(take), theirs[name].take(take_stored)).to_numpy(zero_copy_only=False)
        for at in np.flatnonzero(~same.astype(bool)).tolist():
            differing.setdefault(at, []).append(name)
    for at, names in differing.items():
        row, segment = common[at]
        yield f"segment {segment} differs in {', '.join(names)}", row, ids[places[common[at]][0]]


def _places(table: pa.Table) -> dict[tuple[int, int], list[int]]:
    places: dict[tuple[int, int], list[int]] = {}
    for at, key in enumerate(zip(table["row"].to_pylist(), table["segment"].to_pylist(), strict=True)):
        places.setdefault(key, []).append(at)
    return places

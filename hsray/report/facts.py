"""Everything that the report says, gathered from storage in bounded memory."""

import io
import logging
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.errors import HsrayError, StoreError
from hsray.estimate import Estimate
from hsray.ledger import Ledger
from hsray.records import JsonDict
from hsray.report.sites import Sample, sample_states
from hsray.report.timeline import Timeline, make_timeline
from hsray.schema import DATA_PREFIX, ENGINE_KEY, PREFIXES
from hsray.status.survey import RunStatus, Survey
from hsray.store import Store

log = logging.getLogger(__name__)

MAX_REJECT_EXAMPLES = 20
_MAX_REJECT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Facts:
    """What `page` turns into HTML.

    Attributes:
        status: outcomes, drivers, state.
        engine: `engine.json`, if a replica was ever ready.
        lengths: of all planned prompts.
        timeline: of all drivers.
        sample: statistics of stored states; `sample_problem` says why there are none.
        folders: (prefix, objects, bytes) of what lies at the run's URL, the run's own objects last, under "".
        rejects: the first rejected rows, as dictionaries of `schema.rejects_schema`.
    """

    status: RunStatus
    engine: JsonDict | None
    lengths: Estimate
    timeline: Timeline
    sample: Sample
    sample_problem: str
    folders: tuple[tuple[str, int, int], ...]
    rejects: tuple[JsonDict, ...]

    @property
    def data_objects(self) -> tuple[int, int]:
        """(objects, bytes) in `data/`, named by a record or not."""
        return next(((n, nbytes) for prefix, n, nbytes in self.folders if prefix == DATA_PREFIX), (0, 0))


def gather(store: Store, storage_options: JsonDict, now: float, *, finishing: bool = False) -> Facts:
    """Read what the report needs: records, plan, a sample of the states.

    Args:
        now: Unix seconds.
        finishing: the driver is about to mark the run complete.

    Raises:
        ConfigError: there is no run.
        HsrayError: a record that is none.
        StoreError: the store refuses or does not answer.
    """
    status = Survey(store).look(now, finishing=finishing)
    record = status.record
    sample, problem = Sample(), ""
    try:
        reopened = Ledger(store, record["run_id"]).reopened()
        sample = sample_states(store, storage_options, record, sorted(status.outcomes.leases), reopened)
    except StoreError:
        raise
    except HsrayError as err:
        problem = str(err)
        log.warning("no statistics of stored states: %s", err)
    return Facts(
        status=status,
        engine=_engine(store),
        lengths=_lengths(store, record),
        timeline=make_timeline(status.drivers, status.outcomes),
        sample=sample,
        sample_problem=problem,
        folders=_folders(store),
        rejects=_rejects(store, record),
    )


def _engine(store: Store) -> JsonDict | None:
    try:
        return store.get_json(ENGINE_KEY)
    except FileNotFoundError:
        return None


def _lengths(store: Store, record: JsonDict) -> Estimate:
    table = pq.read_table(io.BytesIO(store.get(record["plan"]["leases"])), columns=["num_tokens"])
    column: Any = table["num_tokens"].combine_chunks()
    lengths = array("i")
    lengths.frombytes(np.ascontiguousarray(column.flatten().to_numpy(), np.int32).tobytes())
    return Estimate(lengths=lengths, leases=table.num_rows)


def _folders(store: Store) -> tuple[tuple[str, int, int], ...]:
    counts: dict[str, tuple[int, int]] = {}
    for info in store.list():
        prefix = next((p for p in PREFIXES if info.key.startswith(p)), "")
        objects, nbytes = counts.get(prefix, (0, 0))
        counts[prefix] = objects + 1, nbytes + info.nbytes
    return tuple((prefix, *counts[prefix]) for prefix in (*PREFIXES, "") if prefix in counts)


def _rejects(store: Store, record: JsonDict) -> tuple[JsonDict, ...]:
    """The first rejected rows; only of a file that is small enough to be read for them."""
    for key in record["plan"]["rejects"][:1]:
        try:
            if store.head(key).nbytes > _MAX_REJECT_BYTES:
                return ()
            table = pq.read_table(io.BytesIO(store.get(key)))
            return tuple(table.slice(0, MAX_REJECT_EXAMPLES).to_pylist())
        except (FileNotFoundError, pa.ArrowException, OSError) as err:
            if isinstance(err, StoreError):
                raise
            log.warning("the rejected rows in %s cannot be read: %s", store.locate(key), err)
    return ()

"""The plan: which prompts there are, and the root leases that hold them. A pure function of inputs and options.

A plan is stored once, under `plan/<plan_id>/`, before `hsray.json` names it: replicas read the token ids of a
lease from there, and a resume reads the list of leases instead of the input files. Planning streams: memory
does not grow with the number of prompts beyond one lease and some 30 bytes a row.

`python -m hsray.plan CONFIG.yaml [key=value ...]` shows what a run would do, without a GPU, Ray or writing anything.
"""

import argparse
import hashlib
import io
import itertools
import json
import logging
import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hsray
from hsray.config import Config, load_config
from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.estimate import LeaseLimits, LeasePacker
from hsray.log import configure_logging
from hsray.ranges import ObjectFile
from hsray.records import JsonDict, Lease, Prompt, Reject
from hsray.schema import (
    FORMAT_VERSION,
    PLAN_PREFIX,
    REJECTS_PREFIX,
    bytes_per_token,
    leases_schema,
    plan_schema,
    rejects_schema,
)
from hsray.site_storage import (
    Storage,
    fingerprint_parts,
    resolve_storage,
    storage_of,
    stored_selections,
    summarize_codecs,
)
from hsray.sites import Site, resolve_sites
from hsray.store import Store
from hsray.upload import Upload

log = logging.getLogger("hsray.plan")  # also when run as __main__

# Token ids of one plan object, before compression.
_PLAN_OBJECT_BYTES = 128_000_000
_REJECTS_PER_OBJECT = 100_000


@dataclass(frozen=True, slots=True)
class PlanRef:
    """Where the prompts of a root lease are: a Parquet object of the run and a row group in it."""

    object: str
    row_group: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A stored plan, read back.

    Attributes:
        leases: root leases in order.
        refs: where each root's prompts are.
        num_rows: input rows; equals num_prompts + num_rejects.
    """

    plan_id: str
    leases: tuple[Lease, ...]
    refs: Mapping[str, PlanRef]
    num_rows: int
    num_prompts: int
    num_rejects: int
    num_tokens: int
    largest_prompt_tokens: int


@dataclass(slots=True)
class PlanCounts:
    """What planning has seen so far; passed to the progress callback."""

    rows: int = 0
    prompts: int = 0
    tokens: int = 0
    largest: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


class _ParquetObject:
    """A Parquet object of the run, written through an upload that shows nothing until it is complete."""

    def __init__(self, store: Store, key: str, schema: pa.Schema) -> None:
        self.key = key
        self.num_row_groups = 0
        self.raw_bytes = 0
        self._context = store.upload(key)
        self._upload: Upload = self._context.__enter__()
        self._writer = pq.ParquetWriter(self._upload, schema, compression="zstd", use_dictionary=["file"])

    def append(self, table: pa.Table) -> int:
        """Write one row group; returns its number."""
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.raw_bytes += table.nbytes
        self.num_row_groups += 1
        return self.num_row_groups - 1

    def finish(self) -> None:
        self._writer.close()
        self._upload.complete()
        self._context.__exit__(None, None, None)

    def abort(self, error: BaseException) -> None:
        # pyarrow would write the footer on its own in __del__.
        self._writer.is_open = False
        self._context.__exit__(type(error), error, error.__traceback__)


def build_plan(
    items: Iterable[Prompt | Reject],
    store: Store,
    *,
    bytes_per_token: int,
    shard_bytes: int,
    max_lease_prompts: int,
    on_progress: Callable[[PlanCounts], None] = lambda counts: None,
) -> JsonDict:
    """Read every item, store the plan, and return the `plan` section of `hsray.json`.

    A lease is closed when the next prompt would take it past `shard_bytes` of hidden states or
    `max_lease_prompts` prompts; a prompt larger than that is a lease of its own.

    Raises:
        HsrayError: rows do not count up from 0 (a bug in a reader: it would break the accounting).
        StoreError: the plan could not be stored. Nothing names the objects left behind.
    """
    plan_id = uuid.uuid4().hex[:12]
    prefix = f"{PLAN_PREFIX}{plan_id}/"
    counts = PlanCounts()
    leases: list[JsonDict] = []
    rejects: list[Reject] = []
    reject_keys: list[str] = []
    group: list[Prompt] = []
    packer = LeasePacker(LeaseLimits(bytes_per_token, shard_bytes, max_lease_prompts))
    current: _ParquetObject | None = None
    num_objects = 0

    def close_lease() -> None:
        nonlocal current, num_objects
        if not group:
            return
        if current is None:
            current = _ParquetObject(store, f"{prefix}prompts-{num_objects:05d}.parquet", plan_schema())
            num_objects += 1
        row_group = current.append(_prompt_table(group))
        leases.append(
            {
                "lease_id": f"{len(leases):06d}",
                "object": current.key,
                "row_group": row_group,
                # Arrays take a fifth of what lists of integers do, and there is one entry for every prompt.
                "rows": np.array([p.row for p in group], np.int64),
                "num_tokens": np.array([p.num_tokens for p in group], np.int32),
            }
        )
        group.clear()
        if current.raw_bytes >= _PLAN_OBJECT_BYTES:
            current.finish()
            current = None

    def close_rejects() -> None:
        if rejects:
            key = f"{REJECTS_PREFIX}{plan_id}-{len(reject_keys):05d}.parquet"
            store.put(key, _table_bytes(_reject_table(rejects)))
            reject_keys.append(key)
            rejects.clear()

    try:
        for item in items:
            if item.row != counts.rows:
                raise HsrayError(f"row {item.row} follows row {counts.rows - 1}: the readers lost or repeated a row")
            counts.rows += 1
            if isinstance(item, Reject):
                counts.rejects[item.reason] += 1
                rejects.append(item)
                if len(rejects) >= _REJECTS_PER_OBJECT:
                    close_rejects()
            else:
                if packer.starts_new(item.num_tokens):
                    close_lease()
                group.append(item)
                counts.prompts += 1
                counts.tokens += item.num_tokens
                counts.largest = max(counts.largest, item.num_tokens)
            if counts.rows % 256 == 0:
                on_progress(counts)
        close_lease()
        close_rejects()
        if current is not None:
            current.finish()
            current = None
    except BaseException as err:
        if current is not None:
            current.abort(err)
        raise
    on_progress(counts)
    leases_key = f"{prefix}leases.parquet"
    store.put(leases_key, _table_bytes(pa.Table.from_pylist(leases, schema=leases_schema())))
    return {
        "plan_id": plan_id,
        "leases": leases_key,
        "rejects": reject_keys,
        "num_rows": counts.rows,
        "num_prompts": counts.prompts,
        "num_rejects": sum(counts.rejects.values()),
        "num_tokens": counts.tokens,
        "largest_prompt_tokens": counts.largest,
        "reject_reasons": dict(counts.rejects.most_common()),
    }


def load_plan(store: Store, record: JsonDict) -> Plan:
    """Read the leases of a stored plan. `record` is the `plan` section of `hsray.json`."""
    table = pq.read_table(io.BytesIO(store.get(record["leases"])))
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    rows = _split(columns["rows"])
    tokens = _split(columns["num_tokens"])
    ids = columns["lease_id"].to_pylist()
    leases = tuple(Lease(i, tuple(r), tuple(n)) for i, r, n in zip(ids, rows, tokens, strict=True))
    objects, groups = columns["object"].to_pylist(), columns["row_group"].to_pylist()
    return Plan(
        plan_id=record["plan_id"],
        leases=leases,
        refs={i: PlanRef(o, g) for i, o, g in zip(ids, objects, groups, strict=True)},
        num_rows=record["num_rows"],
        num_prompts=record["num_prompts"],
        num_rejects=record["num_rejects"],
        num_tokens=record["num_tokens"],
        largest_prompt_tokens=record["largest_prompt_tokens"],
    )


def delete_plan(store: Store, record: JsonDict) -> None:
    """Remove the objects of a plan that lost the race to be the run's plan."""
    objects = [info.key for info in store.list(f"{PLAN_PREFIX}{record['plan_id']}/")]
    store.delete([*objects, *record["rejects"]])


def read_lease_prompts(store: Store, ref: PlanRef, rows: Sequence[int]) -> list[Prompt]:
    """The prompts `rows` of a root lease, in row order.

    Raises:
        HsrayError: the plan object does not hold all of them.
    """
    file = pq.ParquetFile(ObjectFile(store, ref.object, store.head(ref.object).nbytes), pre_buffer=True)
    table = file.read_row_group(ref.row_group)
    wanted = set(rows)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    all_rows = columns["row"].to_pylist()
    ids, masks = _split_arrays(columns["input_ids"], np.int32), _split_arrays(columns["loss_mask"], np.uint8)
    names, files, lines = (columns[c].to_pylist() for c in ("prompt_id", "file", "line"))
    # Runs planned before prompts could be cut lack the column.
    full = columns["full_tokens"].to_pylist() if "full_tokens" in columns else [None] * len(all_rows)
    prompts = [
        Prompt(row, names[i], ids[i], masks[i], files[i], lines[i], full[i])
        for i, row in enumerate(all_rows)
        if row in wanted
    ]
    if len(prompts) != len(wanted):
        raise HsrayError(
            f"{ref.object} row group {ref.row_group} holds {len(prompts)} of the {len(wanted)} prompts of the lease"
        )
    return prompts


def fingerprint(
    config: Config,
    *,
    sites: Sequence[Site],
    model: Mapping[str, str],
    tokenizer: str,
    inputs: Sequence[tuple[str, str]],
    storage: Storage | None = None,
) -> JsonDict:
    """What makes two runs the same: every input and option that changes ids or tensors.

    Args:
        sites: resolved sites.
        model: hashes of the model (`checkpoint.model_fingerprint`).
        tokenizer: hash of tokenizer files and template text.
        inputs: (name, content hash) of every input file, in order. Paths do not count, contents do.
        storage: how sites are stored, if not plainly and whole.

    Returns:
        `{"hash": ..., "parts": {dotted key: value}}`; the parts let a refusal name what differs.
    """
    options = config.prompts.model_dump(mode="json", exclude={"path", "storage_options", "chat_template"})
    parts = {
        **{f"prompts.{key}": json.dumps(value, sort_keys=True) for key, value in options.items()},
        **model,
        "model.tokenizer": tokenizer,
        "capture.sites": ",".join(site.name for site in sites),
        "capture.dtype": config.capture.dtype,
        **fingerprint_parts(storage or {}),
        "capture.scope": config.capture.scope,
        "output.shard_bytes": str(config.output.shard_bytes),
        "output.max_lease_prompts": str(config.output.max_lease_prompts),
        "format": str(FORMAT_VERSION),
    }
    for number, (name, content) in enumerate(inputs):
        parts[f"prompts.path[{number}]"] = f"{os.path.basename(name)}#{content}"  # noqa: PTH119 - URLs too
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return {"hash": digest, "parts": parts}


def run_record(
    config: Config,
    *,
    run_id: str,
    created: str,
    facts: JsonDict,
    sites: Sequence[Site],
    storage: Storage | None = None,
    **sections: Any,
) -> JsonDict:
    """The content of `hsray.json`. `sections` are `fingerprint`, `plan` and whatever else is known."""
    return {
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "created": created,
        "hsray_version": hsray.__version__,
        "config": config.redacted(),
        "model": facts,
        "sites": [
            {
                "name": s.name,
                "index": s.index,
                "norm": s.norm,
                "huggingface": s.huggingface,
                "meaning": s.meaning,
                "codec": storage_of(storage, s.name).codec,
                "tokens": storage_of(storage, s.name).tokens,
            }
            for s in sites
        ],
        "dtype": config.capture.dtype,
        "codec": summarize_codecs(storage),
        **sections,
    }


def check_has_work(plan: JsonDict) -> None:
    """Raises ConfigError when not one prompt was accepted."""
    if plan["num_prompts"] == 0:
        reasons = ", ".join(f"{reason} {n}" for reason, n in plan["reject_reasons"].items()) or "the input is empty"
        raise ConfigError(f"prompts.path: none of {plan['num_rows']} rows can be extracted ({reasons})")


def _prompt_table(prompts: Sequence[Prompt]) -> pa.Table:
    offsets = np.zeros(len(prompts) + 1, np.int32)
    np.cumsum([p.num_tokens for p in prompts], out=offsets[1:])
    schema = plan_schema()

    def lists(arrays: Sequence[np.ndarray[Any, Any]], name: str) -> pa.Array:
        values = pa.array(np.concatenate(arrays))
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=schema.field(name).type)

    return pa.Table.from_arrays(
        [
            pa.array([p.row for p in prompts], pa.int64()),
            pa.array([p.prompt_id for p in prompts], pa.string()),
            pa.array([p.file for p in prompts], pa.string()),
            pa.array([p.line for p in prompts], pa.int64()),
            pa.array([p.full_tokens for p in prompts], pa.int32()),
            lists([p.input_ids for p in prompts], "input_ids"),
            lists([p.loss_mask for p in prompts], "loss_mask"),
        ],
        schema=schema,
    )


def _reject_table(rejects: Sequence[Reject]) -> pa.Table:
    schema = rejects_schema()
    return pa.Table.from_pydict({name: [getattr(r, name) for r in rejects] for name in schema.names}, schema=schema)


def _table_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _split(lists: pa.ListArray) -> list[list[int]]:
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy().tolist()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def _split_arrays(lists: pa.ListArray, dtype: Any) -> list[np.ndarray[Any, Any]]:
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy().astype(dtype, copy=False)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a run of a configuration would do. Returns the exit code: 4 if there is nothing to do."""
    parser = argparse.ArgumentParser(prog="python -m hsray.plan", description="What a run would do. Writes nothing.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example prompts.limit=1000")
    parser.add_argument("--json", action="store_true", help="print figures for programs")
    parser.add_argument("--rejects", type=Path, metavar="PATH", help="write rejected rows to a .parquet or .jsonl file")
    parser.add_argument("--replicas", type=int, help="for the time; default: cluster.replicas, else 1")
    parser.add_argument("--tokens-per-second", type=float, help="of one replica, for the time")
    parser.add_argument("--price", type=float, default=0.023, help="USD per GB and month (default: %(default)s)")
    args = parser.parse_args(argv)
    configure_logging("warning")
    try:
        return int(_show_plan(load_config(args.config, args.overrides), args))
    except HsrayError as err:
        log.error("%s", err)
        log.debug("traceback", exc_info=True)
        return int(err.exit_code)


def _show_plan(config: Config, args: argparse.Namespace) -> ExitCode:
    from rich.console import Console

    from hsray.checkpoint import read_facts
    from hsray.estimate import Costs, Estimate, survey, to_json
    from hsray.plan_report import show_report, write_rejects
    from hsray.prompts import Tally, load_tokenizer, read_prompts
    from hsray.resolve import longest_prompt, resolve_names

    config = resolve_names(config)
    facts = read_facts(config.model.path)
    sites = resolve_sites(config.capture.sites, facts.num_layers, config.capture.final)
    limits = LeaseLimits(
        bytes_per_token(len(sites), facts.hidden_size, config.capture.dtype),
        config.output.shard_bytes,
        config.output.max_lease_prompts,
    )
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        chat_template=config.prompts.chat_template,
    )
    storage = resolve_storage(config.capture.codec, config.capture.tokens, sites, facts.num_layers)
    tally, estimate = Tally(), Estimate(stored_selections(storage))
    items = read_prompts(
        config.prompts,
        tokenizer,
        vocab_size=facts.vocab_size,
        max_tokens=longest_prompt(config, facts),
        tally=tally,
    )
    if args.rejects is not None:
        items = write_rejects(items, args.rejects)
    for _ in survey(items, limits, estimate):
        pass
    replicas = args.replicas or (config.cluster.replicas if isinstance(config.cluster.replicas, int) else 1)
    costs = Costs(replicas, args.tokens_per_second, args.price)
    figures = to_json(
        estimate,
        tally,
        storage,
        hidden_size=facts.hidden_size,
        dtype=config.capture.dtype,
        limits=limits,
        costs=costs,
    )
    if args.json:
        print(json.dumps(figures))  # noqa: T201 - the command's output
    else:
        show_report(Console(), figures, estimate, tally, tokenizer.decode)
    if not estimate.lengths:
        log.error("prompts.path: none of %d rows can be extracted", figures["rows"])
        return ExitCode.CONFIG
    return ExitCode.COMPLETE


if __name__ == "__main__":
    sys.exit(main())

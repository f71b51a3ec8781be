"""A run made of another tool's files: the same plan, shards, resolutions and index that an extraction makes.

So it is as resumable and as accountable: files are looked at once to be planned or rejected, then leases are
committed one by one, and the same command goes on where it was stopped. The files must not change meanwhile.
"""

import dataclasses
import hashlib
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hsray.checkpoint import ModelFacts, model_fingerprint, read_facts
from hsray.config import Config, make_config
from hsray.convert.planning import Input, first_dtype, read_items
from hsray.convert.readers import FORMATS
from hsray.convert.stored import BadFile, Shape
from hsray.errors import ConfigError, HsrayError
from hsray.finish import RunSummary, finish_run, store_final_norm
from hsray.ledger import Ledger
from hsray.plan import Plan, build_plan, delete_plan, load_plan, read_lease_prompts, run_record
from hsray.ranges import RETRY_SECONDS
from hsray.records import JsonDict, Lease, Resolution
from hsray.schema import FORMAT_VERSION, bytes_per_token, shard_metadata
from hsray.shard import ShardRow, write_shard
from hsray.sites import FINAL_PRENORM, Site, resolve_sites
from hsray.store import Store, open_store

log = logging.getLogger(__name__)

# Leases are held in memory while they are written.
_LEASE_BYTES = 256 << 20
_LEASE_PROMPTS = 512
_THREADS = 2


def convert_files(
    format_name: str,
    folder: str | Path,
    url: str,
    *,
    model: str | Path,
    sites: Sequence[str],
    mask_all: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RunSummary:
    """Make a run at `url` of the files below `folder`.

    Args:
        format_name: one of `readers.FORMATS`.
        model: directory of the model whose states they are.
        sites: what the states in a file are, in its order, a final one last.
        mask_all: files without a loss mask get one of ones.

    Returns:
        The counts; rejected are the files that cannot be converted, with reasons in `rejects/`.

    Raises:
        ConfigError: an argument is wrong, or something that the files do not say is not said.
        FingerprintMismatch: the URL holds another run.
        HsrayError: a file changed after it was planned.
        StoreError: the store refuses or does not answer.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"format {format_name!r} is none of {', '.join(FORMATS)}")
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of this machine")
    facts = read_facts(model)
    shape = _shape(sites, facts, format_name)
    source = Input(folder, FORMATS[format_name], shape, mask_all)
    store = open_store(url, storage_options, retry_seconds=RETRY_SECONDS)
    record = _begin(store, source, facts, Path(model).absolute(), storage_options or {})
    ledger = Ledger(store, record["run_id"])
    plan = load_plan(store, record["plan"])
    _commit_leases(store, ledger, record, plan, source)
    found, accounting = ledger.account(plan.leases)
    return finish_run(store, ledger, record, accounting, found)


def _shape(names: Sequence[str], facts: ModelFacts, format_name: str) -> Shape:
    """The sites of a file, in its order."""
    if not names:
        example = f"resid_pre_2,resid_pre_{facts.num_layers // 2},resid_pre_{facts.num_layers - 3},{FINAL_PRENORM}"
        raise ConfigError(
            "--sites: the files do not say which states they hold. Name them in the order of the file, a final one "
            f"last: --sites {example}. {FORMATS[format_name].says}"
        )
    resolve_sites(list(names), facts.num_layers, key="--sites")  # none twice
    sites = [resolve_sites([name], facts.num_layers, key="--sites")[0] for name in names]
    finals = [site.name for site in sites if site.is_final]
    if len(finals) > 1 or (finals and not sites[-1].is_final):
        raise ConfigError(f"--sites: a file has one final state, the last: not {', '.join(names)}")
    residual = tuple(site.name for site in sites if not site.is_final)
    if not residual:
        raise ConfigError("--sites: name the states of inner layers too")
    return Shape(residual, finals[0] if finals else None, facts.hidden_size, facts.vocab_size)


def _begin(store: Store, source: Input, facts: ModelFacts, model: Path, storage_options: Mapping[str, Any]) -> JsonDict:
    """The run at this URL: planned and created, or found."""
    ledger = Ledger(store)
    stored = ledger.read_run()
    fingerprint = _fingerprint(source, model)
    if stored is not None:
        ledger.check_fingerprint(stored, {"fingerprint": fingerprint, "format_version": FORMAT_VERSION})
        return stored
    dtype = first_dtype(source)
    sites = resolve_sites(list(source.shape.sites), facts.num_layers)
    store.probe()
    plan = build_plan(
        read_items(source, dtype),
        store,
        bytes_per_token=bytes_per_token(len(sites), facts.hidden_size, dtype),
        shard_bytes=_LEASE_BYTES,
        max_lease_prompts=_LEASE_PROMPTS,
    )
    if plan["num_prompts"] == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in plan["reject_reasons"].items())
        raise ConfigError(f"none of the {plan['num_rows']} files below {source.folder} can be converted ({reasons})")
    if not store_final_norm(store, model, facts.norm_eps, facts.norm_kind):
        log.warning("the checkpoint at %s shows no final norm weight: postnorm cannot be derived later", model)
    proposed = run_record(
        _config(store, source, model, dtype, storage_options),
        run_id=uuid.uuid4().hex[:12],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        facts={**dataclasses.asdict(facts), "path": str(model)},
        sites=sites,
        fingerprint=fingerprint,
        plan=plan,
        inputs=[],
        imported={"format": source.files.name, "source": str(source.folder)},
    )
    standing = ledger.create_run(proposed)
    if standing["run_id"] != proposed["run_id"]:  # another one was faster; its plan is the run's
        delete_plan(store, plan)
        ledger.check_fingerprint(standing, proposed)
    return standing


def _config(store: Store, source: Input, model: Path, dtype: str, storage_options: Mapping[str, Any]) -> Config:
    return make_config(
        {
            "model": {"path": str(model)},
            "prompts": {"path": str(source.folder)},
            "capture": {"sites": list(source.shape.sites), "dtype": dtype},
            "output": {"url": store.url, "storage_options": dict(storage_options)},
        }
    )


def _fingerprint(source: Input, model: Path) -> JsonDict:
    """What makes two conversions the same. Files count by name and size: they were read once already."""
    files = hashlib.sha256()
    for entry in source.files.entries(source.folder):
        size = entry.path.stat().st_size if entry.path.exists() else -1
        files.update(f"{entry.name}\0{size}\0".encode())
    parts = {
        "convert.format": source.files.name,
        "convert.sites": ",".join(source.shape.sites),
        "convert.files": files.hexdigest()[:32],
        "convert.mask_all": str(source.mask_all),
        **model_fingerprint(model),
        "format": str(FORMAT_VERSION),
    }
    return {"hash": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32], "parts": parts}


def _commit_leases(store: Store, ledger: Ledger, record: JsonDict, plan: Plan, source: Input) -> None:
    sites = [Site(site["index"], site["name"]) for site in record["sites"]]
    hidden_size, dtype = record["model"]["hidden_size"], record["dtype"]
    metadata = shard_metadata(
        sites=sites, hidden_size=hidden_size, dtype=dtype, run_id=record["run_id"], model=record["model"]["name"]
    )
    _, accounting = ledger.account(plan.leases)

    def commit(lease: Lease) -> None:
        attempt = uuid.uuid4().hex[:12]
        prompts = read_lease_prompts(store, plan.refs[lease.root_id], lease.rows)
        rows = []
        for prompt in prompts:
            try:
                stored = source.files.read(Path(prompt.file), source.shape)
            except BadFile as err:
                raise HsrayError(f"{prompt.file} changed while it was converted: {err.detail}") from err
            if not np.array_equal(stored.input_ids, prompt.input_ids) or stored.dtype != dtype:
                raise HsrayError(f"{prompt.file} changed while it was converted: it holds another prompt")
            rows.append(ShardRow(prompt, stored.states))
        shard = write_shard(
            store,
            f"data/{lease.lease_id}-{attempt}-0.parquet",
            rows,
            sites=[site.name for site in sites],
            hidden_size=hidden_size,
            dtype=dtype,
            metadata=metadata,
        )
        ledger.resolve(Resolution("commit", lease.lease_id, attempt, "convert", (shard,)))

    with ThreadPoolExecutor(_THREADS, "hsray-convert") as pool:
        futures = [pool.submit(commit, lease) for lease in accounting.open]
        try:
            for done, future in enumerate(futures, start=1):
                future.result()
                if done % 20 == 0:
                    log.info("%d of %d leases", done, len(futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise

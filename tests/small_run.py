"""A finished run of a few prompts with random states, made of the real plan, shard, ledger and finish modules.

Rows are prompts of the given lengths, with two rejects among them. Leases hold three prompts; the first is
committed in two steps (the record of `000000` and of its remainder), the last gives one prompt up.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.finish import finish_run
from hsray.ledger import Ledger
from hsray.plan import build_plan, load_plan, read_lease_prompts
from hsray.records import DeadPrompt, JsonDict, Prompt, Reject, Resolution
from hsray.schema import bytes_per_token, shard_metadata
from hsray.shard import ShardRow, write_shard
from hsray.site_storage import Storage, storage_of, summarize_codecs
from hsray.sites import resolve_sites
from hsray.store import Store, open_store

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SITES = resolve_sites(["resid_pre_2", "resid_pre_5", "final_prenorm"], 8)
SITE_NAMES = [site.name for site in SITES]
LENGTHS = (5, 1, 130, 64, 17, 9000, 33, 2)


@dataclass
class SmallRun:
    """`states[row][site]` is what was written, `[tokens, hidden]`; dead rows have none."""

    url: str
    store: Store
    record: JsonDict
    prompts: dict[int, Prompt]
    states: dict[int, dict[str, npt.NDArray[Any]]] = field(default_factory=dict)
    dead: int = -1

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store)

    @property
    def rows(self) -> list[int]:
        """Committed rows in order."""
        return sorted(self.states)

    def finish(self) -> None:
        plan = load_plan(self.store, self.record["plan"])
        found, accounting = self.ledger.account(plan.leases)
        finish_run(self.store, self.ledger, self.record, accounting, found)

    def resolution(self, lease_id: str) -> JsonDict:
        record: JsonDict = self.store.get_json(f"leases/{lease_id}.json")
        return record

    def overwrite(self, key: str, record: JsonDict) -> None:
        self.store.put(key, json.dumps(record).encode())

    def shard_of(self, row: int) -> str:
        records = self.ledger.resolutions().values()
        return next(shard.key for record in records for shard in record.shards if row in shard.rows)

    def change_byte(self, key: str, offset: int) -> None:
        data = bytearray(self.store.get(key))
        data[offset] ^= 0xFF
        self.store.put(key, bytes(data))


def make_prompt(row: int, num_tokens: int, seed: int = 0) -> Prompt:
    rng = np.random.default_rng((seed, row))
    return Prompt(
        row=row,
        prompt_id=f"prompt-{row}",
        input_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
        loss_mask=rng.integers(0, 2, num_tokens, dtype=np.uint8),
        file="prompts.jsonl",
        line=row + 1,
    )


def make_states(row: int, num_tokens: int, hidden_size: int, dtype: str) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng((1, row))
    return {site: rng.standard_normal((num_tokens, hidden_size)).astype(DTYPES[dtype]) for site in SITE_NAMES}


def metadata(dtype: str, hidden_size: int, storage: Storage | None = None) -> dict[str, str]:
    return shard_metadata(
        sites=SITES, hidden_size=hidden_size, dtype=dtype, run_id="small", model="tiny", storage=storage
    )


def site_record(name: str, storage: Storage | None) -> JsonDict:
    site = next(s for s in SITES if s.name == name)
    record = {"name": name, "index": site.index, "norm": site.norm, "huggingface": site.huggingface}
    record |= {"meaning": site.meaning}
    # Runs of before there were codecs do not say it.
    return record if storage is None else {**record, **asdict(storage_of(storage, name))}


def build_small_run(
    url: str,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    hidden_size: int = 24,
    dtype: str = "bfloat16",
    finish: bool = True,
    storage_options: dict[str, Any] | None = None,
    config: JsonDict | None = None,
    storage: Storage | None = None,
) -> SmallRun:
    store = open_store(url, storage_options)
    items: list[Prompt | Reject] = []
    for number, length in enumerate(lengths):
        if number in (2, 5):
            items.append(Reject(len(items), None, "prompts.jsonl", len(items) + 1, "empty", "no tokens", "{}"))
        items.append(make_prompt(len(items), length))
    plan = build_plan(
        items,
        store,
        bytes_per_token=bytes_per_token(len(SITES), hidden_size, dtype),
        shard_bytes=1 << 40,
        max_lease_prompts=3,
    )
    record = {
        "format_version": 1,
        "run_id": "small",
        "created": "2026-01-01T00:00:00+00:00",
        "hsray_version": "0",
        "fingerprint": {"hash": "0", "parts": {}},
        "config": config or {"model": {"path": "nowhere", "trust_remote_code": False}, "engine": {"args": {}}},
        "model": {
            "name": "tiny",
            "architecture": "LlamaForCausalLM",
            "num_layers": 8,
            "hidden_size": hidden_size,
            "vocab_size": 50_000,
            "norm_eps": 1e-6,
            "norm_kind": "rms",
        },
        "sites": [site_record(name, storage) for name in SITE_NAMES],
        "dtype": dtype,
        "codec": summarize_codecs(storage),
        "plan": plan,
        "versions": {},
    }
    run = SmallRun(url, store, Ledger(store).create_run(record), {p.row: p for p in items if isinstance(p, Prompt)})
    loaded = load_plan(store, plan)
    for lease in loaded.leases:
        prompts = read_lease_prompts(store, loaded.refs[lease.lease_id], lease.rows)
        steps = [(lease.lease_id, prompts)]
        dead: tuple[DeadPrompt, ...] = ()
        if lease is loaded.leases[0]:
            steps = [(lease.lease_id, prompts[:1]), (f"{lease.lease_id}.r", prompts[1:])]
        elif lease is loaded.leases[-1]:
            given_up = prompts[-1]
            run.dead = given_up.row
            dead = (DeadPrompt(given_up.row, given_up.prompt_id, "prompt_permanent", "too odd", 3),)
            steps = [(lease.lease_id, prompts[:-1])]
        for lease_id, some in steps:
            for prompt in some:
                run.states[prompt.row] = make_states(prompt.row, prompt.num_tokens, hidden_size, dtype)
            shard = write_shard(
                store,
                f"data/{lease_id}-a1-0.parquet",
                [ShardRow(prompt, run.states[prompt.row]) for prompt in some],
                sites=SITE_NAMES,
                hidden_size=hidden_size,
                dtype=dtype,
                metadata=metadata(dtype, hidden_size, storage),
                storage=storage,
            )
            Ledger(store).resolve(Resolution("commit", lease_id, "a1", "replica", (shard,), dead))
    if finish:
        run.finish()
    return run

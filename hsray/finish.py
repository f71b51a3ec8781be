"""The end of a run: what is derived from the resolutions, and `_SUCCESS` last.

Everything here can be rebuilt at any time from `hsray.json`, the plan and the resolutions, so it may be cut
short by a crash and simply runs again.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hsray.checkpoint import final_norm_weight
from hsray.crash_points import crash_point
from hsray.index import write_index
from hsray.ledger import Accounting, Ledger
from hsray.records import JsonDict, ResolutionSummary
from hsray.schema import CARD_KEY, FINAL_NORM_KEY
from hsray.site_storage import PLAIN, Storage, positions_column, recorded_storage, stored_selections
from hsray.store import Store

# Above it the card falls back to a glob.
MAX_LISTED_SHARDS = 2000
_REPAIRED = (
    "",
    "Some rows were damaged and have been stored anew, in another shard. Of two rows with the same `row` and",
    "`segment`, the one that `index.parquet` names counts; hsray's reader sees no other.",
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished (or interrupted) run holds. `committed + rejected + dead + left == rows`."""

    rows: int
    committed: int
    rejected: int
    dead: int
    left: int
    tokens: int
    stored_bytes: int
    shards: int
    reject_reasons: dict[str, int]
    dead_reasons: dict[str, int]

    def to_json(self) -> JsonDict:
        return {name: getattr(self, name) for name in self.__slots__}


def summarize(run: JsonDict, accounting: Accounting, summaries: Mapping[str, ResolutionSummary]) -> RunSummary:
    """Count the outcomes of a run. Superseded records (none in a healthy run) are left out."""
    plan = run["plan"]
    kept = [found for lease_id, found in summaries.items() if lease_id not in accounting.superseded]
    committed, dead = len(accounting.committed), len(accounting.dead)
    return RunSummary(
        rows=plan["num_rows"],
        committed=committed,
        rejected=plan["num_rejects"],
        dead=dead,
        left=plan["num_prompts"] - committed - dead,
        tokens=accounting.tokens,
        stored_bytes=sum(found.stored_bytes for found in kept) - sum(accounting.emptied.values()),
        shards=sum(len(found.shards) for found in kept) - len(accounting.emptied),
        reject_reasons=dict(plan["reject_reasons"]),
        dead_reasons=dict(Counter(d.failure_class for d in accounting.dead.values()).most_common()),
    )


def finish_run(
    store: Store,
    ledger: Ledger,
    run: JsonDict,
    accounting: Accounting,
    summaries: Mapping[str, ResolutionSummary],
    *,
    before_success: Callable[[], None] | None = None,
) -> RunSummary:
    """Write the index, the dataset card and, last, `_SUCCESS`. Every prompt must have its outcome.

    Args:
        before_success: what else is to be there before the run counts as complete.

    Raises:
        FingerprintMismatch: the prefix is another run's by now.
    """
    summary = summarize(run, accounting, summaries)
    if summary.left:
        raise RuntimeError(f"{summary.left} prompts have no outcome; the run is not finished")
    ledger.check_run()
    crash_point("before_index")
    kept = sorted(summaries.keys() - accounting.superseded)
    selections = stored_selections(recorded_storage(run["sites"], store.url))
    write_index(store, ledger.standing(kept, accounting), [site["name"] for site in run["sites"]], selections)
    shards = [key for lease_id in kept for key in summaries[lease_id].shards if key not in accounting.emptied]
    again = accounting.reopened
    repaired = any(again.of(lease_id) & summaries[lease_id].committed_rows for lease_id in kept)
    store.put(CARD_KEY, dataset_card(run, summary, store.url, shards, repaired=repaired).encode())
    if before_success is not None:
        before_success()
    crash_point("before_success")
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    ledger.write_success({**summary.to_json(), "generation": accounting.generation, "finished": finished})
    crash_point("after_success")
    return summary


def store_final_norm(store: Store, model_path: str | Path, eps: float, kind: str) -> bool:
    """Keep the final norm beside the data, so that postnorm can be derived from prenorm without the model.

    Writes `final_norm.safetensors`: tensor `weight` `[hidden]`, metadata `eps` and `kind`. Returns False if the
    checkpoint does not show the weight.
    """
    weight = final_norm_weight(model_path)
    if weight is None:
        return False
    store.put(FINAL_NORM_KEY, save({"weight": np.ascontiguousarray(weight)}, {"eps": repr(eps), "kind": kind}))
    return True


def dataset_card(run: JsonDict, summary: RunSummary, url: str, shards: Sequence[str], *, repaired: bool = False) -> str:
    """README.md of the run, with the Hugging Face metadata block that makes the committed `shards` a dataset.

    `repaired`: some rows of `shards` no longer count, because they were damaged and stored anew.
    """
    sites = run["sites"]
    storage = recorded_storage(sites, url)
    features = [
        ("prompt_id", "string"),
        ("row", "int64"),
        *((name, "int32") for name in ("segment", "num_segments", "token_start", "num_tokens", "seq_len")),
    ]
    # By name, since a glob would take in what interrupted attempts left behind; a card of megabytes helps nobody.
    paths = [f"    - {key}" for key in shards] if len(shards) <= MAX_LISTED_SHARDS else ["    - data/*.parquet"]
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path:",
        *paths,
        "dataset_info:",
        "  features:",
        *(f"  - name: {name}\n    dtype: {dtype}" for name, dtype in features),
        "  - name: input_ids\n    sequence: int32",
        "  - name: loss_mask\n    sequence: uint8",
        *(f"  - name: {positions_column(name)}\n    sequence: int32" for name in stored_selections(storage)),
        *(f"  - name: {site['name']}\n    dtype: binary" for site in sites),
        "---",
        "",
        f"# Hidden states of {run['model']['name']}",
        "",
        f"Made by hsray {run['hsray_version']} on {run['created']}, format version {run['format_version']}.",
        "",
        "| | |",
        "|---|---|",
        f"| input rows | {summary.rows:,} |",
        f"| prompts here | {summary.committed:,} |",
        f"| rejected / dead | {summary.rejected:,} / {summary.dead:,} |",
        f"| tokens | {summary.tokens:,} |",
        f"| bytes in {summary.shards:,} shards | {summary.stored_bytes:,} |",
        f"| hidden size, dtype | {run['model']['hidden_size']}, {run['dtype']} |",
        "",
        "| column | Hugging Face | meaning |",
        "|---|---|---|",
        *(f"| `{s['name']}` | `{s['huggingface']}` | {s['meaning']} |" for s in sites),
        "",
        *_stored_as(storage),
        "Each tensor column holds little-endian, row-major `[num_tokens, hidden_size]` values. One Parquet row is",
        "one segment of one prompt (nearly always the whole prompt); read with hsray to have segments joined.",
        "Only objects that `index.parquet` names are part of the dataset: an interrupted attempt may have left",
        "others in `data/`; `python -m hsray.verify` counts them.",
        *(_REPAIRED if repaired else ()),
        "",
        "```python",
        "from hsray.reader import open_run",
        "",
        f"run = open_run({url!r})",
        "row = next(iter(run))",
        f"states = row[{sites[0]['name']!r}]  # [tokens, {run['model']['hidden_size']}] {run['dtype']}",
        "```",
        "",
        "Reasons of rejects: " + (json.dumps(summary.reject_reasons) if summary.rejected else "none") + ".",
        "",
    ]
    return "\n".join(lines)


def _stored_as(storage: Storage) -> list[str]:
    """What a reader of the plain Parquet files must know of sites that are not stored as they are."""
    others = [(site, entry) for site, entry in storage.items() if entry != PLAIN]
    if not others:
        return []
    return [
        "Not plain, of all tokens: "
        + "; ".join(f"`{site}` (codec {entry.codec}, tokens {entry.tokens})" for site, entry in others)
        + ". hsray decodes them by itself; its docs/format.md says how, and what the columns of positions are for.",
        "",
    ]

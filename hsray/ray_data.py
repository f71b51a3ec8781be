"""A run as a Ray Dataset: `hsray.read_run(url)`.

Unlike `ray.data.read_parquet` on the shards, this follows the resolutions (what interrupted attempts left is not read),
joins the segments of a prompt, and checks hashes. A read task gets its part of the index from the driver, so it opens
nothing but shards. Loaded only when it is called; the one module outside `cluster` that needs Ray.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from hsray.reader import PromptStates, Run, open_run
from hsray.site_storage import positions_column

# What a read task holds in memory at a time, and hands to Ray as one block.
_BLOCK_BYTES = 64 << 20
# Read tasks are made of as many prompts as have so many bytes, unless Ray wants more of them.
_TASK_BYTES = 512 << 20


def read_run(
    url: str, sites: Sequence[str] | None = None, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> "ray.data.Dataset":
    """One row per committed prompt: `prompt_id` string, `row` int64, `input_ids` list<int32>, `loss_mask` list<uint8>,
    and each of `sites` (default: all) as the bytes of its little-endian, row-major `[num_tokens, hidden_size]` values,
    decoded. Where a site is stored for some tokens only, the list<int32> `positions_loss` or
    `positions_through_last_loss` says which.

    Args:
        storage_options: as `output.storage_options`; they travel to the tasks. Credentials of the environment must be
            in that of the tasks, too.
        options: of `ray.data.read_datasource`, such as `concurrency` and `override_num_blocks`.

    Raises:
        ConfigError, HsrayError, StoreError: as `open_run`.
        KeyError: the run does not have one of `sites`.
    """
    run = open_run(url, storage_options)
    return ray.data.read_datasource(RunDatasource(run, run.known(sites)), **options)


class RunDatasource(Datasource):  # type: ignore[misc]
    """Tells Ray Data how to read `sites` of `run`."""

    def __init__(self, run: Run, sites: Sequence[str]) -> None:
        super().__init__()
        self._run = run
        self._sites = tuple(sites)
        index = run.segments
        per_segment = sum(index.nbytes[column].astype(np.int64) for column in run.columns_for(self._sites))
        self._nbytes = np.add.reduceat(per_segment, index.first[:-1]) if len(run) else np.zeros(0, np.int64)

    def get_name(self) -> str:
        return "HsrayRun"

    def estimate_inmemory_data_size(self) -> int:
        return int(self._nbytes.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        total = int(self._nbytes.sum())
        task_bytes = max(1, min(_TASK_BYTES, -(-total // max(1, parallelism))))
        ends = np.cumsum(self._nbytes)
        tasks = []
        start, before = 0, 0
        while start < len(self._run):
            stop = max(start + 1, int(np.searchsorted(ends, before + task_bytes, side="right")))
            metadata = BlockMetadata(
                num_rows=stop - start, size_bytes=int(ends[stop - 1]) - before, exec_stats=None, input_files=None
            )
            part, sites, schema = self._run.part(start, stop), self._sites, block_schema(self._run, self._sites)
            tasks.append(
                ReadTask(
                    lambda part=part, sites=sites: read_blocks(part, sites),
                    metadata,
                    schema=schema,
                    per_task_row_limit=per_task_row_limit,
                )
            )
            start, before = stop, int(ends[stop - 1])
        return tasks


def block_schema(run: Run, sites: Sequence[str]) -> pa.Schema:
    """Arrow schema of the blocks. A block may hold more than 2 GB of one site."""
    types = {"loss_mask": pa.list_(pa.uint8()), **dict.fromkeys(sites, pa.large_binary())}
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("row", pa.int64()),
            *((column, types.get(column, pa.list_(pa.int32()))) for column in run.columns_for(sites)),
        ]
    )


def read_blocks(run: Run, sites: Sequence[str]) -> Iterator[pa.Table]:
    """All prompts of `run`, in tables of about 64 MB or one prompt."""
    prompts: list[PromptStates] = []
    nbytes = 0
    for prompt in run.scan(sites):
        prompts.append(prompt)
        nbytes += sum(prompt[site].nbytes for site in sites)
        if nbytes >= _BLOCK_BYTES:
            yield _table(run, prompts, sites)
            prompts, nbytes = [], 0
    if prompts:
        yield _table(run, prompts, sites)


def _table(run: Run, prompts: Sequence[PromptStates], sites: Sequence[str]) -> pa.Table:
    schema = block_schema(run, sites)
    columns: dict[str, Any] = {
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "row": [prompt.row for prompt in prompts],
        "input_ids": [prompt.input_ids for prompt in prompts],
        "loss_mask": [prompt.loss_mask for prompt in prompts],
    }
    for site in sites:
        columns[site] = [prompt[site].reshape(-1).view(np.uint8).data for prompt in prompts]
        if run.storage[site].tokens != "all":
            columns[positions_column(run.storage[site].tokens)] = [prompt.positions(site) for prompt in prompts]
    return pa.table(columns, schema=schema)

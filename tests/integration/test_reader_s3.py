"""Writing, reading and verifying a run over real S3, also from forked and spawned processes."""

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hsray.errors import HsrayError
from hsray.reader import open_run
from hsray.verify import verify_run
from tests.seaweed import Seaweed
from tests.small_run import SITE_NAMES, SmallRun, build_small_run


@pytest.fixture
def small(seaweed: Seaweed) -> SmallRun:
    """States wide enough for shards of several multipart parts and payloads of several requests."""
    return build_small_run(
        seaweed.new_url(),
        lengths=(300, 2, 4500, 64, 17, 1),
        hidden_size=1536,
        dtype="float32",
        storage_options=seaweed.storage_options,
    )


def test_a_run_on_s3_reads_back_byte_for_byte_and_verifies(seaweed: Seaweed, small: SmallRun) -> None:
    run = open_run(small.url, seaweed.storage_options)

    assert [prompt.row for prompt in run] == small.rows
    for prompt in run:
        for site in SITE_NAMES:
            assert prompt[site].tobytes() == small.states[prompt.row][site].tobytes()
    long = max(small.rows, key=lambda row: small.prompts[row].num_tokens)
    part = pickle.loads(pickle.dumps(run))[f"prompt-{long}"].read("resid_pre_5", 4000, 4200)
    assert part.tobytes() == small.states[long]["resid_pre_5"][4000:4200].tobytes()
    report = verify_run(small.url, seaweed.storage_options, full=True)
    assert report.problems == []
    assert report.counts["bytes"] > 3 * (16 << 20)


def test_damage_on_s3_is_found_by_reader_and_verify(seaweed: Seaweed, small: SmallRun) -> None:
    run = open_run(small.url, seaweed.storage_options)
    prompt = run["prompt-0"]
    where = run.segments.where(prompt.segments.start, "final_prenorm")
    small.change_byte(where.key, where.offset + where.nbytes // 2)

    with pytest.raises(HsrayError, match="final_prenorm of prompt 'prompt-0'"):
        prompt.load()

    report = verify_run(small.url, seaweed.storage_options, full=True)
    assert {(p.check, p.key, p.row) for p in report.problems} == {("hashes", where.key, 0)}


def alone(batch: list[dict[str, Any]]) -> dict[str, Any]:
    (item,) = batch
    return item


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_data_loader_reads_s3_in_its_workers(seaweed: Seaweed, small: SmallRun, context: str) -> None:
    run = open_run(small.url, seaweed.storage_options)
    run.at(0).load()
    loader: DataLoader[Any] = DataLoader(
        run.torch_dataset(),
        batch_size=1,
        collate_fn=alone,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        timeout=240,
    )

    items = {item["prompt_id"]: item for item in loader}

    assert set(items) == set(run.prompt_ids)
    for row in small.rows:
        for site in SITE_NAMES:
            got = items[f"prompt-{row}"][site]
            assert got.dtype == torch.float32
            assert got.numpy().tobytes() == small.states[row][site].tobytes()

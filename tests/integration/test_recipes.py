"""The recipes of docs/reading.md do what they say, on local files and (those that can) on S3."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ray

import hsray
from hsray.errors import HsrayError
from tests.seaweed import Seaweed
from tests.small_run import SmallRun, build_small_run

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(r"^```python (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPES = dict(RECIPE.findall((ROOT / "docs/reading.md").read_text()))
PLAIN = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return with_garbage(build_small_run(str(tmp_path_factory.mktemp("recipes") / "run")))


def with_garbage(small: SmallRun) -> SmallRun:
    """And what an interrupted attempt left: a readable shard that belongs to nothing."""
    small.store.put("data/000000-zombie-0.parquet", small.store.get(small.shard_of(0)))
    return small


def run_recipe(name: str, url: str, folder: Path, storage_options: dict[str, Any] | None = None) -> list[str]:
    """The lines that a recipe prints, in a process of its own."""
    script = folder / name
    script.write_text(f"URL = {url!r}\nSTORAGE_OPTIONS = {storage_options or {}!r}\n{RECIPES[name]}")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def mean_norms(small: SmallRun) -> dict[str, float]:
    return {
        f"prompt-{row}": float(np.linalg.norm(states["final_prenorm"].astype(np.float32), axis=1).mean())
        for row, states in small.states.items()
    }


def segments(small: SmallRun) -> list[str]:
    lines = []
    for row in small.rows:
        tokens = small.prompts[row].num_tokens
        for number, start in enumerate(range(0, tokens, 4096)):
            lines.append(f"prompt-{row} {number} ({min(4096, tokens - start)}, 24)")
    return lines


def test_every_recipe_is_run_here() -> None:
    assert set(RECIPES) == {"ray_data.py", "datasets_streaming.py", "with_duckdb.py", "with_polars.py"}


def test_datasets_streams_every_segment(small: SmallRun, tmp_path: Path) -> None:
    assert sorted(run_recipe("datasets_streaming.py", small.url, tmp_path)) == sorted(segments(small))


def test_duckdb_counts_tokens_and_bytes(small: SmallRun, tmp_path: Path) -> None:
    prompts = [small.prompts[row] for row in small.rows]
    tokens, loss = sum(p.num_tokens for p in prompts), sum(int(p.loss_mask.sum()) for p in prompts)

    (line,) = run_recipe("with_duckdb.py", small.url, tmp_path)

    assert line == str((len(prompts), tokens, loss, tokens * 24 * 2))


def test_polars_finds_the_longest_prompt_of_one_segment(small: SmallRun, tmp_path: Path) -> None:
    row = max((r for r in small.rows if small.prompts[r].num_tokens <= 4096), key=lambda r: small.prompts[r].num_tokens)

    assert run_recipe("with_polars.py", small.url, tmp_path) == [f"prompt-{row} ({small.prompts[row].num_tokens}, 24)"]


def test_recipes_read_s3(seaweed: Seaweed, tmp_path: Path) -> None:
    small = with_garbage(build_small_run(seaweed.new_url(), storage_options=seaweed.storage_options))
    fsspec_options = {
        "key": seaweed.access_key,
        "secret": seaweed.secret_key,
        "client_kwargs": {"endpoint_url": seaweed.endpoint, "region_name": "us-east-1"},
    }
    polars_options = {
        "aws_access_key_id": seaweed.access_key,
        "aws_secret_access_key": seaweed.secret_key,
        "aws_endpoint_url": seaweed.endpoint,
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }

    assert sorted(run_recipe("datasets_streaming.py", small.url, tmp_path, fsspec_options)) == sorted(segments(small))
    assert len(run_recipe("with_polars.py", small.url, tmp_path, polars_options)) == 1


# Ray Data


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.mark.usefixtures("local_ray")
def test_the_ray_recipe_prints_every_prompt_once(small: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: a Ray of its own would take ten seconds.
    exec(compile(RECIPES["ray_data.py"], "ray_data.py", "exec"), {"URL": small.url})

    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("prompt-"))
    assert {name: pytest.approx(float(norm)) for name, norm in printed.items()} == mean_norms(small)


@pytest.mark.usefixtures("local_ray")
def test_ray_data_has_the_bytes_that_were_written(small: SmallRun) -> None:
    dataset = hsray.read_run(small.url, ["resid_pre_2", "final_prenorm"], override_num_blocks=3)  # type: ignore[attr-defined]

    rows = dataset.take_all()

    assert sorted(row["row"] for row in rows) == small.rows
    for row in rows:
        prompt, states = small.prompts[row["row"]], small.states[row["row"]]
        assert row["prompt_id"] == prompt.prompt_id
        assert list(row["input_ids"]) == prompt.input_ids.tolist()
        assert list(row["loss_mask"]) == prompt.loss_mask.tolist()
        for site in ("resid_pre_2", "final_prenorm"):
            assert row[site] == states[site].tobytes()
        assert "resid_pre_5" not in row
        assert np.frombuffer(row["resid_pre_2"], ml_dtypes.bfloat16).size == prompt.num_tokens * 24
    with pytest.raises(HsrayError, match="there is no run at"):
        hsray.read_run(f"{small.url}-nowhere")  # type: ignore[attr-defined]


# The other code of the page


def test_the_training_code_of_the_page_runs(tmp_path: Path) -> None:
    """As it stands, but for the URL and the GPU."""
    url = str(tmp_path / "run")
    from safetensors.numpy import save

    small = build_small_run(url, lengths=(5, 130, 64, 17, 33, 2, 8, 9))
    small.store.put("final_norm.safetensors", save({"weight": np.ones(24, np.float32)}))
    blocks = [block for block in PLAIN.findall((ROOT / "docs/reading.md").read_text()) if "training" in block]
    assert len(blocks) == 2
    for block in blocks:
        code = block.replace("s3://my-bucket/qwen3-8b-states", url).replace(', device="cuda"', "")
        code = code.replace("Eagle3Collate(run)", "Eagle3Collate(run, ['resid_pre_2', 'resid_pre_5'])")
        names: dict[str, Any] = {}
        exec(compile(code.replace("num_workers=4", "num_workers=0"), "reading.md", "exec"), names)
        batches = list(names["loader"])
        assert sum(len(batch["prompt_id"]) for batch in batches) == len(small.rows)

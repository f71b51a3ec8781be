"""Real SGLang on the CPU, real Ray, real weights of tiny random models: whole runs, and deaths of its processes.

Which models and layouts give right states is tested without Ray, in tests/matrix. Each test here starts an engine or
two (10 to 20 s each on two quiet cores).
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.runs import SGLANG, Run, ended, kill, wait_until
from tests.seaweed import Seaweed
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.alone

# Smaller than most prompts: a prompt takes several steps, and a step holds parts of several prompts.
PREFILL_TOKENS = 48
WORDS = ["the", "model", "writes", "residual", "stream", "into", "slot", "17", "naïve", "日本語", "state", "=", "f(x)"]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, engine_class=SGLANG)
    run.env["HSRAY_TEST_RUN"] = str(tmp_path)
    with ended(run) as it:
        yield it


def prepare(run: Run, kind: str, *, prompts: int, dtype: str = "float32", **settings: object) -> None:
    """A run of `prompts` rows: half share a long prefix, lengths from 1 token to several steps."""
    model = make_tiny_model(kind, run.folder / "model")
    rng = random.Random(3)
    prefix = " ".join(rng.choices(WORDS, k=40))
    rows: list[dict[str, object]] = [{"id": "one-token", "input_ids": [7]}]
    while len(rows) < prompts:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        if len(rows) % 2:
            text = f"{prefix} {text}"
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        rows.append(
            {"id": f"p{len(rows)}", "messages": chat} if len(rows) % 3 else {"id": f"p{len(rows)}", "text": text}
        )
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args: dict[str, object] = {"device": "cpu", "chunked_prefill_size": PREFILL_TOKENS, "max_running_requests": 32}
    run.config_path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(model)},
                "prompts": {"path": str(run.folder / "prompts.jsonl")},
                "capture": {
                    "sites": [
                        "resid_pre_1",
                        "resid_pre_2",
                        "resid_pre_4",
                        "resid_pre_7",
                        "final_prenorm",
                        "final_postnorm",
                    ],
                    "dtype": dtype,
                },
                "output": {"url": run.url, "storage_options": run.storage_options, "max_lease_prompts": 8},
                "engine": {"args": args},
                "spool": {"path": str(run.spool), "bytes": 64 << 20},
                "log": {"dir": str(run.folder / "logs"), "interval_seconds": 5},
                **settings,
            }
        )
    )


def test_states_equal_transformers_in_float32(new_run: Run) -> None:
    # The wrapper, MLA and packed aux states: what a whole run of the plainest family would not show.
    prepare(new_run, "kimi_k25", prompts=24)

    assert new_run.finish() == ExitCode.COMPLETE, new_run.log()

    report = verify_run(new_run.url, full=True, parity=12, tolerance=1e-5)
    assert report.problems == []
    assert len(report.parity) == 6
    for site in report.parity:
        assert site.is_ok, str(site)
    new_run.assert_nothing_left()


def test_two_replicas_write_one_dataset_to_s3(new_run: Run, seaweed: Seaweed) -> None:
    new_run.url, new_run.storage_options = seaweed.new_url(), seaweed.storage_options
    prepare(new_run, "llama", prompts=60, dtype="bfloat16", cluster={"replicas": 2, "cpus_per_replica": 1})

    assert new_run.finish() == ExitCode.COMPLETE, new_run.log()

    committed, dead, rejected = new_run.outcomes()
    assert (len(committed), len(dead), rejected) == (60, 0, 0)
    assert new_run.log().count("is ready on") == 2
    assert verify_run(new_run.url, new_run.storage_options, full=True).problems == []


def test_a_killed_scheduler_process_is_seen_in_seconds_and_replaced(new_run: Run) -> None:
    prepare(new_run, "llama", prompts=160, dtype="bfloat16")
    driver = new_run.start()
    new_run.wait_for_resolutions(2)
    (scheduler,) = new_run.processes("sglang::scheduler")

    kill(scheduler)

    wait_until(lambda: new_run.log().count("starting replica") == 2, 30, new_run.log)
    assert driver.wait(240) == ExitCode.COMPLETE, new_run.log()
    committed, dead, _ = new_run.outcomes()
    assert committed == set(range(160))
    assert not dead
    assert verify_run(new_run.url, full=True).problems == []
    new_run.assert_nothing_left()


def test_a_model_class_nobody_tested_is_refused_by_name(new_run: Run) -> None:
    prepare(new_run, "llama", prompts=4)
    config = new_run.folder / "model" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "NobodysForCausalLM"))

    assert new_run.finish() == ExitCode.CONFIG

    assert "engine.allow_untested" in new_run.log()
    assert "NobodysForCausalLM" in new_run.log()
    new_run.assert_nothing_left()

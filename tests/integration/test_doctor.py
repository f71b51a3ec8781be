"""The doctor as a user calls it: on S3, on a Ray cluster of fake nodes, with the real SGLang."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsray.cluster.survey import ask_every_node, run_on_node
from hsray.config import ClusterConfig
from hsray.doctor import collect
from hsray.doctor.__main__ import main
from hsray.doctor.facts import ModelFiles, SGLang, Torch
from hsray.doctor.probe import examine_software
from hsray.errors import ConfigError, HsrayError
from hsray.quickstart import quickstart_config
from hsray.spool import find_arenas
from tests.doctor_facts import lacking, linger, refuse, where
from tests.ray_cluster import FakeNodes, run_ray_cluster
from tests.runs import make_run
from tests.seaweed import READ_ONLY_KEY, Seaweed


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's import takes ten seconds, and the tests' model has no weights; both are tested by themselves."""
    monkeypatch.setattr(collect, "examine_software", lambda **_: (Torch("2.11"), SGLang("0.5.21")))
    monkeypatch.setattr(collect, "examine_model", lambda path: ModelFiles(path, files=1, weight_bytes=1000))


def make_config(folder: Path, url: str, options: dict[str, Any], *, rows: int = 5) -> Path:
    run = make_run(
        folder, [{"id": f"a{n}", "text": f"hello {n}"} for n in range(rows)], url=url, storage_options=options
    )
    settings = yaml.safe_load(run.config_path.read_text())
    settings["engine"]["allow_untested"] = True
    settings["output"]["retry_seconds"] = 2
    run.config_path.write_text(yaml.safe_dump(settings))
    return run.config_path


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def levels(data: dict[str, Any]) -> dict[str, str]:
    worst = {"ok": 0, "warn": 1, "fail": 2}
    found: dict[str, str] = {}
    for finding in data["findings"]:
        check, level = finding["check"], finding["level"]
        if worst[level] >= worst[found.get(check, "ok")]:
            found[check] = level
    return found


@pytest.mark.usefixtures("quick")
def test_a_bucket_that_works_is_in_order_and_left_empty(
    tmp_path: Path, seaweed: Seaweed, capsys: pytest.CaptureFixture[str]
) -> None:
    from hsray.store import open_store

    url = seaweed.new_url()

    code = main([str(make_config(tmp_path, url, seaweed.storage_options)), "--json"])

    data = report(capsys)
    assert code == data["exit_code"] == 0
    assert levels(data)["store"] == levels(data)["clock"] == "ok"
    assert abs(data["facts"]["store"]["skew"]) < 5
    assert list(open_store(url, seaweed.storage_options).list()) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"access_key_id": READ_ONLY_KEY}, "access denied"),
        ({"secret_access_key": "wrong"}, "access denied"),
        ({"endpoint": "http://127.0.0.1:9"}, "is of no use"),
        ({"endpoint": None}, "the bucket"),
    ],
)
def test_a_store_that_refuses_is_exit_code_5(
    tmp_path: Path, seaweed: Seaweed, capsys: pytest.CaptureFixture[str], options: dict[str, Any], words: str
) -> None:
    url = seaweed.new_url()
    if options == {"endpoint": None}:
        options, url = {}, "s3://no-such-bucket/run"

    code = main([str(make_config(tmp_path, url, {**seaweed.storage_options, **options})), "--json"])

    data = report(capsys)
    (store,) = [finding for finding in data["findings"] if finding["check"] == "store"]
    assert code == data["exit_code"] == 5
    assert words in store["seen"]
    assert store["advice"]
    assert seaweed.secret_key not in json.dumps(data)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("overrides", "check", "words"),
    [
        (["prompts.path=/nowhere.jsonl"], "prompts", "/nowhere.jsonl"),
        (["model.path=/nowhere"], "model", "config.json"),
        (["capture.sites=[resid_pre_99]"], "sites", "resid_pre_99"),
        (["engine.args={device: cpu, pp_size: 2}"], "engine arguments", "pp_size"),
        (["engine.args={}"], "gpus", "no GPU here"),
        (["spool.path=/proc/x"], "spool", "cannot be written"),
        (["spool.bytes=900000000000000"], "spool", "lower spool.bytes"),
        (["prompts.max_tokens=100000"], "prompt length", "max_tokens"),
        (["cluster.address=127.0.0.1:9"], "ray", "refused"),
        (["engine.allow_untested=false"], "sglang", "FakeModel"),
        (["output.url=s4://x"], "output.url", "unknown scheme"),
        (["model.tokenizer_path=/proc"], "tokenizer", "no tokenizer"),
    ],
)
def test_each_mistake_is_named_and_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], check: str, words: str
) -> None:
    if "output.url" not in overrides[0]:
        overrides = [*overrides, f"output.url={tmp_path}/run"]

    code = main([str(make_config(tmp_path, "", {})), *overrides, "--json"])

    data = report(capsys)
    assert code == data["exit_code"] == 4
    found = [finding for finding in data["findings"] if finding["check"] == check and finding["level"] == "fail"]
    assert any(words in finding["seen"] + finding["advice"] for finding in found)


@pytest.mark.usefixtures("quick")
def test_a_log_has_plain_lines_and_a_wrong_key_ends_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(make_config(tmp_path, str(tmp_path / "run"), {}))

    assert main([config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Nothing stands in the way: 0 failures")
    assert {line[:4].strip() for line in lines if line[:4].isupper()} <= {"OK", "WARN"}
    assert main([config, "spool.byte=1"]) == 4
    assert "did you mean spool.bytes" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_nodes_without_a_cluster_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    assert main([str(make_config(tmp_path, str(tmp_path / "run"), {})), "--nodes", "--json"]) == 4

    assert "cluster.address" in next(f["seen"] for f in report(capsys)["findings"] if f["check"] == "cluster")


def test_this_sglang_can_be_imported_and_knows_its_arguments() -> None:
    torch, sglang = examine_software(is_cpu=True, has_gpus=False, environment={})

    assert (torch.error, sglang.error) == ("", "")
    assert {"tp_size", "chunked_prefill_size", "attention_backend"} <= set(sglang.arguments)
    assert sglang.version.startswith("0.")


# ---------------------------------------------------------------- cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeNodes]:
    with run_ray_cluster(2) as running:
        yield running


def test_every_node_answers_for_itself(cluster: FakeNodes) -> None:
    config = ClusterConfig(address=cluster.address)

    answers = ask_every_node(config, 8, where, 120)

    assert [answer.error for answer in answers] == ["", "", ""]
    assert all(answer.answer is not None and answer.answer[0] == answer.node_id for answer in answers)
    assert all(answer.answer is not None and answer.answer[1] for answer in answers)  # how a worker knows itself
    assert sorted((answer.gpus, answer.slots) for answer in answers) == [(0, 0), (8, 1), (8, 1)]


def test_what_goes_wrong_on_a_node_is_its_answer(cluster: FakeNodes) -> None:
    config = ClusterConfig(address=cluster.address)

    answers = ask_every_node(config, 8, refuse, 120)

    assert {answer.error for answer in answers} == {"HsrayError: not here"}
    with pytest.raises(HsrayError, match="not here"):
        run_on_node(config, answers[0].node_id, 0, refuse, 120)


def test_a_node_that_lacks_a_package_says_which(cluster: FakeNodes) -> None:
    config = ClusterConfig(address=cluster.address)

    (answer, *_) = ask_every_node(config, 8, lacking, 120)

    assert answer.error == "ModuleNotFoundError: No module named 'no_such_package'"
    with pytest.raises(HsrayError, match="No module named 'no_such_package'"):
        run_on_node(config, answer.node_id, 0, lacking, 120)


def test_a_measurement_waits_for_gpus_only_so_long(cluster: FakeNodes) -> None:
    config = ClusterConfig(address=cluster.address)
    node_id = cluster.nodes[0].node_id

    assert run_on_node(config, node_id, 8, where, 120)[0] == node_id
    with pytest.raises(ConfigError, match="did not answer within 2 s"):
        run_on_node(config, node_id, 8, linger, 2)
    with pytest.raises(HsrayError, match="infeasible"):
        run_on_node(config, node_id, 9, where, 120)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nodes_of_a_cluster_side_by_side(
    tmp_path: Path, cluster: FakeNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight GPUs that Ray gives away and the machine does not have: each node says so."""
    config = make_config(tmp_path, str(tmp_path / "run"), {})
    settings = yaml.safe_load(config.read_text())
    settings["engine"]["args"] = {"tp_size": 8}
    settings["cluster"] = {"address": cluster.address}
    config.write_text(yaml.safe_dump(settings))

    assert main([str(config), "--nodes", "--json"]) == 4

    data = report(capsys)
    assert len(data["nodes"]) == 3
    told = [finding for finding in data["findings"] if finding["check"] == "gpus of ray"]
    assert len(told) == 2
    assert all("Ray gives away 8 GPUs, nvidia-smi shows 0" in finding["seen"] for finding in told)
    assert all(facts["in_ray"] for facts in data["nodes"].values())
    assert levels(data)["differences"] == "ok"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_a_run_of_the_quickstart_would_be_limited_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"output.url={tmp_path}/run", f"spool.path={tmp_path}/spool", "spool.bytes=100000000"]

    assert main([str(quickstart_config()), *overrides, "--bench", "--json"]) == 0

    bench = report(capsys)["bench"]
    assert bench["measured"]["errors"] == {}
    assert set(bench["forecast"]["limits"]) == {"prefill", "shared memory", "store"}
    assert bench["forecast"]["hours"] is None or bench["forecast"]["hours"] > 0
    assert not (tmp_path / "run").exists()
    assert find_arenas(tmp_path / "spool") == []
    assert functools.reduce(min, bench["forecast"]["limits"].values()) == bench["forecast"]["limits"]["prefill"]

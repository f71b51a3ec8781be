"""`--print-submit`: a line that does what it says, on whatever machine the job ends up."""

import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hsray.config import load_config, make_config
from hsray.errors import ConfigError, ExitCode
from hsray.extract import main
from hsray.submit import submit_command, submit_notes
from tests.sizing import ROOT

RUN: dict[str, Any] = {
    "model": {"path": "/models/m"},
    "prompts": {"path": ["s3://bucket/*.jsonl", "hsray:quickstart/prompts.jsonl"]},
    "output": {"url": "s3://bucket/run"},
}


@pytest.fixture(autouse=True)
def no_cluster_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def parse(command: str) -> tuple[list[str], dict[str, str], list[str]]:
    """The words before `ray`'s options, its options, and the entrypoint."""
    words = shlex.split(command.replace("\\\n", ""))
    end = words.index("--")
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    options = words[first:end]
    return words[:first], dict(zip(options[::2], options[1::2], strict=True)), words[end + 1 :]


def test_the_line_names_everything_that_the_job_needs(tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"

    start, options, entrypoint = parse(submit_command(file, ["prompts.where={source: [a, b]}"], make_config(RUN)))

    assert start == ["RAY_AUTH_MODE=disabled", "ray", "job", "submit"]
    assert options.keys() == {"--address", "--runtime-env-json"}
    assert options["--address"] == "http://127.0.0.1:8265"
    runtime_env = json.loads(options["--runtime-env-json"])
    assert runtime_env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    assert runtime_env["working_dir"] == str(tmp_path)
    assert entrypoint == ["python", "-m", "hsray.extract", "my run.yaml", "prompts.where={source: [a, b]}"]


def test_the_quickstart_needs_no_file() -> None:
    _, options, entrypoint = parse(submit_command(None, ["output.url=/data/q"], make_config(RUN)))

    assert "working_dir" not in json.loads(options["--runtime-env-json"])
    assert entrypoint == ["python", "-m", "hsray.extract", "output.url=/data/q"]


@pytest.mark.parametrize("name", ["run.yaml", "my run.yaml", "[a]!#*?.yaml"])
def test_only_the_configuration_travels_with_the_job(name: str, tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    folder = tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    for file in (name, "weights.bin", f"deep/{name}", ".hidden"):
        (folder / file).write_text(file)
    _, options, _ = parse(submit_command(folder / name, [], make_config(RUN)))
    runtime_env = json.loads(options["--runtime-env-json"])

    package = tmp_path / "package.zip"
    create_package(runtime_env["working_dir"], package, include_gitignore=True, excludes=runtime_env["excludes"])

    assert zipfile.ZipFile(package).namelist() == [name]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "http://127.0.0.1:8265"),
        ({"RAY_ADDRESS": "http://10.0.0.1:8265"}, "http://10.0.0.1:8265"),
        ({"RAY_ADDRESS": "http://a:1", "RAY_API_SERVER_ADDRESS": "https://b"}, "https://b"),
    ],
)
def test_the_address_is_rays_own(variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (variables | {"RAY_AUTH_MODE": "token"}).items():
        monkeypatch.setenv(name, value)

    start, options, _ = parse(submit_command(None, [], make_config(RUN)))

    assert options["--address"] == address
    assert start[0] == "RAY_AUTH_MODE=token"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "path", "models/m"),
        ("model", "tokenizer_path", "./t"),
        ("prompts", "path", ["s3://b/p.jsonl", "p.jsonl"]),
        ("prompts", "chat_template", "template.jinja"),
        ("output", "url", "./run"),
        ("spool", "path", "spool"),
        ("log", "dir", "logs"),
    ],
)
def test_relative_paths_are_refused_by_their_key(section: str, key: str, value: Any) -> None:
    config = make_config(RUN | {section: {**RUN.get(section, {}), key: value}})

    with pytest.raises(
        ConfigError, match=rf"^{section}\.{key}: .* is relative, and the job runs in a folder of its own"
    ):
        submit_command(None, [], config)


def test_a_job_cannot_leave_its_cluster() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.address: a submitted job runs on the cluster"):
        submit_command(None, [], make_config(RUN | {"cluster": {"address": "10.0.0.1:6379"}}))


def test_notes_name_what_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(submit_notes(make_config(RUN))) == []

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    notes = list(submit_notes(make_config(RUN | {"output": {"url": "/data/run"}})))

    assert [note.split()[0] for note in notes] == ["output.url:", "the"]
    assert not any("AKIDEXAMPLE" in note for note in notes)


def test_the_command_prints_the_line_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsray.extract.run", lambda *_args, **_kwargs: pytest.fail("it ran"))
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: /m}\nprompts: {path: /p.jsonl}\noutput: {url: s3://<your-bucket>/run}\n")

    assert main([str(file), "--print-submit"]) == ExitCode.CONFIG
    assert main([str(file), "--print-submit", "output.url=s3://b/run"]) == ExitCode.COMPLETE

    shown = capsys.readouterr()
    assert (
        shown.out
        == submit_command(file, ["output.url=s3://b/run"], load_config(file, ["output.url=s3://b/run"])) + "\n"
    )
    assert "output.url ('s3://<your-bucket>/run')" in shown.err


def test_printing_needs_neither_ray_nor_a_model() -> None:
    code = (
        "import sys; from hsray.extract import main; main(sys.argv[1:]); "
        "assert not {'ray', 'torch', 'sglang', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    args = ["configs/quickstart.yaml", "output.url=/data/run", "--print-submit"]

    result = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert "ray job submit" in result.stdout

from pathlib import Path

import pytest

from hsray.config import load_config, make_config
from hsray.errors import ConfigError, ExitCode

MINIMAL = "model: {path: m}\nprompts: {path: p.jsonl}\noutput: {url: out}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_reach_nested_keys_and_are_yaml(file: Path) -> None:
    config = load_config(
        file, ["cluster.replicas=2", "capture.sites=[resid_pre_1, final_prenorm]", "engine.args.tp_size=8"]
    )

    assert config.cluster.replicas == 2
    assert config.capture.sites == ["resid_pre_1", "final_prenorm"]
    assert config.engine.tp_size == 8


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("prompts.fromat=text", "did you mean prompts.format"),
        ("engin.args.tp_size=2", "did you mean engine"),
        ("cluster.replicas=0", "cluster.replicas"),
        ("cluster.replicas=many", "cluster.replicas"),
        ("spool.low_watermark=0.9", "must be below high_watermark"),
        ("budgets.replica_deaths=2", "must be above lease_crashes"),
        ("output.url.x=1", "is a value, not a section"),
        ("capture.dtype=int8", "capture.dtype"),
        ("model.path=null", "model.path"),
        ("nonsense", "dotted.key=value"),
        ("a=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused_and_names_the_key(file: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load_config(file, [override])

    assert refused.value.exit_code is ExitCode.CONFIG


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"model": {"path": "m"}, "prompts": {"pth": "x"}, "output": {}})

    for part in ("prompts.path is required", "unknown key prompts.pth", "output.url is required"):
        assert part in str(refused.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_the_environment_of_the_engine_is_text() -> None:
    config = make_config(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p"},
            "output": {"url": "o"},
            "engine": {"env": {"NCCL_NVLS_ENABLE": 0, "X": True, "Y": "a"}},
        }
    )

    assert config.engine.env == {"NCCL_NVLS_ENABLE": "0", "X": "1", "Y": "a"}


def test_secrets_are_masked_and_nothing_else_is(file: Path) -> None:
    config = load_config(
        file,
        [
            "output.storage_options.secret_access_key=abc",
            "output.storage_options.region=eu",
            "prompts.storage_options.token=t",
            "prompts.max_tokens=5",
            "model.tokenizer_path=tok",
        ],
    )

    shown = config.redacted()

    assert shown["output"]["storage_options"] == {"secret_access_key": "***", "region": "eu"}
    assert shown["prompts"]["storage_options"] == {"token": "***"}
    assert shown["prompts"]["max_tokens"] == 5
    assert shown["model"]["tokenizer_path"] == "tok"

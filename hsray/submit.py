"""The command that submits a run to a Ray cluster: `python -m hsray.extract CONFIG.yaml ... --print-submit`.

It is printed, not run: who submits sees what goes where. The configuration file travels with the job, alone; all else
that the run reads is named by it, and must be where the driver (the head node) and the replicas find it.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsray.config import Config
from hsray.errors import ConfigError
from hsray.quickstart import BUILTIN_PREFIX

# Ray kills a stopped job after three seconds. Replicas get this long to commit what is complete.
STOP_WAIT_SECONDS = 60
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_SPECIAL_IN_PATTERNS = re.compile(r"([\\*?\[\]!# ])")


def submit_command(config_path: str | Path | None, overrides: Sequence[str], config: Config) -> str:
    """A line for a shell. Resource options of `ray job submit` are left out on purpose: with any of them, Ray puts
    the driver on some worker instead of the head node.

    Args:
        config_path: the file of `config`; None: the quickstart, which every installation has.
        overrides: `dotted.key=value`, passed on.

    Raises:
        ConfigError: a key that means something else where the job runs.
    """
    _check_survives_the_journey(config)
    runtime_env: dict[str, object] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)}}
    entrypoint = ["python", "-m", "hsray.extract"]
    if config_path is not None:
        file = Path(config_path).absolute()
        runtime_env["working_dir"] = str(file.parent)
        # Nothing of the folder but the folder itself and the file.
        runtime_env["excludes"] = ["/*", "!/.", "!/" + _SPECIAL_IN_PATTERNS.sub(r"\\\1", file.name)]
        entrypoint.append(file.name)
    lines = [
        f"RAY_AUTH_MODE={shlex.quote(os.environ.get('RAY_AUTH_MODE', 'disabled'))} ray job submit",
        f"--address {shlex.quote(_address())}",
        f"--runtime-env-json {shlex.quote(json.dumps(runtime_env))}",
        f"-- {shlex.join([*entrypoint, *overrides])}",
    ]
    return " \\\n  ".join(lines)


def submit_notes(config: Config) -> Iterator[str]:
    """What whoever submits should know, a sentence each."""
    if "://" not in config.output.url:
        yield f"output.url: {config.output.url} has to be one file system that every node sees"
    if any(name in os.environ for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS")):
        yield "the store's credentials in your environment stay here; the nodes need their own"


def _address() -> str:
    """As `ray job submit` finds it; 8265 of this machine is where `ray dashboard` forwards to."""
    found = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    return found if found and "://" in found else _DEFAULT_ADDRESS


def _check_survives_the_journey(config: Config) -> None:
    if config.cluster.address is not None:
        raise ConfigError(
            f"cluster.address: a submitted job runs on the cluster that it was submitted to. Remove "
            f"{config.cluster.address!r} (cluster.address=null)"
        )
    for key, path in _paths(config):
        if not path.startswith((BUILTIN_PREFIX, "/", "~")) and "://" not in path:
            raise ConfigError(
                f"{key}: {path!r} is relative, and the job runs in a folder of its own. Use an absolute path on "
                f"the cluster's nodes, or a URL ({key}=...)"
            )


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Every key of the configuration that names a file or folder."""
    yield "model.path", config.model.path
    if config.model.tokenizer_path is not None:
        yield "model.tokenizer_path", config.model.tokenizer_path
    for path in config.prompts.paths:
        yield "prompts.path", path
    if config.prompts.chat_template is not None:
        yield "prompts.chat_template", config.prompts.chat_template
    yield "output.url", config.output.url
    yield "spool.path", config.spool.path
    if config.log.dir is not None:
        yield "log.dir", config.log.dir

"""What `hsray` can run on without anything of yours: a small real model and a few hundred prompts.

Configurations name them `hsray:smollm2-135m-instruct` and `hsray:quickstart/prompts.jsonl`. Importing this
package loads neither numpy nor a model; `resolve_builtin` does the work when it is asked.
"""

from pathlib import Path

from hsray.errors import ConfigError

BUILTIN_PREFIX = "hsray:"

_HERE = Path(__file__).parent
_MODEL = f"{BUILTIN_PREFIX}smollm2-135m-instruct"
_PROMPTS = f"{BUILTIN_PREFIX}quickstart/prompts.jsonl"


def resolve_builtin(name: str) -> str:
    """The local path behind a built-in name.

    Args:
        name: `hsray:smollm2-135m-instruct` (the model directory; made on the first call, some ten seconds)
            or `hsray:quickstart/prompts.jsonl`.

    Raises:
        ConfigError: no such built-in, or a package that the model needs is missing.
        HsrayError: the model directory cannot be made.
    """
    if name == _PROMPTS:
        return str(_HERE / "prompts.jsonl")
    if name == _MODEL:
        from hsray.quickstart.model import smollm2_directory

        return str(smollm2_directory())
    raise ConfigError(f"unknown built-in {name!r}; known: {_MODEL}, {_PROMPTS}")


def quickstart_config() -> Path:
    """The packaged configuration that `python -m hsray.extract` runs when it is given none."""
    return _HERE / "quickstart.yaml"

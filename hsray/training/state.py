"""Where an epoch was left: a small dict that says which order it counts in, so that it is never used on another."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hsray.errors import ConfigError

State = dict[str, Any]


def check_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming what differs, if a state was saved under other settings."""
    differing = [
        f"{name} was {theirs.get(name)!r} and is {value!r}" for name, value in ours.items() if theirs.get(name) != value
    ]
    if differing:
        raise ConfigError(
            f"this state counts in another order of prompts: {'; '.join(differing)}. Use the settings that it was "
            "saved under, or start an epoch with set_epoch"
        )


def describe(usable: npt.NDArray[np.bool_]) -> str:
    """Which prompts of a run: how many, and a checksum of which."""
    return f"{usable.sum()} ({zlib.crc32(np.packbits(usable).tobytes()):08x})"

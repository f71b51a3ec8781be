"""The exception tree. Each class knows whether trying again may help.

    HsrayError
    ├─ ConfigError          permanent   the message names the dotted key and what to write instead
    ├─ FingerprintMismatch  permanent   the prefix belongs to another run
    ├─ PromptError          permanent   one prompt; becomes a reject or a dead record, never ends the run
    ├─ EngineError
    │   ├─ EngineStartError permanent   carries the tail of SGLang's log
    │   ├─ SelfTestError    permanent   the capture is not right on this engine
    │   └─ CaptureMismatch  transient   rows, width or ids differ from the request
    ├─ ReplicaLost          transient   actor, worker process or node died
    ├─ SpoolFull            transient   no room in the arena
    └─ StoreError
        ├─ StoreUnavailable transient   5xx, throttling, timeouts, broken connections
        └─ StoreUnusable    permanent   denied, no such bucket, no conditional put

Classes stay picklable (one positional message): they cross Ray.
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of `python -m hsray.<verb>`."""

    COMPLETE = 0
    FAILED = 1  # a bug, or no replica could be started
    INCOMPLETE = 3  # finished, but dead or rejected prompts are over the limit
    CONFIG = 4  # configuration or fingerprint
    STORE = 5  # the store is unusable
    INTERRUPTED = 75  # stopped on request; the same command resumes (EX_TEMPFAIL)


class HsrayError(Exception):
    """Base of everything hsray raises on purpose."""

    transient: ClassVar[bool] = False
    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class ConfigError(HsrayError, ValueError):
    """A configuration value is wrong. The message names the key and what to do."""

    exit_code = ExitCode.CONFIG


class FingerprintMismatch(HsrayError):
    """The output prefix holds a run made from other inputs. The message lists the differing keys."""

    exit_code = ExitCode.CONFIG


class PromptError(HsrayError):
    """One prompt cannot be processed; the message is the reason given in its reject or dead record."""


class EngineError(HsrayError):
    """SGLang failed."""


class EngineStartError(EngineError):
    """The engine did not start, or its capture hooks did not report in."""


class SelfTestError(EngineError):
    """The live engine does not deliver the tensors its sites promise."""


class CaptureMismatch(EngineError):
    """What the capture delivered for a prompt does not fit the request."""

    transient = True


class ReplicaLost(HsrayError):
    """The actor, its process or its node died."""

    transient = True


class SpoolFull(HsrayError):
    """The arena has no room for a slot of this size now, or (permanently) at all."""

    transient = True


class StoreError(HsrayError):
    """An object-store operation failed."""

    exit_code = ExitCode.STORE


class StoreUnavailable(StoreError):
    """The store did not answer in time, throttled us or broke the connection. Try again."""

    transient = True


class StoreUnusable(StoreError):
    """The store refuses: credentials, permissions, a missing bucket or a missing capability."""

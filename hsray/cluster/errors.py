"""What Ray's exceptions mean: our own error inside them, and whether a loss was the node's doing."""

from typing import Any

from hsray import errors
from hsray.errors import ReplicaLost

# Errors that a replica's constructor may raise; Ray keeps only their text.
_CREATION_ERRORS = (
    "ConfigError",
    "SelfTestError",
    "EngineStartError",
    "SpoolFull",
    "StoreUnusable",
    "StoreUnavailable",
)


def is_task_error(error: Exception) -> bool:
    """Whether our own code raised it in a replica that lives on."""
    import ray

    return isinstance(error, ray.exceptions.RayTaskError) and not isinstance(error, ray.exceptions.RayActorError)


def is_node_loss(error: Exception) -> bool:
    """Whether Ray itself says that the node died or was taken away."""
    import ray

    return isinstance(error, ray.exceptions.NodeDiedError) or bool(getattr(error, "preempted", False))


def cause_of(error: Exception) -> BaseException:
    """Our own exception inside Ray's wrapping, or Ray's."""
    import ray

    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        return error.__cause__ or _creation_cause(error) or ReplicaLost(_loss(str(error)))
    return error


def _creation_cause(error: Any) -> BaseException | None:
    """An actor whose constructor raised dies with the error's text as its reason."""
    text = str(error)
    for kind in _CREATION_ERRORS:
        marker = f"{kind}: "
        if marker in text:
            message = text.rpartition(marker)[2].strip()
            made: BaseException = getattr(errors, kind)(message)
            return made
    return None


def _loss(text: str) -> str:
    """The one line of Ray's many that says why an actor is gone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["Ray says nothing"]
    if lines[0].startswith("The actor died because of an error raised in its creation task"):
        return f"it could not be made: {lines[-1]}"
    told = next((line for line in lines if line.startswith("The actor is dead because")), lines[0])
    return told.partition(" Some common causes")[0][:500]


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

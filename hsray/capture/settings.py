"""What a replica tells the scheduler processes it starts: one JSON value in one environment variable."""

import json
import os
from dataclasses import asdict, dataclass

ENVIRONMENT_VARIABLE = "HSRAY_CAPTURE"


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """Settings of the capture side.

    Attributes:
        channel: abstract socket address of the replica's ChannelServer.
        arena_path, arena_bytes: the arena file and its size.
        sites: site names in forward order, the layout of a slot.
        layer_sites: what the self-test of single layers looks at; empty if it cannot be done.
        stored_dtype: dtype of the arena, `bfloat16`, `float16` or `float32`.
        allow_untested: go on with a SGLang version or model class that is not in the table.
        launched_by_engine: hooks are installed by our Engine subclass, not by the plugin entry point.
    """

    channel: str
    arena_path: str
    arena_bytes: int
    sites: tuple[str, ...]
    stored_dtype: str
    layer_sites: tuple[str, ...] = ()
    allow_untested: bool = False
    launched_by_engine: bool = True

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "CaptureSettings | None":
        raw = os.environ.get(ENVIRONMENT_VARIABLE)
        if not raw:
            return None
        data = json.loads(raw)
        data["sites"], data["layer_sites"] = tuple(data["sites"]), tuple(data.get("layer_sites", ()))
        return cls(**data)

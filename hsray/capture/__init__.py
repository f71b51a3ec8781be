"""The "patched SGLang": hooks that run inside SGLang's scheduler processes. No SGLang source is edited.

`launch.py` is what our Engine starts instead of SGLang's own scheduler function; it installs `hooks.py`,
which use `versions.py` (what is known about SGLang's insides) and `writer.py` (states into the arena).
Nothing here may import ray or pyarrow; torch and sglang only inside functions or in modules that the
scheduler process alone loads.
"""

from hsray.capture.settings import CaptureSettings

__all__ = ["CaptureSettings", "register_plugin"]


def register_plugin() -> None:
    """Entry point `sglang.srt.plugins`, for `sglang serve` and other launchers that are not ours.

    Does nothing without HSRAY_CAPTURE in the environment. SGLang only logs what a plugin raises, so whoever
    uses this path must wait for the handshake on the channel before trusting the server.
    """
    settings = CaptureSettings.from_environment()
    if settings is not None and not settings.launched_by_engine:
        from hsray.capture.hooks import install

        install(settings)

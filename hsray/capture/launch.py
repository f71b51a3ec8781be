"""The function our Engine runs in each scheduler process instead of SGLang's own.

spawn pickles it by name, so it must stay a plain module-level function. It fails closed: an exception here
ends the scheduler process, and with it the engine, before a single request is accepted.
"""

from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.scheduler import run_scheduler_process as run_stock_scheduler

    from hsray.capture.hooks import install
    from hsray.capture.settings import CaptureSettings

    settings = CaptureSettings.from_environment()
    if settings is None:
        raise RuntimeError("the scheduler process was started without HSRAY_CAPTURE in its environment")
    install(settings)
    return run_stock_scheduler(*args, **kwargs)

"""How fast states get off the GPU: `python -m hsray.doctor.device_copy`, a process of its own.

Copies from the first GPU into an arena that is registered with the driver, as the capture does. Is told `spool` (a
path); answers `rate` (bytes/s).
"""

import sys
import time
from typing import Any

from hsray.doctor.child import Answer
from hsray.spool import Arena

_BYTES = 1 << 30
_ROUNDS = 8


def measure(torch: Any, arena: Arena) -> float:
    """Bytes/s from the first GPU into the whole arena."""
    host = torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if code != 0:
        raise RuntimeError(f"the CUDA driver cannot page-lock {host.numel():,} bytes of shared memory (error {code})")
    try:
        device = torch.zeros(arena.nbytes, dtype=torch.uint8, device="cuda")
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_ROUNDS):
            host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        return float(_ROUNDS * arena.nbytes / (time.perf_counter() - started))
    finally:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def main() -> int:
    answer = Answer()
    import torch

    arena = Arena(answer.options["spool"], _BYTES)
    try:
        rate = measure(torch, arena)
    finally:
        arena.remove()
    answer.give({"rate": rate})
    return 0


if __name__ == "__main__":
    sys.exit(main())

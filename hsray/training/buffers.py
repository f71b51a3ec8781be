"""Memory that is used again: on fresh pages, a read costs half its CPU for the kernel to provide them.

A tensor from a pool is an ordinary tensor. When the last one that looks at its memory is gone, that memory goes back to
the pool by itself, so nobody gives anything back, and nobody can do it too early.
"""

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict, deque

import numpy as np
import torch

_SMALLEST = 512
# Larger ones are mapped.
_MAPPED = 1 << 20


def size_class(nbytes: int, *, powers_of_two: bool = False) -> int:
    """The smallest class that holds `nbytes`: an eighth larger at most, or the next power of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    power = 1 << (nbytes - 1).bit_length()
    step = power if powers_of_two else power // 16
    return -(-nbytes // step) * step


class BufferPool:
    """Thread-safe. With what it keeps for later, it never holds more than has been in use at a time.

    Args:
        pinned: page-locked memory, so that copies to a GPU run beside everything else; needs CUDA. PyTorch gives it in
            powers of two. Who copies from it must hold it until the copy is done.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._idle_bytes = 0
        self._used_bytes = 0
        self._most_used = 0
        # A finalizer may run anywhere, also while the lock is held: it only appends here.
        self._back: deque[torch.Tensor] = deque()

    @property
    def used_bytes(self) -> int:
        """Of buffers that are out."""
        with self._lock:
            self._collect()
            return self._used_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` with anything in it, aligned for every dtype."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = size_class(nbytes, powers_of_two=self._pinned)
        with self._lock:
            self._collect()
            buffer = self._best_fit(size)
            self._used_bytes += size if buffer is None else buffer.numel()
            self._most_used = max(self._most_used, self._used_bytes)
        if buffer is None:
            buffer = _pages(size) if size >= _MAPPED and not self._pinned else self._allocate(size)
        # torch keeps this array object as long as any view of the tensor.
        memory = buffer.numpy()[:nbytes]
        weakref.finalize(memory, self._back.append, buffer).atexit = False
        return torch.from_numpy(memory)

    def _best_fit(self, size: int) -> torch.Tensor | None:
        """An idle buffer that is large enough, and not more than twice that."""
        fitting = min((other for other in self._idle if size <= other <= 2 * size), default=None)
        if fitting is None:
            return None
        buffer = self._idle[fitting].pop()
        self._idle_bytes -= fitting
        if not self._idle[fitting]:
            del self._idle[fitting]
        return buffer

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def _collect(self) -> None:
        while self._back:
            buffer = self._back.popleft()
            self._idle[buffer.numel()].append(buffer)
            self._idle_bytes += buffer.numel()
            self._used_bytes -= buffer.numel()
        for size in sorted(self._idle):
            while self._idle[size] and self._idle_bytes + self._used_bytes > self._most_used:
                self._idle[size].pop(0)
                self._idle_bytes -= size
            if not self._idle[size]:
                del self._idle[size]


def _pages(size: int) -> torch.Tensor:
    """Memory of its own, which goes back to the kernel when it is dropped: from a heap, it might not."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))

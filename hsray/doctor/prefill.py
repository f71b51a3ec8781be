"""How fast SGLang prefills when nothing is captured: `python -m hsray.doctor.prefill`, a process of its own.

Is told `engine` (EngineSpec) and `lengths`; answers `tokens`, `seconds` and `load_seconds`.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hsray.checkpoint import read_facts
from hsray.doctor.child import Answer
from hsray.engine import EngineSpec, engine_arguments, known_arguments

_WARM_UP_TOKENS = 4096
_SECONDS = 15.0
_ROUND_SECONDS = 5.0


def choose(lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths in order, again and again, until they add up to `tokens`."""
    chosen, left = [], tokens
    for length in itertools.cycle(lengths):
        if left <= 0:
            break
        chosen.append(length)
        left -= length
    return chosen


class Bench:
    """A plain engine with the run's arguments, and prompts of random ids."""

    def __init__(self, spec: EngineSpec) -> None:
        os.environ.update(spec.env)
        if spec.is_cpu:
            from hsray.capture.cpu import cpu_environment

            cpu_environment(os.environ)
        from sglang.srt.entrypoints.engine import Engine

        self.engine: Any = Engine(**engine_arguments(spec, known_arguments()))
        self.loop = asyncio.new_event_loop()
        self.rng = np.random.default_rng(0)
        self.vocabulary = read_facts(spec.model_path).vocab_size
        self.longest = int(self.engine.tokenizer_manager.context_len) - 8
        pool = spec.args.get("max_total_tokens") or self.engine.server_args.max_total_tokens
        if pool:
            self.longest = min(self.longest, int(pool) - 8)

    def seconds(self, lengths: Sequence[int]) -> float:
        """How long these prompts take, all sent at once."""
        prompts = [self.rng.integers(0, self.vocabulary, min(n, self.longest)).tolist() for n in lengths]

        async def send() -> None:
            sampling = {"max_new_tokens": 0, "temperature": 0}
            await asyncio.gather(*[self.engine.async_generate(input_ids=p, sampling_params=sampling) for p in prompts])

        started = time.perf_counter()
        self.loop.run_until_complete(send())
        return time.perf_counter() - started


def main() -> int:
    answer = Answer()
    started = time.perf_counter()
    bench = Bench(EngineSpec(**answer.options["engine"]))
    load_seconds = time.perf_counter() - started
    lengths = [min(n, bench.longest) for n in answer.options["lengths"]]
    bench.seconds(choose(lengths, _WARM_UP_TOKENS))
    tokens, seconds, wanted = 0, 0.0, _WARM_UP_TOKENS
    while seconds < _SECONDS:
        chosen = choose(lengths, wanted)
        took = bench.seconds(chosen)
        tokens, seconds = tokens + sum(chosen), seconds + took
        # Rounds that last: while one ends, the engine is not full.
        wanted = max(_WARM_UP_TOKENS, int(sum(chosen) / took * _ROUND_SECONDS))
    answer.give({"tokens": tokens, "seconds": seconds, "load_seconds": load_seconds})
    bench.engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The self-test's prompts through a live engine, at the sites that the self-test and the oracle ask for."""

import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from hsray.channel import LAYER_LAYOUT, TEST_LAYOUT
from hsray.errors import SelfTestError
from hsray.inflight import WAIT_SECONDS, InFlight, Request
from hsray.oracle import OraclePlan
from hsray.records import Prompt
from hsray.schema import bytes_per_token
from hsray.selftest import SelfTest, SelfTestReport, TestPrompt, make_test_prompts


def self_test(engine: InFlight, oracle: OraclePlan) -> SelfTestReport:
    """Run the self-test on an engine that has no other request.

    Raises:
        SelfTestError: the capture is not right on this engine.
        EngineError: it broke.
    """
    spec, facts = engine.spec, engine.spec.facts
    test_sites, layer_sites = engine.hello.test_sites, oracle.sites(facts.num_layers)
    widest = max(len(test_sites), len(layer_sites))
    arena_tokens = engine.arena.nbytes // bytes_per_token(widest, facts.hidden_size, spec.dtype)
    max_tokens = max(1, min(engine.engine.max_prompt_tokens - 2, arena_tokens // 8))
    # SGLang deals requests to data-parallel ranks in turn: as many sets as ranks.
    prompts = make_test_prompts(facts.vocab_size, max_tokens) * engine.engine.num_leaders
    test = SelfTest(spec.engine.model_path, facts, spec.sites, spec.dtype)
    tested = _probe(engine, prompts, TEST_LAYOUT, test_sites, max_new_tokens=1)
    report = test.check(tested)
    if layer_sites:
        test.check_layers(oracle, tested, _probe(engine, prompts, LAYER_LAYOUT, layer_sites), report)
    return report


def _probe(
    engine: InFlight, prompts: Sequence[Sequence[int]], layout: str, sites: Sequence[str], max_new_tokens: int = 0
) -> list[TestPrompt]:
    """States of some prompts at the sites of a layout, all prompts in the engine at once."""
    spec = engine.spec
    per_token = bytes_per_token(len(sites), spec.facts.hidden_size, spec.dtype)
    requests = []
    with engine.lock:
        for ids in prompts:
            slot = engine.admission.allocator.allocate(len(ids) * per_token)
            if slot is None:
                raise SelfTestError("spool.bytes is too small even for the self-test's prompts")
            prompt = Prompt(-1, "self-test", np.asarray(ids, np.int32), np.zeros(len(ids), np.uint8), "", 0)
            requests.append(engine.send(prompt, slot, _ignore, layout=layout, max_new_tokens=max_new_tokens))
        deadline = time.monotonic() + spec.start_timeout_seconds
        while not all(request.is_done for request in requests):
            engine.check(SelfTestError)
            if time.monotonic() > deadline:
                raise SelfTestError(f"the self-test's prompts did not come back; log: {engine.log_path}")
            engine.lock.wait(WAIT_SECONDS)
    tested = [_states(engine, request, sites) for request in requests]
    with engine.lock:
        for request in requests:
            engine.release(request)
    return tested


def _states(engine: InFlight, request: Request, sites: Sequence[str]) -> TestPrompt:
    # Rows that are zero or NaN are for the self-test to judge: it says more about them.
    problem = request.problem(of_rows=False)
    if problem is not None:
        raise SelfTestError(f"self-test: {problem}")
    assert request.response is not None
    spec, prompt, slot = engine.spec, request.prompt, request.slot
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(spec.dtype) or np.dtype(spec.dtype)
    raw = np.frombuffer(engine.arena.view(slot.offset, slot.nbytes), dtype)
    states = raw.reshape(len(sites), prompt.num_tokens, spec.facts.hidden_size)
    by_site = {site: states[i].copy() for i, site in enumerate(sites)}
    return TestPrompt(prompt.input_ids.tolist(), by_site, next(iter(request.response.output_ids), -1))


def _ignore(_: Request) -> None:
    pass

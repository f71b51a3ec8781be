"""An engine whose capture can be made wrong while it runs.

`MutantEngine` starts SGLang as always, with one addition in its scheduler processes: before each forward pass they
read the name of a fault from a file, and do to the states (or to what is noted of the prompt) what the name says.
Every rank reads the same file. An empty file is a capture that is right.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsray.engine import SGLangEngine

FAULT_FILE = "HSRAY_TEST_FAULT_FILE"


class MutantEngine(SGLangEngine):
    scheduler_function = "tests.mutants.engine:run_mutant_scheduler"


def run_mutant_scheduler(*args: Any, **kwargs: Any) -> Any:
    from hsray.capture import hooks, launch

    mutate(hooks)
    return launch.run_scheduler_process(*args, **kwargs)


def fault() -> str:
    return Path(os.environ[FAULT_FILE]).read_text().strip()


def mutate(hooks: Any) -> None:
    """Wrap our own capture; must happen before it is installed."""
    import torch

    capture_class, versions = hooks.Capture, hooks.versions
    store, select = capture_class.store, capture_class.select_layers
    note = capture_class.note_prompts
    set_layers = versions.set_aux_capture
    partials: dict[int, Any] = {}
    previous: list[Any] = []

    def set_shifted_layers(owner: Any, indices: list[int]) -> None:
        set_layers(owner, [i + 1 for i in indices] if fault() == "layer off by one" else indices)

    def select_again(self: Any, forward_batch: Any) -> None:
        self.indices = [-1]  # the fault may have changed since
        keep_partial_sums(self, partials)
        select(self, forward_batch)

    def store_mutated(self: Any, spans: list[Any], states: Any) -> None:
        name = fault()
        before = list(states.aux)
        change = STATE_FAULTS.get(name)
        if change is not None:
            change(states, spans)
        elif name == "rank-local partial sums":
            *aux, prenorm = states.aux
            states.aux = [*(s + partials[i - 1] for i, s in zip(self.indices, aux, strict=True)), prenorm]
        elif name == "states of the step before" and previous:
            *old, _ = previous
            *new, prenorm = states.aux
            stale = [torch.cat([a, b])[: len(b)] for a, b in zip(old, new, strict=False)]
            states.aux = [*stale, *new[len(stale) :], prenorm]
        previous[:] = before
        store(self, spans, states)

    def note_wrong_ids(self: Any, requests: Any) -> None:
        note(self, requests)
        if fault() == "other prompt ids":
            self.prompt_crc32 = {rid: crc ^ 1 for rid, crc in self.prompt_crc32.items()}

    versions.set_aux_capture = set_shifted_layers
    capture_class.select_layers = select_again
    capture_class.store = store_mutated
    capture_class.note_prompts = note_wrong_ids


def keep_partial_sums(capture: Any, partials: dict[int, Any]) -> None:
    """Note, per layer, what the all-reduce after its MLP added to this rank's own sum (negated)."""
    for index, layer in enumerate(capture.owner.model.layers):
        linear = layer.mlp.down_proj
        if hasattr(linear, "hsray_test_forward"):
            continue
        linear.hsray_test_forward = linear.forward

        def forward(x: Any, *args: Any, _linear: Any = linear, _index: int = index, **kwargs: Any) -> Any:
            own = None
            if fault() == "rank-local partial sums":
                own, _ = _linear.hsray_test_forward(x, *args, **{**kwargs, "skip_all_reduce": True})
                own = own.clone()
            output, bias = _linear.hsray_test_forward(x, *args, **kwargs)
            if own is not None:
                partials[_index] = own - output
            return output, bias

        linear.forward = forward


def _on_aux(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def apply(states: Any, _spans: Any) -> None:
        *aux, prenorm = states.aux
        states.aux = [*(change(state) for state in aux), prenorm]

    return apply


def _on_final(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def apply(states: Any, _spans: Any) -> None:
        *aux, prenorm = states.aux
        states.aux, states.postnorm = [*aux, change(prenorm)], change(states.postnorm)

    return apply


def _swap_norms(states: Any, _spans: Any) -> None:
    *aux, prenorm = states.aux
    states.aux, states.postnorm = [*aux, states.postnorm], prenorm


def _prenorm_twice(states: Any, _spans: Any) -> None:
    states.postnorm = states.aux[-1]


def _aux_swapped(states: Any, _spans: Any) -> None:
    first, second, *rest = states.aux
    states.aux = [second, first, *rest]


def _first_rows_of_another_request(states: Any, spans: Any) -> None:
    """The rows of the two longest requests trade places, in aux states only."""
    if len(spans) < 2:
        return
    a, b = sorted(spans, key=lambda span: span.count)[-2:]
    count = min(a.count, b.count)
    *aux, prenorm = states.aux
    changed = []
    for state in aux:
        copy = state.clone()
        copy[a.first_row : a.first_row + count] = state[b.first_row : b.first_row + count]
        copy[b.first_row : b.first_row + count] = state[a.first_row : a.first_row + count]
        changed.append(copy)
    states.aux = [*changed, prenorm]


def _zero(rows: slice) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        state = state.clone()
        state[rows] = 0
        return state

    return change


def _nan(state: Any) -> Any:
    state = state.clone()
    state[0] = float("nan")
    return state


STATE_FAULTS: dict[str, Callable[[Any, Any], None]] = {
    "norms swapped": _swap_norms,
    "postnorm is prenorm": _prenorm_twice,
    "two aux sites swapped": _aux_swapped,
    "zero aux rows": _on_aux(_zero(slice(0, 1))),
    "zero final rows": _on_final(_zero(slice(-1, None))),
    "constant aux rows": _on_aux(lambda state: state[:1].expand_as(state)),
    "constant final rows": _on_final(lambda state: state[:1].expand_as(state)),
    "aux rows shifted by one": _on_aux(lambda state: state.roll(1, 0)),
    "final rows shifted by one": _on_final(lambda state: state.roll(1, 0)),
    "aux rows of another request": _first_rows_of_another_request,
    "final rows of another request": _on_final(lambda state: state.flip(0)),
    "NaN in an aux row": _on_aux(_nan),
    "NaN in a final row": _on_final(_nan),
}

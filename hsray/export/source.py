"""What a format takes of a run: which residual sites, which final state, and prompts read with bounded memory.

The final state before the norm can be turned into the one after it, with the stored weight; the reverse cannot be
done, because the scale of each row is gone. So a format says which of the two it needs, and a run that cannot give
it is refused here, with the reason.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsray.checkpoint import apply_norm
from hsray.errors import ConfigError, HsrayError
from hsray.reader import FinalNorm, PromptStates, Run, StateArray
from hsray.schema import ENGINE_KEY, FINAL_NORM_KEY, TOKEN_COLUMNS
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM, resolve_sites
from hsray.store import Store

log = logging.getLogger(__name__)

# As the self-test names what it proved (`selftest.SelfTest.check`).
_NORM_PROVEN = "norm(final_prenorm) equals final_postnorm"
# Prompts are read together up to this size.
BATCH_BYTES = 16 << 20
# A norm in float32 is made of so many tokens at a time.
_NORM_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """Which states of a run are exported.

    Attributes:
        residual: residual sites, in the order of the forward pass.
        final: the final site; None for none.
        norm: what makes `final_postnorm` out of the stored `final_prenorm`; None where that is not needed.
    """

    residual: tuple[str, ...]
    final: str | None = None
    norm: FinalNorm | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """The columns that are read."""
        final = FINAL_PRENORM if self.norm is not None else self.final
        return self.residual if final is None else (*self.residual, final)

    @property
    def exported(self) -> tuple[str, ...]:
        return self.residual if self.final is None else (*self.residual, self.final)


def select_residual(run: Run, given: Sequence[str] | None, count: int | None, who: str) -> tuple[str, ...]:
    """The residual sites to export.

    Args:
        given: names, in any order and spelling (`resid_post_1`); None for all of the run.
        count: how many the format takes; None for any number, at least one.
        who: the format, for messages.

    Raises:
        ConfigError: names --sites.
    """
    available = tuple(site for site in run.sites if site not in (FINAL_PRENORM, FINAL_POSTNORM))
    chosen = available if given is None else _known(run, given)
    if finals := [site for site in chosen if site not in available]:
        raise ConfigError(
            f"--sites: {', '.join(finals)}: {who} decides itself which final state it takes; leave it out"
        )
    if not chosen:
        raise ConfigError(
            f"--sites: {who} needs states of inner layers, and this run has only {', '.join(run.sites)}. "
            "Extract with capture.sites: eagle3"
        )
    if count is not None and len(chosen) != count:
        hint = "Name them: --sites " + ",".join(available[:count]) if len(available) >= count else "Extract such a run"
        raise ConfigError(
            f"--sites: {who} takes states of exactly {count} inner layers, not {len(chosen)} "
            f"({', '.join(chosen)}). {hint}"
        )
    return chosen


def select_final(run: Run, store: Store, site: str, who: str) -> tuple[str, FinalNorm | None]:
    """The final site to export, and the norm that makes it where it is not stored.

    Raises:
        ConfigError: the run can give no such state.
        HsrayError: the stored norm does not fit the run.
    """
    if site in run.sites:
        return site, None
    if site == FINAL_PRENORM:
        if FINAL_POSTNORM in run.sites:
            raise ConfigError(
                f"{who} takes the final state before the last norm, and this run has it only after the norm. That "
                "cannot be undone: the scale of each token is gone. Extract with capture.final: prenorm"
            )
        raise ConfigError(f"{who} needs the final state, and this run has none. Extract with {FINAL_PRENORM}")
    if FINAL_PRENORM not in run.sites:
        raise ConfigError(
            f"{who} needs the final state after the last norm, and this run has no final state. Extract with "
            f"{FINAL_PRENORM} or {FINAL_POSTNORM} among capture.sites"
        )
    return site, _checked_norm(run, store, who)


def _checked_norm(run: Run, store: Store, who: str) -> FinalNorm:
    norm = run.final_norm()
    if norm is None:
        raise ConfigError(
            f"{who} takes the final state after the last norm. This run has it before the norm and lacks the weight "
            f"to derive it ({FINAL_NORM_KEY}: the checkpoint did not show one). Extract with capture.final: postnorm"
        )
    weight = norm.weight.astype(np.float32)
    if weight.shape != (run.hidden_size,) or not np.isfinite(weight).all() or not weight.any():
        raise HsrayError(
            f"{store.locate(FINAL_NORM_KEY)} does not hold a norm weight of {run.hidden_size} values (shape "
            f"{list(weight.shape)}). Restore it from the model, or extract with capture.final: postnorm"
        )
    if norm.kind not in ("rms", "rms_one_plus"):
        raise HsrayError(f"{store.url} has a final norm of kind {norm.kind!r}, which this hsray cannot apply")
    if not _was_proven(store):
        log.warning(
            "%s is derived from %s, and the run's self-test did not see that both agree on its engine (engine.json). "
            "Compare some with `python -m hsray.verify %s --parity 4`",
            FINAL_POSTNORM,
            FINAL_PRENORM,
            store.url,
        )
    return norm


def _was_proven(store: Store) -> bool:
    try:
        passed = json.loads(store.get(ENGINE_KEY))["self_test"]["passed"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
    return _NORM_PROVEN in passed


def _known(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    sites = resolve_sites(list(names), run.record["model"]["num_layers"], key="--sites")
    for site in sites:
        if site.name not in run.sites:
            raise ConfigError(f"--sites: {site.name} is not in this run, which has {', '.join(run.sites)}")
    return tuple(site.name for site in sites)


class Sample:
    """One prompt as a format sees it."""

    def __init__(self, prompt: PromptStates, position: int, selection: Selection) -> None:
        self.position = position
        self.prompt_id = prompt.prompt_id
        self.row = prompt.row
        self._prompt = prompt
        self._selection = selection

    def __len__(self) -> int:
        return self._prompt.seq_len

    @property
    def input_ids(self) -> npt.NDArray[np.int64]:
        """int64 `[T]`."""
        return self._prompt.input_ids.astype(np.int64)

    @property
    def loss_mask(self) -> npt.NDArray[np.int64]:
        """int64 `[T]`, aligned with `input_ids`."""
        return self._prompt.loss_mask.astype(np.int64)

    def state(self, site: str) -> StateArray:
        """`[T, hidden]` of the stored dtype, one of `Selection.exported`."""
        norm = self._selection.norm
        if site != FINAL_POSTNORM or norm is None:
            return self._prompt[site]
        before = self._prompt[FINAL_PRENORM]
        after = np.empty_like(before)
        for start in range(0, len(before), _NORM_TOKENS):
            part = slice(start, start + _NORM_TOKENS)
            after[part] = apply_norm(before[part], norm.weight, norm.eps, norm.kind).astype(before.dtype)  # type: ignore[arg-type]
        return after

    def stack(self, sites: Sequence[str]) -> StateArray:
        """`[T, sites, hidden]`: the states of a token side by side."""
        states: StateArray | None = None
        for number, site in enumerate(sites):
            state = self.state(site)
            if states is None:
                states = np.empty((len(state), len(sites), state.shape[1]), state.dtype)
            states[:, number] = state
        assert states is not None
        return states


class Source:
    """Prompts of a run by position, in batches.

    Attributes:
        run: where they come from.
        selection: their states.
        lengths: int64, tokens of each position.
        nbytes: int64, bytes of states that are read for each position.
    """

    def __init__(self, run: Run, selection: Selection) -> None:
        self.run = run
        self.selection = selection
        segments = run.segments
        heads = segments.first[:-1]
        self.lengths: npt.NDArray[np.int64] = segments.seq_len[heads].astype(np.int64)
        itemsize = 4 if run.dtype == "float32" else 2
        self.nbytes = self.lengths * (len(selection.stored) * run.hidden_size * itemsize)

    def __len__(self) -> int:
        return len(self.lengths)

    def samples(self, positions: Sequence[int], *, states: bool = True) -> Iterator[Sample]:
        """The prompts at these ascending positions, read some 16 MB (or one prompt) at a time."""
        columns = (*TOKEN_COLUMNS, *(self.selection.stored if states else ()))
        batch: list[int] = []
        nbytes = 0
        for position in positions:
            size = int(self.nbytes[position]) if states else 8 * int(self.lengths[position])
            if batch and nbytes + size > BATCH_BYTES:
                yield from self._load(batch, columns)
                batch, nbytes = [], 0
            batch.append(position)
            nbytes += size
        if batch:
            yield from self._load(batch, columns)

    def _load(self, positions: list[int], columns: Sequence[str]) -> Iterator[Sample]:
        prompts: list[Any] = list(self.run.load(positions, columns))
        for number, position in enumerate(positions):
            prompt = prompts[number]
            # Whoever takes it is the only one who holds it.
            prompts[number] = None
            yield Sample(prompt, position, self.selection)

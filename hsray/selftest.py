"""Is the capture right on this live engine? Pure checks on the states of a few prompts; no engine, no Ray.

Two independent witnesses. The engine's own next token comes out of SGLang's sampler, ours out of the captured
final state, the checkpoint's norm and lm_head, in numpy: both can only agree if final states are the right rows, in
the right order, before or after the norm as their name says. For residual sites, transformers runs single layers of
the checkpoint on what was captured (`oracle.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsray.checkpoint import ModelFacts, apply_norm, final_norm_weight, lm_head_weight
from hsray.errors import SelfTestError
from hsray.oracle import LayerOracle, OraclePlan
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM

# Relative error allowed between norm(final_prenorm), in float32, and the engine's final_postnorm.
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
# The engine's token may be this far (relative to the spread of logits) below our best: rounding can swap ties.
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
# Error of a captured layer output, relative to what the layer adds: of the median row, and of the median row of a
# single prompt. An expert router may decide a near tie the other way in another arithmetic, so single rows may differ.
LAYER_TOLERANCE = {"float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.3), "float16": (0.05, 0.3)}
# Where a layer adds next to nothing (a massive activation), rounding is measured against this part of the stream:
# adding twice to a bfloat16 stream changes it by some 0.2 %.
_LEAST_UPDATE = 0.05
# Relative difference allowed between two requests with the same ids in the median row. Other company in a batch means
# other kernels, and what they round differently grows with depth: 2 % in the middle of 32 layers of bfloat16.
SAME_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
_LEAST_PROMPT_ROWS = 16
_VOCAB_BLOCK = 16_384


@dataclass(frozen=True, slots=True)
class TestPrompt:
    """A self-test prompt and what came back: states by site `[tokens, hidden]`, and the engine's next token."""

    __test__ = False  # not a pytest class

    input_ids: Sequence[int]
    states: Mapping[str, "np.ndarray[Any, Any]"]
    next_token: int


@dataclass(slots=True)
class SelfTestReport:
    """What was checked, and what could not be, with the reason. The driver logs the second."""

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def make_test_prompts(vocab_size: int, max_tokens: int, seed: int = 0) -> list[list[int]]:
    """Random ids, lengths from 2 up, two of them sharing a long prefix. All at most `max_tokens` long."""
    rng = np.random.default_rng(seed)
    lengths = [n for n in (2, 5, 64, 193) if n <= max_tokens] or [max(1, max_tokens)]
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
    longest = prompts[-1]
    prompts.append([*longest[: len(longest) // 2], *rng.integers(0, vocab_size, len(longest) // 2).tolist()])
    return [p for p in prompts if p]


class SelfTest:
    """Checks of one model. Reads the final norm and lm_head from the checkpoint, as memory maps."""

    def __init__(self, model_path: str | Path, facts: ModelFacts, sites: Sequence[str], dtype: str) -> None:
        self.facts = facts
        self.sites = tuple(sites)
        self.dtype = dtype
        self.model_path = model_path
        self.norm_weight = final_norm_weight(model_path)
        self.head = lm_head_weight(model_path, facts.tie_word_embeddings)

    def check(self, prompts: Sequence[TestPrompt]) -> SelfTestReport:
        """Raises SelfTestError saying which site of which prompt is wrong, and how."""
        report = SelfTestReport()
        for number, prompt in enumerate(prompts):
            where = f"self-test prompt {number} ({len(prompt.input_ids)} tokens)"
            self._check_shapes(prompt, where)
            self._check_norm(prompt, where)
            self._check_next_token(prompt, where)
        report.passed.append("every site present, of the right width, finite and not constant")
        if self.norm_weight is None:
            report.skipped.append("final norm: the checkpoint has no readable final norm weight")
        elif self._has_prenorm(prompts[0]):
            report.passed.append("norm(final_prenorm) equals final_postnorm")
        else:
            report.skipped.append("final_prenorm: this model and layout do not show it (and the run does not ask)")
        if self.head is None:
            report.skipped.append("next token: the checkpoint has no readable lm_head (quantised or not safetensors)")
        else:
            report.passed.append("norm and lm_head on the captured states give the engine's own next token")
        return report

    def check_layers(
        self, plan: OraclePlan, prompts: Sequence[TestPrompt], by_layer: Sequence[TestPrompt], report: SelfTestReport
    ) -> None:
        """Compare what layers were seen to do with what transformers makes them do; adds to `report`.

        Args:
            prompts: the prompts given to `check`.
            by_layer: the same prompts, with states at `plan.sites`.

        Raises SelfTestError naming the layer whose input or output is not what its name says.
        """
        report.skipped += [f"residual sites, independent reference: {reason}" for reason in plan.skipped]
        checked = []
        tokens = sorted({token for prompt in by_layer for token in prompt.input_ids})
        for layer in plan.layers:
            entering, leaving = f"resid_pre_{layer}", f"resid_pre_{layer + 1}"
            if layer == self.facts.num_layers - 1:
                leaving = FINAL_PRENORM
                if not self._has_prenorm(by_layer[0]):
                    report.skipped.append(f"residual sites, independent reference: layer {layer}: no {FINAL_PRENORM}")
                    continue
            try:
                oracle = LayerOracle(self.model_path, layer, tokens)
                expected = [oracle.output(p.input_ids, p.states[entering] if layer else None) for p in by_layer]
            except Exception as err:  # noqa: BLE001 - whatever transformers does not like; not the capture's fault
                reason = f"transformers cannot run it ({type(err).__name__}: {err})"
                report.skipped.append(f"residual sites, independent reference: layer {layer}: {reason}")
                continue
            errors = [
                _layer_errors(expected[n], p.states[leaving], p.states[entering] if layer else None)
                for n, p in enumerate(by_layer)
            ]
            self._judge_layer(layer, entering, leaving, errors)
            checked.append(layer)
        if checked:
            layers = ", ".join(map(str, checked))
            report.passed.append(f"transformers' own layers {layers} make the captured states out of each other")
        self._check_same(prompts, by_layer)

    def _judge_layer(self, layer: int, entering: str, leaving: str, errors: list["np.ndarray[Any, Any]"]) -> None:
        overall, single = LAYER_TOLERANCE[self.dtype]
        median = float(np.median(np.concatenate(errors)))
        longer = [float(np.median(e)) for e in errors if len(e) >= _LEAST_PROMPT_ROWS]
        worst = max(longer, default=median)
        if not (median <= overall and worst <= single):
            first = "the token ids" if layer == 0 else entering
            raise SelfTestError(
                f"layer {layer} of the checkpoint, run by transformers on {first}, does not give the captured "
                f"{leaving}: relative error {median:.2e} in the median row, {worst:.2e} in the median row of one "
                f"prompt (allowed {overall:.0e} and {single:.0e}). The states are of another layer or of other rows "
                "than their names say"
            )

    def _check_same(self, prompts: Sequence[TestPrompt], by_layer: Sequence[TestPrompt]) -> None:
        """The run's own layout must deliver what the layer test saw: the same rows, of no other site."""
        for number, (one, other) in enumerate(zip(prompts, by_layer, strict=True)):
            seen = {site: states.astype(np.float32) for site, states in other.states.items()}
            seen = {site: states for site, states in seen.items() if not np.isnan(states).all()}
            for site in one.states.keys() & seen.keys():
                states = one.states[site].astype(np.float32)
                errors = {name: _median_difference(states, others) for name, others in seen.items()}
                if not errors[site] <= SAME_TOLERANCE[self.dtype]:
                    raise SelfTestError(
                        f"self-test prompt {number}: {site} differs by {errors[site]:.2e} (relative, median row; "
                        f"allowed {SAME_TOLERANCE[self.dtype]:.0e}) between two requests with the same ids"
                    )
                # However much rounding there is, it does not lead to the neighbour.
                nearest = min(errors, key=errors.__getitem__)
                if errors[nearest] < errors[site]:
                    raise SelfTestError(
                        f"self-test prompt {number}: of two requests with the same ids, {site} of one is nearer to "
                        f"{nearest} of the other ({errors[nearest]:.2e}, relative, median row) than to its {site} "
                        f"({errors[site]:.2e}): the states are of another site than their name says"
                    )

    def _has_prenorm(self, prompt: TestPrompt) -> bool:
        return bool(np.isfinite(prompt.states[FINAL_PRENORM].astype(np.float32)).all())

    def _check_shapes(self, prompt: TestPrompt, where: str) -> None:
        expected = (len(prompt.input_ids), self.facts.hidden_size)
        previous: np.ndarray[Any, Any] | None = None
        for site, stored in prompt.states.items():
            if stored.shape != expected:
                raise SelfTestError(f"{where}: {site} is {stored.shape}, expected {expected}")
            states = stored.astype(np.float32)
            if site == FINAL_PRENORM and FINAL_PRENORM not in self.sites and np.isnan(states).all():
                continue  # not delivered, not asked for
            if site == FINAL_PRENORM and np.isnan(states).all():
                raise SelfTestError(
                    f"{where}: this model or layout does not show the residual stream before its final norm. Use "
                    "final_postnorm (capture.final: postnorm)"
                )
            if not np.isfinite(states).all():
                row = int((~np.isfinite(states).all(axis=1)).argmax())
                raise SelfTestError(f"{where}: {site} has NaN or infinity at position {row}")
            if (np.abs(states).max(axis=1) == 0).any():
                row = int((np.abs(states).max(axis=1) == 0).argmax())
                raise SelfTestError(f"{where}: {site} is all zeros at position {row}")
            if len(set(prompt.input_ids)) > 1 and (states == states[0]).all():
                raise SelfTestError(f"{where}: {site} is the same at every position")
            if previous is not None and np.array_equal(states, previous):
                raise SelfTestError(f"{where}: {site} equals the site before it")
            previous = states
        missing = [site for site in self.sites if site not in prompt.states]
        if missing:
            raise SelfTestError(f"{where}: no states for {', '.join(missing)}")

    def _check_norm(self, prompt: TestPrompt, where: str) -> None:
        if self.norm_weight is None or not self._has_prenorm(prompt):
            return
        expected = apply_norm(prompt.states[FINAL_PRENORM], self.norm_weight, self.facts.norm_eps, self.facts.norm_kind)
        actual = prompt.states[FINAL_POSTNORM].astype(np.float32)
        errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
        if errors.max() > NORM_TOLERANCE[self.dtype]:
            raise SelfTestError(
                f"{where}: norm(final_prenorm) differs from final_postnorm by {errors.max():.2e} (relative, position "
                f"{int(errors.argmax())}; allowed {NORM_TOLERANCE[self.dtype]:.0e}). On this model or layout the "
                "residual stream before the final norm cannot be trusted; use capture.final: postnorm if only "
                "that site is needed, and report the model class"
            )

    def _check_next_token(self, prompt: TestPrompt, where: str) -> None:
        if self.head is None:
            return
        state = prompt.states[FINAL_POSTNORM][-1].astype(np.float32)
        logits = np.concatenate(
            [
                self.head[start : start + _VOCAB_BLOCK].astype(np.float32) @ state
                for start in range(0, self.head.shape[0], _VOCAB_BLOCK)
            ]
        )[: self.facts.vocab_size]
        best = int(logits.argmax())
        slack = LOGIT_TOLERANCE[self.dtype] * float(np.ptp(logits))
        if logits[prompt.next_token] < logits[best] - slack:
            raise SelfTestError(
                f"{where}: lm_head on the captured final state says token {best}, the engine generated "
                f"{prompt.next_token}: the captured rows are not the ones this prompt produced"
            )


def _median_difference(states: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> float:
    return float(np.median(np.linalg.norm(states - reference, axis=1) / np.linalg.norm(reference, axis=1)))


def _layer_errors(
    expected: "np.ndarray[Any, Any]", actual: "np.ndarray[Any, Any]", entered: "np.ndarray[Any, Any] | None"
) -> "np.ndarray[Any, Any]":
    """Per row: distance of what left the layer from what should have, relative to what the layer adds. `[tokens]`."""
    left = actual.astype(np.float32)
    size = np.linalg.norm(left, axis=1)
    update = size if entered is None else np.linalg.norm(left - entered.astype(np.float32), axis=1)
    errors: np.ndarray[Any, Any] = np.linalg.norm(left - expected, axis=1) / np.maximum(update, _LEAST_UPDATE * size)
    return errors

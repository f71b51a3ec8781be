"""Site names: which tensor of the forward pass a column holds.

A bare integer is the field's worst bug source: engines and model families disagree by one, and on whether
"final" is before or after the last norm. A site is a name, the same in configs, columns, metadata and code:

* `resid_pre_{i}`, 1 <= i < L: the residual stream entering decoder layer i (0-based), after all reductions.
  Hugging Face `output_hidden_states[i]`; SGLang capture index i; the output of layer i-1, so
  `resid_post_{i-1}` is an accepted spelling of it.
* `final_prenorm`: the residual stream after the last layer, before the final norm (vLLM's and
  speculators' "final").
* `final_postnorm`: after the final norm, what lm_head reads (SpecForge's and ModelOpt-HF's "final";
  Hugging Face `output_hidden_states[-1]`).

Every tensor is `[num_tokens, hidden_size]`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hsray.errors import ConfigError

FINAL_PRENORM = "final_prenorm"
FINAL_POSTNORM = "final_postnorm"
FinalKind = Literal["prenorm", "postnorm"]

_RESID = re.compile(r"resid_(pre|post)_(\d+)")
_PRESET = re.compile(r"(eagle3|dflash)(?::(\w+)=([\d,\s]+))?")


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """One captured tensor. `index` is the residual index i (Hugging Face and SGLang), or L for a final site."""

    index: int
    name: str

    @property
    def is_final(self) -> bool:
        return self.name in (FINAL_PRENORM, FINAL_POSTNORM)

    @property
    def norm(self) -> Literal["pre", "post"]:
        """Whether the tensor is before or after a norm. Residual sites are always `pre`."""
        return "post" if self.name == FINAL_POSTNORM else "pre"

    @property
    def huggingface(self) -> str:
        """Where transformers returns this tensor."""
        if self.name == FINAL_POSTNORM:
            return "hidden_states[-1]"
        if self.name == FINAL_PRENORM:
            return "input of the final norm"
        return f"hidden_states[{self.index}]"

    @property
    def meaning(self) -> str:
        if self.name == FINAL_POSTNORM:
            return "after the final norm: what lm_head reads"
        if self.name == FINAL_PRENORM:
            return f"residual stream after layer {self.index - 1} (the last), before the final norm"
        return f"residual stream entering layer {self.index} = output of layer {self.index - 1}"


def _site(name: str, num_layers: int, key: str) -> Site:
    if name in (FINAL_PRENORM, FINAL_POSTNORM):
        return Site(num_layers, name)
    match = _RESID.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"{key}: unknown site {name!r}. Use resid_pre_1 .. resid_pre_{num_layers - 1} "
            f"(or resid_post_0 .. resid_post_{num_layers - 2}), {FINAL_PRENORM} or {FINAL_POSTNORM}, "
            "or a preset: eagle3, eagle3:layer_outputs=2,30,58, dflash, dflash:layers=5, all"
        )
    index = int(match[2]) + (match[1] == "post")
    if not 1 <= index < num_layers:
        hint = ""
        if index == num_layers:
            hint = f"; the output of the last layer is {FINAL_PRENORM}"
        elif index == 0:
            hint = "; the input of layer 0 is the token embedding, which needs no capture"
        raise ConfigError(
            f"{key}: {name!r} is out of range for a model of {num_layers} layers: valid are "
            f"resid_pre_1 .. resid_pre_{num_layers - 1} (= resid_post_0 .. resid_post_{num_layers - 2}){hint}"
        )
    return Site(index, f"resid_pre_{index}")


def _preset_indices(preset: str, num_layers: int, key: str) -> list[int] | None:
    """Residual indices of a preset, or None if `preset` is not one."""
    if preset == "all":
        return list(range(1, num_layers))
    match = _PRESET.fullmatch(preset.strip())
    if match is None:
        return None
    kind, option, value = match[1], match[2], match[3]
    if kind == "eagle3" and option is None:
        # SGLang's and vLLM's own default for a model without explicit ids: inputs of layers 2, L//2, L-3.
        if num_layers < 6:
            raise ConfigError(
                f"{key}: eagle3 needs a model of at least 6 layers, this one has {num_layers}; list sites instead"
            )
        return [2, num_layers // 2, num_layers - 3]
    if option == "layer_outputs":
        return [int(x) + 1 for x in value.split(",") if x.strip()]
    if kind == "dflash" and option in (None, "layers"):
        # DFlash's own spread: n layer outputs evenly from layer 1 to layer L-3 (z-lab/dflash).
        n = int(value.split(",")[0]) if option else 5
        if n < 1 or num_layers < n + 3:
            raise ConfigError(f"{key}: {preset!r} does not fit a model of {num_layers} layers")
        if n == 1:
            return [num_layers // 2 + 1]
        span = num_layers - 4
        return [round(1 + k * span / (n - 1)) + 1 for k in range(n)]
    raise ConfigError(
        f"{key}: preset {kind!r} has no option {option!r}. "
        "Use eagle3, eagle3:layer_outputs=2,30,58, dflash, dflash:layers=5 or dflash:layer_outputs=1,9,17"
    )


def resolve_sites(
    spec: str | Sequence[str], num_layers: int, final: FinalKind = "prenorm", key: str = "capture.sites"
) -> tuple[Site, ...]:
    """Turn a preset or a list of site names into sites, in the order of the forward pass.

    Args:
        spec: a preset (`eagle3`, `eagle3:layer_outputs=2,30,58`, `dflash`, `dflash:layers=5`, `all`),
            one site name, or a list of site names.
        num_layers: decoder layers L of the model.
        final: the final site that presets add. Explicit lists say themselves whether they want one.
        key: the dotted config key that messages name.

    Returns:
        Sites in ascending order; `final_prenorm` before `final_postnorm`.

    Raises:
        ConfigError: an unknown name, an index outside 1 .. L-1, a duplicate, or an empty list.
    """
    if isinstance(spec, str):
        indices = _preset_indices(spec, num_layers, key)
        if indices is None:
            names = [part.strip() for part in spec.split(",")]
        else:
            names = [f"resid_pre_{i}" for i in indices] + [f"final_{final}"]
    else:
        names = list(spec)
    if not names:
        raise ConfigError(f"{key}: no sites. Name at least one, for example [resid_pre_1, {FINAL_PRENORM}]")
    sites = [_site(name, num_layers, key) for name in names]
    seen: set[str] = set()
    for name, site in zip(names, sites, strict=True):
        if site.name in seen:
            raise ConfigError(f"{key}: {name!r} names {site.name} a second time; remove one")
        seen.add(site.name)
    # final_prenorm sorts before final_postnorm: forward order, not alphabet.
    return tuple(sorted(sites, key=lambda s: (s.index, s.name == FINAL_POSTNORM)))


def describe_sites(sites: Sequence[Site]) -> str:
    """The table printed before anything starts: site, Hugging Face index, meaning."""
    rows = [("site", "Hugging Face", "meaning")] + [(s.name, s.huggingface, s.meaning) for s in sites]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)

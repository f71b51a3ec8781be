"""Recompute committed prompts with transformers and compare: are the states those of the model?

transformers runs in float32 with eager attention, each prompt alone (a very long one in pieces, over its own cache), so
nothing of the engine, its batching or its kernels is shared. torch and transformers are imported when the check runs.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.codecs import decode_bits, find_codec
from hsray.errors import ConfigError
from hsray.reader import Run
from hsray.site_storage import CodecName
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM

if TYPE_CHECKING:
    import torch

FLOAT32_TOLERANCE = 1e-5
# A value rounded to the nearest bfloat16 is off by at most 2^-9 of itself; twice that leaves room for the engine.
ROUNDED_TOLERANCE = 2.0**-8
# Attention weights of one layer for which transformers gets memory; longer prompts go through it in pieces.
_ATTENTION_BYTES = 4 << 30
# A half-precision engine may be so much further from float32 than transformers' own half precision is.
HALF_PRECISION_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class SiteParity:
    """How far one site is from transformers.

    The relative error of a prompt is `|captured - reference| / |reference|` with Euclidean norms over the whole
    prompt.

    Attributes:
        site: the site's name.
        num_prompts: how many prompts were compared.
        max_relative: the largest relative error, `max_allowed` what it may be.
        mean_relative: the mean relative error, `mean_allowed` what it may be.
        max_absolute: the largest difference of any value.
        basis: where the allowed errors come from.
    """

    site: str
    num_prompts: int
    max_relative: float
    max_allowed: float
    mean_relative: float
    mean_allowed: float
    max_absolute: float
    basis: str

    @property
    def is_ok(self) -> bool:
        # Written so that NaN fails.
        return self.max_relative <= self.max_allowed and self.mean_relative <= self.mean_allowed

    def __str__(self) -> str:
        verdict = "ok" if self.is_ok else "TOO FAR"
        return (
            f"{self.site}: {verdict}; relative error max {self.max_relative:.2e} (allowed {self.max_allowed:.2e}), "
            f"mean {self.mean_relative:.2e} (allowed {self.mean_allowed:.2e}), largest difference "
            f"{self.max_absolute:.2e}, {self.num_prompts} prompts, {self.basis}"
        )


def check_parity(
    run: Run, count: int, *, model_path: str | None = None, tolerance: float | None = None, seed: int = 0
) -> list[SiteParity]:
    """Compare `count` committed prompts, the shortest and the longest among them, at every site of the run.

    What is allowed, unless `tolerance` says it: 1e-5 for float32 states; 2^-8 for a float32 engine stored as
    bfloat16; otherwise 1.25 times the error that transformers itself makes on the same prompts in the engine's
    dtype. Of a site with a lossy codec, 1.25 times the codec's own error on the reference comes on top.

    Only positions that have a state are compared.

    Args:
        model_path: a model directory; default: the one in `hsray.json`.

    Raises:
        ConfigError: there is no model there, or transformers cannot load it or does not show its layers.
    """
    positions = choose_positions(run.segments.seq_len[run.segments.first[:-1]], count, seed)
    if not positions:
        return []
    directory = model_directory(run, model_path)
    prompts = [run.at(position).load() for position in positions]
    captured = [{site: prompt[site].astype(np.float32) for site in run.sites} for prompt in prompts]

    def recompute(dtype: str) -> list[dict[str, npt.NDArray[np.float32]]]:
        trust = bool(run.record["config"]["model"]["trust_remote_code"])
        ids = [prompt.input_ids for prompt in prompts]
        return reference_states(directory, ids, run.record["sites"], dtype, trust_remote_code=trust)

    stored = [{site: prompt.positions(site) for site in run.sites} for prompt in prompts]

    def chosen(states: list[dict[str, npt.NDArray[np.float32]]]) -> list[dict[str, npt.NDArray[np.float32]]]:
        return [
            {site: values[places[site]] for site, values in one.items()}
            for one, places in zip(states, stored, strict=True)
        ]

    references = chosen(recompute("float32"))
    relative, absolute = _errors(captured, references)
    engine_dtype = str(run.engine()["engine_dtype"])
    if tolerance is not None or engine_dtype == "float32":
        default = FLOAT32_TOLERANCE if run.dtype == "float32" else ROUNDED_TOLERANCE
        limit = default if tolerance is None else tolerance
        allowed = dict.fromkeys(run.sites, (limit, limit))
        basis = f"float32 engine, {run.dtype} states" if tolerance is None else "--tolerance"
    else:
        own, _ = _errors(chosen(recompute(engine_dtype)), references)
        allowed = {
            site: (HALF_PRECISION_FACTOR * max(errors), HALF_PRECISION_FACTOR * sum(errors) / len(errors))
            for site, errors in own.items()
        }
        basis = f"{HALF_PRECISION_FACTOR} x transformers' own error in {engine_dtype}"
    bases = dict.fromkeys(run.sites, basis)
    for site, name in lossy_codecs(run).items() if tolerance is None else ():
        added = [codec_error(name, one[site]) for one in references]
        most, mean = allowed[site]
        more = HALF_PRECISION_FACTOR * max(added), HALF_PRECISION_FACTOR * sum(added) / len(added)
        allowed[site] = (most + more[0], mean + more[1])
        bases[site] += f", and {HALF_PRECISION_FACTOR} x that of {name}"
    return [
        SiteParity(
            site=site,
            num_prompts=len(prompts),
            max_relative=_max(relative[site]),
            max_allowed=allowed[site][0],
            mean_relative=sum(relative[site]) / len(prompts),
            mean_allowed=allowed[site][1],
            max_absolute=_max(absolute[site]),
            basis=bases[site],
        )
        for site in run.sites
    ]


def lossy_codecs(run: Run) -> dict[str, CodecName]:
    """The sites of a run whose codec loses something."""
    codecs = {site: find_codec(entry.codec) for site, entry in run.storage.items()}
    return {site: codec.name for site, codec in codecs.items() if codec is not None and not codec.is_lossless}


def codec_error(name: CodecName, states: npt.NDArray[np.float32]) -> float:
    """Relative error, as of `SiteParity`, that a codec makes on float32 `[rows, hidden]`, rounded to bfloat16 first."""
    codec = find_codec(name)
    assert codec is not None
    bits = np.ascontiguousarray(states).astype(ml_dtypes.bfloat16).view(np.uint16)
    decoded = decode_bits(name, codec.encode(bits), *bits.shape).view(ml_dtypes.bfloat16)
    return float(np.linalg.norm(decoded.astype(np.float64) - states) / np.linalg.norm(states.astype(np.float64)))


def choose_positions(lengths: npt.NDArray[np.int32], count: int, seed: int) -> list[int]:
    """`count` positions spread over the lengths: the shortest, the longest, and one from each part between."""
    order: list[int] = np.argsort(lengths, kind="stable").tolist()
    if count >= len(order):
        return order
    if count == 1:
        return order[-1:]
    rng = np.random.default_rng(seed)
    between = [int(rng.choice(part)) for part in np.array_split(order[1:-1], count - 2)] if count > 2 else []
    return [order[0], *between, order[-1]]


def reference_states(
    directory: Path,
    prompts: Sequence[npt.NDArray[np.int32]],
    sites: Sequence[Mapping[str, Any]],
    dtype: str,
    *,
    trust_remote_code: bool = False,
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """What transformers computes for each prompt: float32 `[T, hidden]` by site name.

    Args:
        sites: `name` and `index` of each, as in `hsray.json`.
        dtype: of weights and arithmetic.

    Raises:
        ConfigError: the model cannot be loaded, or has no decoder with `layers` and `norm`.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = _load_decoder(directory, getattr(torch, dtype), trust_remote_code).to(device)
    before_norm: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        before_norm[:] = [args[0]]

    results = []
    with ExitStack() as stack:
        stack.callback(decoder.norm.register_forward_pre_hook(keep).remove)
        stack.enter_context(torch.inference_mode())
        for input_ids in prompts:
            tokens = torch.from_numpy(input_ids.astype(np.int64)).to(device)[None]
            pieces: dict[str, list[npt.NDArray[np.float32]]] = {site["name"]: [] for site in sites}
            cache = None
            for piece in torch.split(tokens, _piece_tokens(decoder.config, len(input_ids)), dim=1):
                whole = piece.shape == tokens.shape
                output = decoder(input_ids=piece, output_hidden_states=True, use_cache=not whole, past_key_values=cache)
                cache = output.past_key_values
                for site in sites:
                    state = _select(site, output.hidden_states, before_norm[0])
                    pieces[site["name"]].append(state[0].float().cpu().numpy())
            results.append({name: np.concatenate(parts) for name, parts in pieces.items()})
    return results


def _piece_tokens(config: Any, num_tokens: int) -> int:
    """How many tokens at once: their float32 attention weights `[heads, piece, tokens]` must fit."""
    row_bytes = int(config.num_attention_heads) * num_tokens * 4
    return max(1, min(num_tokens, _ATTENTION_BYTES // row_bytes))


def _select(site: Mapping[str, Any], hidden: Sequence["torch.Tensor"], before_norm: "torch.Tensor") -> "torch.Tensor":
    if site["name"] == FINAL_PRENORM:
        return before_norm
    # transformers puts the normed state last, in the place of the residual stream of the last layer.
    return hidden[-1] if site["name"] == FINAL_POSTNORM else hidden[site["index"]]


def _load_decoder(directory: Path, dtype: "torch.dtype", trust_remote_code: bool) -> Any:
    from torch import nn
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        options: dict[str, Any] = {}
        if "text_config" in raw:
            # A multimodal wrapper: only its language model is wanted, under the names it has without the wrapper.
            options["config"] = CONFIG_MAPPING[raw["text_config"]["model_type"]].from_dict(raw["text_config"])
            options["key_mapping"] = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError) as err:
        raise ConfigError(f"--model: transformers cannot load {directory}: {err}") from err
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ConfigError(f"--model: {directory} has no weights for {', '.join(missing[:5])} ({len(missing)} in all)")
    for module in model.eval().modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and isinstance(
            getattr(module, "norm", None), nn.Module
        ):
            return module
    raise ConfigError(f"--model: {type(model).__name__} has no decoder with `layers` and `norm`")


def model_directory(run: Run, model_path: str | None) -> Path:
    """The directory of the run's model on this machine. Raises ConfigError if it is not here."""
    path = model_path or run.record["config"]["model"]["path"]
    if path.startswith("hsray:"):
        from hsray.quickstart import resolve_builtin

        path = resolve_builtin(path)
    if not Path(path).is_dir():
        raise ConfigError(f"--model: {path} is not a directory on this machine; give the model that made the run")
    return Path(path)


def _errors(
    states: Sequence[Mapping[str, npt.NDArray[np.float32]]], references: Sequence[Mapping[str, npt.NDArray[np.float32]]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By site, for each prompt: relative error and largest absolute difference."""
    relative: dict[str, list[float]] = {site: [] for site in states[0]}
    absolute: dict[str, list[float]] = {site: [] for site in states[0]}
    for ours, theirs in zip(states, references, strict=True):
        for site, reference in theirs.items():
            difference = ours[site].astype(np.float64) - reference
            relative[site].append(float(np.linalg.norm(difference) / np.linalg.norm(reference.astype(np.float64))))
            absolute[site].append(float(np.abs(difference).max()))
    return relative, absolute


def _max(errors: Sequence[float]) -> float:
    # Unlike max(), numpy's does not lose a NaN.
    return float(np.max(errors))

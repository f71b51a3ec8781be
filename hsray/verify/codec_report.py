"""What each codec loses on the states of a run: `python -m hsray.verify URL --codec-report`.

Measured on the first tokens of some prompts, the massive activations of the first token among them. Where a site is
stored without loss, on what is stored; where it is not, the original is gone, and transformers recomputes it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.checkpoint import NormKind, apply_norm, lm_head_weight
from hsray.codecs import Bits, decode_bits, find_codec
from hsray.errors import ConfigError
from hsray.reader import Run
from hsray.site_storage import CODECS, CodecName
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM
from hsray.verify.parity import choose_positions, lossy_codecs, model_directory, reference_states

# Channels left out of `relative_rest`: those that hold the largest values of a site.
TOP_CHANNELS = 4
_PROMPTS = 16
_ROWS_PER_PROMPT = 256
# Prompts beyond are not looked at if there are others: a whole one is read.
_LONGEST = 8192
_LM_HEAD_ROWS = 1024
_VOCAB_BLOCK = 16_384

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CodecError:
    """What one codec does to one site.

    Attributes:
        site, codec: their names; `is_stored` if the site is stored with it.
        num_rows: how many states were measured.
        size: encoded bytes per byte of bfloat16.
        relative: `|decoded - original| / |original|`, Euclidean over everything.
        relative_rest: the same without the four channels that hold the largest values, which otherwise decide alone.
        min_cosine: of the row that lost most.
        top1: for final sites, how often lm_head prefers the same token as before; None where it cannot be said.
        basis: where the originals are from.
    """

    site: str
    codec: CodecName
    is_stored: bool
    num_rows: int
    size: float
    relative: float
    relative_rest: float
    min_cosine: float
    top1: float | None
    basis: str


def measure_codecs(run: Run, *, model_path: str | None = None, seed: int = 0) -> list[CodecError]:
    """Every codec on every site of `run`.

    Args:
        model_path: a model directory, for lm_head and for sites with a lossy codec; default: the one in `hsray.json`.
            Where neither is needed or there, top-1 is left out.

    Raises:
        ConfigError: the run is not of bfloat16, or the model is needed and is not there.
    """
    if run.dtype != "bfloat16":
        raise ConfigError(f"--codec-report: codecs are for bfloat16 states, this run has {run.dtype}")
    lossy = lossy_codecs(run)
    top_token = _top_token(run, model_path, needed=bool(lossy))
    samples = _samples(run, lossy, model_path, seed)
    return [
        error
        for site, (bits, basis) in samples.items()
        for error in _measure(run, site, bits, basis, top_token if site in (FINAL_PRENORM, FINAL_POSTNORM) else None)
    ]


def describe_codecs(errors: list[CodecError]) -> list[str]:
    """A table. The codec that a site is stored with has a star."""
    if not errors:
        return []
    rest = f"but top {TOP_CHANNELS}"
    lines = [f"{'site':<18} {'codec':<23} {'size':>6} {'rel. L2':>9} {rest:>9} {'min cos':>9} {'top-1':>7}"]
    for e in errors:
        top1 = "" if e.top1 is None else f"{e.top1:7.2%}"
        name = f"{e.codec}{' *' if e.is_stored else ''}"
        figures = f"{e.size:6.3f} {e.relative:9.1e} {e.relative_rest:9.1e} {e.min_cosine:9.6f} {top1}"
        lines.append(f"{e.site:<18} {name:<23} {figures}".rstrip())
    measured: dict[tuple[int, str], list[str]] = {}
    for e in errors:
        sites = measured.setdefault((e.num_rows, e.basis), [])
        sites += [] if e.site in sites else [e.site]
    lines += [f"{number:,} states of {', '.join(sites)}: {basis}" for (number, basis), sites in measured.items()]
    return lines


def _samples(
    run: Run, lossy: Mapping[str, CodecName], model_path: str | None, seed: int
) -> dict[str, tuple[Bits, str]]:
    """By site: original states `[rows, hidden]` as bits, and where they are from."""
    lengths = run.segments.seq_len[run.segments.first[:-1]]
    short = np.flatnonzero(lengths <= max(_LONGEST, int(lengths.min(initial=0))))
    chosen = [int(short[place]) for place in choose_positions(lengths[short], _PROMPTS, seed)]
    if not chosen:
        return {}
    prompts = [run.at(position) for position in chosen]
    recomputed: list[dict[str, Floats]] = []
    basis = ""
    if lossy:
        dtype = str(run.engine()["engine_dtype"])
        basis = f"recomputed with transformers in {dtype}, because what is stored has lost something"
        recomputed = reference_states(
            model_directory(run, model_path),
            [prompt.input_ids for prompt in prompts],
            [site for site in run.record["sites"] if site["name"] in lossy],
            dtype,
            trust_remote_code=bool(run.record["config"]["model"]["trust_remote_code"]),
        )
    samples = {}
    for site in run.sites:
        rows = []
        for number, prompt in enumerate(prompts):
            if site in lossy:
                values = recomputed[number][site][prompt.positions(site)[:_ROWS_PER_PROMPT]]
                rows.append(values.astype(ml_dtypes.bfloat16).view(np.uint16))
            else:
                rows.append(np.ascontiguousarray(prompt[site][:_ROWS_PER_PROMPT]).view(np.uint16))
        samples[site] = np.concatenate(rows), basis if site in lossy else "as stored"
    return samples


def _measure(
    run: Run, site: str, bits: Bits, basis: str, top_token: Callable[[str, Floats], npt.NDArray[np.int64]] | None
) -> Iterator[CodecError]:
    original = _values(bits)
    ordinary = np.argsort(np.abs(original).max(axis=0), kind="stable")[: max(1, original.shape[1] - TOP_CHANNELS)]
    best = None if top_token is None else top_token(site, original[:_LM_HEAD_ROWS])
    for name in CODECS:
        codec = find_codec(name)
        if codec is None:
            continue
        payload = codec.encode(bits)
        decoded = _values(decode_bits(name, payload, *bits.shape))
        yield CodecError(
            site=site,
            codec=name,
            is_stored=run.storage[site].codec == name,
            num_rows=len(bits),
            size=payload.nbytes / bits.nbytes,
            relative=_relative(decoded, original),
            relative_rest=_relative(decoded[:, ordinary], original[:, ordinary]),
            min_cosine=_min_cosine(decoded, original),
            top1=None
            if best is None or top_token is None
            else float((top_token(site, decoded[:_LM_HEAD_ROWS]) == best).mean()),
            basis=basis,
        )


def _top_token(
    run: Run, model_path: str | None, *, needed: bool
) -> Callable[[str, Floats], npt.NDArray[np.int64]] | None:
    """A function from a final site and its states to lm_head's first choice for each; None without a model."""
    try:
        directory = model_directory(run, model_path)
    except ConfigError:
        if needed or model_path is not None:
            raise
        return None
    head = lm_head_weight(directory, tied=True)
    norm = run.final_norm()
    if head is None:
        return None

    def choose(site: str, states: Floats) -> npt.NDArray[np.int64]:
        if site == FINAL_PRENORM:
            assert norm is not None
            states = apply_norm(states, norm.weight, norm.eps, cast(NormKind, norm.kind))
        best = np.full(len(states), -np.inf, np.float32)
        token = np.zeros(len(states), np.int64)
        for start in range(0, head.shape[0], _VOCAB_BLOCK):
            logits = states @ head[start : start + _VOCAB_BLOCK].astype(np.float32).T
            first = logits.argmax(axis=1)
            value = logits[np.arange(len(states)), first]
            token[value > best] = (start + first)[value > best]
            best = np.maximum(best, value)
        return token

    return choose


def _values(bits: Bits) -> Floats:
    values: Floats = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    return values


def _relative(decoded: Floats, original: Floats) -> float:
    size = float(np.linalg.norm(original.astype(np.float64)))
    return float(np.linalg.norm(decoded.astype(np.float64) - original)) / size if size else 0.0


def _min_cosine(decoded: Floats, original: Floats) -> float:
    a, b = decoded.astype(np.float64), original.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    if not len(lengths):
        return 1.0
    return float(np.min(np.where(lengths > 0, (a * b).sum(axis=1) / np.where(lengths > 0, lengths, 1), 0.0)))

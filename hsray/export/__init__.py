"""Exports of a run to what drafter trainers read: `export_run`, and `python -m hsray.export URL FORMAT OUT`.

Each format gets the norm, the layer numbering and the file layout that its loader expects, or a refusal that says why
it cannot. Files are named by position, never by prompt id; `hsray_prompts.parquet` says which prompt is in which, and
`hsray_export.json` what the files are made of. Importing this loads no torch; the formats that are `torch.save` files
load it when they write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hsray.errors import ConfigError, HsrayError
from hsray.export.angelslim import AngelSlimFormat
from hsray.export.deepspec import DeepSpecFormat
from hsray.export.formats import Format
from hsray.export.job import THREADS, Exported, check_has_prompts, describe, run_job
from hsray.export.modelopt import ModelOptFormat
from hsray.export.plain import SafetensorsFormat
from hsray.export.source import Selection, Source, select_final, select_residual
from hsray.export.specforge import SpecForgeFormat, check_method
from hsray.export.speculators import SpeculatorsFormat
from hsray.export.vocabulary import VocabularyFormat
from hsray.ranges import RETRY_SECONDS
from hsray.reader import Run, open_run
from hsray.records import JsonDict
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM, resolve_sites
from hsray.store import Store, open_store

__all__ = ["FORMATS", "Exported", "describe", "export_run"]

FORMATS = {
    "specforge": "SpecForge's prepared hidden states (.ckpt)",
    "speculators": "speculators' offline data (datasets + safetensors)",
    "modelopt": "NVIDIA ModelOpt's offline data (.pt)",
    "deepspec": "DeepSpec's target cache, version 2",
    "angelslim": "AngelSlim's offline EAGLE-3 data (.ckpt)",
    "safetensors": "one safetensors file a prompt, every site by its name",
    "vocabulary": "token frequencies, and d2t / t2d for a draft with a smaller vocabulary",
}


def export_run(
    url: str,
    format_name: str,
    out: str,
    *,
    sites: Sequence[str] | None = None,
    method: str | None = None,
    model_name: str | None = None,
    draft_vocab_size: int | None = None,
    incomplete: bool = False,
    threads: int = THREADS,
    storage_options: Mapping[str, Any] | None = None,
    out_storage_options: Mapping[str, Any] | None = None,
) -> tuple[Exported, str]:
    """Export a run. The same call goes on where an interrupted one stopped.

    Args:
        format_name: one of `FORMATS`.
        out: an empty folder, or a prefix of an object store.
        sites: which sites of the run; default: all residual ones. The final state is the format's choice, except of
            `safetensors`, where `final_postnorm` may be named although only `final_prenorm` is stored.
        method: of `specforge`: `eagle3` (default), `dflash` or `dspark`.
        model_name: of `deepspec`: `target_model_name_or_path` of the training configuration (default: the run's model).
        draft_vocab_size: of `vocabulary`.
        incomplete: export what is committed of a run that has not finished.
        threads: files written side by side.

    Returns:
        What is there now, and a line that says so.

    Raises:
        ConfigError: an unknown format, an option that does not fit, a run that the format cannot express, or a URL
            that holds something else.
        HsrayError: there is no run, it has not finished, or a state is damaged.
        StoreError: a store refuses or does not answer.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"format {format_name!r} is none of {', '.join(FORMATS)}")
    run = open_run(url, storage_options)
    if not run.complete and not incomplete:
        raise HsrayError(
            f"{url} has not finished: {len(run):,} prompts are committed. Let the command that started it go on, or "
            "give --incomplete to export those (a later export then needs another folder)"
        )
    store = open_store(url, storage_options, retry_seconds=RETRY_SECONDS)
    for name, value, owner in (
        ("--method", method, "specforge"),
        ("--model-name", model_name, "deepspec"),
        ("--draft-vocab-size", draft_vocab_size, "vocabulary"),
    ):
        if value is not None and format_name != owner:
            raise ConfigError(f"{name} belongs to {owner}, not to {format_name}")
    fmt = _open_format(format_name, run, store, sites, method, model_name, draft_vocab_size)
    check_has_prompts(fmt.source, url)
    target = open_store(out, out_storage_options, retry_seconds=RETRY_SECONDS)
    result = run_job(target, fmt, _identity(url, run, format_name, fmt), threads=threads)
    return result, describe(result, target, fmt.source)


def _open_format(
    name: str,
    run: Run,
    store: Store,
    sites: Sequence[str] | None,
    method_name: str | None,
    model_name: str | None,
    draft_vocab_size: int | None,
) -> Format:
    def source(count: int | None, final: str | None) -> Source:
        residual = select_residual(run, sites, count, name)
        site, norm = (None, None) if final is None else select_final(run, store, final, name)
        return _whole_prompts(Source(run, Selection(residual, site, norm)), name)

    match name:
        case "specforge":
            method = check_method(method_name)
            count = 3 if method == "eagle3" else None
            return SpecForgeFormat(source(count, None if method == "dflash" else FINAL_POSTNORM), method)
        case "speculators":
            return SpeculatorsFormat(source(None, FINAL_PRENORM))
        case "modelopt":
            return ModelOptFormat(source(None, FINAL_POSTNORM))
        case "deepspec":
            named = model_name or str(run.record["config"]["model"]["path"])
            return DeepSpecFormat(source(None, FINAL_POSTNORM), named)
        case "angelslim":
            return AngelSlimFormat(source(3, FINAL_POSTNORM))
        case "vocabulary":
            if sites is not None:
                raise ConfigError("--sites: vocabulary holds no states")
            return VocabularyFormat(Source(run, Selection(())), draft_vocab_size)
        case _:
            return SafetensorsFormat(_whole_prompts(Source(run, _named_sites(run, store, sites)), name))


def _named_sites(run: Run, store: Store, given: Sequence[str] | None) -> Selection:
    """Any sites of the run, and `final_postnorm` where it can be derived."""
    if given is None:
        return Selection(run.sites)
    chosen = [site.name for site in resolve_sites(list(given), run.record["model"]["num_layers"], key="--sites")]
    if FINAL_POSTNORM in chosen and FINAL_POSTNORM not in run.sites:
        site, norm = select_final(run, store, FINAL_POSTNORM, "--sites")
        return Selection(tuple(name for name in chosen if name != site), site, norm)
    if unknown := [name for name in chosen if name not in run.sites]:
        raise ConfigError(f"--sites: {', '.join(unknown)} not in this run, which has {', '.join(run.sites)}")
    return Selection(tuple(chosen))


def _whole_prompts(source: Source, who: str) -> Source:
    for site in source.run.record["sites"]:
        if site["name"] in source.selection.stored and site.get("tokens", "all") != "all":
            raise ConfigError(
                f"{who} takes a state for every token, and this run has {site['name']} only for some "
                f"(capture.tokens: {site['tokens']}). Choose other sites with --sites, or extract with "
                "capture.tokens: all"
            )
    return source


def _identity(url: str, run: Run, name: str, fmt: Format) -> JsonDict:
    selection = fmt.source.selection
    stored = {site["name"]: site for site in run.record["sites"]}
    return {
        "format": name,
        "run": url,
        "run_id": run.record["run_id"],
        "model": run.record["model"]["name"],
        "dtype": run.dtype,
        "num_prompts": len(run),
        "sites": [
            {
                "name": site,
                "derived_from": None if site in run.sites else FINAL_PRENORM,
                "codec": stored.get(site, stored.get(FINAL_PRENORM, {})).get("codec", "none"),
            }
            for site in selection.exported
        ],
    }

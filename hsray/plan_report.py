"""The plan as a person reads it, and the rejects as a file. Colours are for terminals; the text says it all."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from hsray.errors import ConfigError
from hsray.estimate import SECONDS_PER_HOUR, Estimate
from hsray.prompts import Tally
from hsray.records import IntArray, JsonDict, Prompt, Reject
from hsray.schema import rejects_schema
from hsray.units import format_bytes, format_seconds

_FILES_SHOWN = 20
_BAR_WIDTH = 40
_MASK_CHARS = 1200
_REJECTS_PER_BATCH = 10_000
_NOTES = {
    "empty_mask": "have no masked token",
    "truncated": "were cut at prompts.max_tokens",
    "padding_removed": "lost padding at their ends",
    "special_tokens_kept": "spell special tokens in a turn, kept as tokens",
    "special_tokens_split": "spell special tokens in a turn, split into text",
    "reasoning_dropped": "lose the reasoning of earlier answers, as the chat template has it",
    "no_bos": "are text without a beginning of sequence (prompts.add_bos)",
    "duplicate_renamed": "have an id or a content that was there before, and another name now",
    "id_from_content": "have no id and are named by their content",
}


def show_report(
    console: Console, figures: JsonDict, estimate: Estimate, tally: Tally, decode: Callable[[IntArray], str]
) -> None:
    """Print counts, lengths, rejects, masks and costs. `figures` are those of `estimate.to_json`."""

    def say(text: str | Text = "") -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    _show_input(say, figures, tally)
    if estimate.lengths:
        _show_lengths(say, figures)
    _show_rejects(say, estimate)
    for prompt in estimate.mask_examples:
        say(f"\nPrompt {prompt.prompt_id} ({prompt.file}:{prompt.line}), the loss mask in [[ ]]:")
        say(_masked_text(prompt, decode))
    if estimate.lengths:
        _show_costs(say, figures)


def _show_input(say: Callable[..., None], figures: JsonDict, tally: Tally) -> None:
    rejected = figures["rows"] - figures["prompts"]
    filtered = f" ({figures['filtered']:,} more left out by prompts.where)" if figures["filtered"] else ""
    say(f"{figures['rows']:,} rows = {figures['prompts']:,} prompts + {rejected:,} rejects{filtered}")
    for number, (url, file) in enumerate(tally.files.items()):
        if number == _FILES_SHOWN:
            say(f"  and {len(tally.files) - number:,} further files")
            break
        formats = ", ".join(f"{name} {count:,}" for name, count in file.formats.most_common()) or "no known format"
        say(f"  {url}: {file.rows:,} = {file.prompts:,} + {file.rejects.total():,}; {formats}")
    for note, count in tally.notes.most_common():
        say(f"  {count:,} {_NOTES[note]}")


def _show_lengths(say: Callable[..., None], figures: JsonDict) -> None:
    lengths = figures["lengths"]
    say(
        f"\n{figures['tokens']:,} tokens, {figures['masked_tokens']:,} of them masked; lengths {lengths['min']:,} to "
        f"{lengths['max']:,}, half up to {lengths['p50']:,}, 90% up to {lengths['p90']:,}, 99% up to {lengths['p99']:,}"
    )
    most = max(count for _, _, count in lengths["histogram"])
    for low, high, count in lengths["histogram"]:
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        say(f"  {low:>7,} to {high - 1:>7,} {count:>9,} {bar}")


def _show_rejects(say: Callable[..., None], estimate: Estimate) -> None:
    if estimate.rejects:
        say("\nRejects:")
    for reason, count in estimate.rejects.most_common():
        say(Text(f"  {count:,} {reason}", style="bold"))
        for reject in estimate.reject_examples[reason]:
            say(f"    {reject.file}:{reject.line}: {reject.detail[:300]}")


def _masked_text(prompt: Prompt, decode: Callable[[IntArray], str]) -> Text:
    text = Text("  ")
    edges = [0, *(np.flatnonzero(np.diff(prompt.loss_mask)) + 1).tolist(), prompt.num_tokens]
    for start, end in pairwise(edges):
        piece = decode(prompt.input_ids[start:end])
        if prompt.loss_mask[start]:
            text.append(f"[[{piece}]]", style="bold black on green")
        else:
            text.append(piece, style="dim")
        if len(text) > _MASK_CHARS:
            text.truncate(_MASK_CHARS)
            text.append(" ...")
            break
    return Text("\n  ").join(text.split("\n"))


def _show_costs(say: Callable[..., None], figures: JsonDict) -> None:
    sites = figures["bytes_per_site"]
    say(f"\n{len(sites)} sites, {figures['bytes_per_token']:,} bytes per token, {figures['leases']:,} leases")
    for site, codecs in sites.items():
        stored = figures["storage"][site]
        tokens = "" if stored["tokens"] == "all" else f"{stored['stored_tokens']:,} tokens ({stored['tokens']}), "
        others = ", ".join(f"{codec} {format_bytes(n)}" for codec, n in codecs.items() if codec != stored["codec"])
        with_others = f" (with {others})" if others else ""
        say(f"  {site}: {tokens}{format_bytes(codecs[stored['codec']])} as {stored['codec']}{with_others}")
    hours = figures["hours"]
    replicas = f"{figures['replicas']:,} replica{'s' if figures['replicas'] != 1 else ''}"
    time = "say --tokens-per-second for the time" if hours is None else format_seconds(hours * SECONDS_PER_HOUR)
    cost = f"USD {figures['usd_per_month']:,.2f} a month to keep"
    say(f"{format_bytes(figures['bytes'])} in all; {replicas}: {time}; {cost}")


def write_rejects(items: Iterable[Prompt | Reject], path: Path) -> Iterator[Prompt | Reject]:
    """Pass all items on, and write the rejects to `path`, `.parquet` or `.jsonl`, which is there at the end.

    Raises:
        ConfigError: another suffix, or the file cannot be written.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--rejects: {path} must end in .parquet or .jsonl")
    partial = path.with_name(f".{path.name}.partial")
    try:
        write, close = _reject_writer(partial)
    except OSError as err:
        raise ConfigError(f"--rejects: cannot write {path}: {err.strerror or err}") from err
    waiting: list[Reject] = []
    try:
        for item in items:
            if isinstance(item, Reject):
                waiting.append(item)
                if len(waiting) >= _REJECTS_PER_BATCH:
                    write(waiting)
                    waiting = []
            yield item
        write(waiting)
        close()
        partial.replace(path)
    except BaseException:
        close()
        partial.unlink(missing_ok=True)
        raise


def _reject_writer(path: Path) -> tuple[Callable[[Sequence[Reject]], Any], Callable[[], Any]]:
    if path.name.endswith(".jsonl.partial"):
        text = path.open("w", encoding="utf-8")
        return lambda rejects: text.writelines(json.dumps(asdict(r)) + "\n" for r in rejects), text.close
    parquet = pq.ParquetWriter(path, rejects_schema(), compression="zstd")
    return lambda rejects: parquet.write_table(
        pa.Table.from_pylist([asdict(r) for r in rejects], schema=rejects_schema())
    ), parquet.close

"""Facts as one page of HTML that needs nothing else: no script, no font, no request.

Jinja escapes whatever comes from inputs, models or engines; the page's own policy forbids scripts and requests besides.
Everything is cut to a size that does not grow with the run.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

import hsray
from hsray.records import JsonDict
from hsray.report.facts import Facts
from hsray.report.plots import area_chart, bar, strip
from hsray.report.sites import SiteSample
from hsray.report.timeline import Timeline
from hsray.status.document import DriverStatus
from hsray.status.recorder import KINDS
from hsray.status.show import clean
from hsray.status.survey import RunStatus, SiteTally
from hsray.units import format_bytes, format_count, format_seconds

SECTIONS = {
    "run": "Run",
    "sites": "Sites",
    "outcomes": "Outcomes",
    "throughput": "Throughput",
    "lengths": "Lengths",
    "states": "Norms and outliers",
    "failures": "Failures",
    "storage": "Storage",
    "reading": "Reading",
}
MAX_REPLICAS = 50
_MAX_INPUTS = 20
_MAX_REASONS = 30
_MAX_DEAD = 50
_MAX_INCIDENTS = 50
_MAX_DRIVERS = 30
_MAX_CHARS = 500
_MAX_CONFIG_CHARS = 20_000

Rows = list[tuple[Any, ...]]


def make_page(facts: Facts) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hsray", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
    )
    status = facts.status
    page: str = environment.get_template("page.html.j2").render(
        style=Markup(files("hsray.report").joinpath("style.css").read_text()),
        version=hsray.__version__,
        made=_date(status.now),
        url=status.url,
        record=status.record,
        model=status.record["model"],
        sections=list(SECTIONS.items()),
        **_head(facts),
        **_run(facts),
        **_outcomes(facts),
        **_throughput(facts),
        **_lengths(facts),
        **_states(facts),
        **_failures(facts),
        **_storage(facts),
        snippet=reading_snippet(facts),
    )
    return page


def reading_snippet(facts: Facts) -> str:
    """Python that reads the run."""
    record = facts.status.record
    site = record["sites"][-1]["name"]
    return (
        "from hsray.reader import open_run\n\n"
        f"run = open_run({facts.status.url!r})\n"
        "print(len(run), run.sites, run.hidden_size, run.dtype)\n"
        "for row in run:\n"
        f"    states = row[{site!r}]  # numpy [tokens, {record['model']['hidden_size']}], {record['dtype']}\n"
        "    print(row.prompt_id, states.shape, row.loss_mask.sum())\n"
        "    break"
    )


def _head(facts: Facts) -> JsonDict:
    status, counts = facts.status, facts.status.outcomes
    badges = {
        "complete": ("complete", "good"),
        "running": ("in progress", "warn"),
        "stopped": ("stopped", "warn"),
        "silent": ("driver silent", "bad"),
        "unknown": ("not finished", "warn"),
    }
    notice: tuple[str, str] | None = None
    if status.state != "complete":
        heard = status.heard_seconds_ago
        last = "" if heard is None else f" The driver was last heard {format_seconds(heard)} before this was written."
        notice = f"{format_count(status.left, 'prompt')} had no outcome yet.{last}", badges[status.state][1]
    elif counts.dead:
        notice = f"{format_count(counts.dead, 'prompt')} given up as dead.", "bad"
    worked = facts.timeline.seconds
    # The resolutions count what is stored; the histories also what was thrown away, and lack what died unheard.
    rate = f"{counts.tokens / worked:,.0f}" if worked > 0 else "not recorded"
    return {
        "badge": badges[status.state],
        "notice": notice,
        "tiles": [
            ("prompts stored", f"{counts.prompts:,}"),
            ("tokens", _short(counts.tokens)),
            ("stored", format_bytes(counts.nbytes)),
            ("rejected / dead", f"{status.rejected:,} / {counts.dead:,}"),
            ("time worked", format_seconds(worked) if worked else "not recorded"),
            ("tokens per second overall", rate),
        ],
    }


def _run(facts: Facts) -> JsonDict:
    record, engine = facts.status.record, facts.engine or {}
    model = record["model"]
    inputs = [f"{_cut(entry['url'])} ({format_bytes(entry['nbytes'])})" for entry in record.get("inputs", [])]
    if len(inputs) > _MAX_INPUTS:
        inputs[_MAX_INPUTS:] = [f"and {len(inputs) - _MAX_INPUTS:,} further files"]
    rows: Rows = [
        ("model", f"{model['name']} ({model['architecture']})"),
        ("layers, hidden size", f"{model['num_layers']}, {model['hidden_size']:,}"),
        ("dtype, codec", f"{record['dtype']}, {_cut(str(record.get('codec', 'none')))}"),
        ("input", "; ".join(inputs) or "not recorded"),
        ("plan", f"{record['plan']['num_prompts']:,} prompts in {facts.lengths.leases:,} leases"),
        ("engine", ", ".join(f"{k} {_cut(str(v))}" for k, v in engine.get("engine", {}).items()) or "none so far"),
        ("hsray", f"{record['hsray_version']}, format version {record['format_version']}"),
        ("fingerprint", record["fingerprint"]["hash"]),
    ]
    config = yaml.safe_dump(record.get("config", {}), sort_keys=False, allow_unicode=True)
    if len(config) > _MAX_CONFIG_CHARS:
        config = f"{config[:_MAX_CONFIG_CHARS]}\n... (hsray.json has all)"
    test = engine.get("self_test")
    return {
        "facts": rows,
        "config": config,
        "self_test": test,
        "sites": [(s["name"], s["huggingface"], s["meaning"]) for s in record["sites"]],
    }


def _outcomes(facts: Facts) -> JsonDict:
    status, counts = facts.status, facts.status.outcomes
    rows = max(1, status.rows)
    outcomes: Rows = [
        (name, f"{number:,}", f"{100 * number / rows:.2f}%", bar(number / rows, kind))
        for name, number, kind in (
            ("committed", counts.prompts, "good"),
            ("rejected (bad input)", status.rejected, "warn"),
            ("dead (given up)", counts.dead, "bad"),
            ("left to do", status.left, "left"),
        )
    ]
    outcomes.append(("input rows", f"{status.rows:,}", "", ""))
    rejects = sorted(status.record["plan"]["reject_reasons"].items(), key=lambda item: -item[1])
    dead = [(f"{kind}: {_cut(message)}", n) for (kind, message), n in counts.dead_reasons.most_common()]
    return {
        "outcomes": outcomes,
        "reject_reasons": _counted(rejects),
        "reject_examples": [(f"{_cut(r['file'])}:{r['line']}", r["reason"], _cut(r["detail"])) for r in facts.rejects],
        "dead_reasons": _counted(dead),
        "dead_examples": [
            (_cut(d.prompt_id), f"{d.row:,}", d.attempts, f"{d.failure_class}: {_cut(d.message)}")
            for d in counts.dead_examples[:_MAX_DEAD]
        ],
    }


def _counted(items: Iterable[tuple[str, int]]) -> Rows:
    listed = [*items]
    rows: Rows = [(name, f"{n:,}") for name, n in listed[:_MAX_REASONS]]
    if len(listed) > _MAX_REASONS:
        others = sum(n for _, n in listed[_MAX_REASONS:])
        rows.append((f"{len(listed) - _MAX_REASONS:,} other reasons", f"{others:,}"))
    return rows


def _throughput(facts: Facts) -> JsonDict:
    status, line = facts.status, facts.timeline
    drivers: Rows = [
        (
            f"{_cut(d.host)} (pid {d.pid})",
            _date(d.started),
            format_seconds(d.updated - d.started),
            f"exit {d.exit.exit_code}: {_cut(d.exit.detail)}" if d.exit is not None else _last_word(d, status),
        )
        for d in status.drivers[-_MAX_DRIVERS:]
    ]
    replicas = [(name, tally) for name, _, tally in status.replica_rows() if tally.leases]
    most = max((tally.tokens for _, tally in replicas), default=0) or 1
    caption = "What each replica delivered"
    if len(replicas) > MAX_REPLICAS:
        caption += f": the first {MAX_REPLICAS} of {len(replicas):,}"
    return {
        "throughput_text": _throughput_text(facts),
        "charts": _charts(line) if len(line.tokens) else [],
        "drivers": drivers,
        "replicas_caption": caption,
        "replicas": [
            (
                _cut(name, 40),
                f"{tally.leases:,}",
                f"{tally.prompts:,}",
                f"{tally.tokens:,}",
                format_bytes(tally.nbytes),
                f"{tally.tokens / tally.seconds:,.0f}" if tally.seconds else "",
                bar(tally.tokens / most),
            )
            for name, tally in replicas[:MAX_REPLICAS]
        ],
    }


def _last_word(driver: DriverStatus, status: RunStatus) -> str:
    if driver is status.driver and not driver.is_silent(status.now):
        return "finishing" if driver.phase == "finishing" else "at work"
    return f"without a word, while {driver.phase}"


def _throughput_text(facts: Facts) -> str:
    line = facts.timeline
    if not len(line.tokens):
        return "Nothing was delivered over a time that could be plotted."
    if line.from_records:
        return "The drivers left no history; the rates are those at which leases were committed, pauses included."
    text = f"{format_seconds(line.seconds)} of work by {format_count(len(line.stretches), 'driver')}"
    if len(line.stretches) > 1:
        text += ", one after the other; dashed lines mark where the next one began, pauses are cut out"
    peak = facts.status.outcomes.spool_peak
    if peak:
        text += f". The fullest arena of a replica held {format_bytes(peak)}"
    return text + "."


def _charts(line: Timeline) -> list[Markup]:
    ends = ("0", format_seconds(line.seconds))
    marks = [s.begin / line.seconds for s in line.stretches[1:]] if line.seconds else []
    charts = [
        area_chart(
            "Tokens per second",
            line.tokens,
            _short,
            ends=ends,
            marks=marks,
            summary=f"mean {_short(line.tokens.mean())}, highest {_short(line.tokens.max())}",
        ),
        area_chart(
            "Stored bytes per second",
            line.nbytes,
            format_bytes,
            ends=ends,
            marks=marks,
            summary=f"mean {format_bytes(line.nbytes.mean())}, highest {format_bytes(line.nbytes.max())}",
        ),
    ]
    if line.from_records:
        return charts
    return [
        *charts,
        area_chart(
            "Spool fill",
            100 * line.spool_max,
            lambda v: f"{v:.0f}%",
            ends=ends,
            marks=marks,
            line=100 * line.spool_mean,
            top=100.0,
            summary=f"highest {100 * line.spool_max.max():.0f}%; line: mean, {100 * line.spool_mean.mean():.0f}%",
        ),
        area_chart(
            "Ready replicas",
            line.replicas,
            lambda v: f"{v:,.4g}",
            ends=ends,
            marks=marks,
            summary=f"most {line.replicas.max():,.0f}",
        ),
    ]


def _lengths(facts: Facts) -> JsonDict:
    lengths = facts.lengths
    bins = lengths.histogram()
    most = max((n for _, _, n in bins), default=1)
    text = (
        f"{len(lengths.lengths):,} planned prompts, {lengths.num_tokens:,} tokens; half have up to "
        f"{lengths.percentile(50):,}, 90% up to {lengths.percentile(90):,}, 99% up to {lengths.percentile(99):,}, "
        f"the longest {lengths.percentile(100):,}."
    )
    return {
        "lengths_text": text,
        "lengths": [(f"{low:,} to {high - 1:,}", f"{n:,}", bar(n / most)) for low, high, n in bins],
    }


def _states(facts: Facts) -> JsonDict:
    sample, tallies = facts.sample, facts.status.outcomes.sites
    if facts.sample_problem:
        text = f"The stored states could not be read: {facts.sample_problem}. Run python -m hsray.verify."
    elif not sample.prompts:
        text = "No states are stored yet."
    else:
        text = (
            f"From a sample: the first {sample.tokens_per_prompt:,} tokens of {sample.prompts:,} prompts of "
            f"{sample.leases:,} leases, {sample.tokens:,} tokens in all. The mean norm is over every stored token, and "
            "with it the lowest and highest mean of one lease. Percentiles leave first tokens out. A massive "
            "activation is above 100 and above 1,000 times the median magnitude of its site."
        )
    if any(site.get("tokens", "all") != "all" for site in facts.status.record["sites"]):
        text += " Of sites that are stored for some tokens only, the sample has the first stretch of these."
    largest = max((tally.mean for tally in tallies.values()), default=0.0) or 1.0
    sampled = {site.name: site for site in sample.sites}
    norms = [
        (site["name"], *_mean_norm(tallies.get(site["name"]), largest), *_sampled(sampled.get(site["name"])))
        for site in facts.status.record["sites"]
    ]
    return {
        "states_text": text,
        "norms": norms if sample.sites or tallies else [],
        "channels": [
            (
                site.name,
                c.channel,
                _number(c.largest),
                _number(c.ratio),
                f"{100 * c.tokens:.2f}%" if c.tokens else "none",
                f"{100 * c.first:.0f}%" if c.tokens else "",
            )
            for site in sample.sites
            for c in site.channels[: 3 if len(sample.sites) <= 16 else 1]
        ],
    }


def _mean_norm(tally: SiteTally | None, largest: float) -> tuple[str, str, str]:
    if tally is None or not tally.tokens:
        return "not recorded", "", ""
    return _number(tally.mean), bar(tally.mean / largest), f"{_number(tally.lowest)} to {_number(tally.highest)}"


def _sampled(site: SiteSample | None) -> tuple[str, ...]:
    if site is None:
        return ("",) * 7
    first = "" if site.norm_first is None else _number(site.norm_first)
    numbers = (site.norm_p1, site.norm_p50, site.norm_p99, site.median, site.largest)
    return first, *map(_number, numbers), f"{site.massive:,}"


def _failures(facts: Facts) -> JsonDict:
    status, line = facts.status, facts.timeline
    incidents = sorted((i for d in status.drivers for i in d.incidents), key=lambda i: i.time)
    totals: dict[str, int] = {}
    for driver in status.drivers:
        for kind, number in driver.num_incidents.items():
            totals[kind] = totals.get(kind, 0) + number
    strips: Rows = []
    for kind, number in sorted(totals.items(), key=lambda item: -item[1]):
        places = [at for i in incidents if i.kind == kind and (at := line.place(i.time)) is not None]
        name = KINDS.get(kind, _cut(kind, 80))
        strips.append((name, f"{number:,}", strip(places, f"{name}: {number:,} times")))
    if not status.drivers:
        text = "The drivers of this run kept no record of failures."
    elif not totals:
        text = "None: no replica died, no lease failed, no prompt is dead."
    else:
        text = f"{format_count(sum(totals.values()), 'incident')}."
    return {
        "failures_text": text,
        "strips": strips,
        "incidents": [
            (_date(i.time), KINDS.get(i.kind, _cut(i.kind, 80)), _cut(i.subject, 80), _cut(i.message))
            for i in incidents[-_MAX_INCIDENTS:]
        ],
    }


def _storage(facts: Facts) -> JsonDict:
    counts = facts.status.outcomes
    objects, nbytes = facts.data_objects
    text = f"{counts.shards:,} shards of {format_bytes(counts.nbytes / max(1, counts.shards))} on average"
    if objects > counts.shards:
        text += (
            f"; data/ holds {format_count(objects - counts.shards, 'further object')} of "
            f"{format_bytes(max(0, nbytes - counts.nbytes))}, left over from interrupted attempts: no part of the "
            "dataset (python -m hsray.gc removes them)"
        )
    return {
        "storage_text": text + ".",
        "folders": [(prefix or "the run's own objects", f"{n:,}", format_bytes(b)) for prefix, n, b in facts.folders],
    }


def _cut(text: str, most: int = _MAX_CHARS) -> str:
    text = clean(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(value: float) -> str:
    """`1.8M`: for axes."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"

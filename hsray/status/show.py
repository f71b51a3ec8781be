"""A look at a run, for a terminal or a log. Colours are for terminals; the text says it all.

Ids and messages come from inputs and from SGLang, so whatever could move a terminal's cursor is taken out of them.
"""

import re
import time
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hsray.status.document import ReplicaRow
from hsray.status.recorder import KINDS
from hsray.status.survey import RunStatus
from hsray.units import format_bytes, format_count, format_seconds

MAX_REPLICAS_SHOWN = 40
_MAX_REASONS_SHOWN = 10
_INCIDENTS_SHOWN = 6
_STYLES = {"complete": "bold green", "running": "bold cyan", "stopped": "bold yellow", "silent": "bold red"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Without control characters and marks that turn the direction of writing."""
    return _CONTROLS.sub("\ufffd", text)


def render(status: RunStatus) -> RenderableType:
    """Everything that one look showed."""
    parts: list[RenderableType] = [_headline(status), _bar(status), _facts(status)]
    if status.outcomes.replicas or (status.driver is not None and status.driver.replicas):
        parts += [Text(), _replicas(status)]
    if status.outcomes.dead_reasons:
        parts += [Text(), _dead(status)]
    if status.rejected:
        parts += [Text(), _rejects(status)]
    if (incidents := _incidents(status)) is not None:
        parts += [Text(), incidents]
    parts += [Text(), _advice(status)]
    return Group(*parts)


def one_line(status: RunStatus) -> str:
    """For logs: a line per look."""
    driver, counts = status.driver, status.outcomes
    parts = [
        status.state,
        f"{counts.prompts + counts.dead:,}/{status.rows - status.rejected:,} prompts {_percent(status):.1f}%",
        f"{counts.dead:,} dead",
        f"{format_bytes(counts.nbytes)}",
    ]
    if status.state == "running" and driver is not None:
        parts += [f"{driver.tokens_per_second:,.0f} tok/s", f"{driver.counters.replicas_ready} replicas"]
    if status.eta_seconds is not None:
        parts.append(f"eta {format_seconds(status.eta_seconds)}")
    if status.heard_seconds_ago is not None and status.state != "complete":
        parts.append(f"driver heard {format_seconds(status.heard_seconds_ago)} ago")
    return "  ".join(parts)


def _headline(status: RunStatus) -> Text:
    text = Text()
    text.append(status.state.upper(), style=_STYLES.get(status.state, "bold"))
    text.append(f"  {clean(str(status.record.get('model', {}).get('name', '?')))}", style="bold")
    text.append(f"  {clean(status.url)}  run {status.record['run_id']}")
    return text


def _bar(status: RunStatus) -> RenderableType:
    planned = max(1, status.rows - status.rejected)
    done = status.outcomes.prompts + status.outcomes.dead
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=planned, completed=done, width=40), Text(f"{_percent(status):.1f}%"))
    return grid


def _percent(status: RunStatus) -> float:
    planned = max(1, status.rows - status.rejected)
    return 100 * (status.outcomes.prompts + status.outcomes.dead) / planned


def _facts(status: RunStatus) -> Table:
    counts, driver = status.outcomes, status.driver
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")

    def row(name: str, *parts: str) -> None:
        grid.add_row(name, Text("  ".join(parts)))

    row(
        "rows",
        f"{status.rows:,} = {counts.prompts:,} committed + {status.rejected:,} rejected + {counts.dead:,} dead + "
        f"{status.left:,} left",
    )
    row("stored", f"{counts.tokens:,} tokens, {format_bytes(counts.nbytes)} in {counts.shards:,} shards")
    if driver is not None and status.state == "running":
        now = driver.counters
        if driver.phase == "running":
            eta = "" if status.eta_seconds is None else f"eta {format_seconds(status.eta_seconds)}"
            row(
                "rate",
                f"{driver.tokens_per_second:,.0f} tok/s",
                f"{format_bytes(driver.bytes_per_second)}/s",
                f"{driver.prompts_per_second:,.1f} prompts/s",
                eta,
            )
        fill = 100 * now.spool_bytes / now.spool_capacity if now.spool_capacity else 0.0
        row("spool", f"{fill:.0f}% of {format_bytes(now.spool_capacity)}", f"{now.in_flight:,} prompts in flight")
        row(
            "replicas",
            f"{now.replicas_ready:,} ready, {now.replicas_starting:,} starting",
            f"{format_count(now.replica_deaths, 'death')}, {format_count(now.places_abandoned, 'place')} given up",
            f"{format_count(now.retries, 'lease')} tried again",
        )
    row("driver", *_driver(status))
    return grid


def _driver(status: RunStatus) -> Iterable[str]:
    driver, exit_ = status.driver, status.last_exit
    if driver is None:
        yield "none was ever heard of" if exit_ is None else _exit_text(exit_["exit_code"], exit_.get("detail", ""))
        if status.outcomes.newest:
            yield f"the newest record is {format_seconds(max(0, status.now - status.outcomes.newest))} old"
        return
    yield f"{clean(driver.host)} (pid {driver.pid}), started {_ago(status.now - driver.started)}"
    if driver.exit is not None:
        yield f"ended {_ago(status.now - driver.updated)}"
        yield _exit_text(driver.exit.exit_code, driver.exit.detail)
    elif status.state == "stopped" and exit_ is not None:
        yield _exit_text(exit_["exit_code"], exit_.get("detail", ""))
    else:
        yield f"{driver.phase}, last heard {_ago(status.now - driver.updated)}"
    stuck = driver.updated - driver.turned
    if driver.exit is None and driver.phase == "running" and stuck > 4 * driver.interval_seconds:
        yield f"ITS LOOP HAS NOT TURNED FOR {format_seconds(stuck)}"
    if status.num_living > 1:
        yield f"{status.num_living} drivers are at work on this run"


def _exit_text(code: int, detail: str) -> str:
    return f"exit {code}: {clean((detail.splitlines() or [''])[0])[:300]}"


def _ago(seconds: float) -> str:
    return f"{format_seconds(max(0.0, seconds))} ago"


def _replicas(status: RunStatus) -> Table:
    """What each does and delivered; of a run that nobody works on, what each delivered."""
    is_running = status.state == "running"
    now = ["node", "state", "tok/s", "in flight", "spool"] if is_running else []
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False)
    for name in ("replica", *now, "leases", "prompts", "tokens", *(() if is_running else ("stored",))):
        table.add_column(name, justify="left" if name in ("replica", "node", "state") else "right", no_wrap=True)
    rows = status.replica_rows()
    for name, row, tally in rows[:MAX_REPLICAS_SHOWN]:
        cells = [_short(name), *(_present(row) if is_running else ())]
        cells += [f"{tally.leases:,}", f"{tally.prompts:,}", f"{tally.tokens:,}"]
        cells += [] if is_running else [format_bytes(tally.nbytes)]
        table.add_row(*(Text(cell) for cell in cells), style="dim" if row is None and is_running else "")
    if len(rows) > MAX_REPLICAS_SHOWN:
        table.add_row(Text(f"and {len(rows) - MAX_REPLICAS_SHOWN:,} more (--json has all)", style="dim"))
    return table


def _present(row: ReplicaRow | None) -> list[str]:
    if row is None:
        return ["", "gone", "", "", ""]
    late = f", silent {format_seconds(row.heard_seconds_ago)}" if row.heard_seconds_ago > 60 else ""
    fill = f"{100 * row.spool_bytes / row.spool_capacity:.0f}%" if row.spool_capacity else ""
    return [clean(row.node), row.state + late, f"{row.tokens_per_second:,.0f}", f"{row.in_flight:,}", fill]


def _short(name: str) -> str:
    """A place on a node begins with the node's id of 56 digits."""
    return re.sub(r"^([0-9a-f]{8})[0-9a-f]{48}/", r"\1/", clean(name))


def _dead(status: RunStatus) -> Group:
    return _counted(
        "dead prompts",
        [(n, f"{kind}: {message}") for (kind, message), n in status.outcomes.dead_reasons.most_common()],
    )


def _rejects(status: RunStatus) -> Group:
    reasons = status.record["plan"]["reject_reasons"]
    return _counted("rejected rows", [(n, name) for name, n in sorted(reasons.items(), key=lambda item: -item[1])])


def _counted(title: str, items: list[tuple[int, str]]) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", min_width=6)
    table.add_column(overflow="fold")
    for count, text in items[:_MAX_REASONS_SHOWN]:
        table.add_row(f"{count:,}", Text(clean(text)))
    if len(items) > _MAX_REASONS_SHOWN:
        left = sum(count for count, _ in items[_MAX_REASONS_SHOWN:])
        table.add_row(f"{left:,}", Text(f"for {len(items) - _MAX_REASONS_SHOWN} other reasons", style="dim"))
    return Group(Text(title, style="dim"), table)


def _incidents(status: RunStatus) -> Group | None:
    incidents = [i for d in status.drivers for i in d.incidents if i.kind != "prompt_dead"]
    if not incidents:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(overflow="fold")
    for incident in sorted(incidents, key=lambda i: i.time)[-_INCIDENTS_SHOWN:]:
        first_line = (incident.message.splitlines() or [""])[0]
        text = f"{_short(incident.subject)} {clean(first_line)[:200]}".strip()
        kind = KINDS.get(incident.kind, clean(incident.kind))
        table.add_row(_ago(status.now - incident.time), Text(kind), Text(text))
    return Group(Text("last incidents", style="dim"), table)


def _advice(status: RunStatus) -> Text:
    driver = status.driver
    with_what = "with the command that made the run"
    if driver is not None and driver.command:
        with_what = f"with:\n    {clean(driver.command)}\n  as on {clean(driver.host)} in {clean(driver.directory)}"
    match status.state:
        case "complete":
            return Text(f"Complete. Check it: python -m hsray.verify {clean(status.url)}")
        case "running":
            return Text("")
        case "silent":
            ago = format_seconds(status.heard_seconds_ago or 0.0)
            return Text(
                f"The driver was last heard {ago} ago and did not say that it ended; {status.left:,} prompts are left. "
                f"If it is gone, resume {with_what}",
                style="bold",
            )
        case "stopped":
            return Text(f"Not finished, {status.left:,} prompts are left. Resume {with_what}", style="bold")
        case _:
            return Text(
                "No driver has left a status here: none ever began, or one of an hsray that kept none. "
                f"{status.left:,} prompts are left; resume {with_what}"
            )


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def timestamp(now: float) -> str:
    """Local time, as in logs."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))

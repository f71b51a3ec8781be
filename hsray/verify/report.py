"""What a verification found: counts, problems, and how they print."""

import threading
from collections import Counter
from dataclasses import asdict, dataclass, field

from hsray.errors import ExitCode
from hsray.records import JsonDict
from hsray.schema import DATA_PREFIX
from hsray.verify.codec_report import CodecError, describe_codecs
from hsray.verify.parity import SiteParity

# More problems of one kind are counted, not kept.
_MAX_KEPT = 200

CHECKS = {
    "record": "hsray.json is there and of a known version",
    "plan": "root leases hold every planned row once",
    "rejects": "reject files hold the counted rows",
    "resolutions": "every resolution parses",
    "accounting": "every planned row has one outcome, and all rows add up",
    "shards": "every shard is there, with its recorded size",
    "layout": "footers: schema, metadata, payload extents",
    "contents": "rows, ids and tokens of shards are those of the plan",
    "index": "index.parquet equals the resolutions",
    "success": "_SUCCESS agrees with what is there",
    "hashes": "every byte of shards and payloads hashes to what was recorded",
    "values": "all values are finite",
    "parity": "prompts recomputed with transformers agree",
}


# What these find is wrong with a row of a shard, or with all of it.
_OF_SHARDS = frozenset({"shards", "layout", "contents", "hashes", "values"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `check` is a key of `CHECKS`; the rest says where, as far as it applies."""

    check: str
    message: str
    key: str | None = None
    row: int | None = None
    prompt_id: str | None = None

    def __str__(self) -> str:
        where = [self.key or ""]
        where.append(f"row {self.row}" if self.row is not None else "")
        where.append(f"prompt {self.prompt_id!r}" if self.prompt_id is not None else "")
        return f"{self.check}: {', '.join(w for w in where if w)}{': ' if any(where) else ''}{self.message}"


@dataclass(slots=True)
class Report:
    """What was checked and what was found.

    Attributes:
        url: the run.
        checked: how many things each check looked at; a check that did not run is not in it.
        found: how many problems each check found.
        problems: at most 200 of each check.
        counts: the run's figures: rows, committed, rejected, dead, open, shards, bytes, and objects in `data/`
            that no resolution names (left by interrupted attempts; not a problem).
        parity: one line per site, if it was asked for.
        codecs: what each codec loses on each site, if it was asked for.
        damage: by shard, the rows of it that are not what was written; None stands for all of them.
    """

    url: str
    checked: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    parity: list[SiteParity] = field(default_factory=list)
    codecs: list[CodecError] = field(default_factory=list)
    damage: dict[str, set[int] | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_ok(self) -> bool:
        return not self.found

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.COMPLETE if self.is_ok else ExitCode.INCOMPLETE

    def count(self, check: str, number: int = 1) -> None:
        with self._lock:
            self.checked[check] += number

    def add(
        self, check: str, message: str, *, key: str | None = None, row: int | None = None, prompt_id: str | None = None
    ) -> None:
        with self._lock:
            self.found[check] += 1
            if check in _OF_SHARDS and key is not None and key.startswith(DATA_PREFIX):
                rows = self.damage.setdefault(key, set())
                if row is None:
                    self.damage[key] = None
                elif rows is not None:
                    rows.add(row)
            if self.found[check] <= _MAX_KEPT:
                self.problems.append(Problem(check, message, key, row, prompt_id))

    def to_json(self) -> JsonDict:
        return {
            "url": self.url,
            "ok": self.is_ok,
            "checked": dict(self.checked),
            "found": dict(self.found),
            "problems": [asdict(problem) for problem in self.problems],
            "counts": self.counts,
            "parity": [asdict(site) for site in self.parity],
            "codecs": [asdict(error) for error in self.codecs],
        }

    def __str__(self) -> str:
        lines = [self.url]
        for check, meaning in CHECKS.items():
            if check in self.checked or check in self.found:
                verdict = f"{self.found[check]} PROBLEMS" if self.found[check] else "ok"
                lines.append(f"  {check:<12} {self.checked[check]:>10,}  {verdict:<12} {meaning}")
        lines.append("  " + ", ".join(f"{name} {number:,}" for name, number in self.counts.items()))
        lines += [f"  {site}" for site in self.parity]
        lines += [f"  {line}" for line in describe_codecs(self.codecs)]
        lines += [f"PROBLEM {problem}" for problem in self.problems]
        unkept = self.found.total() - len(self.problems)
        if unkept:
            lines.append(f"and {unkept:,} more")
        total = self.found.total()
        lines.append("ok" if self.is_ok else f"{total:,} problem{'s' if total > 1 else ''}")
        return "\n".join(lines)

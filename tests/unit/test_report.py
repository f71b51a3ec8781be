"""The page: whole, true, safe, small, and of no danger to the run."""

import html.parser
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hsray import extract
from hsray.config import make_config
from hsray.errors import ExitCode
from hsray.history import History, Point
from hsray.ledger import Ledger
from hsray.plan import load_plan, read_lease_prompts
from hsray.records import Reopened, Resolution
from hsray.report import __main__ as report_command
from hsray.report.facts import gather
from hsray.report.page import SECTIONS, make_page
from hsray.report.plots import area_chart, nice_ceiling
from hsray.report.sites import sample_states
from hsray.report.timeline import make_timeline
from hsray.schema import REPORT_KEY, shard_metadata
from hsray.shard import ShardRow, write_shard
from hsray.site_storage import SiteStorage, Storage
from hsray.status.document import DriverStatus, Exit, Incident, document_key, put_document
from hsray.status.survey import Outcomes, Survey
from hsray.store import Store, open_store
from hsray.token_selection import select_positions
from tests.small_run import SITE_NAMES, SITES, SmallRun, build_small_run, make_states

NOW = 1_800_000_000.0
NASTY = "</code><script>alert(\"x\")</script><img src=x onerror=alert(1)> & 'quoted' \u202e\x1b[2J"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    made = build_small_run(str(tmp_path_factory.mktemp("report") / "run"))
    put_driver(made.store, NOW - 5000, 900.0)
    put_driver(made.store, NOW - 1000, 100.0, exit_=Exit(exit_code=3, name="incomplete", detail=NASTY))
    return made


def put_driver(store: Store, started: float, seconds: float, exit_: Exit | None = None) -> None:
    history = History()
    for second in range(int(seconds) + 1):
        fill = 1.0 if second == 50 else 0.5
        history.add(Point(started + second, 20 * second, 100 * second, second, fill, fill, 3, 1 if second > 9 else 0))
    incidents = tuple(Incident(time=started + 10, kind=kind, subject=NASTY, message=NASTY) for kind in ("stop", NASTY))
    document = DriverStatus(
        run_id="small",
        host=NASTY,
        pid=1,
        started=started,
        updated=started + seconds,
        turned=started + seconds,
        interval_seconds=30,
        phase="running" if exit_ is None else "ended",
        exit=exit_,
        history=history.to_json(),
        incidents=incidents,
        num_incidents={"stop": 1, NASTY: 1},
    )
    put_document(store, document_key(started, f"{int(started):x}"), document)


def page_of(run: SmallRun) -> str:
    return make_page(gather(open_store(run.url), {}, NOW))


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, and the text and table rows of each section; complains about what is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.section = ""
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs).get("id") or ""
        elif tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self.section] = self.text.get(self.section, "") + data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[self.section][-1][-1] += data


def test_every_section_is_there_and_well_formed(run: SmallRun) -> None:
    reader = Reader(page_of(run))

    ids = [attributes["id"] for tag, attributes in reader.tags if tag == "section"]
    assert ids == list(SECTIONS)
    links = {attributes["href"] for tag, attributes in reader.tags if tag == "a"}
    assert links == {f"#{name}" for name in SECTIONS}
    for name in SECTIONS:
        assert len(reader.text[name]) > 40, name


def test_the_page_says_what_the_run_holds(run: SmallRun) -> None:
    reader = Reader(page_of(run))
    text = reader.text

    assert "LlamaForCausalLM" in text["run"]
    for site in SITE_NAMES:
        assert site in text["sites"]
        assert site in text["states"]
    outcomes = {cells[0]: cells[1:] for cells in reader.rows["outcomes"]}
    assert outcomes["committed"] == ["7", "70.00%", ""]
    assert outcomes["rejected (bad input)"][0] == "2"
    assert outcomes["dead (given up)"][0] == "1"
    assert outcomes["left to do"][0] == "0"
    assert outcomes["input rows"][0] == "10"
    assert outcomes["prompt_permanent: too odd"] == ["1"]
    assert outcomes["prompts.jsonl:3"] == ["empty", "no tokens"]
    assert "16m40s of work by 2 drivers" in text["throughput"]
    assert "mean 20, highest 20" in text["throughput"]
    assert "highest 100%" in text["throughput"]
    assert "8 planned prompts, 9,252 tokens" in text["lengths"]
    assert ["8,192 to 16,383", "1", ""] in reader.rows["lengths"]
    assert "first 512 tokens of 7 prompts of 4 leases, 762 tokens" in text["states"]
    assert "4 shards" in text["storage"]


def test_text_from_inputs_stays_text(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"))
    put_driver(run.store, NOW - 5000, 900.0, exit_=Exit(exit_code=1, name="failed", detail=NASTY))
    record = run.resolution("000002")
    record["dead"][0] |= {"prompt_id": NASTY, "message": NASTY}
    run.overwrite("leases/000002.json", record)
    hsray = run.store.get_json("hsray.json")
    hsray["model"]["name"] = NASTY
    hsray["config"]["x"] = NASTY
    hsray["plan"]["reject_reasons"] = {NASTY: 2}
    hsray["inputs"] = [{"url": NASTY, "nbytes": 1}]
    run.overwrite("hsray.json", hsray)
    run.overwrite("engine.json", {"engine": {"k": NASTY}, "self_test": {"passed": [NASTY], "skipped": [NASTY]}})

    page = page_of(run)

    reader = Reader(page)
    assert not {"script", "img", "iframe", "object", "embed", "form"} & {tag for tag, _ in reader.tags}
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert page.count("&lt;script&gt;") >= 10
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_nothing_is_fetched(run: SmallRun) -> None:
    page = page_of(run)

    reader = Reader(page)
    sources = [a[n] for _, a in reader.tags for n in ("src", "href", "srcset", "action", "data") if a.get(n)]
    assert {s for s in sources if not str(s).startswith("#")} == {"data:,"}
    assert not re.search(r"@import|url\(|https?:(?!//arxiv)", page)
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy


def test_the_snippet_reads_the_run(run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Reader(page_of(run)).text["reading"]
    snippet = text[text.index("from hsray.reader") : text.index("break") + len("break")]
    script = tmp_path / "snippet.py"
    script.write_text(snippet)

    runpy.run_path(str(script))

    out = capsys.readouterr().out
    assert out.startswith("7 ")
    assert f"prompt-0 ({run.prompts[0].num_tokens}, 24)" in out


def test_the_page_of_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), finish=False)
    run.store.delete([info.key for info in run.store.list("leases/")])

    text = Reader(page_of(run)).text

    assert "8 prompts had no outcome yet" in text[""]
    assert "No states are stored yet" in text["states"]
    assert "Nothing was delivered" in text["throughput"]
    assert "kept no record of failures" in text["failures"]


def test_leftovers_of_interrupted_attempts_are_told_from_the_dataset(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"))
    run.store.put("data/000000-zz-0.parquet", b"x" * 5000)

    text = Reader(page_of(run)).text["storage"]

    assert "data/ holds 1 further object of 5.0 kB" in text


# ------------------------------------------------------------------ statistics


def outlier_run(tmp_path: Path, dtype: str, storage: Storage | None = None) -> tuple[SmallRun, Any]:
    """Prompts whose first token has 5000 in channel 3 of `resid_pre_5`; everything else is of magnitude 1."""
    run = build_small_run(str(tmp_path / "run"), lengths=(4, 20, 30), hidden_size=16, dtype=dtype, finish=False)
    run.store.delete([info.key for info in run.store.list("leases/")])
    plan = load_plan(run.store, run.record["plan"])
    states: dict[int, Any] = {}
    for lease in plan.leases:
        rows = []
        for prompt in read_lease_prompts(run.store, plan.refs[lease.lease_id], lease.rows):
            states[prompt.row] = make_states(prompt.row, prompt.num_tokens, 16, dtype)
            states[prompt.row]["resid_pre_5"][0, 3] = -5000
            rows.append(ShardRow(prompt, states[prompt.row]))
        shard = write_shard(
            run.store,
            f"data/{lease.lease_id}-a2-0.parquet",
            rows,
            sites=SITE_NAMES,
            hidden_size=16,
            dtype=dtype,
            metadata=shard_metadata(
                sites=SITES, hidden_size=16, dtype=dtype, run_id="small", model="tiny", storage=storage
            ),
            storage=storage,
        )
        Ledger(run.store).resolve(Resolution("commit", lease.lease_id, "a2", "replica", (shard,)))
    return run, states


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_massive_activations_are_found_with_channel_and_token(tmp_path: Path, dtype: str) -> None:
    run, states = outlier_run(tmp_path, dtype)
    leases = [info.key[7:-5] for info in run.store.list("leases/")]

    sample = sample_states(run.store, {}, run.record, sorted(leases), Reopened())

    assert (sample.prompts, sample.tokens) == (3, 54)
    plain, massive, _ = sample.sites
    assert (plain.name, plain.massive) == ("resid_pre_2", 0)
    assert (massive.name, massive.massive) == ("resid_pre_5", 1)
    worst = massive.channels[0]
    assert worst.channel == 3
    assert worst.largest == pytest.approx(5000, rel=0.01)
    assert worst.tokens == pytest.approx(3 / 54)
    assert worst.first == 1.0
    every = np.concatenate([s["resid_pre_2"].astype(np.float32) for s in states.values()])
    assert plain.median == pytest.approx(float(np.median(np.abs(every))), rel=1e-6)
    assert plain.largest == pytest.approx(float(np.abs(every).max()), rel=1e-6)
    firsts = [s["resid_pre_2"].astype(np.float32)[0] for s in states.values()]
    assert plain.norm_first == pytest.approx(float(np.mean([np.linalg.norm(f) for f in firsts])), rel=1e-5)
    rest = np.concatenate([np.linalg.norm(s["resid_pre_2"].astype(np.float32)[1:], axis=1) for s in states.values()])
    assert plain.norm_p50 == pytest.approx(float(np.percentile(rest, 50)), rel=1e-5)
    # The huge first token is not in the percentiles of the others.
    assert massive.norm_first > 4900
    assert massive.norm_p99 < 100


def test_encoded_and_partly_stored_sites_are_sampled_as_what_they_mean(tmp_path: Path) -> None:
    storage: Storage = {
        "resid_pre_2": SiteStorage("bf16-hl-zstd"),
        "resid_pre_5": SiteStorage("none", "loss"),
        "final_prenorm": SiteStorage("bf16-hl-zstd", "through_last_loss"),
    }
    run, states = outlier_run(tmp_path, "bfloat16", storage)
    sites = [
        {**site, "codec": storage[site["name"]].codec, "tokens": storage[site["name"]].tokens}
        for site in run.record["sites"]
    ]
    leases = [info.key[7:-5] for info in run.store.list("leases/")]

    sample = sample_states(run.store, {}, {**run.record, "sites": sites}, sorted(leases), Reopened())

    for found in sample.sites:
        expected, firsts = [], []
        for row, prompt in ((row, run.prompts[row]) for row in states):
            positions = select_positions(storage[found.name].tokens, prompt.loss_mask)
            if len(positions):
                stretch = [p for i, p in enumerate(positions) if p == positions[0] + i]
                norms = np.linalg.norm(states[row][found.name][stretch].astype(np.float32), axis=1)
                firsts += norms[:1].tolist() if stretch[0] == 0 else []
                expected += norms[1:].tolist() if stretch[0] == 0 else norms.tolist()
        assert found.norm_p50 == pytest.approx(float(np.percentile(expected, 50)), rel=1e-5), found.name
        assert found.norm_first == (pytest.approx(float(np.mean(firsts)), rel=1e-5) if firsts else None)
    assert [site.name for site in sample.sites] == SITE_NAMES


def test_a_sample_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_small_run(str(tmp_path / "run"))
    monkeypatch.setattr("hsray.report.sites.MAX_BYTES", 7 * 3 * 24 * 2 * 10)
    leases = sorted(Survey(run.store).look(NOW).outcomes.leases)

    sample = sample_states(run.store, {}, run.record, leases, Reopened())

    assert sample.tokens_per_prompt == 10
    assert sample.tokens == sum(min(10, p.num_tokens) for p in run.prompts.values() if p.row in run.states)


def test_a_damaged_shard_costs_the_statistics_only(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), lengths=(5, 1, 130))
    extent = run.resolution("000000")["shards"][0]["entries"][0]["extents"]["resid_pre_2"]
    run.change_byte(run.shard_of(0), extent["offset"] + 2)

    text = Reader(page_of(run)).text

    assert "does not have the hash it was written with" in text["states"]
    assert "committed" in text["outcomes"]


# ------------------------------------------------------------------ time


def test_pauses_between_drivers_are_cut_out(run: SmallRun) -> None:
    status = Survey(run.store).look(NOW)

    line = make_timeline(status.drivers, status.outcomes)

    assert line.seconds == 1000.0
    assert [(s.begin, s.seconds) for s in line.stretches] == [(0.0, 900.0), (900.0, 100.0)]
    assert np.allclose(line.tokens, 20.0)
    assert line.spool_max.max() == 1.0
    assert line.place(NOW - 5000 + 450) == pytest.approx(0.45)
    assert line.place(NOW - 1000 + 50) == pytest.approx(0.95)
    assert line.place(NOW - 2000) is None


def test_without_histories_the_records_tell_the_rate() -> None:
    outcomes = Outcomes()
    for second in range(0, 1000, 10):
        outcomes.ended.append(NOW + second)
        outcomes.ended_tokens.append(500)
        outcomes.ended_nbytes.append(1000)

    line = make_timeline((), outcomes)

    assert line.from_records
    assert line.seconds == 990.0
    assert line.tokens.mean() == pytest.approx(50, rel=0.02)
    assert make_timeline((), Outcomes()).seconds == 0.0


@pytest.mark.parametrize(
    ("value", "ceiling"), [(0, 1), (0.3, 0.5), (1, 1), (1.01, 2), (21, 25), (180_000, 200_000), (float("nan"), 1)]
)
def test_axes_end_at_round_numbers(value: float, ceiling: float) -> None:
    assert nice_ceiling(value) == pytest.approx(ceiling)


def test_a_chart_of_one_value_or_none_is_drawn() -> None:
    for values in ([], [3.0], [0.0, 0.0]):
        chart = area_chart("<t>", values, str, ends=("0", "1"), summary="<s>")
        assert "&lt;t&gt;" in chart
        assert "nan" not in chart.lower()


# ------------------------------------------------------------------ size, command, failure


def test_a_page_does_not_grow_with_the_run(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), finish=False)
    record = run.resolution("000002")
    dead = record["dead"][0]
    record["dead"] = [{**dead, "message": f"{i} " + "y" * 3000, "prompt_id": "p" * 900} for i in range(3000)]
    run.overwrite("leases/000002.json", record)
    for i in range(300):
        copy = {**run.resolution("000001"), "lease_id": f"1{i:05d}", "replica": f"{i:056x}/0#1", "dead": []}
        run.overwrite(f"leases/1{i:05d}.json", copy)
    hsray = run.store.get_json("hsray.json")
    hsray["inputs"] = [{"url": f"s3://b/{i}" + "z" * 900, "nbytes": 1} for i in range(5000)]
    hsray["config"]["x"] = "w" * 1_000_000
    hsray["plan"]["reject_reasons"] = {f"reason {i}": i for i in range(2000)}
    run.overwrite("hsray.json", hsray)
    message = "m" * 5000
    for i in range(150):
        incidents = tuple(
            Incident(time=NOW - 9000 + i, kind="replica_died", subject="s" * 200, message=message) for _ in range(30)
        )
        document = DriverStatus(
            run_id="small",
            host="h" * 300,
            pid=1,
            started=NOW - 9000 + i,
            updated=NOW - 9000 + i,
            turned=0,
            interval_seconds=30,
            phase="running",
            incidents=incidents,
            num_incidents={"replica_died": 30},
        )
        put_document(run.store, document_key(document.started, f"{i:x}"), document)

    page = page_of(run)

    assert len(page.encode()) < 400_000
    assert "270 other reasons" not in page
    assert "other reasons" in page


def test_the_command_writes_it_beside_the_data_or_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_small_run(str(tmp_path / "run"))

    assert report_command.main([run.url]) == 0
    assert report_command.main([run.url, "--output", str(tmp_path / "x.html")]) == 0
    assert report_command.main([run.url, "--output", str(tmp_path / "no" / "x.html")]) == ExitCode.CONFIG
    assert report_command.main([str(tmp_path)]) == ExitCode.CONFIG

    assert Reader(run.store.get(REPORT_KEY).decode()).text["run"]
    assert Reader((tmp_path / "x.html").read_text()).text["run"]
    assert "report.html" in capsys.readouterr().out


def test_a_report_that_fails_is_said_and_finishes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_small_run(str(tmp_path / "run"), finish=False)
    job = job_of(run)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no paper")

    monkeypatch.setattr("hsray.report.write_report", fail)

    with caplog.at_level("WARNING"):
        code, _ = extract._conclude(job, None)

    assert code == ExitCode.INCOMPLETE  # one of eight is dead
    assert Ledger(run.store).is_complete()
    assert "RuntimeError: no paper" in caplog.text
    assert f"python -m hsray.report {run.url}" in caplog.text


def test_the_report_of_a_finished_run_is_there_before_its_success(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), finish=False)

    extract._conclude(job_of(run), None)

    infos = {info.key: info.modified for info in run.store.list()}
    assert infos[REPORT_KEY] <= infos["_SUCCESS"]
    assert ">complete<" in run.store.get(REPORT_KEY).decode()


def job_of(run: SmallRun) -> Any:
    config = make_config({"model": {"path": "m"}, "prompts": {"path": "p"}, "output": {"url": run.url}})
    plan = load_plan(run.store, run.record["plan"])
    return SimpleNamespace(config=config, store=run.store, ledger=run.ledger, record=run.record, plan=plan, sites=SITES)

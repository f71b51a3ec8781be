"""An export that was killed goes on; each file is whole or not there; memory stays bounded; damage is not exported."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hsray.errors import HsrayError, StoreUnavailable
from hsray.export import export_run
from hsray.export import job as export_job
from hsray.export.formats import Piece
from hsray.export.job import run_job
from hsray.export.modelopt import ModelOptFormat
from hsray.export.plain import SafetensorsFormat
from hsray.export.source import Selection, Source
from hsray.reader import open_run
from hsray.store import open_store
from hsray.testing import FlakyStore
from tests.export_runs import INNER, LENGTHS, make_export_run
from tests.runs import ROOT

# Kills the process in the middle of file number N, when some bytes of it have been written.
KILLED = """
import os, signal, sys
from hsray.export import safetensors_files, torch_files, export_run
from hsray.upload import Upload
url, name, out, number = sys.argv[1:]
write, seen = Upload.writelines, set()
def dying(self, buffers):
    buffers = list(buffers)
    seen.add(self._key)
    if len(seen) > int(number):
        write(self, [bytes(200)])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, buffers)
Upload.writelines = dying
import hsray.upload; hsray.upload.PART_BYTES = 64  # so that there is a file on the disk
export_run(url, name, out, threads=2)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_export_run(tmp_path_factory.mktemp("run"))


def contents(folder: Path) -> dict[str, str]:
    """Hashes by file, of all but the times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name in ("hsray_export.json", "hsray_export_complete.json"):
                record = json.loads(data)
                data = json.dumps(
                    {k: v for k, v in record.items() if k not in ("created", "finished", "write_id")}
                ).encode()
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.parametrize(("name", "number"), [("modelopt", 5), ("deepspec", 0)])
def test_killed_in_the_middle_of_a_file_and_started_again(url: str, tmp_path: Path, name: str, number: int) -> None:
    export_run(url, name, str(tmp_path / "whole"))
    killed = tmp_path / "killed"

    died = subprocess.run([sys.executable, "-c", KILLED, url, name, str(killed), str(number)], cwd=ROOT, check=False)

    assert died.returncode == -signal.SIGKILL
    there = contents(killed)
    whole = contents(tmp_path / "whole")
    unfinished = {file for file in there if "#" in file}
    assert unfinished
    assert "hsray_export_complete.json" not in there
    assert {file: there[file] for file in there if file not in unfinished} == {
        file: whole[file] for file in there if file not in unfinished
    }
    result, _ = export_run(url, name, str(killed))
    assert result.written <= result.files - max(0, number - 2)
    assert contents(killed) == whole
    assert export_run(url, name, str(killed))[0].was_complete


def test_a_file_that_was_removed_is_written_again(url: str, tmp_path: Path) -> None:
    export_run(url, "modelopt", str(tmp_path))
    before = contents(tmp_path)
    next(tmp_path.rglob("00000004.pt")).unlink()

    result, _ = export_run(url, "modelopt", str(tmp_path))

    assert (result.written, result.was_complete) == (1, False)
    assert contents(tmp_path) == before


def test_a_damaged_state_ends_the_export_and_what_is_whole_stays(tmp_path: Path) -> None:
    url = make_export_run(tmp_path)
    segments = open_run(url).segments
    where = segments.where(6, "resid_pre_4")
    store = open_store(url)
    data = bytearray(store.get(where.key))
    whole = bytes(data)
    data[where.offset + 1] ^= 1
    store.put(where.key, bytes(data))

    with pytest.raises(HsrayError, match="resid_pre_4 of prompt 'é/ü'"):
        export_run(url, "modelopt", str(tmp_path / "out"), threads=1)
    assert not (tmp_path / "out" / "hsray_export_complete.json").exists()

    store.put(where.key, whole)
    assert export_run(url, "modelopt", str(tmp_path / "out"))[0].files == len(LENGTHS)


def test_a_store_that_loses_requests_is_asked_again(url: str, tmp_path: Path) -> None:
    import random

    inner = open_store("memory://flaky-export")
    flaky = FlakyStore(inner, random.Random(5), before=0.2, after=0.2, retry_seconds=60)

    run_job(flaky, SafetensorsFormat(Source(open_run(url), Selection(INNER))), {"format": "safetensors"})

    run_job(
        open_store(str(tmp_path)), SafetensorsFormat(Source(open_run(url), Selection(INNER))), {"format": "safetensors"}
    )
    assert flaky.injected["before"] > 0
    exported = {i.key: inner.get(i.key) for i in inner.list() if i.key.startswith("rows")}
    assert exported == {i: (tmp_path / i).read_bytes() for i in contents(tmp_path) if i.startswith("rows")}


def test_a_store_that_is_gone_ends_the_export(url: str) -> None:
    import random

    flaky = FlakyStore(open_store("memory://gone-export"), random.Random(5), before=1.0, operations=["put"])

    with pytest.raises(StoreUnavailable):
        run_job(flaky, SafetensorsFormat(Source(open_run(url), Selection(INNER))), {"format": "safetensors"})


def test_what_is_in_memory_at_once_is_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 100 tokens of budget: the prompt of 300 goes alone, others side by side."""
    token_bytes = 24 * 2 * len(INNER)
    monkeypatch.setattr(export_job, "_MEMORY_BYTES", 250 * token_bytes * 5)
    monkeypatch.setattr(export_job, "BATCH_BYTES", 0)
    lock, running, most = threading.Lock(), [], []

    class Watched(SafetensorsFormat):
        def write(self, piece: Piece, samples: Any, out: Any) -> str | None:
            size = int(self.source.lengths[piece.positions.start])
            with lock:
                running.append(size)
                most.append(tuple(running))
            reason = super().write(piece, samples, out)
            threading.Event().wait(0.05)
            with lock:
                running.remove(size)
            return reason

    run_job(
        open_store("memory://bounded"), Watched(Source(open_run(url), Selection(INNER))), {"format": "x"}, threads=6
    )

    assert (300,) in most
    assert all(len(together) == 1 for together in most if 300 in together)
    assert max(map(len, most)) > 1
    assert max(map(sum, most)) <= 300


def test_an_export_to_an_object_store_equals_one_to_a_folder(url: str, tmp_path: Path) -> None:
    export_run(url, "modelopt", "memory://elsewhere")
    export_run(url, "modelopt", str(tmp_path))

    store = open_store("memory://elsewhere")

    files = [file for file in contents(tmp_path) if not file.startswith("hsray_export")]
    assert {file: store.get(file) for file in files} == {file: (tmp_path / file).read_bytes() for file in files}


def test_torch_is_loaded_when_it_is_needed_and_not_before(url: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hsray.export import export_run\n"
        "for name in ('safetensors', 'deepspec'): export_run(sys.argv[1], name, sys.argv[2] + name)\n"
        "assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code, url, str(tmp_path / "x")], cwd=ROOT, check=True)


def test_the_same_states_are_the_same_export_and_others_are_not(url: str, tmp_path: Path) -> None:
    source = Source(open_run(url), Selection(INNER))
    other = Source(open_run(make_export_run(tmp_path, lengths=LENGTHS[:-1])), Selection(INNER))

    assert export_job.states_digest(source) == export_job.states_digest(Source(open_run(url), Selection(INNER)))
    assert export_job.states_digest(source) != export_job.states_digest(other)
    assert export_job.states_digest(source) != export_job.states_digest(Source(open_run(url), Selection(INNER[:2])))
    assert ModelOptFormat.name == "modelopt"

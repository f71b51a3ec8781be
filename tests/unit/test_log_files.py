"""The log file of a replica, in a process of its own: what children print, how it stays small, what is removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsray.errors import ConfigError
from hsray.log_files import OutputFile, file_stem, find_log, lock_log, remove_old_logs, tail, take_output


def in_a_process(code: str, *arguments: object) -> str:
    """Standard output and error of a fresh interpreter: what did not go to the file."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


TALKER = """
import subprocess, sys, ctypes
from pathlib import Path
from hsray.log import configure_file_logging
import logging
print("before", flush=True)
configure_file_logging(Path(sys.argv[1]), "gpu-7/0#1", "debug")
print("from print", flush=True)
logging.getLogger("hsray.x").debug("from a logger")
subprocess.run(["sh", "-c", "echo from a child; echo its error >&2"])
ctypes.string_at(0)
"""


def test_everything_a_process_and_its_children_print_is_in_the_file_even_its_last_words(tmp_path: Path) -> None:
    code = "import faulthandler; faulthandler.enable()\n" + TALKER

    assert in_a_process(code, tmp_path) == "before\n"

    written = (tmp_path / "gpu-7_0_1.log").read_text()
    for said in ("from print", "DEBUG from a logger", "from a child", "its error", "Segmentation fault"):
        assert said in written
    assert find_log(tmp_path, "gpu-7/0#1") == tmp_path / "gpu-7_0_1.log"


def test_a_large_file_is_cut_while_a_child_goes_on_writing(tmp_path: Path) -> None:
    path = tmp_path / "r0.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    output = OutputFile(path, descriptor, max_bytes=10_000)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=descriptor)
    assert child.stdin is not None

    def say(first: int, last: int) -> None:
        assert child.stdin is not None
        child.stdin.write("".join(f"line {i}\n" for i in range(first, last)).encode())
        child.stdin.flush()
        while f"line {last - 1}\n" not in path.read_text():
            pass

    say(0, 500)
    assert not output.bound()
    say(500, 2000)
    assert output.bound()
    say(2000, 2100)
    assert not output.bound()
    child.stdin.close()
    child.wait()

    earlier, now = (tmp_path / "r0.log.1").read_text().splitlines(), path.read_text().splitlines()
    assert earlier == [f"line {i}" for i in range(2000)]
    assert now == ["--- earlier lines: r0.log.1; older ones are gone ---", *(f"line {i}" for i in range(2000, 2100))]
    assert not path.read_bytes().count(b"\0")


def test_a_cut_that_fails_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r0.log"
    path.write_text("x" * 100)
    (tmp_path / "r0.log.1").mkdir()

    with pytest.raises(IsADirectoryError):
        OutputFile(path, os.open(path, os.O_WRONLY | os.O_APPEND), max_bytes=10).bound()

    assert path.read_text() == "x" * 100


def test_old_logs_go_oldest_first_and_never_those_of_the_living(tmp_path: Path) -> None:
    for age, name in enumerate(["new.log", "driver-a-1.jsonl", "held.log.1", "held.log", "old.log.1", "old.log"]):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (10_000 - age, 10_000 - age))
    (tmp_path / "notes.txt").write_bytes(bytes(100_000))
    held = os.open(tmp_path / "held.log", os.O_WRONLY)
    assert lock_log(held)

    removed = remove_old_logs(tmp_path, max_bytes=3500)

    assert [path.name for path in removed] == ["old.log", "old.log.1", "driver-a-1.jsonl"]
    assert remove_old_logs(tmp_path, max_bytes=3500) == []
    os.close(held)
    assert [path.name for path in remove_old_logs(tmp_path, max_bytes=500)] == ["held.log", "held.log.1", "new.log"]
    assert (tmp_path / "notes.txt").exists()


def test_two_processes_of_one_name_have_two_files(tmp_path: Path) -> None:
    first = os.open(tmp_path / "r0_1.log", os.O_WRONLY | os.O_CREAT)
    assert lock_log(first)

    in_a_process(TALKER, tmp_path)  # another name
    in_a_process(TALKER.replace("gpu-7/0#1", "r0#1"), tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-7_0_1.log", "r0_1-2.log", "r0_1.log"]
    assert find_log(tmp_path, "r0#1") == tmp_path / "r0_1-2.log"
    assert find_log(tmp_path, "r0") is None


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"log\.dir: cannot write .*/file/logs on .* Set log\.dir"):
        take_output(tmp_path / "file" / "logs", "r0")


def test_the_tail_is_short_in_lines_and_in_width(tmp_path: Path) -> None:
    path = tmp_path / "r0.log"
    path.write_text("\n".join([*(f"line {i}" for i in range(100)), "server_args=" + "x" * 9000, "the end é"]) + "\n")

    lines = tail(path, lines=3, width=50).splitlines()

    assert lines[0] == "line 99"
    assert lines[1] == "server_args=" + "x" * 35 + "..."
    assert lines[2] == "the end é"
    assert tail(tmp_path / "none.log") == ""


def test_names_become_file_names() -> None:
    assert file_stem("gpu-7/0#1") == "gpu-7_0_1"

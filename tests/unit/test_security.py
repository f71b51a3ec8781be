"""What nobody may do to a run: run code from what it reads back, write to where an id points, look into states."""

import ast
import os
import re
import socket
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hsray.channel import ChannelServer, Message
from hsray.reader import open_run
from hsray.records import Prompt
from hsray.spool import Arena
from tests import small_run
from tests.runs import wait_until

PACKAGE = Path(__file__).parents[2] / "hsray"

# Between a process and its own child or its own temporary folder of mode 0700; never from storage.
PICKLES = {"ranges.py": 3, "prompts/selection.py": 1}
LOADERS = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")

HOSTILE_IDS = [
    "../../../../tmp/escaped",
    "/etc/passwd",
    "a/b\\c",
    "..",
    "data/000000-x.parquet",
    "nul\0byte",
    "line\nbreak",
    "%2e%2e%2f",
    "~root",
    "<script>alert(1)</script>",
    "ü\u202e" + "x" * 3000,
]


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_that_is_read_back_can_run_code() -> None:
    pickles: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for function, call in calls(ast.parse(path.read_text())):
            options = {word.arg: ast.unparse(word.value) for word in call.keywords}
            where = f"{name}:{call.lineno}: {function}"
            if function.split(".")[0] in LOADERS and function.split(".")[-1] in ("load", "loads", "open", "Unpickler"):
                pickles[name] = pickles.get(name, 0) + 1
            assert function not in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"), where
            if function == "torch.load":
                assert options.get("weights_only") == "True", where
            assert options.get("allow_pickle", "False") == "False", where
            assert options.get("trust_remote_code", "False") != "True", where
    assert pickles == PICKLES


def test_the_ids_of_prompts_are_data_and_never_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_prompt = small_run.make_prompt
    ids: dict[int, str] = {}

    def hostile(row: int, num_tokens: int, seed: int = 0) -> Prompt:
        ids[row] = HOSTILE_IDS[len(ids)]
        return replace(make_prompt(row, num_tokens, seed), prompt_id=ids[row])

    monkeypatch.setattr(small_run, "make_prompt", hostile)
    inside = tmp_path / "inside"

    run = small_run.build_small_run(str(inside / "run"), lengths=(3,) * len(HOSTILE_IDS))

    assert len(ids) == len(HOSTILE_IDS)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in inside.iterdir()] == ["run"]
    keys = [found.key for found in run.store.list("")]
    assert len(keys) > 8
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)*", key), key
    assert {row.prompt_id for row in open_run(run.url)} == {ids[row] for row in run.rows}


def test_only_its_owner_can_look_into_an_arena(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        arena = Arena(tmp_path / "spool", 4096)
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in arena.directory.iterdir()}
    directory = stat.S_IMODE(arena.directory.stat().st_mode)
    arena.remove()

    assert modes == {"arena": 0o600, "lock": 0o600}
    assert directory == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_the_channel_listens_to_its_own_user_only() -> None:
    """It has an abstract address, which has no mode: the kernel says who is at the other end instead."""
    messages: list[Message] = []
    server = ChannelServer(f"hsray-test-{os.getpid()}", messages.append, lambda: None)
    code = textwrap.dedent(
        f"""
        import os, socket, sys
        os.setuid(int(sys.argv[1]))
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        s.connect("\\0{server.address}")
        try:
            s.sendall(b'{{"kind": "failed", "message": "from ' + sys.argv[1].encode() + b'"}}\\n')
            print(len(s.recv(1)))
        except OSError:
            print(0)
        """
    )
    try:
        answer = subprocess.run([sys.executable, "-c", code, "65534"], capture_output=True, text=True, check=True)
        assert answer.stdout == "0\n"  # hung up on
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
            mine.connect("\0" + server.address)
            mine.sendall(b'{"kind": "failed", "message": "from me"}\n')
            wait_until(lambda: bool(messages), 20, lambda: "nothing came")
    finally:
        server.close()
    assert [getattr(message, "message", "") for message in messages] == ["from me"]

"""Fixtures that several test files share."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seaweed import Seaweed, run_seaweed


@pytest.fixture(autouse=True)
def hsray_logger() -> Iterator[logging.Logger]:
    """hsray's logger as in a fresh process, before and after each test: commands run in this process configure it."""
    logger = logging.getLogger("hsray")

    def reset() -> None:
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:] = []
        logger.setLevel(logging.NOTSET)
        logger.propagate = True

    reset()
    yield logger
    reset()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server. Without the `weed` binary the test fails: it does not skip."""
    with run_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs of 16 MiB. Mounting needs root: without it the test is skipped, in CI it fails."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)

"""Python in a process of its own, for what takes much memory, holds a GPU or may end in any way.

`ask` runs `python -m hsray.doctor.<module>` with one JSON object on standard input; the module answers with another on
standard output, through `Answer`. Whatever else it or its libraries print goes to a log, of which errors quote the end.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from hsray.errors import HsrayError
from hsray.log_files import tail

_PR_SET_PDEATHSIG = 1


def ask(module: str, options: Mapping[str, Any], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """The answer of a module. Raises HsrayError with the end of its log if there is none in time."""
    with tempfile.NamedTemporaryFile(prefix=f"hsray-doctor-{module}-", suffix=".log") as log:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", f"hsray.doctor.{module}"],
                input=json.dumps(options),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=seconds,
                check=False,
                # A Ray worker finds hsray by its path, not by its environment.
                env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except subprocess.TimeoutExpired as err:
            raise HsrayError(f"{module}: not done within {seconds:.0f} s; its log ends:\n{tail(log.name, 5)}") from err
        try:
            answer: dict[str, Any] = json.loads(ended.stdout)
        except ValueError as err:
            raise HsrayError(
                f"{module}: ended with exit code {ended.returncode}; its log ends:\n{tail(log.name, 5)}"
            ) from err
    return answer


class Answer:
    """The child's end: takes standard output for the answer alone, and ends with whoever asked."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.options: dict[str, Any] = json.loads(sys.stdin.read())
        self._file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def give(self, answer: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(answer))
        self._file.close()

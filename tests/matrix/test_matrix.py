"""Real SGLang against transformers, one model per axis. `scripts/test --matrix` runs every case."""

from pathlib import Path

import pytest

from tests.matrix.cases import CI, Case
from tests.matrix.runner import run_in_process, table_row

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Families that several cases need are made once."""
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", CI, ids=lambda case: case.name)
def test_states_equal_transformers_whatever_the_steps_and_the_layout(case: Case, folder: Path) -> None:
    result = run_in_process(case, folder)

    print(table_row(result))
    assert result["problems"] == []

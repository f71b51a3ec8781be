"""What the documentation quotes exists: messages, keys, files."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hsray"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
# Fakes have no users; these parts describe their own errors, in pages or in what they print.
ELSEWHERE = ("testing.py", "doctor/", "training/", "codecs/", "export/", "convert/")
# Reasons of single rows, tabled in docs/prompts.md; and errors of Python's own kinds, which are the caller's mistakes.
NOT_OURS = {"RowRejected", "EncodingError", "ValueError", "TypeError", "RuntimeError", "AttributeError", "IndexError"}
HOLE = "\0"


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "cpu_stand_ins" not in path.parts]


def template(node: ast.AST) -> str:
    """A string of the source, with HOLE for each value that is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return HOLE


def templates() -> list[str]:
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(template(node))
    return found


def raised() -> Iterator[tuple[str, str]]:
    """(where, message) of every error of hsray's own that the package raises with a text."""
    for path in modules():
        name = str(path.relative_to(PACKAGE))
        if name.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind = getattr(node.exc.func, "id", "")
                message = template(node.exc.args[0])
                letters = sum(character.isalpha() for character in message)
                if kind.endswith(("Error", "Mismatch", "Unusable", "Unavailable", "Full")) and kind not in NOT_OURS:
                    # A message of holes alone is another one, passed on.
                    yield from [(f"{name}:{node.lineno}", message)] if letters > 12 else []


def quotes() -> list[str]:
    """The messages in the first column of every table of the page."""
    rows = re.findall(r"^\| (.+?) \| ", TROUBLESHOOTING.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [cell for row in rows for cell in row.split("<br>")]
    return [cell.strip()[1:-1] for cell in cells if cell.strip().startswith("`")]


def fits(quote: str, message: str) -> bool:
    """Whether the parts of a quote between its `…` stand in a message, in this order."""
    at = 0
    for part in quote.split("…"):
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_every_quoted_message_is_in_the_code() -> None:
    known = [text for text in templates() if HOLE not in text or text.strip(HOLE)]
    known += ["The actor is dead because its worker process has died."]  # Ray's

    strangers = [quote for quote in quotes() if not any(fits(quote, text) for text in known)]

    assert strangers == []
    assert len(quotes()) > 150


def test_every_message_is_on_the_page() -> None:
    said = quotes()

    missing = [
        f"{where}: {message.replace(HOLE, '…')}"
        for where, message in raised()
        if not any(fits(q, message) for q in said)
    ]

    assert missing == [], "docs/troubleshooting.md lacks these, or a part of them"


def test_quotes_say_enough_to_be_found() -> None:
    assert [quote for quote in quotes() if sum(c.isalpha() for c in quote) < 5] == []


def test_the_configuration_page_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "docs"), "--check"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)

    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]

    assert missing == []


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []


@pytest.mark.parametrize("page", ["operations.md", "troubleshooting.md"])
def test_keys_that_a_page_names_exist(page: str) -> None:
    from hsray.config import Config

    keys = {f"{s}.{k}" for s, f in Config.model_fields.items() for k in f.annotation.model_fields}  # type: ignore[union-attr]
    sections = "|".join(Config.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)", (ROOT / "docs" / page).read_text(encoding="utf-8"))

    assert set(named) - keys == set()

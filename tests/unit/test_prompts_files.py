"""Which files `prompts.path` names, in which order, and what happens when it names none."""

import gzip
import io
import os
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import xxhash
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts import InputFile, hash_file, input_files
from hsray.prompts.files import ReadError, read_blocks

LINE = b'{"text": "hello"}\n'


def make(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(LINE)


def found(path: str | list[str], **options: Any) -> list[str]:
    return [file.url for file in input_files(PromptsConfig(path=path, storage_options=options))]


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """A folder of its own in the process-wide memory file system."""
    folder = f"memory://{uuid.uuid4().hex}"
    fs = fsspec.filesystem("memory")
    yield folder
    fs.rm(folder, recursive=True)


def test_paths_keep_the_order_they_are_given_in(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.jsonl", "c.parquet")

    paths = [str(tmp_path / name) for name in ("c.parquet", "a.jsonl", "b.jsonl", "a.jsonl")]

    assert found(paths) == paths


def test_a_glob_is_sorted_by_name_and_skips_markers(tmp_path: Path) -> None:
    make(tmp_path, "p10.jsonl", "p2.jsonl", "P1.jsonl", ".p0.jsonl", "_p0.jsonl", "p3.jsonl.crc", "sub/p4.jsonl")

    assert found(str(tmp_path / "*")) == [str(tmp_path / name) for name in ("P1.jsonl", "p10.jsonl", "p2.jsonl")]
    assert found(str(tmp_path / "**" / "*.jsonl"))[-1] == str(tmp_path / "sub" / "p4.jsonl")


def test_a_directory_stands_for_every_prompt_file_below_it(tmp_path: Path) -> None:
    make(tmp_path, "b/2.jsonl.gz", "b/10.JSONL", "a.parquet", "_SUCCESS", ".DS_Store", "a.parquet.crc")
    make(tmp_path, "_temporary/0.jsonl", ".ipynb_checkpoints/a.jsonl", "b/_delta_log/0.json")

    assert found(str(tmp_path)) == [str(tmp_path / name) for name in ("a.parquet", "b/10.JSONL", "b/2.jsonl.gz")]
    assert found(f"{tmp_path}/") == found(str(tmp_path))


def test_a_hidden_folder_on_the_way_to_the_glob_or_directory_hides_nothing(tmp_path: Path) -> None:
    make(tmp_path, ".cache/_data/a.jsonl", ".cache/_data/_tmp/b.jsonl")
    folder = tmp_path / ".cache" / "_data"

    assert found(str(folder)) == [str(folder / "a.jsonl")]
    assert found(str(folder / "**" / "*.jsonl")) == [str(folder / "a.jsonl")]
    assert found(str(folder / "*.jsonl")) == [str(folder / "a.jsonl")]


def test_a_marker_that_is_written_out_is_read(tmp_path: Path) -> None:
    make(tmp_path, "_rows.jsonl")

    assert found(str(tmp_path / "_rows.jsonl")) == [str(tmp_path / "_rows.jsonl")]


def test_a_name_with_glob_characters_that_exists_is_that_file(tmp_path: Path) -> None:
    make(tmp_path, "part[1].jsonl", "part1.jsonl")

    assert found(str(tmp_path / "part[1].jsonl")) == [str(tmp_path / "part[1].jsonl")]


def test_relative_paths_stay_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "data/a.jsonl", "data/b.jsonl")
    monkeypatch.chdir(tmp_path)

    assert found(["data/b.jsonl", "data", "./data/*.jsonl"]) == [
        "data/b.jsonl",
        *["data/a.jsonl", "data/b.jsonl"] * 2,
    ]
    assert hash_file(input_files(PromptsConfig(path="data"))[0], {}) == xxhash.xxh3_128(LINE).hexdigest()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.jsonl", "does not exist"),
        ("*.jsonl.zst", "matches no file"),
        ("empty", "is a directory without prompt files"),
        ("markers", "is a directory without prompt files"),
        ("notes.md", "is no prompt file"),
        ("rows.parquet.gz", "is no prompt file"),
        ("rows.gz", "is no prompt file"),
        ("noext", "is no prompt file"),
    ],
)
def test_a_path_that_names_no_prompt_file_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    make(tmp_path, "markers/_SUCCESS", "markers/.a.jsonl", "notes.md", "rows.parquet.gz", "rows.gz", "noext")
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=message) as caught:
        found(str(tmp_path / path))

    assert str(caught.value).startswith(f"prompts.path: {tmp_path / path} ")


def test_a_foreign_file_in_a_directory_is_an_error_that_names_it_and_the_way_out(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "README.md")

    with pytest.raises(ConfigError, match=r"README\.md is no prompt file.*found by .*\*\.jsonl"):
        found(str(tmp_path))


def test_text_files_are_prompts_alone_but_may_be_notes_among_others(tmp_path: Path) -> None:
    make(tmp_path, "text/a.txt", "text/b.txt.gz", "mixed/a.jsonl", "mixed/LICENSE.txt")

    assert len(found(str(tmp_path / "text"))) == 2
    assert len(found(str(tmp_path / "mixed" / "*.txt"))) == 1
    for path in ("mixed", "mixed/*"):
        with pytest.raises(ConfigError, match=r"LICENSE\.txt beside files of other kinds.*Name the files"):
            found(str(tmp_path / path))


def test_a_folder_that_datasets_saved_is_its_arrow_files(tmp_path: Path) -> None:
    make(tmp_path, "set/dataset_dict.json")
    for split in ("test", "train"):
        make(tmp_path, *(f"set/{split}/{name}" for name in ("data-00000-of-00001.arrow", "state.json")))
        make(tmp_path, f"set/{split}/dataset_info.json", f"set/{split}/cache-1.arrow.crc")

    assert found(str(tmp_path / "set")) == [
        str(tmp_path / "set" / split / "data-00000-of-00001.arrow") for split in ("test", "train")
    ]
    # Without the arrow files these are rows like any others.
    make(tmp_path, "other/state.json")
    assert found(str(tmp_path / "other")) == [str(tmp_path / "other" / "state.json")]


@pytest.mark.parametrize("path", ["nosuch://bucket/a.jsonl", "memory://nobody/here/*.jsonl", "memory://nobody/a.jsonl"])
def test_a_remote_path_that_cannot_be_read_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match=f"prompts.path: {path.split('*')[0]}"):
        found(path)


def test_remote_files_are_found_by_path_glob_and_directory(memory_folder: str) -> None:
    for name in ("a.jsonl", "b.jsonl", "_SUCCESS"):
        fsspec.filesystem("memory").pipe(f"{memory_folder}/{name}", LINE)

    for path in (memory_folder, f"{memory_folder}/*", f"{memory_folder}/*.jsonl"):
        urls = found(path)
        assert [url.rsplit("/", 1)[1] for url in urls] == ["a.jsonl", "b.jsonl"]
        assert all(url.startswith("memory://") for url in urls)
        # The URL that is handed out opens the file.
        assert hash_file(InputFile(urls[0], None, ""), {}) == xxhash.xxh3_128(LINE).hexdigest()
    assert found(f"{memory_folder}/b.jsonl") == [f"{memory_folder}/b.jsonl"]


def test_storage_options_reach_the_file_system_but_not_the_local_one(tmp_path: Path) -> None:
    make(tmp_path, "local.jsonl")
    archive = tmp_path / "rows.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("b.jsonl", LINE)
        writer.writestr("a.jsonl", LINE)

    # `fo` is how the zip file system is told where the archive is; the local one has no such option.
    urls = found(["zip://*.jsonl", str(tmp_path / "local.jsonl")], fo=str(archive))

    assert urls == ["zip://a.jsonl", "zip://b.jsonl", str(tmp_path / "local.jsonl")]
    for url in urls:
        assert hash_file(InputFile(url, None, ""), {"fo": str(archive)}) == xxhash.xxh3_128(LINE).hexdigest()


def test_a_glob_inside_a_chained_url_gives_urls_that_open(tmp_path: Path) -> None:
    archive = tmp_path / "rows.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a.jsonl", LINE)

    urls = found(f"zip://*.jsonl::{archive}")

    assert urls == [f"zip://a.jsonl::{archive}"]
    assert hash_file(InputFile(urls[0], None, ""), {}) == xxhash.xxh3_128(LINE).hexdigest()


def test_a_rewritten_file_of_the_same_size_is_told_apart(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    path = tmp_path / "a.jsonl"
    [before] = input_files(PromptsConfig(path=str(path)))
    assert [before] == input_files(PromptsConfig(path=str(path)))

    path.write_bytes(LINE.replace(b"hello", b"jello"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    [after] = input_files(PromptsConfig(path=str(path)))

    assert before.nbytes == after.nbytes == len(LINE)
    assert before.modified != after.modified
    assert hash_file(before, {}) == hash_file(after, {}) == xxhash.xxh3_128(path.read_bytes()).hexdigest()


def test_the_hash_is_of_the_stored_bytes(tmp_path: Path) -> None:
    stored = gzip.compress(os.urandom(3 << 20))
    (tmp_path / "a.jsonl.gz").write_bytes(stored)
    [file] = input_files(PromptsConfig(path=str(tmp_path)))

    assert hash_file(file, {}) == xxhash.xxh3_128(stored).hexdigest()
    assert file.nbytes == len(stored)


class DyingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store whose connection breaks after two reads of a file."""

    protocol = "dying"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("dying://")))

    class _Handle(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            if self.reads > 2:
                raise ConnectionResetError("connection reset by peer")
            return super().read(size)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, *args, **kwargs)
        if path.endswith("locked.jsonl"):
            raise PermissionError("access denied")
        with super()._open(path, mode, *args, **kwargs) as file:
            return self._Handle(file.read())


@pytest.fixture
def dying_folder() -> str:
    fsspec.register_implementation("dying", DyingFileSystem, clobber=True)
    fs = fsspec.filesystem("dying")
    fs.pipe("/in/long.jsonl", LINE * 200_000)
    fs.pipe("/in/locked.jsonl", LINE)
    return "dying://in"


def test_a_file_that_cannot_be_opened_is_an_error(dying_folder: str) -> None:
    file = InputFile(f"{dying_folder}/locked.jsonl", None, "")

    with pytest.raises(ConfigError, match=r"prompts\.path: .*locked\.jsonl cannot be opened: .*access denied"):
        hash_file(file, {})
    with pytest.raises(ConfigError, match=r"locked\.jsonl cannot be opened"):
        list(read_blocks(file, {}))


def test_a_connection_that_breaks_is_an_error_and_no_end_of_file(dying_folder: str) -> None:
    file = InputFile(f"{dying_folder}/long.jsonl", None, "")

    with pytest.raises(ConfigError, match=r"prompts\.path: .*long\.jsonl: reading fails: .*reset by peer"):
        hash_file(file, {})
    with pytest.raises(ReadError, match="reset by peer"):
        list(read_blocks(file, {}))


def _gz(data: bytes) -> bytes:
    return gzip.compress(data)


def _zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", _gz), (".zst", _zst)], ids=["gz", "zst"])
def test_compressed_files_are_read_whole_or_not_at_all(tmp_path: Path, suffix: str, compress: Any) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    text = os.urandom(300_000).hex().encode()
    file = InputFile(str(path), None, "")

    # Several members in one file are one text: `cat a.gz b.gz` and parallel compressors write such files.
    path.write_bytes(compress(text) + compress(b"") + compress(text))
    assert b"".join(read_blocks(file, {})) == text + text

    stored = compress(text)
    damaged = bytearray(stored)
    damaged[len(damaged) // 2] ^= 0xFF
    wrong_sum = stored[:-6] + bytes(b ^ 0xFF for b in stored[-6:])
    for broken, message in [
        (stored[:-1], "was cut"),
        (stored[: len(stored) // 2], "was cut"),
        (compress(text) + stored[:20], "was cut"),
        (b"", "was cut"),
        (bytes(damaged), "damaged"),
        (wrong_sum, "damaged"),
        (stored + b"garbage", "damaged"),
        (text, "damaged"),
    ]:
        path.write_bytes(broken)
        with pytest.raises(ReadError, match=message):
            list(read_blocks(file, {}))


def test_zero_padding_after_a_gzip_member_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINE) + b"\0" * 512)

    assert b"".join(read_blocks(InputFile(str(tmp_path / "a.jsonl.gz"), None, ""), {})) == LINE

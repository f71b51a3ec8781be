"""Prompts under an s3:// prefix, through a real server."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts import Tally, hash_file, input_files, load_tokenizer, read_prompts
from hsray.records import Prompt
from tests.seaweed import Seaweed
from tests.tiny_tokenizers import make_tokenizer


def test_a_prefix_holds_files_of_every_kind_and_markers(seaweed: Seaweed, tmp_path: Path) -> None:
    url = seaweed.new_url()
    options = {
        "endpoint_url": seaweed.endpoint,
        "key": seaweed.env["AWS_ACCESS_KEY_ID"],
        "secret": seaweed.env["AWS_SECRET_ACCESS_KEY"],
    }
    s3 = s3fs.S3FileSystem(**options)
    lines = "".join(json.dumps({"id": f"l{n}", "text": f"line {n}"}) + "\n" for n in range(3000)).encode()
    with s3.open(f"{url}/in/b/rows.jsonl.gz", "wb") as file:
        file.write(gzip.compress(lines))
    with s3.open(f"{url}/in/a.parquet", "wb") as file:
        pq.write_table(pa.table({"id": ["p0", "p1"], "text": ["x", "y"]}), file)
    s3.pipe(f"{url}/in/_SUCCESS", b"")
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path)), trust_remote_code=False, chat_template=None)

    for path in (f"{url}/in", f"{url}/in/", [f"{url}/in/*.parquet", f"{url}/in/b/*"]):
        config = PromptsConfig(path=path, storage_options=options)
        tally = Tally()
        records = list(read_prompts(config, tokenizer, vocab_size=400, max_tokens=100, tally=tally))
        assert [r.prompt_id for r in records] == ["p0", "p1", *(f"l{n}" for n in range(3000))]
        assert all(isinstance(r, Prompt) for r in records)
        assert {name.rsplit("/", 1)[1]: file.rows for name, file in tally.files.items()} == {
            "a.parquet": 2,
            "rows.jsonl.gz": 3000,
        }
    hashes = {hash_file(file, options) for file in input_files(config)}
    assert len(hashes) == 2

    with pytest.raises(ConfigError, match=r"prompts\.path: s3://.*gone.* does not exist"):
        input_files(PromptsConfig(path=f"{url}/gone", storage_options=options))

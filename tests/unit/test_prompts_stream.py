"""The whole way from files to prompts: every row once, in order, under its own number."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts import REASONS, PromptTokenizer, load_tokenizer, read_prompts
from hsray.records import Prompt, Reject
from tests.tiny_tokenizers import TEMPLATES, make_tokenizer

VOCAB = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(
    path: Path, tokenizer: PromptTokenizer, *, vocab_size: int = VOCAB, max_tokens: int = 1000, **config: Any
) -> list[Prompt | Reject]:
    records = list(
        read_prompts(PromptsConfig(path=str(path), **config), tokenizer, vocab_size=vocab_size, max_tokens=max_tokens)
    )
    assert [record.row for record in records] == list(range(len(records)))
    assert {record.reason for record in records if isinstance(record, Reject)} <= REASONS
    ids = [record.prompt_id for record in records if isinstance(record, Prompt)]
    assert len(ids) == len(set(ids))
    return records


def ids_or_reasons(records: list[Prompt | Reject]) -> list[str]:
    return [record.prompt_id if isinstance(record, Prompt) else record.reason for record in records]


def test_every_row_comes_out_once_in_order_over_files_shapes_and_batches(
    source: Path, tokenizer: PromptTokenizer
) -> None:
    def row(n: int) -> Any:
        return [
            {"id": f"t{n}", "text": f"text {n}"},
            {"id": f"m{n}", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"{n}"}]},
            {"id": f"c{n}", "conversations": [{"from": "human", "value": f"{n}"}, {"from": "gpt", "value": "yes"}]},
            {"id": f"i{n}", "input_ids": [5, 6, n % VOCAB], "loss_mask": [0, 0, 1]},
            '{"id": "cut',
            {"id": f"e{n}", "text": ""},
        ][n % 6]

    rows = [row(n) for n in range(1500)]
    write_jsonl(source / "a.jsonl", rows[:700])
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b"\n\n"))
    write_jsonl(source / "c.jsonl", rows[700:])

    records = read(source, tokenizer)

    expected = ["malformed_json" if n % 6 == 4 else "empty" if n % 6 == 5 else rows[n]["id"] for n in range(1500)]
    assert ids_or_reasons(records) == expected
    assert [(Path(r.file).name, r.line) for r in records] == [
        *(("a.jsonl", n + 1) for n in range(700)),
        *(("c.jsonl", n + 1) for n in range(800)),
    ]
    for n, record in enumerate(records):
        if isinstance(record, Prompt):
            assert record.input_ids.dtype == np.int32
            assert record.loss_mask.dtype == np.uint8
            assert len(record.loss_mask) == record.num_tokens >= 1
            assert record.loss_mask.any()
            assert bool(record.loss_mask.all()) == (n % 6 == 0)
    text, chat = records[600], records[601]
    assert isinstance(text, Prompt)
    assert isinstance(chat, Prompt)
    assert tokenizer.decode(text.input_ids) == "text 600"
    assert tokenizer.decode(chat.input_ids[chat.loss_mask == 1]) == "601<|im_end|>"


def test_the_same_rows_in_parquet_give_the_same_prompts(source: Path, tokenizer: PromptTokenizer) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"id": None, "text": "hello"},
        {"id": "b", "input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]},
        {"id": "c", "input_ids": [1, 2, 3]},
        {"id": "d"},
        {"id": "e", "messages": [{"role": "robot", "content": "hi"}]},
    ]
    keys = ("id", "messages", "text", "input_ids", "loss_mask")
    write_jsonl(source / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows]), source / "a.parquet")

    lines = read(source / "a.jsonl", tokenizer)
    columns = read(source / "a.parquet", tokenizer)

    assert ids_or_reasons(lines) == ids_or_reasons(columns)
    assert ids_or_reasons(lines)[2:] == ["b", "c", "unknown_shape", "unknown_role"]
    for one, other in zip(lines, columns, strict=True):
        assert one.line == other.line
        if isinstance(one, Prompt) and isinstance(other, Prompt):
            np.testing.assert_array_equal(one.input_ids, other.input_ids)
            np.testing.assert_array_equal(one.loss_mask, other.loss_mask)


def test_reading_twice_gives_the_same_stream(source: Path, tokenizer: PromptTokenizer) -> None:
    write_jsonl(source / "a.jsonl", [{"text": f"row {n % 90}"} for n in range(100)])

    first, second = read(source, tokenizer), read(source, tokenizer)

    assert ids_or_reasons(first) == ids_or_reasons(second)
    assert Counter(ids_or_reasons(first))["duplicate"] == 10


def test_a_reject_says_what_where_and_shows_the_row(source: Path, tokenizer: PromptTokenizer) -> None:
    long = "hello world" * 50
    write_jsonl(source / "a.jsonl", [{"id": 7, "text": long}, "", '{"id": 8, "text": caf'])

    too_long, malformed = read(source / "a.jsonl", tokenizer, max_tokens=100)

    assert isinstance(too_long, Reject)
    num_tokens = len(tokenizer.encode([long], with_spans=[False])[0].ids)
    assert too_long == Reject(
        row=0,
        prompt_id="7",
        file=str(source / "a.jsonl"),
        line=1,
        reason="too_long",
        detail=f"{num_tokens} tokens, at most 100 fit",
        snippet=json.dumps({"id": 7, "text": long})[:200],
    )
    assert isinstance(malformed, Reject)
    assert (malformed.row, malformed.line, malformed.prompt_id) == (1, 3, None)
    assert malformed.snippet == '{"id": 8, "text": caf'


# --------------------------------------------------------------------- length


def test_lengths_at_the_limits_are_taken_and_beyond_them_refused(source: Path, tokenizer: PromptTokenizer) -> None:
    rows = [{"id": str(n), "input_ids": list(range(3, 3 + n))} for n in range(7)]
    write_jsonl(source / "a.jsonl", rows)

    records = read(source, tokenizer, min_tokens=2, max_tokens=5)

    assert ids_or_reasons(records) == ["empty", "too_short", "2", "3", "4", "5", "too_long"]
    assert isinstance(records[1], Reject)
    assert records[1].detail == "1 tokens, prompts.min_tokens is 2"
    assert isinstance(records[5], Prompt)
    assert records[5].input_ids.tolist() == [3, 4, 5, 6, 7]


def test_a_row_that_cannot_fit_is_refused_before_it_is_tokenized(source: Path, tokenizer: PromptTokenizer) -> None:
    # This would take the tokenizer a minute.
    write_jsonl(source / "a.jsonl", [{"id": "a", "text": "x" * (20 << 20)}, {"id": "b", "text": "y"}])

    records = read(source, tokenizer)

    assert ids_or_reasons(records) == ["too_long", "b"]
    assert isinstance(records[0], Reject)
    assert records[0].detail.endswith("tokens or more, at most 1000 fit")
    for text in ("hello world" * 9, "<|im_start|>" * 9, "", "\u4e16" * 5):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode([text], with_spans=[False])[0].ids)


def test_a_row_whose_ids_the_model_does_not_have_is_refused(source: Path, tokenizer: PromptTokenizer) -> None:
    [encoding] = tokenizer.encode(["hello world"], with_spans=[False])
    top = int(encoding.ids.max())
    write_jsonl(source / "a.jsonl", [{"id": "a", "text": "hello world"}, {"id": "b", "input_ids": [1, top]}])

    assert ids_or_reasons(read(source, tokenizer, vocab_size=top + 1)) == ["a", "b"]
    assert ids_or_reasons(read(source, tokenizer, vocab_size=top)) == ["id_out_of_range", "id_out_of_range"]


def test_a_doubled_beginning_of_sequence_is_refused_in_every_shape(source: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi"}
    write_jsonl(source / "a.jsonl", [{"id": "m", "messages": [message]}, {"id": "t", "text": "<s>hi"}])
    write_jsonl(source / "b.jsonl", [{"id": "tt", "text": "<s><s>hi"}, {"id": "ii", "input_ids": [0, 0, 5]}])
    good = load_tokenizer(
        str(make_tokenizer(tmp_path / "bos", TEMPLATES["bos"])), trust_remote_code=False, chat_template=None
    )
    doubled = load_tokenizer(
        str(make_tokenizer(tmp_path / "double", TEMPLATES["double_bos"])), trust_remote_code=False, chat_template=None
    )

    assert ids_or_reasons(read(source, good)) == ["m", "t", "double_bos", "double_bos"]
    assert ids_or_reasons(read(source, doubled)) == ["double_bos", "t", "double_bos", "double_bos"]


# ------------------------------------------------------------------- identity


def test_the_first_good_row_keeps_an_id(source: Path, tokenizer: PromptTokenizer) -> None:
    write_jsonl(
        source / "a.jsonl",
        [
            {"id": "x", "text": ""},
            {"id": "x", "text": "first"},
            {"id": "x", "text": "second"},
            {"id": 5, "text": "five"},
            {"id": "5", "text": "also five"},
        ],
    )

    records = read(source, tokenizer)

    assert ids_or_reasons(records) == ["empty", "x", "duplicate_id", "5", "duplicate_id"]
    assert isinstance(records[2], Reject)
    assert records[2].prompt_id == "x"
    assert "set prompts.id_field" in records[2].detail


def test_rows_without_an_id_are_known_by_tokens_and_mask(source: Path, tokenizer: PromptTokenizer) -> None:
    hello = tokenizer.encode(["hello"], with_spans=[False])[0].ids.tolist()
    write_jsonl(
        source / "a.jsonl",
        [
            {"text": "hello"},
            {"id": "", "text": "hello", "source": "elsewhere"},
            {"input_ids": hello},
            {"input_ids": hello, "loss_mask": [0] * len(hello)},
            {"id": "named", "text": "hello"},
        ],
    )

    records = read(source, tokenizer)

    first, copy, same_ids, other_mask, named = ids_or_reasons(records)
    assert first.startswith("h-")
    assert len(first) == 34
    assert (copy, same_ids, named) == ("duplicate", "duplicate", "named")
    assert other_mask.startswith("h-")
    assert other_mask != first
    assert isinstance(records[1], Reject)
    assert records[1].prompt_id is None


def test_ids_do_not_depend_on_where_a_row_stands(source: Path, tokenizer: PromptTokenizer) -> None:
    rows = [{"text": f"row {n}"} for n in range(20)]
    write_jsonl(source / "a.jsonl", rows)
    write_jsonl(source / "b.jsonl", rows[::-1])

    forward, backward = read(source / "a.jsonl", tokenizer), read(source / "b.jsonl", tokenizer)

    assert ids_or_reasons(forward) == ids_or_reasons(backward)[::-1]


def test_the_id_field_is_the_users(source: Path, tokenizer: PromptTokenizer) -> None:
    table = pa.table({"id": [1, 1], "prompt_id": ["a", "b"], "text": ["x", "y"]})
    pq.write_table(table, source / "a.parquet")

    assert ids_or_reasons(read(source, tokenizer)) == ["1", "duplicate_id"]
    assert ids_or_reasons(read(source, tokenizer, id_field="prompt_id")) == ["a", "b"]


# ------------------------------------------------------------- configuration


def test_the_limit_counts_rows_rejects_included_and_reads_no_further(source: Path, tokenizer: PromptTokenizer) -> None:
    write_jsonl(source / "a.jsonl", [{"id": "a", "text": "x"}, "nonsense", {"id": "b", "text": "y"}])
    (source / "b.jsonl.gz").write_bytes(b"not gzip")

    assert ids_or_reasons(read(source, tokenizer, limit=2)) == ["a", "malformed_json"]
    assert ids_or_reasons(read(source, tokenizer, limit=3)) == ["a", "malformed_json", "b"]
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz: the compressed data is damaged"):
        read(source, tokenizer, limit=4)


def test_rows_in_front_of_a_cut_come_out_before_the_run_is_refused(source: Path, tokenizer: PromptTokenizer) -> None:
    content = "".join(json.dumps({"id": f"{n}", "text": f"{n * 7919**9:x}"}) + "\n" for n in range(5000))
    (source / "a.jsonl.gz").write_bytes(gzip.compress(content.encode())[:-9])

    records: list[Prompt | Reject] = []
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: .*was cut"):
        records.extend(read_prompts(PromptsConfig(path=str(source)), tokenizer, vocab_size=VOCAB, max_tokens=100))

    assert len(records) > 4000
    assert ids_or_reasons(records) == [f"{n}" for n in range(len(records))]


def test_a_forced_format_reads_its_key_only(source: Path, tokenizer: PromptTokenizer) -> None:
    row = {"id": "a", "text": "x", "messages": [{"role": "user", "content": "hi"}]}
    write_jsonl(source / "a.jsonl", [row, {"id": "b", "messages": row["messages"]}])

    records = read(source, tokenizer, format="text")

    assert ids_or_reasons(records) == ["a", "missing_field"]
    assert isinstance(records[0], Prompt)
    assert tokenizer.decode(records[0].input_ids) == "x"


def test_only_conversations_need_a_chat_template(source: Path, tmp_path: Path) -> None:
    bare = load_tokenizer(str(make_tokenizer(tmp_path / "bare", None)), trust_remote_code=False, chat_template=None)
    write_jsonl(source / "a.jsonl", [{"id": "t", "text": "x"}, {"id": "i", "input_ids": [1]}])
    assert ids_or_reasons(read(source, bare)) == ["t", "i"]

    write_jsonl(source / "b.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ConfigError, match=r"prompts\.chat_template: .* has no chat template"):
        read(source, bare)


def test_every_way_of_refusing_a_conversation_leaves_its_neighbours_alone(source: Path, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    write_jsonl(
        source / "a.jsonl",
        [
            {"id": "good", "messages": [user, answer]},
            {"id": "order", "messages": [answer, user]},
            {"id": "none", "messages": []},
            {"id": "image", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"id": "prompt", "messages": [user]},
        ],
    )
    directory = make_tokenizer(tmp_path / "alternating", TEMPLATES["alternating"])
    strict = load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)

    records = read(source, strict)

    assert ids_or_reasons(records) == ["good", "template_error", "empty_conversation", "multimodal", "prompt"]
    assert isinstance(records[1], Reject)
    assert records[1].detail == "TemplateError: roles must alternate"
    assert records[1].prompt_id == "order"


def test_a_batch_of_long_rows_is_no_larger_than_its_bytes_allow(source: Path, tokenizer: PromptTokenizer) -> None:
    class Counting(PromptTokenizer):
        calls: list[tuple[int, int]]

        def encode(self, texts: Any, *, with_spans: Any) -> Any:
            self.calls.append((len(texts), sum(map(len, texts))))
            return tokenizer.encode(texts, with_spans=with_spans)

    counting = Counting.__new__(Counting)
    counting.__dict__.update(tokenizer.__dict__)
    counting.calls = []
    write_jsonl(source / "a.jsonl", [{"id": f"{n}", "text": f"{n} " + "hello " * 120_000} for n in range(10)])
    write_jsonl(source / "b.jsonl", [{"id": f"s{n}", "text": f"{n}"} for n in range(600)])

    records = read(source, counting, max_tokens=10**6)

    assert ids_or_reasons(records) == [f"{n}" for n in range(10)] + [f"s{n}" for n in range(600)]
    assert max(rows for rows, _ in counting.calls) == 256
    assert max(chars for _, chars in counting.calls) < 6_000_000

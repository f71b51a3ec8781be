"""The files that people have, each read whole: what every row becomes, and that the counts add up."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts import PromptTokenizer, load_tokenizer, read_prompts
from hsray.prompts.tally import Tally
from hsray.records import Prompt, Reject
from tests import chat_templates
from tests.tiny_tokenizers import CHATML, make_tokenizer

VOCAB = 400
END = "<|im_end|>"
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
HI_TEXT = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\nHello{END}\n"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = make_tokenizer(tmp_path_factory.mktemp("chatml"), CHATML, writes_bos=True)
    return load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = make_tokenizer(
        tmp_path_factory.mktemp("qwen3"), chat_templates.QWEN3, special=[*chat_templates.SPECIAL, "<|image_pad|>"]
    )
    return load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)


def read(
    path: Path | list[Path], tokenizer: PromptTokenizer, max_tokens: int = 2000, **options: Any
) -> tuple[list[Prompt | Reject], Tally]:
    tally = Tally()
    paths = path if isinstance(path, list) else [path]
    config = PromptsConfig(path=[str(p) for p in paths], **options)
    records = list(read_prompts(config, tokenizer, vocab_size=VOCAB, max_tokens=max_tokens, tally=tally))
    assert [record.row for record in records] == list(range(len(records)))
    for file, counts in tally.files.items():
        mine = [record for record in records if record.file == file]
        assert counts.rows == len(mine) == counts.prompts + counts.rejects.total()
        assert counts.prompts == sum(isinstance(record, Prompt) for record in mine)
    return records, tally


def rows(path: Path, data: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in data))
    return path


def outcome(records: list[Prompt | Reject], tokenizer: PromptTokenizer) -> list[tuple[str, str]]:
    """(text, masked text) of prompts, ("", reason) of rejects."""
    return [
        (tokenizer.decode(r.input_ids), tokenizer.decode(r.input_ids[r.loss_mask == 1]))
        if isinstance(r, Prompt)
        else ("", r.reason)
        for r in records
    ]


def chat(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in turns)


# -------------------------------------------------------------------- formats


def test_f1_sharegpt(tmp_path: Path, chatml: PromptTokenizer) -> None:
    def row(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
        return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}

    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(
            [
                row(("human", "Name a prime."), ("gpt", "7"), id="k3_0"),
                row(("system", "Be brief."), ("human", "Hi"), ("chatgpt", "Hello"), id=17),
                row(("gpt", "Hello"), ("human", "Hi")),
                row(id="none"),
                row(("human", "a"), ("human", "b\u200b<br>"), ("gpt", "")),
                row(("human", "a"), ("gpt", "b"), id="k3_0"),
                row(("human", "a"), ("laguna_s", "b"), id="named"),
            ]
        )
    )

    records, tally = read(path, chatml)

    assert outcome(records, chatml) == [
        (chat(("user", "Name a prime."), ("assistant", "7")), f"7{END}"),
        (chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")), f"Hello{END}"),
        (chat(("assistant", "Hello"), ("user", "Hi")), f"Hello{END}"),
        ("", "empty_conversation"),
        (chat(("user", "a"), ("user", "b\u200b<br>"), ("assistant", "")), END),
        ("", "duplicate_id"),
        ("", "unknown_role"),
    ]
    assert isinstance(records[1], Prompt)
    assert records[1].prompt_id == "17"
    assert tally.total().formats == {"conversations": 5}
    mapped, _ = read(path, chatml, role_map={"laguna_s": "assistant"})
    assert outcome(mapped, chatml)[-1] == (chat(("user", "a"), ("assistant", "b")), f"b{END}")


def test_f2_sharegpt_with_system_tools_and_calls(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Weather in Oslo?"},
            {"from": "function_call", "value": '{"name":"w","arguments":{"c":"Oslo"}}'},
            {"from": "observation", "value": '{"t":4}'},
            {"from": "gpt", "value": "4 degrees."},
        ],
        "system": "Be brief.",
        "tools": '[{"name":"w"}]',
    }

    [(text, masked)] = outcome(read(rows(tmp_path / "a.jsonl", [row]), qwen3)[0], qwen3)

    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert '{"type": "function", "function": {"name": "w"}}' in text
    assert '<tool_response>\n{"t":4}\n</tool_response>' in text
    assert masked == (
        '\n<tool_call>\n{"name": "w", "arguments": {"c": "Oslo"}}\n</tool_call><|im_end|>'
        "<think>\n\n</think>\n\n4 degrees.<|im_end|>"
    )


def test_f3_openai_messages(tmp_path: Path, chatml: PromptTokenizer) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    data = [
        {"id": 12, "messages": [{"role": "developer", "content": "Terse."}, {"role": "user", "content": parts}]},
        {"id": 13, "messages": [{"role": "system", "content": "alone"}], "annotations": [], "refusal": None},
        {"id": 14, "messages": [*HI, {"role": "user", "content": None}]},
        {"id": 15, "messages": [{**HI[0], "name": "bob"}, {**HI[1], "weight": 0, "annotations": []}]},
    ]

    records, tally = read(rows(tmp_path / "a.jsonl", data), chatml)

    assert outcome(records, chatml) == [
        (chat(("developer", "Terse."), ("user", "2+2?")), ""),
        (chat(("system", "alone")), ""),
        ("", "missing_content"),
        (HI_TEXT, ""),
    ]
    assert tally.notes["empty_mask"] == 3
    assert outcome(read(tmp_path / "a.jsonl", chatml, empty_mask="reject")[0], chatml) == [
        ("", "empty_mask"),
        ("", "empty_mask"),
        ("", "missing_content"),
        ("", "empty_mask"),
    ]


def test_f4_tools_in_columnar_storage_carry_no_nulls_into_the_prompt(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    def row(tool: dict[str, Any], arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
        turns = [HI[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {
            "messages": [*turns, {"role": "tool", "tool_call_id": "c", "content": ""}, HI[1]],
            "tools": [{"type": "function", "function": tool}],
        }

    data = [
        row({"name": "now", "parameters": {"tz": {"type": "string"}}}, {"tz": "Rome"}),
        row({"name": "w", "parameters": {"city": {"type": "string"}}, "description": "weather"}, {"city": "Oslo"}),
    ]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "a.parquet")
    as_text = [row({"name": "now", "parameters": {"tz": {"type": "string"}}}, '{"tz": "Rome"}'), data[1]]

    columns, _ = read(tmp_path / "a.parquet", qwen3)
    lines, _ = read(rows(tmp_path / "a.jsonl", as_text), qwen3)

    assert outcome(columns, qwen3) == outcome(lines, qwen3)
    text, masked = outcome(columns, qwen3)[0]
    assert "null" not in text
    assert '{"name": "now", "arguments": {"tz": "Rome"}}' in masked


def test_f5_ultrachat_parquet_shards(tmp_path: Path, chatml: PromptTokenizer) -> None:
    schema = pa.schema(
        {
            "prompt": pa.string(),
            "prompt_id": pa.string(),
            "messages": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        }
    )
    data = [
        {"prompt": "Hi", "prompt_id": "9f", "messages": HI},
        {"prompt": "Bye", "prompt_id": "a0", "messages": [{"role": "user", "content": "Bye"}]},
    ]
    for number, row in enumerate(data):
        pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / f"train-0000{number}.parquet")

    records, tally = read(tmp_path, chatml)

    assert outcome(records, chatml) == [(HI_TEXT, f"Hello{END}"), (chat(("user", "Bye")), "")]
    assert [r.prompt_id for r in records] == ["9f", "a0"]
    assert [file.rows for file in tally.files.values()] == [1, 1]


def test_f6_f7_rows_without_id_and_ids_that_restart(tmp_path: Path, chatml: PromptTokenizer) -> None:
    human = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    blend = rows(tmp_path / "blend.jsonl", [{"conversations": human, "source": s} for s in ("code", "math")])
    first = rows(tmp_path / "a.jsonl", [{"id": "0", "conversations": HI}])
    other = [{"role": "user", "content": "Bye"}]
    second = rows(tmp_path / "b.jsonl", [{"id": "0", "conversations": HI}, {"id": "0", "conversations": other}])
    paths = [blend, first, second]

    records, tally = read(paths, chatml)
    assert [r.prompt_id if isinstance(r, Prompt) else r.reason for r in records[1:]] == [
        "duplicate",
        "0",
        "duplicate_id",
        "duplicate_id",
    ]
    content = records[0].prompt_id
    assert content is not None
    assert content.startswith("h-")
    assert tally.notes["id_from_content"] == 1

    every, tally = read(paths, chatml, duplicates="keep-all")
    ids = [r.prompt_id for r in every]
    assert ids[:4] == [content, f"{content}#2", "0", f"{content}#3"]
    assert str(ids[4]).startswith("h-")
    assert len(set(ids)) == 5
    assert tally.notes["duplicate_renamed"] == 3

    none, _ = read(paths, chatml, duplicates="reject")
    assert outcome(none, chatml) == [("", r) for r in ("duplicate", "duplicate", *["duplicate_id"] * 3)]


def test_f8_regenerated_rows(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    thought = {"role": "assistant", "reasoning_content": "Greet.", "content": "Hello"}
    data = [
        {"id": "1", "status": "success", "conversations": [HI[0], thought], "finish_reason": "stop", "error": None},
        {"id": "2", "status": "error", "error": "timeout", "conversations": [HI[0]]},
        {"id": "3", "status": "success", "conversations": HI, "finish_reason": "length"},
        {"id": "4", "status": "success", "conversations": [HI[0], {**thought, "content": ""}]},
    ]
    path = rows(tmp_path / "a.jsonl", data)

    assert [masked for _, masked in outcome(read(path, qwen3)[0], qwen3)] == [
        "<think>\nGreet.\n</think>\n\nHello<|im_end|>",
        "source_error",
        "source_error",
        "<think>\nGreet.\n</think>\n\n<|im_end|>",
    ]
    kept, tally = read(path, qwen3, where={"status": "success"}, ignore_fields=["finish_reason"])
    assert [r.prompt_id for r in kept] == ["1", "3", "4"]
    assert tally.total().filtered == 1


def test_f9_reasoning_that_the_template_drops_is_counted(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    def answer(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": f"<think>\n{text} because\n</think>\n\n{text}"}

    turns = [HI[0], answer("nine"), {"role": "user", "content": "Sure?"}, answer("yes")]

    records, tally = read(rows(tmp_path / "a.jsonl", [{"messages": turns}]), qwen3)

    assert outcome(records, qwen3)[0][1] == "nine<|im_end|><think>\nyes because\n</think>\n\nyes<|im_end|>"
    assert tally.notes["reasoning_dropped"] == 1


def test_f10_harmony_roles(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant_analysis", "content": "greet"},
        {"role": "assistant_final", "content": "Hello"},
    ]

    records, _ = read(rows(tmp_path / "a.jsonl", [{"conversations": turns, "reasoning_effort": "low"}]), qwen3)

    assert outcome(records, qwen3)[0][1] == "<think>\ngreet\n</think>\n\nHello<|im_end|>"


def test_f11_text_that_is_rendered_already(tmp_path: Path, chatml: PromptTokenizer) -> None:
    two = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    cut = f"{HI_TEXT}<|im_start|>assistant\nand"
    data = [{"text": two}, {"text": f"<s>{HI_TEXT}"}, {"text": f"<s><s>{HI_TEXT}"}, {"text": cut}, {"text": "[INST]a"}]
    path = rows(tmp_path / "a.jsonl", data)

    assert outcome(read(path, chatml, format="rendered")[0], chatml) == [
        (two, f"b{END}d{END}"),
        (f"<s>{HI_TEXT}", f"Hello{END}"),
        ("", "double_bos"),
        (cut, f"Hello{END}and"),
        ("", "mask_mismatch"),
    ]
    last, _ = read(path, chatml, format="rendered", mask_turns="last", add_bos=True)
    assert outcome(last, chatml)[0] == (f"<s>{two}", f"d{END}")
    # As text, all of it counts, but for a beginning of sequence.
    plain, tally = read(path, chatml)
    assert outcome(plain, chatml)[:2] == [(two, two), (f"<s>{HI_TEXT}", HI_TEXT)]
    assert tally.notes["no_bos"] == 3


def test_f12_plain_prompts(tmp_path: Path, chatml: PromptTokenizer) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfWrite a haiku.\r\n\r\n  indented\\n\xff\r\n  kept  \nlast")
    (tmp_path / "b.csv").write_bytes(
        b'id,question,n\r\n1,"a, ""b""\nc",x\r\n2,,\r\n3,d\r\n4,"e"f,\r\n5,\xff,\r\n6,g,\r\n'
    )
    (tmp_path / "c.tsv").write_text("prompt\tmessages\nhi\t\n")
    pq.write_table(pa.table({"query": ["why?"]}), tmp_path / "d.parquet")

    assert outcome(read(tmp_path / "a.txt", chatml)[0], chatml) == [
        ("Write a haiku.", "Write a haiku."),
        ("", "bad_encoding"),
        ("  kept  ", "  kept  "),
        ("last", "last"),
    ]
    turns, _ = read(tmp_path / "a.txt", chatml, format="prompt")
    assert outcome(turns, chatml)[0] == (chat(("user", "Write a haiku.")), "")
    records, _ = read(tmp_path / "b.csv", chatml)
    assert outcome(records, chatml) == [
        (chat(("user", 'a, "b"\nc')), ""),
        ("", "unknown_shape"),
        ("", "malformed_csv"),
        ("", "malformed_csv"),
        ("", "bad_encoding"),
        (chat(("user", "g")), ""),
    ]
    assert [r.line for r in records] == [1, 2, 3, 4, 5, 6]
    assert outcome(read(tmp_path / "c.tsv", chatml)[0], chatml) == [(chat(("user", "hi")), "")]
    assert outcome(read(tmp_path / "d.parquet", chatml)[0], chatml) == [(chat(("user", "why?")), "")]


def test_a_csv_header_that_names_a_column_twice_ends_the_run(tmp_path: Path, chatml: PromptTokenizer) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")

    with pytest.raises(ConfigError, match=r"prompts\.path: the header of .*a\.csv names a column twice"):
        read(tmp_path / "a.csv", chatml)


def test_f13_token_ids(tmp_path: Path, chatml: PromptTokenizer) -> None:
    data = [
        {"id": "mask", "input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1]},
        {"id": "labels", "input_ids": [[5, 6]], "labels": [[-100, 6]]},
        {"id": "pad", "input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]},
        {"id": "shifted", "input_ids": [5, 6], "labels": [6, -100]},
        {"id": "other", "input_ids": [5, 400]},
        {"id": "none", "input_ids": []},
        {"id": "zeros", "input_ids": [5, 6], "loss_mask": [0, 0]},
    ]
    path = rows(tmp_path / "a.jsonl", data)

    records, tally = read(path, chatml)

    assert [r.loss_mask.tolist() if isinstance(r, Prompt) else r.reason for r in records] == [
        [1, 0, 1, 1],
        [0, 1],
        [1, 1],
        "bad_labels",
        "id_out_of_range",
        "empty",
        [0, 0],
    ]
    assert tally.notes == {"padding_removed": 1, "empty_mask": 1}
    last = read(path, chatml, mask_turns="last")[0][0]
    assert isinstance(last, Prompt)
    assert last.loss_mask.tolist() == [0, 0, 1, 1]


def test_f14_f15_instructions_and_other_spellings(tmp_path: Path, chatml: PromptTokenizer) -> None:
    data: list[Any] = [
        {"instruction": "Translate.", "input": "Hund", "output": "dog", "history": [["Hi", "Hello"]]},
        {"uuid": "u1", "conversation": [{"role": "User", "text": "Hi"}, {"role": "Assistant", "text": "Hello"}]},
        {"uuid": "u2", "conversation": HI[:1], "generated_message": HI[1]},
    ]

    records, tally = read(rows(tmp_path / "a.jsonl", data), chatml)

    assert outcome(records, chatml) == [
        (HI_TEXT + chat(("user", "Translate.\nHund"), ("assistant", "dog")), f"Hello{END}dog{END}"),
        (HI_TEXT, f"Hello{END}"),
        (HI_TEXT, f"Hello{END}"),
    ]
    assert [r.prompt_id for r in records[1:]] == ["u1", "u2"]
    assert tally.total().formats == {"prompt": 1, "conversations": 2}


def test_f16_media_are_refused_as_parts_columns_and_tokens(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    pad = int(qwen3.media_ids[0])
    image = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "file:///x.png"}}]
    data = [
        {"id": "part", "messages": [{"role": "user", "content": image}]},
        {"id": "column", "messages": HI, "images": ["x.png"]},
        {"id": "null", "messages": HI, "images": None},
        {"id": "ids", "input_ids": [5, pad, 6]},
        {"id": "text", "text": "a<|image_pad|>b"},
        {"id": "marker", "messages": [{"role": "user", "content": "<image>"}]},
    ]

    records, _ = read(rows(tmp_path / "a.jsonl", data), qwen3)

    assert [masked for _, masked in outcome(records, qwen3)] == [
        "multimodal",
        "multimodal",
        "<think>\n\n</think>\n\nHello<|im_end|>",
        "multimodal",
        "multimodal",
        "",
    ]


def test_f17_preference_pairs(tmp_path: Path, chatml: PromptTokenizer) -> None:
    path = rows(tmp_path / "a.jsonl", [{"prompt": "Hi", "chosen": HI, "rejected": [HI[0], {**HI[1], "content": "no"}]}])

    assert outcome(read(path, chatml)[0], chatml) == [("", "ambiguous_shape")]
    assert outcome(read(path, chatml, format="chosen")[0], chatml) == [(HI_TEXT, f"Hello{END}")]
    assert outcome(read(path, chatml, format="rejected")[0], chatml)[0][1] == f"no{END}"


# ----------------------------------------------------------------- containers


def test_f18_containers_hold_the_same_rows(tmp_path: Path, chatml: PromptTokenizer) -> None:
    data = [{"id": str(n), "messages": HI} for n in range(3)]
    array, lines = json.dumps(data).encode(), b"".join(json.dumps(row).encode() + b"\n" for row in data)
    files = {
        "a.json": array,
        "b.jsonl": array,
        "c.jsonl": json.dumps(data, indent=1).encode(),
        "d.json": lines,
        "e.jsonl": b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\r\n").rstrip(),
        "f.jsonl.gz": gzip.compress(lines),
        "g.json.zst": zstandard.ZstdCompressor().compress(array),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "h.parquet")
    for name in ("_SUCCESS", ".DS_Store", "a.json.crc"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "i.jsonl").write_bytes(b"")

    records, tally = read(tmp_path, chatml, duplicates="keep-all")

    assert outcome(records, chatml) == [(HI_TEXT, f"Hello{END}")] * 24
    assert [file.rows for file in tally.files.values()] == [3] * 8 + [0]


def test_lines_that_are_arrays_are_bad_rows_and_not_one_array(tmp_path: Path, chatml: PromptTokenizer) -> None:
    path = rows(tmp_path / "a.jsonl", [[1], {"text": "a"}, [2]])

    assert outcome(read(path, chatml)[0], chatml) == [("", "not_an_object"), ("a", "a"), ("", "not_an_object")]


def test_a_data_set_that_datasets_saved(tmp_path: Path, chatml: PromptTokenizer) -> None:
    import datasets

    data = [{"id": n, "messages": HI, "images": None, "tools": None} for n in range(5)]
    split = datasets.Dataset.from_list(data)
    datasets.DatasetDict({"train": split, "test": split.select([1])}).save_to_disk(tmp_path / "set")

    records, _ = read(tmp_path / "set" / "train", chatml)
    assert outcome(records, chatml) == [(HI_TEXT, f"Hello{END}")] * 5
    assert [r.prompt_id for r in records] == [str(n) for n in range(5)]
    both, _ = read(tmp_path / "set", chatml)
    assert outcome(both, chatml)[1:] == [("", "duplicate_id") if n == 1 else (HI_TEXT, f"Hello{END}") for n in range(5)]

    [file] = (tmp_path / "set" / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="no end marker: the file was cut"):
        read(file, chatml)
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, pa.schema({"text": pa.string()})) as w,
    ):
        w.write_batch(pa.record_batch({"text": ["a"]}))
    assert outcome(read(tmp_path / "b.arrow", chatml)[0], chatml) == [("a", "a")]


# --------------------------------------------------------------------- quirks


def test_qa_quirks_of_lines_and_rows(tmp_path: Path, chatml: PromptTokenizer) -> None:
    long = "x" * (21 << 20)
    content = [
        b'\xef\xbb\xbf{"id": 1, "text": "bom and crlf"}\r\n',
        b"\r\n",
        b'{"id": 1.5, "text": "' + long.encode() + b'"}\n',
        b'{"id": null, "text": "\\ud800"}\n',
        b'{"id": NaN, "text": "same"}\n',
        b'{"text": "same"}\n',
        b'{"id": "", "text": " "}\n',
        b'{"messages": [{"role": "user", "content": " "}]}\n',
        b'{"messages": [{"role": "robot", "content": "a"}]}\n',
        b'{"id": 1, "conversations": [{"from": "human", "value": "mixed"}]}\n',
        b'{"id": "cut", "text": "a',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(content))

    records, _ = read(tmp_path / "a.jsonl", chatml)

    assert outcome(records, chatml) == [
        ("bom and crlf", "bom and crlf"),
        ("", "too_long"),
        ("", "bad_encoding"),
        ("same", "same"),
        ("", "duplicate"),
        (" ", " "),
        (chat(("user", " ")), ""),
        ("", "unknown_role"),
        ("", "duplicate_id"),
        ("", "malformed_json"),
    ]
    assert [r.line for r in records] == [1, *range(3, 12)]


def test_qa_lengths_around_the_limit_are_refused_or_cut_with_their_mask(
    tmp_path: Path, chatml: PromptTokenizer
) -> None:
    data = [{"id": f"{n}", "input_ids": [5] * n, "loss_mask": [0] * 8 + [1] * (n - 8)} for n in (9, 10, 11)]
    path = rows(tmp_path / "a.jsonl", [*data, {"id": "q", "input_ids": [5] * 12, "loss_mask": [0] * 10 + [1, 1]}])

    refused, _ = read(path, chatml, max_tokens=10)
    assert [r.reason if isinstance(r, Reject) else r.num_tokens for r in refused] == [9, 10, "too_long", "too_long"]

    cut, tally = read(path, chatml, max_tokens=10, over_length="truncate")
    prompts = [r for r in cut if isinstance(r, Prompt)]
    assert [(p.num_tokens, len(p.loss_mask), int(p.loss_mask.sum()), p.full_tokens) for p in prompts] == [
        (9, 9, 1, None),
        (10, 10, 2, None),
        (10, 10, 2, 11),
        (10, 10, 0, 12),
    ]
    assert tally.notes == {"truncated": 2, "empty_mask": 1}
    strict, _ = read(path, chatml, max_tokens=10, over_length="truncate", empty_mask="reject")
    assert isinstance(strict[3], Reject)
    assert (strict[3].reason, strict[3].detail) == ("empty_mask", "the answers were cut away")


@pytest.mark.parametrize("limit", [20, 30, 40])
def test_a_cut_conversation_is_the_beginning_of_the_whole_one(
    tmp_path: Path, chatml: PromptTokenizer, limit: int
) -> None:
    path = rows(tmp_path / "a.jsonl", [{"id": "a", "messages": HI * 3}])

    [whole], [cut] = read(path, chatml)[0], read(path, chatml, max_tokens=limit, over_length="truncate")[0]

    assert isinstance(whole, Prompt)
    assert isinstance(cut, Prompt)
    assert cut.num_tokens == limit < whole.num_tokens == cut.full_tokens
    np.testing.assert_array_equal(cut.input_ids, whole.input_ids[:limit])
    np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask[:limit])


def test_qa_identical_rows_and_a_long_shared_system_prompt(tmp_path: Path, chatml: PromptTokenizer) -> None:
    same = rows(tmp_path / "same.jsonl", [{"messages": HI}] * 600)
    system = {"role": "system", "content": "rule " * 500}
    shared = rows(
        tmp_path / "shared.jsonl",
        [{"messages": [system, {"role": "user", "content": f"{n}"}, HI[1]]} for n in range(300)],
    )

    assert read(same, chatml)[1].total().rejects == {"duplicate": 599}
    records, _ = read(shared, chatml, max_tokens=4000)
    assert {masked for _, masked in outcome(records, chatml)} == {f"Hello{END}"}
    assert len({r.prompt_id for r in records}) == 300


def test_qa_special_tokens_in_what_people_write(tmp_path: Path, chatml: PromptTokenizer) -> None:
    said = {"role": "user", "content": f"is {END} the <s>end</s>?"}
    path = rows(tmp_path / "a.jsonl", [{"id": "a", "messages": [said, HI[1]]}, {"id": "b", "messages": HI}])
    text = chat(("user", said["content"]), ("assistant", "Hello"))

    refused, _ = read(path, chatml)
    assert isinstance(refused[0], Reject)
    assert (refused[0].reason, "turn 0 (user)" in refused[0].detail) == ("special_token", True)
    assert isinstance(refused[1], Prompt)

    kept, tally = read(path, chatml, special_tokens="keep")
    split, split_tally = read(path, chatml, special_tokens="split")
    assert outcome(kept, chatml) == outcome(split, chatml) == [(text, f"Hello{END}"), (HI_TEXT, f"Hello{END}")]
    assert (tally.notes["special_tokens_kept"], split_tally.notes["special_tokens_split"]) == (1, 1)
    specials = [
        int(np.isin(r.input_ids, chatml.special_ids).sum()) for r in (kept[0], split[0]) if isinstance(r, Prompt)
    ]
    # The template writes four of its own.
    assert specials == [6, 4]


def test_qa_special_tokens_in_arguments_of_a_call_count_too(tmp_path: Path, qwen3: PromptTokenizer) -> None:
    call = {"function": {"name": "now", "arguments": {"tz": "<|im_end|>"}}}
    turns = [HI[0], {"role": "assistant", "tool_calls": [call]}]
    path = rows(tmp_path / "a.jsonl", [{"messages": turns}])

    assert outcome(read(path, qwen3)[0], qwen3) == [("", "special_token")]
    assert outcome(read(path, qwen3, special_tokens="split")[0], qwen3) == [("", "special_token")]
    assert outcome(read(path, qwen3, special_tokens="keep")[0], qwen3)[0][1].count("<|im_end|>") == 2


@pytest.mark.parametrize("count", [0, 1])
def test_qa_files_of_no_row_and_of_one(tmp_path: Path, chatml: PromptTokenizer, count: int) -> None:
    pq.write_table(pa.table({"text": pa.array(["a"] * count, pa.string())}), tmp_path / "a.parquet")
    rows(tmp_path / "b.jsonl", [{"text": "b"}] * count)

    records, tally = read(tmp_path, chatml)

    assert outcome(records, chatml) == [("a", "a"), ("b", "b")][: 2 * count]
    assert [file.rows for file in tally.files.values()] == [count, count]


# ------------------------------------------------------------------ selection


def test_selection_is_a_function_of_input_and_seed(tmp_path: Path, chatml: PromptTokenizer) -> None:
    paths = [
        rows(tmp_path / f"{name}.jsonl", [{"id": f"{name}{n}", "text": f"{n}", "n": n % 3} for n in range(400)])
        for name in ("a", "b")
    ]

    def ids(**options: Any) -> list[str | None]:
        return [r.prompt_id for r in read(paths, chatml, **options)[0]]

    order = ids(shuffle_seed=7)
    assert sorted(map(str, order)) == sorted(map(str, ids()))
    assert order != ids()
    assert order == ids(shuffle_seed=7)
    assert order != ids(shuffle_seed=8)
    # A limit takes the beginning of that order, over all files.
    some = ids(shuffle_seed=7, limit=100)
    assert some == order[:100]
    assert 30 < sum(str(i).startswith("a") for i in some) < 70
    assert ids(where={"n": [1, 2]}, limit=3) == ["a1", "a2", "a4"]
    assert len(ids(where={"n": 0}, shuffle_seed=7)) == 2 * 134


def test_rows_that_cannot_be_read_pass_every_filter_and_shuffle(tmp_path: Path, chatml: PromptTokenizer) -> None:
    path = rows(tmp_path / "a.jsonl", [{"id": "a", "text": "a", "s": "x"}, "{cut", {"id": "b", "text": "b"}])

    records, tally = read(path, chatml, where={"s": "x"}, shuffle_seed=1)

    assert sorted(r.prompt_id or "" for r in records) == ["", "a"]
    assert tally.total().filtered == 1


def test_a_shuffle_without_room_on_the_disk_says_so(
    tmp_path: Path, chatml: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hsray.errors import HsrayError
    from hsray.prompts import selection

    class Full:
        def dump(self, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        HIGHEST_PROTOCOL = 5

    monkeypatch.setattr(selection, "pickle", Full())
    path = rows(tmp_path / "a.jsonl", [{"text": "a"}])

    with pytest.raises(HsrayError, match=r"prompts\.shuffle_seed: cannot write to .*No space left"):
        read(path, chatml, shuffle_seed=1)

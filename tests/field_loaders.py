"""Loaders of tools that are on no package index, written from what their own loaders read (field by field).

Each checks what the tool's loader checks and gives the fields that its trainer takes, in the order in which the tool
would see the prompts.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load_modelopt(folder: Path) -> list[dict[str, Any]]:
    """Model-Optimizer a2fbac7, `OfflineSupervisedDataset`: every .pt, weights_only, keys by index."""
    items = []
    for path in sorted(folder.rglob("*.pt")):
        content = torch.load(path, weights_only=True)
        labels = torch.full_like(content["input_ids"], -100)
        labels[..., :-1] = content["input_ids"][..., 1:]
        items.append(
            {
                "input_ids": content["input_ids"],
                "base_model_hidden_states": content["hidden_states"],
                "aux_hidden_states": content["aux_hidden_states"],
                "loss_mask": content["loss_mask"].to(content["input_ids"].dtype),
                "labels": labels,
                "base_hidden_prenorm": bool(content.get("hidden_states_prenorm", False)),
                "conversation_id": content["conversation_id"],
            }
        )
    return items


def load_angelslim(folder: Path) -> list[dict[str, Any]]:
    """AngelSlim 67394ce, `OfflineEagle3Dataset`: every .ckpt, sorted; four tensors with a batch dimension."""
    items = []
    for path in sorted(folder.rglob("*.ckpt")):
        content = torch.load(path, map_location="cpu")
        for key in ("input_ids", "target_hiddens", "hidden_states", "loss_mask"):
            assert isinstance(content[key], torch.Tensor), key
            assert content[key].shape[0] == 1, key
        content["attention_mask"] = torch.ones_like(content["input_ids"])
        items.append(content)
    return items


def load_deepspec(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """DeepSpec afdfa7c, `CacheDataset` with its manifest checks."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert (manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"]) == ("bfloat16", "int32", "uint8")
    assert manifest["index_record_size"] == struct.calcsize("<QIIQQQQQ") == 56
    layers = manifest["target_layer_ids"]
    assert layers
    assert layers == sorted(layers)
    assert manifest["num_shards"] == len(manifest["shards"])
    assert [shard["shard_id"] for shard in manifest["shards"]] == list(range(manifest["num_shards"]))
    shards = [(folder / shard["file_name"]).read_bytes() for shard in manifest["shards"]]
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == manifest["num_samples"] * 56
    hidden, items, ends = manifest["hidden_size"], [], [0] * len(shards)
    for number, record in enumerate(struct.iter_unpack("<QIIQQQQQ", index)):
        sample_id, shard_id, length, *offsets = record
        assert sample_id == number
        widths = {
            "input_ids": (4, np.int32, ()),
            "attention_mask": (1, np.uint8, ()),
            "loss_mask": (1, np.uint8, ()),
            "target_hidden_states": (2 * len(layers) * hidden, np.uint16, (len(layers) * hidden,)),
            "target_last_hidden_states": (2 * hidden, np.uint16, (hidden,)),
        }
        item = {}
        for (name, (nbytes, dtype, shape)), offset in zip(widths.items(), offsets, strict=True):
            assert offset + nbytes * length <= len(shards[shard_id])
            data = np.frombuffer(shards[shard_id], dtype, nbytes * length // np.dtype(dtype).itemsize, offset).copy()
            tensor = torch.from_numpy(data.reshape(length, *shape))
            item[name] = tensor.view(torch.bfloat16) if dtype is np.uint16 else tensor
            ends[shard_id] = max(ends[shard_id], offset + nbytes * length)
        items.append(item)
    assert ends == [len(shard) for shard in shards]
    return manifest, items

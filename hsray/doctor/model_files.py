"""Is a model directory whole? Downloads that broke off leave short files, pointers and lists of what is missing."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from hsray.checkpoint import model_fingerprint
from hsray.doctor.facts import ModelFiles

_POINTER = b"version https://git-lfs"
_SHOWN = 5
_ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def examine_model(path: str) -> ModelFiles:
    """Compare the index with the files, and each file's size with its own header. Reads no weights."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        return ModelFiles(path, error=f"cannot read {folder / 'config.json'}: {reason}")
    files = sorted(folder.glob("*.safetensors"))
    problems: list[str] = []
    tensors: dict[str, str] = {}
    nbytes, elements = 0, Counter[str]()
    for file in files:
        header, problem = _read_header(file)
        if problem:
            problems.append(f"{file.name} {problem}")
            continue
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = file.name
                count = math.prod(entry["shape"])
                elements[str(entry["dtype"])] += count
                nbytes += count * _ITEMSIZE.get(str(entry["dtype"]), 1)
    problems = _against_index(folder, tensors, {file.name for file in files}) + problems
    problems += [f"{file.name} is an unfinished download" for file in sorted(folder.glob("*.incomplete"))]
    if not files and not problems:
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        problems.append("no *.safetensors files" + (", only weights in another format" if others else ""))
    return ModelFiles(
        path=path,
        files=len(files),
        weight_bytes=nbytes,
        elements=dict(elements),
        problems=_shorten(problems),
        digest="" if problems else _digest(folder),
        quantized=_is_quantized(config),
    )


def _read_header(file: Path) -> tuple[dict[str, Any], str]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
            if start == _POINTER:
                return {}, "is a git-lfs pointer, not the file"
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > size - 8:
                return {}, f"is cut off: {size:,} bytes"
            stream.seek(8)
            header: dict[str, Any] = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        return {}, f"cannot be read: {err}"
    wanted = 8 + length + end
    if size != wanted:
        return {}, f"is {'cut off' if size < wanted else 'too long'}: {size:,} of {wanted:,} bytes"
    return header, ""


def _against_index(folder: Path, tensors: dict[str, str], present: set[str]) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        return [f"{index.name} cannot be read: {err}"]
    missing = sorted(set(weight_map.values()) - present)
    problems = [f"{name} is missing" for name in missing]
    absent = [name for name, file in weight_map.items() if file in present and name not in tensors]
    # Tensors of files that are cut off are reported with the file.
    readable = set(tensors.values())
    absent = [name for name in absent if weight_map[name] in readable]
    if absent:
        problems.append(f"{len(absent)} tensors of the index are in no file, first {absent[0]}")
    return problems


def _digest(folder: Path) -> str:
    parts = sorted(model_fingerprint(folder).items())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _is_quantized(config: Any) -> bool:
    nested = config.get("text_config") if isinstance(config, dict) else None
    return any(isinstance(part, dict) and part.get("quantization_config") for part in (config, nested))


def _shorten(problems: list[str]) -> tuple[str, ...]:
    if len(problems) <= _SHOWN:
        return tuple(problems)
    return (*problems[:_SHOWN], f"and {len(problems) - _SHOWN} more")

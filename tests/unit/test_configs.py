"""Every file under configs/ is for a real model: what its header says is computed, and it would start."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsray.capture.tested import untested
from hsray.config import load_config
from hsray.engine import EngineSpec, check_arguments, engine_arguments
from hsray.errors import ConfigError
from tests.sizing import (
    GPU_GB,
    GPU_MIB,
    GPUS_PER_NODE,
    MODEL_CONFIGS,
    PLACEHOLDERS,
    ROOT,
    STATIC_FRACTION,
    Sizes,
    count_parameters,
    document_lines,
    load_sizes,
)

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "quickstart")
# Parameters as the models' authors publish them, in billions; Kimi's in GB of its checkpoint.
PUBLISHED_PARAMETERS = {
    "DeepSeek-V3": 671.0,
    "Qwen3-8B": 8.19,
    "Qwen3-235B-A22B": 235.1,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.1-70B-Instruct": 70.55,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
}
PUBLISHED_GB = {"Kimi-K2.5": 595}


@pytest.fixture(params=CONFIGS)
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return load_sizes(request.param)


def text_of(name: str) -> str:
    return (ROOT / "configs" / f"{name}.yaml").read_text()


def test_every_configuration_is_looked_at() -> None:
    assert set(CONFIGS) == set(GPU_GB)
    assert {path.stem for path in MODEL_CONFIGS.glob("*.json")} == PUBLISHED_PARAMETERS.keys() | PUBLISHED_GB.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_placeholders_are_refused_by_their_keys_until_they_are_filled_in(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"

    with pytest.raises(ConfigError) as refused:
        load_config(path)
    with pytest.raises(
        ConfigError, match=r"still to be filled in: output\.url \('.*<your-bucket>.*as output\.url=\.\.\."
    ):
        load_config(path, PLACEHOLDERS[:1])

    assert "prompts.path ('" in str(refused.value)
    assert "output.url ('" in str(refused.value)
    assert load_config(path, PLACEHOLDERS).output.url == "s3://bucket/run"


def test_the_header_has_the_figures_of_the_model(sizes: Sizes) -> None:
    header = text_of(sizes.name).partition("\nmodel:")[0]
    print(f"{sizes.name}: {sizes.bytes_per_token:,} bytes per token")

    missing = [line for line in sizes.header() if f"# {line}\n" not in header]

    assert not missing, f"python -m tests.sizing prints them: {missing}"
    assert f"python -m hsray.extract configs/{sizes.name}.yaml --print-submit" in header


def test_sites_named_in_comments_are_the_resolved_ones(sizes: Sizes) -> None:
    named = set(re.findall(r"resid_pre_\d+", text_of(sizes.name)))

    assert named == {site.name for site in sizes.sites if not site.is_final}
    assert sizes.sites[-1].name == "final_prenorm"


def test_heads_and_experts_divide_over_the_gpus_of_a_replica(sizes: Sizes) -> None:
    text, tp = sizes.model.get("text_config", sizes.model), sizes.tp_size
    kv_heads = text["num_key_value_heads"]

    assert text["num_attention_heads"] % tp == 0
    assert kv_heads % tp == 0 or tp % kv_heads == 0
    assert text.get("moe_intermediate_size", text["intermediate_size"]) % tp == 0
    assert GPUS_PER_NODE % tp == 0


def test_weights_cache_and_staging_fit_the_gpu(sizes: Sizes) -> None:
    fraction = sizes.config.engine.args.get("mem_fraction_static", STATIC_FRACTION)
    # What every GPU holds whole: MLA's down projections, routers, norms, a vision tower.
    whole = 0.03 * sizes.parameters.nbytes / sizes.tp_size

    assert sizes.gpu_bytes + whole < fraction * GPU_MIB[GPU_GB[sizes.name]] * 2**20
    assert sizes.kv_tokens >= max(sizes.longest_prompt, 2 * sizes.chunk)


def test_a_longest_prompt_fits_the_arena_twice(sizes: Sizes) -> None:
    assert 2 * sizes.longest_prompt * sizes.bytes_per_token <= sizes.arena_bytes


def test_model_classes_are_tested_or_say_that_they_are_not(sizes: Sizes) -> None:
    problem = untested("0.5.21", sizes.facts.architecture)

    assert sizes.config.engine.allow_untested == (problem is not None)
    if problem is not None:
        assert "Not tested here: this model class" in text_of(sizes.name)


def sglang_names(file: str, variable: str) -> list[str]:
    """A list of names in a file of the installed SGLang (0.5.21's layout), read without importing all of it."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    source = Path(str(package.origin)).parent / "srt" / "arg_groups" / file
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == variable:
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{source} has no {variable}")


def test_engine_arguments_exist_and_are_the_users_to_set(sizes: Sizes) -> None:
    known = sglang_names("field_order.py", "POSITIONAL_FIELD_ORDER")
    args = sizes.config.engine.args
    check_arguments(args)

    final = engine_arguments(EngineSpec(sizes.config.model.path, args=args), known)

    assert set(final) <= set(known)
    assert args.items() <= final.items()
    backend = args.get("attention_backend")
    assert backend is None or backend in sglang_names("choices.py", "ATTENTION_BACKEND_CHOICES")


@pytest.mark.parametrize("model", sorted(PUBLISHED_PARAMETERS.keys() | PUBLISHED_GB.keys()))
def test_counted_weights_are_the_published_ones(model: str) -> None:
    counted = count_parameters(json.loads((MODEL_CONFIGS / f"{model}.json").read_text()))

    if model in PUBLISHED_GB:
        assert counted.nbytes / 1e9 == pytest.approx(PUBLISHED_GB[model], rel=0.003)
    else:
        assert counted.count / 1e9 == pytest.approx(PUBLISHED_PARAMETERS[model], rel=0.003)


def test_figures_of_the_sizing_page_are_computed() -> None:
    page = " ".join((ROOT / "docs" / "sizing.md").read_text().split())

    missing = [line for line in document_lines() if " ".join(line.split()) not in page]

    assert not missing, f"python -m tests.sizing prints them: {missing}"


def test_no_line_of_a_configuration_is_too_long_to_read() -> None:
    files = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "clusters").rglob("*.*"), *(ROOT / "scripts").glob("start_*")]
    long = [
        f"{path.name}:{n}"
        for path in files
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]

    assert not long


def test_yaml_of_configurations_has_no_key_twice() -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for path in (ROOT / "configs").glob("*.yaml"):
        yaml.load(path.read_text(), Strict)

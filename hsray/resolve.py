"""What a configuration means on this machine and for this model: absolute names, the longest prompt."""

from pathlib import Path

from hsray.checkpoint import ModelFacts
from hsray.config import Config
from hsray.errors import ConfigError
from hsray.quickstart import BUILTIN_PREFIX, resolve_builtin

# SGLang refuses prompts this close to its context length (one generated token and a reserve of its own).
ENGINE_RESERVED_TOKENS = 7


def resolve_names(config: Config) -> Config:
    """Built-in names and relative paths become absolute: replicas have another working directory.

    Raises:
        ConfigError: no such built-in.
    """

    def local(path: str) -> str:
        if path.startswith(BUILTIN_PREFIX):
            return resolve_builtin(path)
        return str(Path(path).expanduser().absolute()) if "://" not in path else path

    model = config.model.model_copy(
        update={
            "path": local(config.model.path),
            "tokenizer_path": local(config.model.tokenizer_path) if config.model.tokenizer_path else None,
        }
    )
    prompts = config.prompts.model_copy(update={"path": [local(path) for path in config.prompts.paths]})
    output = config.output.model_copy(update={"url": local(config.output.url)})
    return config.model_copy(update={"model": model, "prompts": prompts, "output": output})


def replicas_per_node(config: Config) -> int:
    """How many replicas may share a node's memory: those of eight GPUs, or on a CPU all there are, and never more than
    the run has."""
    wanted = config.cluster.replicas if isinstance(config.cluster.replicas, int) else None
    if config.engine.is_cpu:
        return wanted or 1
    return max(1, min(8 // config.engine.tp_size, wanted or 8))


def longest_prompt(config: Config, facts: ModelFacts) -> int:
    """Longest prompt that will be accepted, in tokens.

    Raises:
        ConfigError: `prompts.max_tokens` is more than the engine takes.
    """
    context = int(config.engine.args.get("context_length") or facts.context_length)
    pool = int(config.engine.args.get("max_total_tokens") or context)
    limit = min(context, pool) - ENGINE_RESERVED_TOKENS
    wanted = config.prompts.max_tokens
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"prompts.max_tokens: {wanted} is more than the engine takes ({limit}: context length {context}, "
            f"KV pool {pool}, less {ENGINE_RESERVED_TOKENS}). Lower it, or set engine.args.context_length or "
            "max_total_tokens"
        )
    return wanted or limit

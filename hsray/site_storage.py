"""How each site is stored: in which encoding, and which of a prompt's tokens. Names only; the work is in
`codecs` and `token_selection`.

In a configuration, `capture.codec` and `capture.tokens` say it for all sites or by site; in `hsray.json` and in the
metadata of a shard, each site says it of itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hsray.errors import ConfigError, HsrayError
from hsray.sites import Site, resolve_sites

CodecName = Literal["none", "bf16-hl-zstd", "fp8-token", "int8-block64-outlier4"]
TokenSelection = Literal["all", "loss", "through_last_loss"]

CODECS: tuple[CodecName, ...] = get_args(CodecName)
TOKEN_SELECTIONS: tuple[TokenSelection, ...] = get_args(TokenSelection)
# The key of a mapping that speaks for the sites that it does not name.
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SiteStorage:
    """How one site is stored.

    Attributes:
        codec: a name of `CODECS`; `none` is the plain tensor.
        tokens: which positions have a state (`token_selection.select_positions`).
    """

    codec: CodecName = "none"
    tokens: TokenSelection = "all"


PLAIN = SiteStorage()
Storage = Mapping[str, SiteStorage]


def storage_of(storage: Storage | None, site: str) -> SiteStorage:
    """How `site` is stored; plain where nothing is said."""
    return PLAIN if storage is None else storage.get(site, PLAIN)


def resolve_storage(
    codec: Mapping[str, CodecName], tokens: Mapping[str, TokenSelection], sites: Sequence[Site], num_layers: int
) -> dict[str, SiteStorage]:
    """What `capture.codec` and `capture.tokens` mean for the sites of a run, in their order.

    Raises:
        ConfigError: a key is no site of the run.
    """
    codecs = _by_site(codec, "none", sites, num_layers, "capture.codec")
    selections = _by_site(tokens, "all", sites, num_layers, "capture.tokens")
    return {site.name: SiteStorage(codecs[site.name], selections[site.name]) for site in sites}


def recorded_storage(sites: Sequence[Mapping[str, Any]], where: str) -> dict[str, SiteStorage]:
    """How the sites of `hsray.json` are stored.

    Raises:
        HsrayError: in a way that this version does not know; `where` names the run.
    """
    storage = {}
    for site in sites:
        codec, tokens = site.get("codec", "none"), site.get("tokens", "all")
        if codec not in CODECS or tokens not in TOKEN_SELECTIONS:
            raise HsrayError(
                f"{where}: {site['name']} is stored with codec {codec!r} and tokens {tokens!r}; this hsray reads "
                f"{', '.join(CODECS)} and {', '.join(TOKEN_SELECTIONS)}. Use the hsray that wrote it, or a later one"
            )
        storage[site["name"]] = SiteStorage(codec, tokens)
    return storage


def stored_selections(storage: Storage | None) -> tuple[TokenSelection, ...]:
    """The selections other than `all` that some site has, in a fixed order. Each has a column of positions."""
    used = {entry.tokens for entry in (storage or {}).values()}
    return tuple(name for name in TOKEN_SELECTIONS if name != "all" and name in used)


def positions_column(selection: TokenSelection) -> str:
    """The column that holds the positions of a selection, in a shard and (its extent) in the index."""
    return f"positions_{selection}"


def summarize_codecs(storage: Storage | None) -> str:
    """`hsray.codec`: the codec of all sites, or `by-site` where they differ."""
    return _summary({site: entry.codec for site, entry in (storage or {}).items()}, "none") or "by-site"


def describe_storage(storage: Storage) -> list[str]:
    """A line for each site that is not stored plainly and whole."""
    return [
        f"{site} is stored as {entry.codec}, tokens {entry.tokens}" for site, entry in storage.items() if entry != PLAIN
    ]


def fingerprint_parts(storage: Storage) -> dict[str, str]:
    """What of it belongs into the fingerprint of a run. A plain run has the parts it always had."""
    codecs = {site: entry.codec for site, entry in storage.items()}
    selections = {site: entry.tokens for site, entry in storage.items()}
    parts = {"capture.codec": _summary(codecs, "none") or _spelled(codecs)}
    if set(selections.values()) != {"all"}:
        parts["capture.tokens"] = _summary(selections, "all") or _spelled(selections)
    return parts


def _summary(values: Mapping[str, str], empty: str) -> str | None:
    distinct = set(values.values()) or {empty}
    return distinct.pop() if len(distinct) == 1 else None


def _spelled(values: Mapping[str, str]) -> str:
    return ",".join(f"{site}:{value}" for site, value in values.items())


def _by_site(
    given: Mapping[str, Any], default: str, sites: Sequence[Site], num_layers: int, key: str
) -> dict[str, Any]:
    values = {site.name: given.get(DEFAULT, default) for site in sites}
    for name, value in given.items():
        if name == DEFAULT:
            continue
        # By any spelling that capture.sites takes.
        for site in resolve_sites([name], num_layers, key=f"{key}.{name}"):
            if site.name not in values:
                raise ConfigError(
                    f"{key}.{name}: not a site of this run, which has {', '.join(values)}. Name one of these, or "
                    f"{DEFAULT} for those that are not named"
                )
            values[site.name] = value
    return values

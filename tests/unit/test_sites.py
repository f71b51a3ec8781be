import pytest

from hsray.errors import ConfigError
from hsray.sites import describe_sites, resolve_sites


def names(spec: str | list[str], layers: int, **options: str) -> list[str]:
    return [site.name for site in resolve_sites(spec, layers, **options)]  # type: ignore[arg-type]


def test_eagle3_is_the_engines_default_for_a_61_layer_model() -> None:
    assert names("eagle3", 61) == ["resid_pre_2", "resid_pre_30", "resid_pre_58", "final_prenorm"]


def test_layer_outputs_2_30_58_are_the_streams_entering_3_31_59() -> None:
    sites = resolve_sites("eagle3:layer_outputs=2,30,58", 61)

    assert [s.name for s in sites] == ["resid_pre_3", "resid_pre_31", "resid_pre_59", "final_prenorm"]
    assert [s.huggingface for s in sites[:3]] == ["hidden_states[3]", "hidden_states[31]", "hidden_states[59]"]


def test_resid_post_is_the_same_tensor_as_the_next_resid_pre() -> None:
    assert names(["resid_post_2"], 8) == names(["resid_pre_3"], 8) == ["resid_pre_3"]


def test_presets_take_the_final_site_they_are_told() -> None:
    assert names("eagle3", 8, final="postnorm")[-1] == "final_postnorm"


def test_dflash_spreads_five_layer_outputs_evenly() -> None:
    # z-lab/dflash build_target_layer_ids(36, 5) = [1, 9, 17, 25, 33], each an output.
    assert names("dflash", 36) == [f"resid_pre_{i}" for i in (2, 10, 18, 26, 34)] + ["final_prenorm"]


def test_all_means_every_residual_and_the_final_state() -> None:
    assert names("all", 4) == ["resid_pre_1", "resid_pre_2", "resid_pre_3", "final_prenorm"]


def test_sites_come_in_the_order_of_the_forward_pass() -> None:
    assert names(["final_postnorm", "resid_pre_10", "final_prenorm", "resid_pre_9"], 12) == [
        "resid_pre_9",
        "resid_pre_10",
        "final_prenorm",
        "final_postnorm",
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (["resid_pre_0"], "token embedding"),
        (["resid_pre_8"], "final_prenorm"),
        (["resid_post_7"], "final_prenorm"),
        (["resid_pre_9"], "resid_pre_1 .. resid_pre_7"),
        (["layer_3"], "unknown site"),
        ([], "no sites"),
        (["resid_pre_3", "resid_post_2"], "second time"),
        ("eagle3:layers=3", "no option"),
        ("eagle3:layer_outputs=2,9", "out of range"),
        ("dflash:layers=7", "does not fit"),
    ],
)
def test_wrong_sites_are_refused_with_the_reason(spec: str | list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        resolve_sites(spec, 8)

    assert "capture.sites" in str(refused.value)


def test_eagle3_needs_six_layers() -> None:
    with pytest.raises(ConfigError, match="at least 6 layers"):
        resolve_sites("eagle3", 5)


def test_the_table_says_what_each_site_is() -> None:
    table = describe_sites(resolve_sites("eagle3", 61))

    assert "resid_pre_30" in table
    assert "hidden_states[30]" in table
    assert "residual stream entering layer 30 = output of layer 29" in table

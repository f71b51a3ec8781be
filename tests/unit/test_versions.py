"""Finding and switching on the capture in models shaped like SGLang's. No SGLang here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsray.capture import versions
from hsray.capture.tested import TESTED_MODELS, TESTED_VERSIONS
from hsray.capture.versions import UnsupportedModel


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.norm = torch.nn.LayerNorm(4)


class MoeBody(torch.nn.Module):
    """Qwen MoE keeps its flags behind a setter."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[int] = []
        self.norm = torch.nn.LayerNorm(4)

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.flags = layers


class CausalLM(torch.nn.Module):
    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.model = body
        self.capture_aux_hidden_states = False
        self.logits_processor = torch.nn.Identity()
        self.config = SimpleNamespace(num_hidden_layers=6, hidden_size=4)


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.vision = torch.nn.Identity()
        self.language_model = inner


def test_the_owner_is_found_inside_a_multimodal_wrapper() -> None:
    inner = CausalLM(Body())

    assert versions.find_capture_owner(inner) is inner
    assert versions.find_capture_owner(Wrapper(inner)) is inner


def test_a_model_without_capture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="Wrapper has no aux"):
        versions.find_capture_owner(Wrapper(torch.nn.Identity()))


@pytest.mark.parametrize("body", [Body(), MoeBody()], ids=["list", "setter"])
def test_indices_reach_the_body_and_the_flag_the_owner(body: Any) -> None:
    owner = CausalLM(body)

    versions.enable_aux_capture(owner, [2, 5])

    assert owner.capture_aux_hidden_states is True
    assert (body.flags if isinstance(body, MoeBody) else body.layers_to_capture) == [2, 5]


@pytest.mark.parametrize("indices", [[0, 2], [2, 6], [3, 2], [2, 2]])
def test_indices_that_sglang_would_drop_or_die_of_are_refused(indices: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"1 \.\. 5"):
        versions.enable_aux_capture(CausalLM(Body()), indices)


def test_a_body_without_the_switch_is_refused_by_name() -> None:
    body = torch.nn.Identity()

    with pytest.raises(UnsupportedModel, match="Identity has neither"):
        versions.enable_aux_capture(CausalLM(body), [2])
    with pytest.raises(UnsupportedModel, match="no module named norm"):
        versions.final_norm(CausalLM(body))


def test_packed_and_listed_states_unpack_to_the_same_rows() -> None:
    states = [torch.randn(7, 4) for _ in range(3)]

    packed = versions.unpack_aux(torch.cat(states, dim=-1), 3, 4)
    listed = versions.unpack_aux(states, 3, 4)

    for a, b, want in zip(packed, listed, states, strict=True):
        assert torch.equal(a, want)
        assert torch.equal(b, want)
        assert a.is_contiguous()


@pytest.mark.parametrize("aux", [torch.zeros(7, 8), [torch.zeros(7, 4)]], ids=["packed", "list"])
def test_a_wrong_number_of_states_is_refused(aux: Any) -> None:
    with pytest.raises(UnsupportedModel):
        versions.unpack_aux(aux, 3, 4)


def test_what_was_not_tested_is_named_unless_allowed() -> None:
    with pytest.raises(UnsupportedModel, match=r"SGLang 9\.9 .*model class Other .*engine\.allow_untested"):
        versions.check_tested("9.9", "Other", allow_untested=False)

    assert versions.check_tested("9.9", "Other", allow_untested=True) is False
    assert versions.check_tested(TESTED_VERSIONS[0], TESTED_MODELS[0], allow_untested=False) is True

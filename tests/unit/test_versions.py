"""Finding and switching on the capture in models shaped like SGLang's. No SGLang here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsray.capture import tested, versions
from hsray.capture.tested import TESTED, WRONG, untested
from hsray.capture.versions import UnsupportedModel


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.norm = torch.nn.LayerNorm(4)

    def captured(self) -> list[int]:
        return self.layers_to_capture


class Norm(torch.nn.Module):
    """Returns what it is told, or its input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.output is None else self.output


class MoeBody(torch.nn.Module):
    """Qwen MoE keeps its flags behind a setter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(6)])
        self.norm = torch.nn.LayerNorm(4)

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        for layer in layers:
            self.layers[layer]._is_layer_to_capture = True

    def captured(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if getattr(layer, "_is_layer_to_capture", False)]


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
def test_layers_are_switched_on_and_off_again(body: Any) -> None:
    owner = CausalLM(body)

    versions.set_aux_capture(owner, [2, 5])
    assert body.captured() == [2, 5]
    versions.set_aux_capture(owner, [3])
    assert body.captured() == [3]
    versions.set_aux_capture(owner, [])
    assert body.captured() == []


@pytest.mark.parametrize("indices", [[0, 2], [2, 6], [3, 2], [2, 2]])
def test_indices_that_sglang_would_drop_or_die_of_are_refused(indices: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"1 \.\. 5"):
        versions.set_aux_capture(CausalLM(Body()), indices)


def test_a_body_without_the_switch_is_refused_by_name() -> None:
    body = torch.nn.Identity()

    with pytest.raises(UnsupportedModel, match="Identity has neither"):
        versions.set_aux_capture(CausalLM(body), [2])
    with pytest.raises(UnsupportedModel, match="no module named norm"):
        versions.final_norm(CausalLM(body))


def run(owner: Any, output: Any, norm_output: Any = None) -> Any:
    """One pass through a body that returns `output` and calls its norm on the way."""
    body = owner.model
    body.norm = Norm(norm_output)
    body.forward = lambda x: (body.norm(x), output)[1]
    versions.deliver_states(owner, 4)
    return body(torch.ones(7, 4))


@pytest.mark.parametrize("rows", [7, 0], ids=["rows", "an idle data-parallel rank"])
@pytest.mark.parametrize("packed", [True, False])
def test_aux_states_come_one_by_one_and_the_stream_before_the_norm_last(packed: bool, rows: int) -> None:
    states = [torch.randn(rows, 4) for _ in range(3)]
    post, residual = torch.randn(rows, 4), torch.randn(rows, 4)
    owner = CausalLM(Body())

    postnorm, delivered = run(owner, (post, torch.cat(states, dim=-1) if packed else states), (post, residual))

    assert owner.capture_aux_hidden_states is True
    assert postnorm is post
    assert type(delivered) is list  # what a recorded graph can hold
    for got, want in zip(delivered, [*states, residual], strict=True):
        assert torch.equal(got, want)


def test_without_aux_layers_the_stream_before_the_norm_still_comes() -> None:
    post = torch.randn(7, 4)

    _, (prenorm,) = run(CausalLM(Body()), post, post)

    assert torch.equal(prenorm, torch.ones(7, 4))  # a plain norm's input


def test_a_body_that_calls_no_norm_module_delivers_not_a_number() -> None:
    post = torch.randn(7, 4)
    owner = CausalLM(Body())
    owner.model.forward = lambda x: post
    versions.deliver_states(owner, 4)

    _, (prenorm,) = owner.model(torch.ones(7, 4))

    assert prenorm.isnan().all()


def test_what_was_not_tested_is_named_unless_allowed() -> None:
    with pytest.raises(UnsupportedModel, match=r"SGLang 9\.9 .*model class Other .*engine\.allow_untested"):
        versions.check_tested("9.9", "Other", allow_untested=False)

    assert versions.check_tested("9.9", "Other", allow_untested=True) is False
    for version, classes in TESTED.items():
        for model_class in classes:
            assert versions.check_tested(version, model_class, allow_untested=False) is True


def test_a_class_tested_with_another_version_is_refused_and_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "TESTED", {"1.0": ("Old", "New"), "2.0": ("New",)})

    assert untested("2.0", "Old") == (
        "capture was not tested on model class Old with SGLang 2.0 (tested with: 1.0). "
        "Set engine.allow_untested: true to let the self-test decide"
    )
    assert untested("2.0", "New") is None
    assert untested(None, "Old") is None


def test_a_class_found_wrong_is_refused_with_the_reason() -> None:
    assert WRONG
    for model_class, reason in WRONG.items():
        assert reason in str(untested(None, model_class))
        assert not any(model_class in classes for classes in TESTED.values())

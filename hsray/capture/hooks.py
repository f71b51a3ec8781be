"""The hooks: which tensors of a forward pass belong to which prompt.

Four methods of SGLang are wrapped. `ModelRunner.load_model` switches the native EAGLE-3 capture on and says
hello; `ForwardBatch.init_new` notes the prompt ids the scheduler holds; `LogitsProcessor.forward` picks up aux
and final states, after SGLang has resolved every reduction and fusion; `ModelRunner.forward` maps rows to
prompts and hands them to the writer. Decoder layers are never hooked: what leaves them may be an unreduced
partial sum in a buffer about to be reused.
"""

import functools
import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hsray.capture import versions
from hsray.capture.settings import CaptureSettings
from hsray.capture.writer import Span, StateWriter
from hsray.channel import (
    LAYER_LAYOUT,
    RUN_LAYOUT,
    TEST_LAYOUT,
    CaptureFailed,
    ChannelClient,
    Hello,
    RequestId,
)
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM
from hsray.spool import name_gpu

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ForwardStates:
    """What one forward pass showed: filled by the inner hook, read by the outer one."""

    aux: Sequence[torch.Tensor] | None = None
    postnorm: torch.Tensor | None = None
    prenorm: torch.Tensor | None = None


class Capture:
    """The capture of one scheduler process: what it found in its model, and where the states go."""

    def __init__(self, settings: CaptureSettings, runner: Any) -> None:
        import sglang

        self.owner = versions.find_capture_owner(runner.model)
        model_class = type(runner.model).__name__
        tested = versions.check_tested(sglang.__version__, model_class, settings.allow_untested)
        config = self.owner.config
        self.hidden_size = int(getattr(config, "text_config", config).hidden_size)
        aux = [site for site in settings.sites if site not in (FINAL_PRENORM, FINAL_POSTNORM)]
        # The self-test always looks at both final states, whatever the run keeps.
        self.layouts = {
            RUN_LAYOUT: settings.sites,
            TEST_LAYOUT: (*aux, FINAL_PRENORM, FINAL_POSTNORM),
            LAYER_LAYOUT: settings.layer_sites,
        }
        self.run_indices = _indices(settings.sites)
        self.indices: list[int] = []
        versions.deliver_states(self.owner, self.hidden_size)
        self._switch(self.run_indices)
        self.forward: ForwardStates | None = None
        self.prompt_crc32: dict[str, int] = {}
        self.is_leader = versions.is_capture_leader()
        if torch.device(runner.device).type == "cuda":
            name_gpu(settings.arena_path, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        if not self.is_leader:
            return
        dp_rank = int(getattr(runner, "dp_rank", 0) or 0)
        channel = ChannelClient(settings.channel)
        self.writer = StateWriter(
            settings,
            self.layouts,
            self.hidden_size,
            torch.device(runner.device),
            channel,
            step_rows=versions.step_rows(runner.server_args),
            dp_rank=dp_rank,
        )
        channel.send(
            Hello(
                pid=os.getpid(),
                rank=int(getattr(runner, "tp_rank", 0) or 0),
                dp_rank=dp_rank,
                sglang_version=sglang.__version__,
                model_class=model_class,
                sites=settings.sites,
                test_sites=self.layouts[TEST_LAYOUT],
                hidden_size=self.hidden_size,
                engine_dtype=str(runner.dtype).removeprefix("torch."),
                stored_dtype=settings.stored_dtype,
                num_layers=versions.num_layers(self.owner),
                tested=tested,
            )
        )

    def select_layers(self, forward_batch: Any) -> None:
        """Switch on the layers that the requests of this batch ask for. Called on every rank, before the forward."""
        requests = [request for rid in forward_batch.rids if (request := RequestId.parse(rid)) is not None]
        wanted = set(self.run_indices)
        for layout in {request.layout for request in requests}:
            wanted.update(_indices(self.layouts[layout]))
        self._switch(sorted(wanted))
        if self.indices != self.run_indices:
            versions.run_eagerly(forward_batch)

    def _switch(self, indices: list[int]) -> None:
        if indices != self.indices:
            versions.set_aux_capture(self.owner, indices)
            self.indices = indices

    def spans(self, forward_batch: Any) -> list[Span]:
        """The rows of this extend step that are ours, with their place in it.

        Must be read before the forward: data-parallel attention pads the batch in place.
        """
        spans, first_row = [], 0
        for rid, start, count in zip(
            forward_batch.rids,
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        ):
            request = RequestId.parse(rid)
            if request is not None:
                # Mixed and overlapped steps may run past the end of a prompt.
                inside = max(0, min(int(count), request.num_tokens - int(start)))
                if inside:
                    spans.append(Span(rid, request, first_row, int(start), inside, self.prompt_crc32.get(rid, 0)))
            first_row += int(count)
        return spans

    def note_prompts(self, requests: Any) -> None:
        for request in requests:
            if request.rid not in self.prompt_crc32 and RequestId.parse(request.rid) is not None:
                ids = np.asarray(request.origin_input_ids, dtype="<i4")
                self.prompt_crc32[request.rid] = zlib.crc32(ids.tobytes())

    def store(self, spans: list[Span], states: ForwardStates) -> None:
        """Hand the states to the writer; they may lie in buffers that the next step overwrites."""
        if states.aux is None or states.postnorm is None:
            raise RuntimeError("the forward pass did not reach the model's LogitsProcessor")
        *aux, prenorm = states.aux
        if len(aux) != len(self.indices):
            raise RuntimeError(f"the model handed on {len(aux)} aux states, {len(self.indices)} were asked for")
        by_site = dict(zip((f"resid_pre_{i}" for i in self.indices), aux, strict=True))
        by_site[FINAL_PRENORM] = prenorm if states.prenorm is None else states.prenorm
        by_site[FINAL_POSTNORM] = states.postnorm
        self.writer.put(spans, by_site)
        for span in spans:
            if span.start + span.count >= span.request.num_tokens:
                self.prompt_crc32.pop(span.rid, None)


def _indices(sites: Sequence[str]) -> list[int]:
    return [int(site.removeprefix("resid_pre_")) for site in sites if site.startswith("resid_pre_")]


def install(settings: CaptureSettings) -> None:
    """Wrap SGLang's methods in this process. Raises AttributeError or ImportError where one is missing."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from hsray.capture.cpu import prepare_cpu_engine

        prepare_cpu_engine()

    captures: list[Capture] = []  # one per scheduler process, once its model is loaded

    load_model = ModelRunner.load_model
    run_forward = ModelRunner.forward
    logits_forward = LogitsProcessor.forward
    init_new = ForwardBatch.init_new.__func__

    @functools.wraps(load_model)
    def load_model_and_enable(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        if not getattr(self, "is_draft_worker", False):
            try:
                self.hsray_capture = Capture(settings, self)
            except Exception as err:
                ChannelClient(settings.channel).send(CaptureFailed(f"{type(err).__name__}: {err}"))
                raise
            captures[:] = [self.hsray_capture]
        return result

    @functools.wraps(init_new)
    def init_new_and_note(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if captures and captures[0].is_leader and batch.reqs:
            captures[0].note_prompts(batch.reqs)
        return init_new(cls, batch, *args, **kwargs)

    @functools.wraps(logits_forward)
    def logits_forward_and_keep(
        self: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        hidden_states_before_norm: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if captures and captures[0].forward is not None:
            seen = captures[0].forward
            seen.aux, seen.postnorm = aux_hidden_states, hidden_states
            seen.prenorm = hidden_states_before_norm
        return logits_forward(
            self,
            input_ids,
            hidden_states,
            lm_head,
            logits_metadata,
            None,  # speculation is refused: nobody but us has a use for aux states
            hidden_states_before_norm,
            *args,
            **kwargs,
        )

    @functools.wraps(run_forward)
    def run_forward_and_store(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        capture: Capture | None = getattr(self, "hsray_capture", None)
        if capture is None or not forward_batch.rids or not forward_batch.forward_mode.is_extend():
            return run_forward(self, forward_batch, *args, **kwargs)
        capture.select_layers(forward_batch)
        spans = capture.spans(forward_batch) if capture.is_leader else []
        if not spans:
            return run_forward(self, forward_batch, *args, **kwargs)
        capture.forward = states = ForwardStates()
        try:
            output = run_forward(self, forward_batch, *args, **kwargs)
        finally:
            capture.forward = None
        capture.store(spans, states)
        return output

    ModelRunner.load_model = load_model_and_enable
    ModelRunner.forward = run_forward_and_store
    LogitsProcessor.forward = logits_forward_and_keep
    ForwardBatch.init_new = classmethod(init_new_and_note)

"""An EAGLE-3 style drafter (arXiv 2503.01840): one decoder layer that reads the target's states and drafts ahead.

Step 0 reads, at position t, the fused low, mid and high states of token t and the embedding of token t+1. Each further
step k reads, in place of the states, what the step before made of position t (training-time test, section 3.2 of the
paper), and the embedding of token t+1+k. It attends to all step-0 positions up to t, and to its own earlier steps at t:
what a drafter has at hand when it drafts k tokens beyond what the target has verified.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of `[B, T, heads, dim]` at `positions` `[B, T]`."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, :, None, None] * frequencies
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)


class Drafter(nn.Module):
    """Args:
    embedding: the target's token embedding `[vocab, hidden]`, not trained.
    draft_vocab: ids of the tokens it can draft, int64 `[draft vocab]`.
    num_aux: how many states of the target are fused.
    heads: of the attention.
    """

    def __init__(self, embedding: Tensor, draft_vocab: Tensor, num_aux: int = 3, heads: int = 8) -> None:
        super().__init__()
        hidden = embedding.shape[1]
        self.heads = heads
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_vocab", draft_vocab)
        self.fuse = nn.Linear(num_aux * hidden, hidden, bias=False)
        self.embedding_norm = nn.RMSNorm(hidden)
        self.state_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, len(draft_vocab), bias=False)

    def forward(self, hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor, steps: int) -> list[Tensor]:
        """Logits `[B, T, draft vocab]` of each step, which predict token t+2+k.

        Args:
            hidden_states: `[B, T, num_aux * hidden]`, input_ids: int64 `[B, T]`, attention_mask: bool `[B, T]`, all
                as of `hsray.training.Eagle3Collate`.
        """
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        allowed = (causal & attention_mask[:, None, :])[:, None]
        places = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        state = self.fuse(hidden_states.float())
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            ids = F.pad(input_ids[:, step:], (0, step))
            embedded = self.embedding_norm(self.embedding[ids].float())
            q, k, v = self.qkv(torch.cat((embedded, self.state_norm(state)), -1)).chunk(3, -1)
            q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))
            q, k = rotate(q, places + step), rotate(k, places + step)
            keys.append(k)
            values.append(v)
            state = state + self.out(self._attend(q, keys, values, allowed))
            gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, -1)
            state = state + self.down(F.silu(gate) * up)
            logits.append(self.lm_head(self.final_norm(state)))
        return logits

    @staticmethod
    def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], allowed: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        verified = torch.einsum("bthd,bshd->bhts", q, keys[0]).masked_fill(~allowed, float("-inf"))
        # Of the steps after the first, only those of the same position.
        drafted = [torch.einsum("bthd,bthd->bht", q, k)[..., None] for k in keys[1:]]
        weights = (torch.cat((verified, *drafted), -1) * scale).softmax(-1)
        # A padded position at the start of which nothing is allowed cannot occur: padding is at the end.
        length = verified.shape[-1]
        mixed = torch.einsum("bhts,bshd->bthd", weights[..., :length], values[0])
        for number, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + number].transpose(1, 2)[..., None] * value
        return mixed.flatten(-2)

"""Feeding a run to a trainer: batches by token budget, from a laptop's disk or a bucket, on any number of ranks.

`Loader` is the short way: it yields collated batches and remembers where it is. `PromptStream` is the iterable
dataset in it, `TokenBatchSampler` orders `Run.torch_dataset` instead, and `pad_batch` and `Eagle3Collate` make
batches. docs/reading.md tells when to take which. Needs torch; never Ray or SGLang.
"""

from hsray.training.collate import pad_batch
from hsray.training.eagle3 import Eagle3Collate
from hsray.training.loader import Loader
from hsray.training.sampler import TokenBatchSampler
from hsray.training.stream import PromptStream

__all__ = ["Eagle3Collate", "Loader", "PromptStream", "TokenBatchSampler", "pad_batch"]

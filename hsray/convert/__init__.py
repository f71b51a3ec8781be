"""Other tools' hidden states as a run: `convert_files`, and `python -m hsray.convert FORMAT IN OUT`.

The result is an ordinary run: readers, verify and exports take it. What the files do not say (which layers, which
norm, which model, which tokens are to be learned) is asked for, never guessed. Each file is one input row; those that
cannot be converted are rejects with a reason, and committed and rejected add up to the files.
"""

from hsray.convert.job import convert_files
from hsray.convert.readers import FORMATS

__all__ = ["FORMATS", "convert_files"]

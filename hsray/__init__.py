"""hsray: verified hidden-state datasets from SGLang prefill, on object storage.

Importing the package loads nothing heavy: it is also imported inside SGLang's processes.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hsray")
except PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    __version__ = "0+source"


def __getattr__(name: str) -> object:
    # Lazy, so that `import hsray` stays free of pyarrow and obstore.
    if name in ("open_run", "Run"):
        from hsray import reader

        return getattr(reader, name)
    if name == "read_run":
        from hsray.ray_data import read_run

        return read_run
    raise AttributeError(f"module 'hsray' has no attribute {name!r}")

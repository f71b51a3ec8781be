"""A package that can be imported, subclassed and looked into at any depth, and called nowhere."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Absent(type):
    """Metaclass: any attribute of an absent thing is another absent thing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __iter__(cls):
        return iter(())

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(
            f"{cls.__qualname__} is not installed: hsray put a stand-in here so that SGLang imports on a CPU"
        )


def absent(name):
    return _Absent(name.rpartition(".")[2], (), {"__qualname__": name, "__module__": __name__})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package):
        self.prefix = package + "."

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self.prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def stand_in_for(package, submodules=()):
    """Serve every submodule of `package`; returns its module-level `__getattr__`."""
    sys.meta_path.append(_Finder(package))

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        return absent(f"{package}.{name}")

    return __getattr__

"""Stand-in for SGLang's compiled kernels: on the CPU engine nothing calls them."""

from hsray_stand_in import stand_in_for

__version__ = "0.4.7"
__getattr__ = stand_in_for("sgl_kernel")

"""Stand-in for torchvision: transformers imports it for image processors that text models never make."""

from hsray_stand_in import stand_in_for

__version__ = "0.28.0"
__getattr__ = stand_in_for("torchvision", ("transforms", "io", "ops", "models", "utils", "tv_tensors"))

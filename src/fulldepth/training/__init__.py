"""`fulldepth train`: training with objectives and architectures for the use of depth."""

from fulldepth.settings.train import TrainSettings
from fulldepth.training.folder import export_run
from fulldepth.training.plan import dry_run_lines
from fulldepth.training.run import train

__all__ = ["TrainSettings", "dry_run_lines", "export_run", "train"]

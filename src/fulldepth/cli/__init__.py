"""The command line. Each module adds its commands to the program; `--help` lists them in the order of the imports."""

# ruff: noqa: F401, I001
from fulldepth.cli.program import DEBUG, app, main
import fulldepth.cli.measure
import fulldepth.cli.lens
import fulldepth.cli.train
import fulldepth.cli.pages
import fulldepth.cli.skip
import fulldepth.cli.exit
import fulldepth.cli.evaluate

__all__ = ["DEBUG", "app", "main"]

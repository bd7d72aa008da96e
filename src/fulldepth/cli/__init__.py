"""The command line. Each module adds its commands to the program; `--help` lists them in the order of the imports."""

# ruff: noqa: I001
from fulldepth.cli.program import DEBUG, app, main
from fulldepth.cli.measure import measure_command
from fulldepth.cli.lens import lens_command
from fulldepth.cli.train import train_command, train_export_command
from fulldepth.cli.pages import compare_command, demo_command, report_command
from fulldepth.cli.skip import apply_command, bench_command, curve_command, search_command
from fulldepth.cli.exit import exit_command, generate_command
from fulldepth.cli.evaluate import evaluate_command

__all__ = [
    "DEBUG",
    "app",
    "apply_command",
    "bench_command",
    "compare_command",
    "curve_command",
    "demo_command",
    "evaluate_command",
    "exit_command",
    "generate_command",
    "lens_command",
    "main",
    "measure_command",
    "report_command",
    "search_command",
    "train_command",
    "train_export_command",
]

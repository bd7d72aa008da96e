"""Finds blocks to remove, trains scalars that compensate, and exports verified checkpoints."""

from fulldepth.data.batches import Example, batches
from fulldepth.data.examples import Examples, read_examples
from fulldepth.hf import GRANULARITIES, Scalars, Switches, skipping
from fulldepth.hf.model_hash import model_hash
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.bench import bench
from fulldepth.skip.curve import Curve, curve
from fulldepth.skip.exports.export import Export, export, load
from fulldepth.skip.exports.fold import fold
from fulldepth.skip.fit import FitResult, fit_scales
from fulldepth.skip.least_squares import Healing, refit
from fulldepth.skip.plan import CRITERIA, SEARCHES, Plan
from fulldepth.skip.responses import generate_responses, read_prompts
from fulldepth.skip.search import search

__all__ = [
    "CRITERIA",
    "GRANULARITIES",
    "SEARCHES",
    "BenchSettings",
    "Curve",
    "Example",
    "Examples",
    "Export",
    "FitResult",
    "Healing",
    "Plan",
    "Scalars",
    "SearchSettings",
    "Switches",
    "batches",
    "bench",
    "curve",
    "export",
    "fit_scales",
    "fold",
    "generate_responses",
    "load",
    "model_hash",
    "read_examples",
    "read_prompts",
    "refit",
    "search",
    "skipping",
]

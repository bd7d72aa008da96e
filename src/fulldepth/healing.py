"""`fulldepth skip heal`: heals the model of a plan in closed form and by training, and writes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip import Plan, merge_maps, save_healed


@takes_settings(HealSettings)
def heal(
    plan: Any,
    model: Any,
    data: Any,
    output: str | Path,
    *,
    settings: HealSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    heldout: Any = None,
) -> Results:
    """Heal the model of a plan, and write an ordinary checkpoint with the results of healing.

    Args:
        plan: the plan, its file, or its folder.
        model: the checkpoint that the plan was made for, or the loaded model, which does not change.
        data: as for `fulldepth.skip.search`.
        output: folder to create: the checkpoint, and `results.json`, `results.parquet` and `report.html`.
        settings: fields of `HealSettings` as keywords, or an instance.
        watcher: receives progress.
        tokenizer: as for `search`.
        heldout: data to measure on; None = rows that did not choose the blocks are kept apart from `data`.

    Returns:
        Held-out losses of the original, the removed and the healed models; see `fulldepth.skip.healed`.

    Raises:
        FulldepthError: as `fulldepth.skip.merge_maps` and `export`; if `output` exists.
    """
    target = Path(output)
    if target.exists():
        raise FulldepthError(f"{target} exists already; a checkpoint is never written over anything.")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    healing = merge_maps(plan, model, data, settings=settings, watcher=watcher, tokenizer=tokenizer, heldout=heldout)
    return save_healed(healing, plan, target, format=settings.format, tokenizer=tokenizer or settings.tokenizer)

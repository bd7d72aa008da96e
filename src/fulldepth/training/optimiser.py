"""AdamW's parameter groups: weight decay and learning rate by kind of parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.losses.trainer import AnyTrainer
from fulldepth.training.settings import TrainSettings


def parameter_groups(model: Any, settings: TrainSettings) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group; no group is empty.

    A model's own method `parameter_groups` is used if it has one (`DepthLlamaForCausalLM`). For other models
    `decay: matrices` leaves vectors and embeddings without weight decay.

    Raises:
        FulldepthError: for `decay: routers` if the model has no dynamic or kv router.
    """
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            router_learning_rate=settings.router_learning_rate,
            decay=settings.decay,
        )
    else:
        groups = _groups(model, settings)
    if settings.decay == "routers" and "router_decay" not in {group["name"] for group in groups}:
        raise FulldepthError(
            "decay=routers would let nothing decay: it names dynamic and kv routers, and this model has none."
        )
    return [group for group in groups if group["params"]]


def _groups(model: nn.Module, settings: TrainSettings) -> list[dict[str, Any]]:
    """Groups of a model without routers."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    everything = settings.decay == "all"
    decayed = [p for p in trained if everything or (p.ndim >= 2 and id(p) not in embeddings)]
    decayed_ids = {id(p) for p in decayed}
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay, "lr": settings.learning_rate, "name": "decay"},
        {
            "params": [p for p in trained if id(p) not in decayed_ids],
            "weight_decay": 0.0,
            "lr": settings.learning_rate,
            "name": "no decay",
        },
    ]
    return groups if settings.backbone_learning_rate is None else _with_backbone(model, groups, settings)


def _with_backbone(model: nn.Module, groups: list[dict[str, Any]], settings: TrainSettings) -> list[dict[str, Any]]:
    """The groups, each divided into the backbone's parameters, with their own learning rate, and all others.

    Raises:
        FulldepthError: if the model has no backbone.
    """
    anatomy = find_anatomy(model)  # type: ignore[arg-type]
    if anatomy.family.backbone is None:
        raise FulldepthError(f"backbone_learning_rate is for detectors; {type(model).__name__} has no backbone.")
    inside = {id(p) for p in anatomy.body.get_submodule(anatomy.family.backbone).parameters()}
    divided = []
    for group in groups:
        for is_backbone, name in ((False, group["name"]), (True, f"backbone, {group['name']}")):
            chosen = [p for p in group["params"] if (id(p) in inside) is is_backbone]
            rate = settings.backbone_learning_rate if is_backbone else group["lr"]
            divided.append({**group, "params": chosen, "lr": rate, "name": name})
    return divided


class GroupsMixin(AnyTrainer):
    """Adds `settings=` to a Trainer with an objective, and takes the parameter groups from them."""

    lr_scheduler: Any

    def __init__(self, *args: Any, settings: TrainSettings, **kwargs: Any) -> None:
        self.settings = settings
        super().__init__(*args, **kwargs)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """The parameter groups by the run's settings."""
        return parameter_groups(model, self.settings)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The Trainer's schedule, or a multistep one, which transformers lacks."""
        if self.settings.schedule == "multistep" and self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, partial(multistep, self.settings))
        return super().create_scheduler(num_training_steps, optimizer)


def multistep(settings: TrainSettings, step: int) -> float:
    """Factor of the learning rate at a 0-based step: a linear warm-up, then a tenth from each milestone on."""
    if step < settings.warmup_length:
        return step / settings.warmup_length
    factor: float = 0.1 ** sum(step >= round(share * settings.steps) for share in settings.milestones)
    return factor

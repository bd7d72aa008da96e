"""Configuration of `depth_llama`: a Llama whose residual path and attention memory are switches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from operator import index
from typing import Any, Literal, get_args

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig

Residual = Literal["serial", "tree", "hyper"]
Memory = Literal["none", "static", "dynamic", "kv"]
KvInit = Literal["identity", "public"]
RouterInput = Literal["normed", "raw"]
CHOICES = {"residual": Residual, "memory": Memory, "kv_init": KvInit, "router_input": RouterInput}
"""Switch -> its values."""
AUTO_MAP = {
    "AutoConfig": "configuration_depth_llama.DepthLlamaConfig",
    "AutoModel": "modeling_depth_llama.DepthLlamaModel",
    "AutoModelForCausalLM": "modeling_depth_llama.DepthLlamaForCausalLM",
}
"""Auto class -> class in the modelling files of a checkpoint."""
IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
"""Entries of a configuration that identify its class and origin."""
EMBEDDING = -1
"""The embedding's number in a tree, whose layers are numbered from 0."""


def build_tree(num_layers: int) -> dict[int, tuple[int, int]]:
    """Return the tree of residual paths for a depth: layer -> (ancestor, previous layer), 0-based, -1 = embedding.

    It is the highest full binary tree that fits. Its root is the embedding, the root's children are layers 0 and 1, and
    all further nodes, row by row, are the even layers from 2 on, each with a buffer layer after it. A node reads its
    parent and the layer before it; layer 0, whose parent comes directly before it, is serial. Height h, that is
    `2^h - 1` nodes, needs `2^(h+1) - 6` layers: 10 for the paper's three rows, 26 for four, 58 for five; with fewer
    than 10 layers the tree has two rows.

    Args:
        num_layers: layers of the model, at least 2.

    Returns:
        At 12 layers `{1: (-1, 0), 2: (0, 1), 4: (0, 3), 6: (1, 5), 8: (1, 7)}`.

    Raises:
        ValueError: for fewer than 2 layers.

    Source: "CR-Guided Transformers", Sec. 3.2 and Listing 1; other depths than 12 are this project's reading of it.
    """
    if num_layers < 2:
        raise ValueError(f"a tree of residual paths needs at least 2 layers, got {num_layers}")
    height = max(2, (num_layers + 6).bit_length() - 2)
    nodes = [EMBEDDING, 0, 1, *range(2, 2 ** (height + 1) - 7, 2)]
    parents = [nodes[(position - 1) // 2] for position in range(1, len(nodes))]
    return {node: (parent, node - 1) for node, parent in zip(nodes[1:], parents, strict=True) if parent != node - 1}


class DepthLlamaConfig(LlamaConfig):
    """Configuration with the fields of `LlamaConfig`, and switches that change the connections between layers.

    With the defaults the model is Llama: the same weights with the same names, the same outputs. The methods below
    state the cost of the switches and the related stock family.

    Raises:
        ValueError: for an unknown value, a tree that refers forward or out of range, or incompatible switches.
    """

    model_type = "depth_llama"
    stock_model_type = "llama"
    """Family whose checkpoints this class can load, with switches added."""
    # Layers read more than the layer before them, for which neither split is defined.
    base_model_tp_plan = None  # type: ignore[assignment]
    base_model_pp_plan = None  # type: ignore[assignment]

    residual: Residual = "serial"
    """`serial`; `tree`: the input of some layers is the sum of two separately normalised earlier outputs ("CR-Guided
    Transformers", Sec. 3.2); `hyper`: Hyper-Connections between several residual streams (arXiv 2409.19606)."""
    tree: dict[int, list[int]] | None = None
    """Layer -> `[ancestor, previous]`, all 0-based, -1 = embedding; None = the tree of `build_tree`."""
    num_streams: int = 4
    """Number of residual streams of `hyper`."""
    hyper_dynamic: bool = True
    """True if the connections of `hyper` depend on the streams, False if they are constants."""
    norm_scaling: bool = False
    """LayerNorm scaling (arXiv 2502.05795): the output of both norms of layer l is multiplied by `l**-0.5`. It has no
    parameters. The stock class computes the same with the factors in the gains of its norms."""
    memory: Memory = "none"
    """Source of the attention's keys and values. `none`: the residual stream. `static`, `dynamic`: for every key/value
    head, a mixture of all earlier layers' outputs ("LIME", Sec. 4); `kv`: a linear map of the key and value states of
    all earlier layers and heads (its later public version)."""
    kv_init: KvInit = "identity"
    """Initial weights of `memory="kv"`. `identity`: equal to plain Llama. `public`: random for earlier layers."""
    router_input: RouterInput = "normed"
    """Input of a dynamic router. `normed`: `LN_r(X_{r-1})` (App. E); `raw`: `X_{r-1}` (Sec. 4.3)."""
    router_top_p: float | None = None
    """For every head of a static router, and every head and token of a dynamic one, keep only the smallest set of
    sources whose weights exceed this, in training too (App. B, Fig. 9); None keeps all."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**({"auto_map": dict(AUTO_MAP)} | kwargs))
        self.resolve()

    @classmethod
    def from_llama(cls, llama_config: PreTrainedConfig, **switches: Any) -> DepthLlamaConfig:
        """Add switches to the configuration of a Llama, for `from_pretrained(..., config=...)`.

        Raises:
            ValueError: if the configuration is of another family, or a switch is unknown or incompatible with others.
        """
        if llama_config.model_type not in ("llama", cls.model_type):
            raise ValueError(f"expected the configuration of a llama, got one of {llama_config.model_type!r}")
        values = {name: value for name, value in llama_config.to_dict().items() if name not in IDENTITY}
        if llama_config._attn_implementation is not None:
            values["attn_implementation"] = llama_config._attn_implementation
        names = {field.name for field in fields(cls)} | {"attn_implementation", *values}
        for name in switches:
            _check_choice("switch", name, names)
        return cls(**(values | switches))

    @property
    def switches(self) -> dict[str, str]:
        """The switches that the stock class cannot compute, with their values."""
        plain = {"residual": "serial", "memory": "none"}  # all other switches need one of these
        return {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}

    def stock_config(self) -> LlamaConfig:
        """Return the configuration of a Llama of the same sizes, without the switches."""
        switches = {field.name for field in fields(self)} - {field.name for field in fields(LlamaConfig)}
        values = {name: value for name, value in self.to_dict().items() if name not in switches | {*IDENTITY}}
        return LlamaConfig(**values | {"attn_implementation": self._attn_implementation})

    def extra_flops(self, sequence_length: int) -> float:
        """Count the operations of one token besides linear layers and attention, averaged over a sequence.

        Memory `static`: mixtures of the r sources of layers r = 2..L, `2 r H_kv D` each; `dynamic`: as many again for
        the router's weights; `kv`: `4 r H_kv^2 d_h`. Hyper-Connections, twice a layer: `2 n (n + 1) D` to mix n
        streams, and if dynamic `2 n (n + 2) D`. None depends on the sequence's length.
        """
        layers = self.num_hidden_layers
        width = self.hidden_size
        streams = self.num_streams
        heads = self.num_key_value_heads or self.num_attention_heads
        channels = self.head_dim or width // self.num_attention_heads
        sources = layers * (layers + 1) // 2 - 1  # the sum of r = 2..L
        per_source = {"none": 0, "static": width, "dynamic": 2 * width, "kv": 2 * heads * channels}
        flops = 2.0 * sources * heads * per_source[self.memory]
        if self.residual == "hyper":
            products = streams + 1 + (streams + 2 if self.hyper_dynamic else 0)
            flops += 4.0 * layers * streams * products * width
        return flops

    def resolve(self) -> None:
        """Check the switches and set the tree. Models call it again, because attributes may be set later.

        Raises:
            ValueError: as for the class.
        """
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), get_args(choices))
        if self.residual == "hyper" and self.memory != "none":
            raise ValueError(
                f"memory={self.memory!r} is not defined with residual='hyper': memory mixes the outputs of earlier "
                f"layers, and a layer of Hyper-Connections has {self.num_streams} streams and no single output. Use "
                "residual='serial' or 'tree'."
            )
        if not isinstance(self.norm_scaling, bool):
            raise ValueError(f"norm_scaling must be true or false, got {self.norm_scaling!r}")
        if self.norm_scaling and self.memory != "none":
            raise ValueError(
                f"norm_scaling is defined for the two norms of a layer; memory={self.memory!r} reads earlier layers "
                "without the first of them. Use memory='none'."
            )
        needs = {  # switches that have no effect otherwise
            "tree": (self.tree is not None, "residual", "tree"),
            "hyper_dynamic=False": (not self.hyper_dynamic, "residual", "hyper"),
            "kv_init='public'": (self.kv_init != "identity", "memory", "kv"),
            "router_input='raw'": (self.router_input != "normed", "memory", "dynamic"),
        }
        for option, (is_set, switch, value) in needs.items():
            if is_set and (actual := getattr(self, switch)) != value:
                raise ValueError(f"{option} needs {switch}={value!r}, got {switch}={actual!r}")
        if self.router_top_p is not None and self.memory not in ("static", "dynamic"):
            raise ValueError(f"router_top_p needs memory='static' or memory='dynamic', got memory={self.memory!r}")
        self.validate_architecture()
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if not (isinstance(self.num_streams, int) and self.num_streams >= 1):
            raise ValueError(f"num_streams must be a whole number of at least 1, got {self.num_streams!r}")
        if self.router_top_p is not None and not 0 < self.router_top_p <= 1:
            raise ValueError(f"router_top_p must be above 0 and at most 1, got {self.router_top_p}")
        if self.residual == "tree":
            tree = build_tree(self.num_hidden_layers) if self.tree is None else self.tree
            self.tree = _checked_tree(tree, self.num_hidden_layers)


def _check_choice(kind: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not one of the choices, and suggest the nearest."""
    names = list(choices)
    if value not in names:
        near = get_close_matches(str(value), names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {kind} {value!r}.{hint} Available: {', '.join(names)}")


def _checked_tree(tree: Any, num_layers: int) -> dict[int, list[int]]:
    """Return the tree with integer keys (JSON's are strings) and lists of two, sorted by layer."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"tree must be a mapping of layers to [ancestor, previous], got {tree!r}")
    checked: dict[int, list[int]] = {}
    for key, sources in tree.items():
        try:
            layer = int(key)
            ancestor, previous = (index(source) for source in sources)
        except (TypeError, ValueError) as error:
            raise ValueError(f"tree must map a layer to [ancestor, previous], got {key!r}: {sources!r}") from error
        if not (0 <= layer < num_layers and all(EMBEDDING <= source < layer for source in (ancestor, previous))):
            raise ValueError(
                f"tree: layer {layer} reads {ancestor} and {previous}; layers are numbered 0 to {num_layers - 1}, and "
                f"read earlier ones or {EMBEDDING}, the embedding"
            )
        checked[layer] = [ancestor, previous]
    return dict(sorted(checked.items()))


__all__ = ["DepthLlamaConfig", "build_tree"]

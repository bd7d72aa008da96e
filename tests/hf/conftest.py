"""A saved checkpoint, a copy to break, and one that carries code."""

import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from json_files import write_json

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "llama"
    tiny_models.build("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of a good checkpoint, to be broken."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


CODE = """
import torch, transformers
class MineConfig(transformers.PretrainedConfig):
    model_type = "mine"
class MineModel(transformers.PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.post_init()
    def forward(self, input_ids=None):
        return self.scale
open({marker!r}, "a").close()
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A checkpoint that carries its own code, which leaves a mark when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, mark = tmp_path / "foreign", tmp_path / "it-ran"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE.format(marker=str(mark)))
    auto = {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.MineModel"}
    config = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": auto}
    write_json(folder / "config.json", config)
    save_file({"scale": torch.tensor([1.0, 2.0, 3.0])}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder, mark

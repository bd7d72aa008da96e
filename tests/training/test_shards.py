"""Checkpoints in shards: resumed as if nothing had happened, put together into what one process would have saved."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fulldepth.training.sharding import Writing
from safetensors.torch import load_file

from fulldepth.errors import FulldepthError
from fulldepth.hf import checkpoint_of, is_sealed, is_sharded, load_checkpoint, stored_shapes, write_shards
from fulldepth.measurement.folder import measure_into
from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.settings.measure import MeasureSettings
from fulldepth.training import TrainSettings, export_run, train
from fulldepth.training import export as exporting

sys.path.insert(0, str(Path(__file__).parent))
from sharded_train import launch

WEIGHTS = "model.safetensors"


def losses(run: Path) -> list[float]:
    table = Results.load(run).table
    return table[table.measure.isin(("validation_loss", "train_loss", "displacement"))].value.tolist()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.rglob("*.safetensors")) for name, value in load_file(path).items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def sharded(*arguments: object, processes: int = 2) -> None:
    done = launch("train", *arguments, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]


def back_to(run: Path, step: int, copy: Path) -> Path:
    """The run as it was when it was killed after a checkpoint."""
    shutil.copytree(run, copy)
    for path in copy.glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    return copy


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, sources: tuple[Path, Path]) -> tuple[Path, Path, Path]:
    """A recipe with tied weights and dropout-free attention, a run of one process and one of two that shard."""
    home = tmp_path_factory.mktemp("runs")
    text, tokenizer = sources
    recipe = {
        "model": {"type": "depth_llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "memory": "static", "tie_word_embeddings": True},
        "data": {"name": str(text), "validation_share": 0.2, "validation_sequences": 6},
        "tokenizer": str(tokenizer),
        **{"steps": 6, "eval_every": 2, "save_every": 2, "warmup_steps": 2, "global_batch_size": 6},
        **{"sequence_length": 24, "learning_rate": 3e-3},
    }
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    train(layer(TrainSettings, read(home / "recipe.yaml", "train")), home / "one")
    sharded(home / "recipe.yaml", "fsdp=true", "--output", home / "two")
    return home / "recipe.yaml", home / "one", home / "two"


@pytest.mark.slow
def test_weights_are_stored_once_by_every_process_and_nothing_is_a_pickle_but_small_states(
    runs: tuple[Path, Path, Path],
) -> None:
    _, one, two = runs
    checkpoint = two / "checkpoint-4"
    assert is_sealed(checkpoint)
    assert len(list((checkpoint / "weights").iterdir())) == 2
    assert len(list((checkpoint / "optimizer").iterdir())) == 2
    pickles = {path.name for path in checkpoint.rglob("*") if path.is_file() and path.suffix in (".pt", ".pth", ".bin")}
    assert pickles == {"scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    whole = load_file(one / "checkpoint-4" / WEIGHTS)
    assert stored_shapes(checkpoint / "weights") == {name: list(value.shape) for name, value in whole.items()}
    sizes = [path.stat().st_size for path in (checkpoint / "weights").iterdir()]
    assert sum(sizes) < 1.5 * sum(value.numel() * 4 for value in whole.values())
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.slow
def test_a_finished_sharded_run_ends_with_an_ordinary_model(runs: tuple[Path, Path, Path]) -> None:
    _, one, two = runs
    assert losses(two) == pytest.approx(losses(one), rel=1e-5, abs=1e-6)
    assert checkpoint_of(two) == str(two / "checkpoint-6")
    assert not is_sharded(two / "checkpoint-6")
    assert is_sealed(two / "checkpoint-6")
    mine, theirs = (load_file(run / "checkpoint-6" / WEIGHTS) for run in (one, two))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5)
    ours = json.loads((two / "checkpoint-6" / "config.json").read_text())
    assert ours == json.loads((one / "checkpoint-6" / "config.json").read_text())
    names = {path.name for path in (one / "checkpoint-6").iterdir()}
    here = {path.name for path in (two / "checkpoint-6").iterdir()}
    assert names - here == {"training_args.bin", "optimizer.pt", "rng_state.pth"}


@pytest.mark.slow
def test_resumed_on_as_many_processes_it_is_bit_equal_and_on_others_right(
    runs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    recipe, _, two = runs
    same = back_to(two, 4, tmp_path / "same")
    sharded(recipe, "fsdp=true", "--output", same, "--resume")
    assert equal(stored(same / "checkpoint-6"), stored(two / "checkpoint-6"))
    assert losses(same) == losses(two)
    export_run(back_to(two, 2, tmp_path / "three"))  # its weights are whole now, its optimiser is not
    assert not is_sharded(tmp_path / "three" / "checkpoint-2")
    sharded(recipe, "fsdp=true", "--output", tmp_path / "three", "--resume", processes=3)
    alone = back_to(two, 4, tmp_path / "alone")
    train(layer(TrainSettings, read(recipe, "train")), alone, resume=True)
    for run in (tmp_path / "three", alone):
        assert losses(run) == pytest.approx(losses(two), rel=1e-5, abs=1e-6)
        for name, value in load_file(run / "checkpoint-6" / WEIGHTS).items():
            torch.testing.assert_close(value, load_file(two / "checkpoint-6" / WEIGHTS)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_damaged_shards_end_in_one_message_and_are_never_unpickled(
    runs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    recipe, _, two = runs
    chosen = layer(TrainSettings, read(recipe, "train"))
    for name in ("weights/shard-00001-model-00001-of-00001.safetensors", "optimizer.json", "optimizer"):
        run = back_to(two, 4, tmp_path / name.replace("/", "-"))
        path = run / "checkpoint-4" / name
        if path.is_dir():
            path = next(path.iterdir())
            path.unlink()
        else:
            path.write_bytes(pickle.dumps({"a": 1}))
        exporting.seal(run / "checkpoint-4")
        with pytest.raises(FulldepthError, match="Cannot read"):
            train(chosen, run, resume=True)


@pytest.mark.slow
def test_export_makes_a_model_that_loads_and_refuses_what_does_not_fit(
    runs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, one, two = runs
    with pytest.raises(FulldepthError, match=r"train export .*checkpoint-4"):
        load_checkpoint(two / "checkpoint-4")
    for run in (one, two):
        for dtype in (None, "bfloat16"):
            (made,) = export_run(run, tmp_path / f"{run.name}-{dtype}", step=4, dtype=dtype)
            model = transformers.AutoModelForCausalLM.from_pretrained(made)
            assert model.dtype == (torch.bfloat16 if dtype else torch.float32)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            transformers.AutoTokenizer.from_pretrained(made)
            assert not list(made.glob("optimizer*")) + list(made.glob("rng*"))
    exact = load_file(tmp_path / "two-None" / WEIGHTS)
    export_run(back_to(two, 4, tmp_path / "copy"))
    assert equal(exact, load_file(tmp_path / "copy" / "checkpoint-4" / WEIGHTS))
    for arguments, words in (
        ({"output": tmp_path / "two-None"}, "already exists"),
        ({"output": tmp_path / "new", "step": 5}, "no whole checkpoint-5"),
        ({"dtype": "bfloat16"}, "needs --output"),
        ({"every": True, "step": 4}, "goes with neither"),
        ({"output": tmp_path / "new", "dtype": "int3"}, "dtype"),
    ):
        with pytest.raises(FulldepthError, match=words):
            export_run(two, **arguments)
    with pytest.raises(FulldepthError, match="holds no whole checkpoint"):
        export_run(tmp_path)
    assert not (tmp_path / "new").exists()

    settings = MeasureSettings(measures=["displacement"], max_sequences=4, sequence_length=16)
    series = shutil.copytree(two, tmp_path / "series")
    text = layer(TrainSettings, read(recipe, "train")).data.name
    with pytest.raises(FulldepthError, match=r"train export .* --all"):
        measure_into(series, text, tmp_path / "measured", settings)
    for fails in ("_sharded_model", "seal"):  # killed while the weights are written, and before the seal
        with monkeypatch.context() as patch:
            patch.setattr(exporting, fails, lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(FulldepthError, match="disk is full"):
                export_run(series, every=True)
        assert is_sealed(series / "checkpoint-2")
        assert is_sharded(series / "checkpoint-2")
    export_run(series, every=True)
    measure_into(series, text, tmp_path / "measured", settings)
    assert sorted(path.name for path in (tmp_path / "measured" / "steps").iterdir()) == [
        *("checkpoint-2", "checkpoint-4", "checkpoint-6")
    ]


def test_weights_that_are_saved_under_other_names_are_resumed_too(recipe: Any, tmp_path: Path) -> None:
    chosen = layer(TrainSettings, read(recipe(model={"type": "mixtral"}, steps=4, eval_every=4, save_every=2), "train"))
    train(chosen, tmp_path / "whole")
    again = back_to(tmp_path / "whole", 2, tmp_path / "again")
    train(chosen, again, resume=True)
    assert equal(stored(again / "checkpoint-4"), stored(tmp_path / "whole" / "checkpoint-4"))


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_fails_is_an_error(tmp_path: Path, background: bool) -> None:
    (tmp_path / "file").touch()
    writing = Writing([write_shards(tmp_path / "file" / "x", {"a": torch.ones(2)}, None, background=background)])
    with pytest.raises(FulldepthError, match="could not be written"):
        writing.wait()
    assert not writing.completes(1.0)
    full: Future[None] = Future()
    full.set_exception(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        Writing([full]).wait()

"""Models that are loaded between the lines of mkd draw no progress bars of transformers."""

from __future__ import annotations

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mkd.progress_bars import without_progress_bars
from tests.tiny_models import make_model


def test_a_model_is_loaded_without_a_bar(tmp_path, capfd):
    folder = make_model(tmp_path / "model", family="llama", seed=1)
    assert logging.is_progress_bar_enabled()
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err
    with without_progress_bars():
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "copy", max_shard_size="1MB")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()

"""Text models of models with images that mkd does not run: the command of the error makes a model of them."""

from __future__ import annotations

import shlex

import pytest
import torch
import transformers as hf

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.errors import UsageError
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.request import refuse_other_kinds
from mkd.tokenizers.load import load_tokenizer
from tests.reported import refused
from tests.tiny_models import add_tokenizer
from tests.tiny_vision_models import make_vision_model

TEXT = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, vocab_size=307, head_dim=16)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
TOWER |= dict(image_size=28, patch_size=14)


def nested(text: str, tower: str, **more) -> dict:
    return dict(
        text_config=dict(model_type=text, **TEXT, **more),
        vision_config=dict(model_type=tower, **TOWER),
        image_token_index=5,
    )


GEMMA = dict(text_config=TEXT | dict(sliding_window=12), vision_config=TOWER, mm_tokens_per_image=1)
GEMMA |= dict(image_token_id=5, boi_token_index=6, eoi_token_index=7)
MODELS = {  # class of transformers, its configuration, family of the text model, whether its head is tied
    "gemma3": ("Gemma3", GEMMA, "gemma3_text", True),
    "llava": ("Llava", nested("llama", "clip_vision_model", tie_word_embeddings=False), "llama", False),
    "mistral3": ("Mistral3", nested("mistral", "pixtral"), "mistral", True),
}


def save(folder, name: str):
    """Save a random model with images; return it."""
    kind, config, _, _ = MODELS[name]
    torch.manual_seed(3)
    model = getattr(hf, f"{kind}ForConditionalGeneration")(getattr(hf, f"{kind}Config")(**config)).eval()
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


def run_offered(text: str, folder, new) -> None:
    """Run the command that an error offers."""
    (code,) = shlex.split(text.partition("python -c ")[2])
    exec(code.replace("DIR", str(folder)).replace("NEW", str(new)), {})


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(20, 40)[None]).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_command_saves_the_text_model(name, tmp_path):
    """Its logits are those of the whole model for text, and mkd reads it with its tokenizer."""
    *_, family, is_tied = MODELS[name]
    folder, new = tmp_path / "whole", tmp_path / "text"
    whole = save(folder, name)
    with refused("model-type-not-supported", UsageError) as caught:
        ModelShape.from_hf_dir(folder)
    assert f"its text model ({family})" in caught.value.do
    run_offered(caught.value.do, folder, new)
    shape = ModelShape.from_hf_dir(new)
    check_hf_checkpoint(shape, HFCheckpoint(new))
    assert shape.family == family and shape.tie_word_embeddings == is_tied
    text = hf.AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    assert torch.equal(logits(text), logits(whole))
    tokenizers = [load_tokenizer("HuggingFaceTokenizer", str(one)) for one in (folder, new)]
    assert tokenizers[0].encode("the quick fox") == tokenizers[1].encode("the quick fox")


def test_a_model_with_images_is_not_cut_but_its_text_model_is(tmp_path):
    folder, new = make_vision_model(tmp_path / "whole", "smolvlm"), tmp_path / "text"
    with refused("cut-not-supported: cut its text model", UsageError) as caught:
        refuse_other_kinds(ModelShape.from_hf_dir(folder))
    add_tokenizer(folder)
    run_offered(caught.value.do, folder, new)
    shape = ModelShape.from_hf_dir(new)
    check_hf_checkpoint(shape, HFCheckpoint(new))
    refuse_other_kinds(shape)


def test_a_text_model_that_cannot_be_saved_alone_is_not_offered(tmp_path):
    """transformers has no class for the text model of Qwen2.5-VL alone."""
    folder = make_vision_model(tmp_path / "whole", "qwen2_5_vl")
    with refused("cut-not-supported: cut a model of text alone", UsageError) as caught:
        refuse_other_kinds(ModelShape.from_hf_dir(folder))
    assert "one of qwen2" in caught.value.do

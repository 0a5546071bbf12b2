"""Networks by name: a gpt with settings, a function of the user, a model of transformers."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from offbeat import models
from offbeat.errors import UserError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "def tokens(shape, classes):\n"
        "    return nn.Sequential(nn.Embedding(classes, 8), nn.Linear(8, classes))\n"
        "def plain():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))\n"
        "def wrong():\n    return 3\n"
        "def broken():\n    raise KeyError('lost')\n"
        "def needs(width):\n    return nn.Linear(width, width)\n"
        "number = 3\n"
    )
    yield
    sys.modules.pop("my_networks", None)


def test_a_gpt_has_the_given_settings_and_the_context_of_the_data():
    model = models.build("gpt:layers=3,width=16,heads=2", shape=(8,), classes=11)
    assert [name for name, _ in model.named_children()] == ["embedding", "block0", "block1", "block2", "head"]
    assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 11)
    assert models.default_size("gpt:context=32") == ((32,), 256)
    assert models.default_size("gpt") == ((128,), 256)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt:layers", "give each setting once and with a value, as in gpt:layers=12"),
        ("gpt:depth=3", "gpt takes no depth: its settings are layers"),
        ("gpt:vocabulary=3", "gpt takes no vocabulary"),
        ("gpt:layers=two", "'layers=two': use an integer"),
        ("gpt:layers=0", "layers=0 of a gpt"),
        ("gpt:width=6,heads=4", "width=6 with heads=4"),
        ("gpt2", "unknown model 'gpt2': did you mean 'gpt'"),
        ("hf:", "no such file or folder"),
        ("hf:nowhere", "no such file or folder"),
        ("no_such_module:build", "cannot be imported (No module named 'no_such_module')"),
        ("my_networks:absent", "cannot be imported"),
        ("my_networks:number", "not a function"),
        ("my_networks:wrong", "returned int"),
        ("my_networks:broken", "failed with KeyError"),
        ("my_networks:needs", "it is called with those of shape= and classes= that it has"),
        (":build", "cannot be imported"),
    ],
)
def test_an_unusable_name_is_refused_in_one_line(module, name, words):
    with pytest.raises(UserError) as caught:
        models.build(name, shape=(8,), classes=10)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("gpt:context=16", (8,), "shape=(8,), but gpt:context=16 has a context of 16 tokens"),
        ("gpt", (3, 8, 8), "shape=(3, 8, 8) for gpt: use the number of tokens of a sample, such as (128,)"),
        ("resnet8", (16,), "shape=(16,) for resnet8: use (channels, height, width)"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(name, shape, words):
    with pytest.raises(UserError) as caught:
        models.build(name, shape=shape)
    assert words in str(caught.value)


@pytest.mark.parametrize("shape", [(8,), (3, 4, 4)])
def test_a_random_batch_leaves_the_random_state_alone(shape):
    before = torch.get_rng_state()
    assert torch.equal(models.random_batch(2, shape, 10), models.random_batch(2, shape, 10))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_gets_the_shape_and_classes_that_it_takes(module):
    assert models.build("my_networks:tokens", shape=(8,), classes=7)[0].num_embeddings == 7
    assert isinstance(models.build("my_networks:plain", shape=(1, 8, 8), classes=10), nn.Sequential)
    with pytest.raises(UserError, match="no shape of its own: give shape="):
        models.default_size("my_networks:plain")


@pytest.fixture
def gpt2(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 300}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return path


def test_a_model_of_transformers_takes_tokens_and_returns_logits(gpt2):
    name = f"hf:{gpt2}"
    assert models.default_size(name) == ((32,), 300)
    model = models.build(name, shape=(8,), classes=256)
    assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 300)
    assert "transformer.h.0.attn.c_attn.weight" in model.state_dict()
    with pytest.raises(UserError, match="at most 32 tokens"):
        models.build(name, shape=(33,), classes=256)
    with pytest.raises(UserError, match="vocabulary of 300 tokens, but the data has 301"):
        models.build(name, shape=(8,), classes=301)


def test_a_saved_model_of_transformers_keeps_its_weights(gpt2, tmp_path):
    name, folder = f"hf:{gpt2}", tmp_path / "saved"
    first = models.build(name, shape=(8,), classes=256)
    first.save_pretrained(folder)
    second = models.build(f"hf:{folder}", shape=(8,), classes=256)
    x = torch.arange(8)[None]
    assert torch.equal(first.eval()(x), second.eval()(x))


def test_a_config_of_something_else_is_refused_in_one_line(tmp_path):
    pytest.importorskip("transformers")
    for number, text in enumerate(["{}", "not json", '{"model_type": "vit"}']):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(UserError, match="is not a causal language model") as caught:
            models.build(f"hf:{path}")
        assert "\n" not in str(caught.value)

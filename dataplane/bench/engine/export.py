"""A checkpoint as the folder that other engines read: the very weights that ours computes with.

Layer: service. It uses the engine's own readers, so that what a peer loads is what the engine loads: a GGUF file is
dequantised to float32 and its tokenizer written as `tokenizer.json`. Ends of sequence are left out of the
configuration, so that a server without `ignore_eos` makes as many tokens as it is asked for.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dataplane.bench.errors import NotToBeHadError
from dataplane.gguf_tokenizer import gguf_backend
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.shape import ModelShape, read_json
from dataplane.models.sources import open_source

ENDS = ("eos_token_id", "forced_eos_token_id", "stop_strings")
WITHOUT_ENDS = ("config.json", "generation_config.json")


def hugging_face_folder(model: Path, folder: Path) -> Path:
    """`folder`, with the checkpoint at `model` in Hugging Face's layout and without ends of sequence.

    A GGUF file becomes float32 safetensors; of a folder that is in that layout already, the weights are linked to.
    Raises NotToBeHadError for a model whose configuration cannot be written so, CheckpointError for a damaged one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.is_dir():
        _link(model, folder)
    else:
        _convert(model, folder)
    return folder


def _link(model: Path, folder: Path) -> None:
    for source in sorted(model.iterdir()):
        target = folder / source.name
        target.unlink(missing_ok=True)
        if source.name in WITHOUT_ENDS:
            settings = read_json(source)
            _write(target, {name: value for name, value in settings.items() if name not in ENDS})
        elif source.is_file():
            target.symlink_to(source.resolve())


def _convert(model: Path, folder: Path) -> None:
    file, shape = GGUFFile.open(model), ModelShape.read(model)
    _write(folder / "config.json", _config(shape, model))
    _write(folder / "generation_config.json", {"do_sample": False})
    gguf_backend(file.metadata, model).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(file))
    with ExitStack() as stack:
        source = open_source(model, shape, stack)
        weights: dict[str, Tensor] = {name: source.read(name).contiguous() for name in source.shapes()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _config(shape: ModelShape, model: Path) -> dict[str, Any]:
    """Llama's configuration. Raises NotToBeHadError for what it cannot say."""
    if shape.architecture != "llama" or shape.rope_scaling is not None:
        raise NotToBeHadError(f"{model.name} cannot be written for other engines: it is no plain Llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "hidden_act": "silu",
        "dtype": "float32",
    }


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    meta = file.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            found[name] = tokens[int(index)]
    if isinstance(template := meta.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")

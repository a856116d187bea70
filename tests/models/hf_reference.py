"""Random checkpoints written by transformers itself, and what transformers computes from them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

ROPES: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default", "rope_theta": 1000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@dataclass(frozen=True)
class Case:
    """A small random model. Norms and biases are random too, or swapping them would not show."""

    family: str = "llama"
    kv_heads: int = 2
    tied: bool = False
    rope: str = "none"
    heads: int = 8
    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 80
    layers: int = 3
    head_dim: int | None = None
    own: tuple[tuple[str, Any], ...] = ()  # settings of the family

    def __str__(self) -> str:
        """Its name as a pytest id."""
        tied = "tied" if self.tied else "untied"
        layers = "" if self.layers == 3 else f"-{self.layers}"
        own = "".join(f"-{key}={value}" for key, value in self.own)
        return f"{self.family}-{self.heads}:{self.kv_heads}-{tied}-{self.rope}{layers}{own}"

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        config_class, model_class = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
            "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        }[self.family]
        own: dict[str, Any] = {"sliding_window": None} if self.family == "mistral" else {}
        rope: dict[str, Any] = dict(ROPES[self.rope])
        if self.family == "gemma3":
            rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        own |= dict(self.own)
        if self.head_dim is not None:
            own["head_dim"] = self.head_dim
        config = config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=256,
            # At the default of 0.02 such a model repeats one token, and comparing tokens shows nothing.
            initializer_range=0.2,
            tie_word_embeddings=self.tied,
            rope_parameters=rope,
            bos_token_id=1,
            eos_token_id=2,
            **own,
        )
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.ndim == 1:
                    param.normal_(1.0 if "norm" in name else 0.0, 0.2)
                if self.family == "gemma3" and "_layernorm" in name and "post_" in name:
                    param.mul_(10)  # else the scaled embedding would outweigh the layers, and tokens repeat
        return model

    def write(self, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
        model = dataclasses.replace(self, **changes).build()
        model.save_pretrained(directory)
        return model


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Float32 `[B, T, vocab]`."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def greedy(model: transformers.PreTrainedModel, prompt: np.ndarray, count: int) -> np.ndarray:
    """The `count` tokens `[B, count]` that transformers generates after `prompt` `[B, T]`."""
    ids = torch.tensor(prompt)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[:, prompt.shape[1] :].numpy()

"""Public names of `longctx.models`, each loaded when it is first used."""

from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint_save import save_checkpoint as save_checkpoint
from .checkpoint_verify import checkpoint_fingerprint as checkpoint_fingerprint
from .checkpoint_verify import verify as verify
from .config import LlamaConfig as LlamaConfig
from .footprint import cache_bytes as cache_bytes
from .footprint import weight_bytes as weight_bytes
from .hub import resolve_model as resolve_model
from .llama import Llama as Llama
from .params import param_specs as param_specs
from .quantization_config import RowwiseFp8 as RowwiseFp8
from .quantize_checkpoint import quantize_checkpoint as quantize_checkpoint
from .rope_config import RopeConfig as RopeConfig
from .safetensors_reader import CheckpointError as CheckpointError
from .tokenizer import ByteTokenizer as ByteTokenizer
from .tokenizer import StreamDecoder as StreamDecoder
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import load_tokenizer as load_tokenizer

"""The Llama 3 family and Qwen2.5: configuration, forward pass, checkpoints and tokenizers."""

from longctx.models.checkpoint import load_checkpoint as load_checkpoint
from longctx.models.checkpoint_save import save_checkpoint as save_checkpoint
from longctx.models.config import LlamaConfig as LlamaConfig
from longctx.models.fingerprint import checkpoint_fingerprint as checkpoint_fingerprint
from longctx.models.llama import Llama as Llama
from longctx.models.params import param_specs as param_specs
from longctx.models.rope_config import RopeConfig as RopeConfig
from longctx.models.safetensors_reader import CheckpointError as CheckpointError
from longctx.models.stream_decoder import StreamDecoder as StreamDecoder
from longctx.models.tokenizer import ByteTokenizer as ByteTokenizer
from longctx.models.tokenizer import Tokenizer as Tokenizer
from longctx.models.tokenizer import load_tokenizer as load_tokenizer

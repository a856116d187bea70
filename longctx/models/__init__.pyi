"""What `longctx.models` exports, each loaded when it is first used."""

from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint_save import save_checkpoint as save_checkpoint
from .config import LlamaConfig as LlamaConfig
from .fingerprint import checkpoint_fingerprint as checkpoint_fingerprint
from .llama import Llama as Llama
from .params import param_specs as param_specs
from .rope_config import RopeConfig as RopeConfig
from .safetensors_reader import CheckpointError as CheckpointError
from .stream_decoder import StreamDecoder as StreamDecoder
from .tokenizer import ByteTokenizer as ByteTokenizer
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import load_tokenizer as load_tokenizer

"""The decoder's configuration and the named ones. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from jaxdp.config import ComputeDtype, check_choice, check_integer, check_number
from jaxdp.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, and what else its bits depend on.

    `heads` query heads share `kv_heads` key and value heads. Matrix products run in `compute_dtype`;
    parameters, norms, softmax and loss are float32 always. `dropout` is the rate after the
    embedding, the attention and the feed-forward part. Up to `one_hot_vocab_limit` the embedding's
    gradient is a one-hot matrix product, above it a sorted segment sum (see `embedding.py`).
    Raises `ConfigError` naming field, value and what is allowed.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    context: int
    dropout: float = 0.0
    compute_dtype: ComputeDtype = "float32"
    one_hot_vocab_limit: int = 8192

    def __post_init__(self) -> None:
        for field in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "context"):
            check_integer(field, getattr(self, field), minimum=1)
        check_integer("one_hot_vocab_limit", self.one_hot_vocab_limit, minimum=0)
        check_number("dropout", self.dropout, minimum=0, below=1)
        check_choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16", "float16"))
        if self.dim % (2 * self.heads):
            raise ConfigError("dim", self.dim, f"an even multiple of heads ({self.heads}): rotary positions turn pairs")
        if self.heads % self.kv_heads:
            raise ConfigError("kv_heads", self.kv_heads, f"a divisor of heads ({self.heads})")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.dim // self.heads

    @property
    def matrix_elements(self) -> int:
        """The number of parameters that are drawn: all but the scales of the norms."""
        layer = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim + 3 * self.dim * self.ffn_dim
        return 2 * self.vocab_size * self.dim + self.layers * layer


PRESETS = MappingProxyType({
    "tiny": DecoderConfig(vocab_size=8, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=16, context=4),
    "model-s": DecoderConfig(vocab_size=8192, dim=384, layers=6, heads=6, kv_heads=6, ffn_dim=832, context=512),
    "bytes-s": DecoderConfig(vocab_size=256, dim=128, layers=4, heads=4, kv_heads=4, ffn_dim=344, context=256),
    "gpt2-124m": DecoderConfig(vocab_size=50304, dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048,
                               context=1024),
})

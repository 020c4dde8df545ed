"""Training data: corpora, and batches addressed by one integer."""

from __future__ import annotations

from jaxdp.data.batches import Batch, BatchSource
from jaxdp.data.corpora import NAMES, load_tokens
from jaxdp.data.corpus import Corpus, WindowSource, split
from jaxdp.data.evaluation import EvaluationBatches, mean_loss
from jaxdp.data.ramp import RampCorpus
from jaxdp.data.validate import check_token_ids

__all__ = ["NAMES", "Batch", "BatchSource", "Corpus", "EvaluationBatches", "RampCorpus", "WindowSource",
           "check_token_ids", "load_tokens", "mean_loss", "split"]
